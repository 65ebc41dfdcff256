"""Assertions inside ``strategy.run``: values are the same, or close, on all replicas of all workers.

What crosses the replicas is one fingerprint for each tensor, in one all-reduce. Only where fingerprints differ the
values themselves are looked at, in a branch that all replicas take alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.monitor.fingerprint import (
    COLUMNS,
    bits,
    column_weights,
    fingerprints,
    from_bits,
    has_bits,
    numbers_per_element,
    row_hashes,
)
from framework.step.autograph import own
from framework.step.gradients import forbid_communication, native
from framework.step.reduce import Reduction, all_reduce_sum

# How the text of a failed assertion begins and ends, so that it can be told from other errors of TensorFlow.
FIRST_WORDS, LAST_WORDS = "replicas differ: ", "(framework.assert_replicas)"


@own
def assert_replicas_equal(values: Any, *, name: str = "values") -> None:
    """Asserts, in the graph, that ``values`` are bit for bit the same on all replicas. Call it in replica context.

    A NaN equals a NaN of the same bits; -0.0 differs from 0.0. With one replica it does nothing. All replicas have to
    call it, and not in a branch or loop of the graph inside the step: they meet there.

    Args:
      values: a tensor or variable of any numeric dtype or bool and a shape known while tracing, or a nest of them; what
        each replica passes is compared with what the others pass.
      name: what the error calls them; parts of a nest are ``name/key``.

    Raises:
      ConfigError: a dtype that is not numeric, or a shape that is not known.
      LockstepError: called outside a replica.
      tf.errors.InvalidArgumentError: when it runs and the replicas differ: the message names the first tensor that
        differs, the place of its first differing element, and its value on each replica.
    """
    _assert(values, name, _explain_equal)


@own
def assert_replicas_close(values: Any, *, rtol: float, atol: float, name: str = "values") -> None:
    """Asserts, in the graph, that ``values`` are about the same on all replicas. Call it in replica context.

    Each replica r must have ``|x_r - x_0| <= atol + rtol * |x_0|`` in every element, in float64, x_0 being the first
    replica's; two NaNs count as equal, and so do two equal infinities. Where all bits are equal only fingerprints
    cross the replicas; otherwise the first replica's values go to all. Like ``assert_replicas_equal`` in all else.

    Args:
      values: a tensor or variable of real numbers or bool, or a nest of them.
      rtol: at least 0.
      atol: at least 0.
      name: what the error calls them.

    Raises:
      ConfigError: a tolerance below 0, a complex dtype or one that is not numeric, or a shape that is not known.
      LockstepError: called outside a replica.
      tf.errors.InvalidArgumentError: when it runs and the replicas differ by more.
    """
    if not (rtol >= 0.0 and atol >= 0.0):
        raise ConfigError(f"rtol={rtol}, atol={atol} but both must be at least 0; for example rtol=1e-6, atol=0.0")
    _assert(values, name, functools.partial(_explain_close, rtol=rtol, atol=atol))


@own
def gather_slots(mine: tf.Tensor, how: Reduction | None = None) -> tf.Tensor:
    """``mine`` (int64 ``[count]``) of all replicas, ``[replicas, count]``; in replica context, in one all-reduce."""
    context = tf.distribute.get_replica_context()
    here = tf.equal(tf.range(context.num_replicas_in_sync), context.replica_id_in_sync_group)
    (table,) = all_reduce_sum([tf.where(here[:, None], mine[None], tf.zeros([], tf.int64))], how)
    return table


# (strategy, name, copies on this worker's replicas) -> None; makes the assertion, in cross-replica context.
_Explain = Callable[[Any, str, Sequence[tf.Tensor]], None]


def _assert(values: Any, name: str, explain: _Explain) -> None:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LockstepError(f"the assertion about {name} was called outside a replica; call it inside strategy.run")
    named = dict(_named(values, name))
    for key, tensor in named.items():
        if not has_bits(tensor.dtype):
            raise ConfigError(f"{key} has dtype {tensor.dtype.name} but it must be numeric or bool to be compared")
        if tensor.dtype.is_complex and explain is not _explain_equal:
            raise ConfigError(f"{key} has dtype {tensor.dtype.name} but it must be real; compare its parts")
        if tensor.shape.num_elements() is None:
            raise ConfigError(f"{key} has shape {tensor.shape} but it must be known while tracing to be compared")
    if context.num_replicas_in_sync == 1 or not named:
        return
    forbid_communication()
    table = gather_slots(fingerprints([[tensor] for tensor in named.values()]))

    def look(strategy: Any, table: Any, *copies: Any) -> None:
        _look(strategy, table, copies, list(named), explain)

    context.merge_call(look, args=(table, *named.values()))


def _look(strategy: Any, table: Any, values: Sequence[Any], names: Sequence[str], explain: _Explain) -> None:
    """In cross-replica context, where the graph sees all copies of this worker: no communication unless they differ."""
    tables = strategy.experimental_local_results(table)
    common = _settled(tables)
    differs = tf.reduce_any(tf.not_equal(common, common[:1]), 0)  # [tensors], alike on all workers
    nothing = tf.constant(False)

    def look(number: int) -> tf.Tensor:
        copies = strategy.experimental_local_results(values[number])
        # What is one object on all replicas comes here as that object.
        explain(strategy, names[number], copies if len(copies) == len(tables) else copies * len(tables))
        return tf.constant(True)

    def look_at_all() -> tf.Tensor:
        for number in range(len(names)):
            if not strategy.experimental_local_results(values[number])[0].shape.num_elements():
                continue
            tf.cond(differs[number], functools.partial(look, number), lambda: nothing)
        return tf.constant(True)

    tf.cond(tf.reduce_any(differs), look_at_all, lambda: nothing)


def _explain_equal(strategy: Any, name: str, copies: Sequence[tf.Tensor]) -> None:
    dtype, shape = copies[0].dtype, copies[0].shape
    numbers, weights = [bits(copy) for copy in copies], column_weights()
    rows = _gather(strategy, [row_hashes(n, weights) for n in numbers])  # [replicas, rows]
    row = _first(tf.not_equal(rows, rows[:1]))
    count = -(-int(numbers[0].shape[0]) // COLUMNS)
    tables = [tf.reshape(tf.pad(n, [[0, count * COLUMNS - int(n.shape[0])]]), [count, COLUMNS]) for n in numbers]
    piece = _gather(strategy, [table[row] for table in tables])  # [replicas, COLUMNS]
    column = _first(tf.not_equal(piece, piece[:1]))
    per = numbers_per_element(dtype)
    start = column // per * per
    values = from_bits(tf.stack([piece[:, start + i] for i in range(per)], 1), dtype)
    flat = (row * COLUMNS + column) // per
    same = tf.reduce_all(tf.equal(piece, piece[:1]))
    # Of three or more replicas the one whose row no majority has.
    votes = tf.reduce_sum(tf.cast(tf.reduce_all(tf.equal(piece[:, None], piece[None]), 2), tf.int32), 1)
    odd = _odd_ones(votes)
    _fail_unless(same, name, shape, flat, values, odd)


def _explain_close(strategy: Any, name: str, copies: Sequence[tf.Tensor], *, rtol: float, atol: float) -> None:
    wide = [tf.reshape(tf.cast(copy, tf.float64), [-1]) for copy in copies]
    size = int(wide[0].shape[0])
    reference = _from_first(strategy, wide)
    nobody = tf.constant(size, tf.int64)

    def first_bad(value: tf.Tensor) -> tf.Tensor:
        near = tf.abs(value - reference) <= atol + rtol * tf.abs(reference)
        near &= tf.math.is_finite(value) & tf.math.is_finite(reference)
        near |= tf.equal(value, reference) | (tf.math.is_nan(value) & tf.math.is_nan(reference))
        return tf.reduce_min(tf.where(near, nobody, tf.range(size, dtype=tf.int64)))

    place = tf.reduce_min(_gather(strategy, [first_bad(value)[None] for value in wide]))
    flat = tf.minimum(place, size - 1)
    values = _gather(strategy, [tf.bitcast(value[flat][None], tf.int64) for value in wide])[:, 0]
    text = f"by more than {atol:g} + {rtol:g} * |replica 0| "
    values = tf.cast(tf.bitcast(values, tf.float64), copies[0].dtype)  # exact: they were of it
    _fail_unless(tf.equal(place, nobody), name, copies[0].shape, flat, values, text)


def _fail_unless(
    same: tf.Tensor, name: str, shape: tf.TensorShape, flat: tf.Tensor, values: tf.Tensor, remark: Any
) -> None:
    """The assertion: ``values`` ``[replicas]`` are those of the element at ``flat``."""
    index = tf.unravel_index(flat, tf.constant(shape.as_list(), tf.int64)) if shape.rank else tf.zeros([0], tf.int64)
    replicas = int(values.shape[0])
    with tf.device("CPU:0"):  # texts live on the host
        place = tf.strings.join(["[", tf.strings.reduce_join(tf.as_string(index), separator=", "), "]"])
        each = tf.strings.join([tf.constant([f"replica {i}: " for i in range(replicas)]), _texts(values)])
        text = tf.strings.join(
            [
                f"{FIRST_WORDS}{name} ({values.dtype.name} {shape.as_list()}) at ",
                place,
                " ",
                remark,
                "is ",
                tf.strings.reduce_join(each, separator=", "),
                f" {LAST_WORDS}",
            ]
        )
        tf.debugging.Assert(same, [text], summarize=-1)


def _texts(values: tf.Tensor) -> tf.Tensor:
    """Each value to as many digits as tell it from its neighbours."""
    if values.dtype in (tf.bool, tf.string) or values.dtype.is_integer:
        return tf.as_string(values)
    if values.dtype.is_complex:
        return tf.strings.join([_texts(tf.math.real(values)), " + ", _texts(tf.math.imag(values)), "i"])
    if values.dtype == tf.float64:
        return tf.as_string(values, precision=17, shortest=True)
    return tf.as_string(tf.cast(values, tf.float32), precision=9, shortest=True)


def _odd_ones(votes: tf.Tensor) -> tf.Tensor:
    """A remark that names replicas outside the majority; ``votes`` ``[replicas]`` are the replicas each one equals."""
    replicas = int(votes.shape[0])
    with tf.device("CPU:0"):
        odd = tf.boolean_mask(tf.constant([str(i) for i in range(replicas)]), 2 * votes <= replicas)
        some = tf.reduce_any(2 * votes > replicas) if replicas > 2 else tf.constant(False)
        said = tf.strings.join(["(odd one out: replica ", tf.strings.reduce_join(odd, separator=", "), ") "])
        return tf.where(some, said, "")


def _first(differs: tf.Tensor) -> tf.Tensor:
    """Number of the first column of ``[replicas, columns]`` in which any is True; 0 if there is none."""
    return tf.argmax(tf.cast(tf.reduce_any(differs, 0), tf.int32))


def _gather(strategy: Any, local: Sequence[tf.Tensor]) -> tf.Tensor:
    """int64 ``[count]`` of each of this worker's replicas -> ``[replicas, count]`` of all; in cross-replica context."""
    replicas = strategy.num_replicas_in_sync
    if len(local) == replicas:
        return tf.stack(list(local))
    ids = _local_ids(strategy, len(local))
    slots = []
    for i, value in zip(ids, local, strict=True):
        slots.append(tf.where(tf.equal(tf.range(replicas), i)[:, None], value[None], tf.zeros([], tf.int64)))
    return _summed(strategy, slots)


def _from_first(strategy: Any, local: Sequence[tf.Tensor]) -> tf.Tensor:
    """float64 values of replica 0, whichever worker has it."""
    if len(local) == strategy.num_replicas_in_sync:
        return local[0]
    ids = _local_ids(strategy, len(local))
    # As integers: a sum of floats would lose the bits of a NaN.
    whole = [tf.bitcast(value, tf.int64) for value in local]
    return tf.bitcast(
        _summed(strategy, [w if i == 0 else tf.zeros_like(w) for i, w in zip(ids, whole, strict=True)]), tf.float64
    )


def _local_ids(strategy: Any, count: int) -> list[int]:
    """Numbers of this worker's replicas among all."""
    first = strategy.cluster_resolver.task_id * count
    return list(range(first, first + count))


def _summed(strategy: Any, local: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum of one tensor of each replica over all workers; in cross-replica context, also in a branch of the graph."""
    # Private: there is no public way to make a per-replica value of tensors in a graph.
    from tensorflow.python.distribute import distribute_utils

    values = distribute_utils.regroup(tuple(local), always_wrap=True)
    total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, values, values)
    return _settled(strategy.experimental_local_results(total))


def _settled(copies: Sequence[tf.Tensor]) -> tf.Tensor:
    """The first of some equal tensors, once all are there.

    An assertion that fails ends the step; a reduction of another replica that was still going on would leave the other
    workers waiting for this one.
    """
    with tf.control_dependencies(list(copies)):
        return tf.identity(copies[0])


def _named(values: Any, name: str) -> Iterator[tuple[str, tf.Tensor]]:
    """Tensors of a nest with a name for each."""
    if isinstance(values, Mapping):
        for key in sorted(values, key=str):
            yield from _named(values[key], f"{name}/{key}")
    elif isinstance(values, (list, tuple)):
        for i, part in enumerate(values):
            yield from _named(part, f"{name}/{i}")
    elif isinstance(values, tf.IndexedSlices):
        yield from _named({"indices": values.indices, "values": values.values}, name)
    elif values is not None:
        yield name, tf.convert_to_tensor(np.asarray(values) if isinstance(values, np.generic) else native(values))
