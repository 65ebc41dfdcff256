"""The all-reduce: gradients, weights, figures and state of all replicas, added in flat packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from framework.errors import LockstepError
from framework.step.autograph import own
from framework.step.gradients import StepSums, forbid_communication
from framework.step.values import Stat

DEFAULT_PACK_BYTES = 32_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """How sums cross the replicas.

    Attributes:
      pack_bytes: tensors of one dtype are joined into flat packs of at most this many bytes (a larger tensor goes
        alone); one all-reduce a pack. 0: every tensor goes alone.
      options: ``tf.distribute.experimental.CommunicationOptions``.
      wire: dtype of gradients on the wire; other sums always go as they are.
      wire_scale: gradients are multiplied by this power of two before they become ``wire``, and divided after: sums
        over a batch would overflow float16.
      sparse: how ``tf.IndexedSlices`` go: ``dense``, ``sparse`` (indices and rows of all replicas are gathered), or
        ``auto``: sparse where the replicas' rows together are fewer than the variable's.
      report: is called while tracing with the plan of packs.
      watch: is called while tracing, on each replica, with ``local`` and a tensor that needs all of the replica's own
        work, then with ``reduced`` and what the reduction gave, first what stands for the former.
    """

    pack_bytes: int = DEFAULT_PACK_BYTES
    options: Any = None
    wire: tf.DType | None = None
    wire_scale: float = 1.0
    sparse: str = "auto"
    report: Callable[[list[dict[str, Any]]], None] | None = None
    watch: Callable[[str, Sequence[tf.Tensor]], None] | None = None


@own
def reduce(sums: StepSums, how: Reduction | None = None) -> StepSums:
    """Adds ``sums`` over all replicas. Call it in replica context, once.

    Args:
      sums: this replica's sums.
      how: packing, algorithm and wire dtype; None: the defaults.

    Raises:
      LockstepError: ``sums`` were reduced before; a second reduction would multiply them by the number of replicas.
    """
    how = how or Reduction()
    if sums.reduced:
        raise LockstepError("reduce() was called twice on the same sums; they are already sums over all replicas")
    _context()
    merged = [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in sums.gradients]
    norms = Stat("slots", local_norms(sums, merged))
    if how.watch is not None:
        how.watch("local", [norms.value])
    dense: dict[int, tf.Tensor] = {}
    gradients: list[Any] = [None] * len(merged)
    for i, gradient in enumerate(merged):
        if isinstance(gradient, tf.IndexedSlices):
            if _goes_sparse(gradient, sums.gradients[i], how.sparse):
                gradients[i] = gather_rows(gradient, how.options)
                continue
            gradient = tf.convert_to_tensor(gradient)
        if gradient is not None:
            dense[i] = gradient
    flat, rebuild = _flatten_stats(
        {**_prefixed("stat/", sums.stats), **_prefixed("state/", sums.state), "norms": norms}
    )
    total = _all_reduce([*dense.values()], [sums.weight, *flat], how)
    for i, value in zip(dense, total, strict=False):
        gradients[i] = value
    stats = rebuild(total[len(dense) + 1 :])
    if how.watch is not None:
        rows = [g.values for g in gradients if isinstance(g, tf.IndexedSlices)]
        how.watch("reduced", [stats["norms"].value, *total, *rows])
    return dataclasses.replace(
        sums,
        gradients=gradients,
        weight=total[len(dense)],
        stats={n[5:]: s for n, s in stats.items() if n.startswith("stat/")},
        state={n[6:]: s for n, s in stats.items() if n.startswith("state/")},
        norms=stats["norms"].value,
        reduced=True,
    )


def _prefixed(prefix: str, stats: Mapping[str, Stat]) -> dict[str, Stat]:
    return {prefix + name: stat for name, stat in stats.items()}


def local_norms(sums: StepSums, gradients: Sequence[Any]) -> tf.Tensor:
    """float32 ``[1 + variables]``: this replica's loss sum, and each gradient's sum of squares, without the scale."""
    loss = sums.stats["loss"].value if "loss" in sums.stats else tf.zeros([])
    squares = []
    for g in gradients:
        values = g.values if isinstance(g, tf.IndexedSlices) else g
        # l2_loss is one fused pass: sum(t ** 2) / 2.
        squares.append(tf.zeros([]) if g is None else 2.0 * tf.cast(tf.nn.l2_loss(values), tf.float32))
    scale = 1.0 if sums.scale is None else tf.square(tf.cast(sums.scale, tf.float32) * sums.nominal)
    return tf.concat([[tf.cast(loss, tf.float32)], tf.stack(squares) / scale], 0)


@own
def reduce_stats(stats: dict[str, Stat], how: Reduction | None = None) -> dict[str, Stat]:
    """Reduces the figures that are not reduced yet, in one all-reduce. Call it in replica context."""
    local = {name: stat for name, stat in stats.items() if not stat.reduced}
    if not local:
        return stats
    flat, rebuild = _flatten_stats(local)
    how = dataclasses.replace(how or Reduction(), report=None)
    reduced = rebuild(_all_reduce([], flat, how))
    return {name: reduced.get(name, stat) for name, stat in stats.items()}


@own
def all_gather(value: Any, axis: int = 0, options: Any = None) -> tf.Tensor:
    """``value`` of all replicas, joined along ``axis`` in the order of the replicas; call it in replica context.

    Sizes along ``axis`` may differ. Its gradient is right for a loss that is summed over replicas: each replica gets
    the sum of what all replicas' losses say about its part.

    Raises:
      LockstepError: called outside a replica.
    """
    context = _context()
    if context.num_replicas_in_sync == 1:
        return value
    forbid_communication()
    return context.all_gather(value, axis, options)


def _context() -> Any:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LockstepError("the reduction was called outside a replica; call it inside strategy.run")
    return context


@own
def merge_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds rows of one index: unique, sorted indices. Norms and updates are wrong on duplicates."""
    indices = tf.cast(tf.reshape(slices.indices, [-1]), tf.int64)
    values = tf.reshape(slices.values, tf.concat([[-1], tf.shape(slices.values)[slices.indices.shape.rank :]], 0))
    order = tf.argsort(indices, stable=True)  # stable: rows of one index are added in their order, on all devices
    unique, position = tf.unique(tf.gather(indices, order))
    summed = tf.math.unsorted_segment_sum(tf.gather(values, order), position, tf.size(unique))
    return tf.IndexedSlices(summed, unique, slices.dense_shape)


def gather_rows(slices: tf.IndexedSlices, options: Any) -> tf.IndexedSlices:
    """The sum over replicas of ``slices`` with unique indices, by gathering rows and indices of all."""
    context = _context()
    if context.num_replicas_in_sync == 1:
        return slices
    indices, values = (context.all_gather(t, 0, options) for t in (slices.indices, slices.values))
    return merge_rows(tf.IndexedSlices(values, indices, slices.dense_shape))


def _goes_sparse(slices: tf.IndexedSlices, original: Any, choice: str) -> bool:
    if choice != "auto":
        return choice == "sparse"
    rows = _rows_of_all(original.indices.shape.num_elements())  # before duplicates were merged
    shape = tf.get_static_value(slices.dense_shape) if slices.dense_shape is not None else None
    if rows is None or shape is None:
        return False
    return rows < int(shape[0])


def _rows_of_all(mine: int | None) -> int | None:
    """Rows of all replicas together, as far as they are known while tracing: one answer for all of them."""
    context = _context()
    replicas = context.num_replicas_in_sync
    if replicas == 1:
        return mine

    def largest(strategy: Any, counts: Any) -> int:
        return max(strategy.experimental_local_results(counts))

    most = context.merge_call(largest, args=(_UNKNOWN if mine is None else mine,))
    return None if most == _UNKNOWN else int(most) * replicas


_UNKNOWN = 1 << 62  # larger than any number of rows


def _all_reduce(gradients: Sequence[tf.Tensor], others: Sequence[tf.Tensor], how: Reduction) -> list[tf.Tensor]:
    """Sums over the replicas; gradients in the wire dtype, the rest as they are, all in one call.

    With one replica the tensors come back as they are: nothing is packed, and nothing is rounded to the wire dtype.
    """
    context = _context()
    if context.num_replicas_in_sync == 1:
        return [*gradients, *others]
    wired = [_to_wire(g, how) for g in gradients]
    tensors = [*wired, *others]
    packs = plan_packs(tensors, how.pack_bytes)
    if how.report is not None:
        how.report(describe_packs(tensors, packs))
    result: list[Any] = [None] * len(tensors)
    flat = [_join([tensors[i] for i in pack]) for pack in packs]
    # One call a dtype: under MirroredStrategy each call is a meeting point of the replicas' threads, and some
    # algorithms join the tensors of a call whatever their dtypes.
    values: list[Any] = [None] * len(flat)
    for dtype in dict.fromkeys(t.dtype for t in flat):
        same = [i for i, t in enumerate(flat) if t.dtype == dtype]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[i] for i in same], how.options)
        for i, value in zip(same, summed, strict=True):
            values[i] = value
    for pack, value in zip(packs, values, strict=True):
        sizes = [tensors[i].shape.num_elements() for i in pack]
        for i, part in zip(pack, tf.split(value, sizes) if len(pack) > 1 else [value], strict=True):
            result[i] = tf.reshape(part, tensors[i].shape)
    for i, gradient in enumerate(gradients):
        if wired[i] is not gradient:
            result[i] = tf.cast(result[i], gradient.dtype) / tf.cast(how.wire_scale, gradient.dtype)
    return result


@own
def all_reduce_sum(tensors: Sequence[tf.Tensor], how: Reduction | None = None) -> list[tf.Tensor]:
    """Sums each tensor over the replicas; the same packs in the same order on all of them, by construction."""
    return _all_reduce([], tensors, how or Reduction())


def _to_wire(gradient: tf.Tensor, how: Reduction) -> tf.Tensor:
    if how.wire is None or how.wire == gradient.dtype or gradient.dtype != tf.float32:
        return gradient
    return tf.cast(gradient * how.wire_scale, how.wire)


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


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


def describe_packs(tensors: Sequence[tf.Tensor], packs: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The plan for people and for ``config.json``: dtype, number of tensors and bytes of each pack."""
    return [
        {
            "dtype": tensors[pack[0]].dtype.name,
            "tensors": len(pack),
            "bytes": sum(tensors[i].shape.num_elements() * tensors[i].dtype.size for i in pack),
        }
        for pack in packs
    ]


def _flatten_stats(stats: Mapping[str, Stat]) -> tuple[list[tf.Tensor], Any]:
    """Figures as tensors whose sum over replicas carries them, and a function that puts the sums back."""
    context = _context()
    replicas = context.num_replicas_in_sync
    flat: list[tf.Tensor] = []
    for stat in stats.values():
        if stat.kind in _BY_SLOT:
            # What is no sum crosses as one: each replica fills its own slot of an array of zeros.
            mine = tf.equal(tf.range(replicas), context.replica_id_in_sync_group)
            mine = tf.reshape(mine, [replicas] + [1] * stat.value.shape.rank)
            flat.append(tf.where(mine, stat.value[None], tf.zeros([], stat.value.dtype)))
        else:
            flat.append(stat.value)
        if stat.weight is not None:
            flat.append(stat.weight)

    def rebuild(total: Sequence[tf.Tensor]) -> dict[str, Stat]:
        values, result = iter(total), {}
        for name, stat in stats.items():
            value = next(values)
            if stat.kind in _BY_SLOT:
                value = _BY_SLOT[stat.kind](value)
            weight = None if stat.weight is None else next(values)
            result[name] = stat._replace(value=value, weight=weight, reduced=True)
        return result

    return flat, rebuild


# Kinds that cross in slots ``[replicas, ...]``, and what is made of the slots.
_BY_SLOT: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "max": lambda slots: tf.reduce_max(slots, 0),
    "min": lambda slots: tf.reduce_min(slots, 0),
    "slots": lambda slots: slots,
}
