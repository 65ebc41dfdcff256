"""The all-reduce: gradients, weights and figures of all replicas, added in flat packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from framework.errors import LockstepError
from framework.step.gradients import StepSums
from framework.step.values import Stat

DEFAULT_PACK_BYTES = 32 << 20


def reduce(sums: StepSums, *, pack_bytes: int = DEFAULT_PACK_BYTES, options: Any = None) -> StepSums:
    """Adds ``sums`` over all replicas. Call it in replica context, once.

    Args:
      sums: this replica's sums.
      pack_bytes: tensors of one dtype are joined into flat packs of at most this many bytes (a larger tensor goes
        alone); one all-reduce a pack. 0: every tensor goes alone.
      options: ``tf.distribute.experimental.CommunicationOptions``.

    Raises:
      LockstepError: ``sums`` were reduced before; a second reduction would multiply them by the number of replicas.
    """
    if sums.reduced:
        raise LockstepError("reduce() was called twice on the same sums; they are already sums over all replicas")
    present = [i for i, g in enumerate(sums.gradients) if g is not None]
    tensors = [tf.convert_to_tensor(sums.gradients[i]) for i in present] + [sums.weight]
    flat, rebuild = _flatten_stats(sums.stats)
    total = all_reduce_sum([*tensors, *flat], pack_bytes=pack_bytes, options=options)
    gradients: list[tf.Tensor | None] = [None] * len(sums.gradients)
    for i, value in zip(present, total, strict=False):
        gradients[i] = value
    return dataclasses.replace(
        sums,
        gradients=gradients,
        weight=total[len(present)],
        stats=rebuild(total[len(present) + 1 :]),
        reduced=True,
    )


def reduce_stats(stats: dict[str, Stat], *, options: Any = None) -> dict[str, Stat]:
    """Reduces the figures that are not reduced yet, in one all-reduce. Call it in replica context."""
    local = {name: stat for name, stat in stats.items() if not stat.reduced}
    if not local:
        return stats
    flat, rebuild = _flatten_stats(local)
    reduced = rebuild(all_reduce_sum(flat, options=options))
    return {name: reduced.get(name, stat) for name, stat in stats.items()}


def all_reduce_sum(
    tensors: Sequence[tf.Tensor], *, pack_bytes: int = DEFAULT_PACK_BYTES, options: Any = None
) -> list[tf.Tensor]:
    """Sums each tensor over the replicas; the same packs in the same order on all of them, by construction.

    With one replica the tensors come back as they are and nothing is packed.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LockstepError("the reduction was called outside a replica; call it inside strategy.run")
    if context.num_replicas_in_sync == 1:
        return list(tensors)
    result: list[Any] = [None] * len(tensors)
    packs = plan_packs(tensors, pack_bytes)
    flat = [tf.reshape(tensors[p[0]], [-1]) if len(p) == 1 else _join([tensors[i] for i in p]) for p in packs]
    # One call for all packs: under MirroredStrategy each call is a meeting point of the replicas' threads.
    for pack, value in zip(packs, context.all_reduce(tf.distribute.ReduceOp.SUM, flat, options), strict=True):
        sizes = [tensors[i].shape.num_elements() for i in pack]
        for i, part in zip(pack, tf.split(value, sizes) if len(pack) > 1 else [value], strict=True):
            result[i] = tf.reshape(part, tensors[i].shape)
    return result


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


def plan_packs(tensors: Sequence[tf.Tensor], pack_bytes: int) -> list[list[int]]:
    """Groups tensor indices into packs: by dtype, in order, each pack at most ``pack_bytes``.

    Raises:
      LockstepError: a tensor's shape is not known while tracing.
    """
    packs: list[list[int]] = []
    open_pack: dict[tf.DType, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        count = tensor.shape.num_elements()
        if count is None:
            raise LockstepError(f"cannot reduce {tensor.name}: its shape {tensor.shape} is not known while tracing")
        size = count * tensor.dtype.size
        pack, filled = open_pack.get(tensor.dtype, ([], 0))
        if not pack or filled + size > pack_bytes:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(i)
        open_pack[tensor.dtype] = (pack, filled + size)
    return packs


def _flatten_stats(stats: dict[str, Stat]) -> tuple[list[tf.Tensor], Any]:
    """Figures as tensors whose sum over replicas carries them, and a function that puts the sums back."""
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync if context else 1
    flat: list[tf.Tensor] = []
    for stat in stats.values():
        if stat.kind in ("max", "min") and replicas > 1:
            # An extreme crosses as a sum: each replica fills its own slot of a vector of zeros.
            mine = tf.one_hot(context.replica_id_in_sync_group, replicas, on_value=True, off_value=False, dtype=tf.bool)
            flat.append(tf.where(mine, stat.value, tf.zeros([], stat.value.dtype)))
        else:
            flat.append(stat.value)
        if stat.weight is not None:
            flat.append(stat.weight)

    def rebuild(total: Sequence[tf.Tensor]) -> dict[str, Stat]:
        values, result = iter(total), {}
        for name, stat in stats.items():
            value = next(values)
            if stat.kind in ("max", "min") and replicas > 1:
                value = tf.reduce_max(value) if stat.kind == "max" else tf.reduce_min(value)
            result[name] = Stat(stat.kind, value, None if stat.weight is None else next(values), reduced=True)
        return result

    return flat, rebuild
