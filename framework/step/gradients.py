"""Local sums: one replica's loss, gradients and figures, before anything crosses replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.step.autograph import own, users
from framework.step.values import LossOutput, Stat, StatLayout, local_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over examples, of one replica or, when ``reduced``, of all of them.

    Attributes:
      gradients: one per variable, the gradient of the *sum* of weighted losses (and of penalty x weight), times
        ``scale``; None where the loss does not depend on the variable. ``tf.IndexedSlices`` of an embedding stay so.
      weight: scalar, sum of the weights: what the gradients are to be divided by, once, after the reduction.
      stats: the figures to report, by name.
      variables: the variables the gradients belong to.
      scale: the loss scale in the gradients; None: 1.
      nominal: a power of two that the gradients are multiplied by besides; 1 without a loss scale.
      state: what the replicas' non-trainable state needs to become one again, by name.
      norms: float32 ``[replicas, 1 + variables]`` when reduced: each replica's own loss sum, then the sum of squares of
        each of its gradients (0 for None). Which replica went wrong can be seen only before the reduction.
      reduced: whether ``reduce`` has been called.
    """

    gradients: Sequence[Any]
    weight: tf.Tensor
    stats: dict[str, Stat]
    variables: Sequence[Any]
    scale: tf.Tensor | None = None
    nominal: float = 1.0
    state: dict[str, Stat] = dataclasses.field(default_factory=dict)
    norms: tf.Tensor | None = None
    reduced: bool = False


_thread = threading.local()  # each replica is traced in its own thread


@contextlib.contextmanager
def local_only(why: str) -> Iterator[None]:
    """Marks code, while it is traced, where replicas cannot meet; ``forbid_communication`` raises inside the block."""
    before = getattr(_thread, "why", "")
    _thread.why = why
    try:
        yield
    finally:
        _thread.why = before


def forbid_communication() -> None:
    """Raises ConfigError where replicas cannot meet."""
    why = getattr(_thread, "why", "")
    if why:
        raise ConfigError(f"the loss communicates with other replicas, but replicas cannot meet {why}")


@own
def gradients(
    compute: Callable[[], LossOutput],
    variables: Sequence[Any],
    *,
    scale: tf.Tensor | None = None,
    examples: int = 1,
) -> StepSums:
    """Runs ``compute`` under a gradient tape and returns local sums. Call it in replica context.

    Args:
      compute: returns the replica's ``LossOutput``.
      variables: Keras or TensorFlow variables to differentiate for.
      scale: loss scale for float16; figures are not scaled.
      examples: of the global batch. With a loss scale the sum that is differentiated is also divided by the number of
        its terms, rounded to a power of two, so that float16 sees gradients of about a mean, as loss scales are made
        for.

    Raises:
      ConfigError: the ``LossOutput`` breaks its rules.
    """
    variables = [native(v) for v in variables]
    with tf.GradientTape() as tape:
        output = users(compute)()
        objective, weight, stats = local_sums(output)
        scaled, nominal = objective, 1.0
        if scale is not None:
            nominal = power_of_two(examples * (tf.convert_to_tensor(output.loss).shape[1:].num_elements() or 1))
            scaled = objective * tf.cast(scale * nominal, objective.dtype)
    found = tape.gradient(scaled, variables)
    for gradient, variable in zip(found, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)  # lost where the batch's size is not known while tracing
    return StepSums(
        gradients=found,
        weight=tf.stop_gradient(weight),
        stats=stats,
        variables=variables,
        scale=scale,
        nominal=nominal,
    )


def accumulate(
    one: Callable[[Any, Any], StepSums],
    batch: Any,
    count: int,
    *,
    variables: Sequence[Any],
    unroll: bool = False,
    sizes: tf.Tensor | None = None,
) -> StepSums:
    """Adds the local sums of ``count`` micro-batches, one after the other, so that memory holds one at a time.

    Args:
      one: (micro-batch, its number) -> local sums. Traced once, or ``count`` times if ``unroll``.
      batch: this replica's batch; its rows are split into parts whose sizes differ by at most one, some maybe empty.
      count: micro-batches.
      variables: what ``one`` differentiates for.
      unroll: lay the micro-batches out in the graph; needed where ``one`` itself communicates.
      sizes: int64 ``[count]``, rows of each micro-batch; None: as equal as can be.

    Raises:
      LockstepError: the micro-batches give different figures.
    """
    if count == 1:
        return one(batch, 0)
    first = tf.nest.flatten(batch)[0]
    rows = None if isinstance(first, (tf.RaggedTensor, tf.SparseTensor)) else first.shape[0]
    static = rows // count if rows is not None and rows % count == 0 and sizes is None else None
    if sizes is None:
        total = row_count(batch)
        k = tf.range(count, dtype=tf.int64)
        sizes = total // count + tf.cast(k < total % count, tf.int64)
    starts = tf.cumsum(sizes, exclusive=True)

    def part(k: Any) -> Any:
        return tf.nest.map_structure(lambda t: _slice(t, starts[k], sizes[k], static), batch)

    return _unrolled(one, part, count) if unroll else _looped(one, part, count, [native(v) for v in variables])


def _slice(value: Any, low: tf.Tensor, size: tf.Tensor, static: int | None) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return value[low : low + size]
    if isinstance(value, tf.SparseTensor):
        rest = tf.cast(value.dense_shape[1:], tf.int64)
        start = tf.concat([[low], tf.zeros_like(rest)], 0)
        return tf.sparse.slice(value, start, tf.concat([[size], rest], 0))
    if static is None:
        return value[low : low + size]
    begin = tf.concat([[low], tf.zeros([value.shape.rank - 1], low.dtype)], 0)
    return tf.slice(value, begin, [static] + [-1] * (value.shape.rank - 1))  # also XLA knows this shape


def _unrolled(one: Callable[[Any, Any], StepSums], part: Callable[[Any], Any], count: int) -> StepSums:
    sums = one(part(0), 0)
    for k in range(1, count):
        # The next micro-batch waits for the one before, or all activations would be in memory together.
        with tf.control_dependencies([sums.weight, *(g for g in map(_tensor, sums.gradients) if g is not None)]):
            batch = tf.nest.map_structure(tf.identity, part(k), expand_composites=True)
            sums = _add(sums, one(batch, k))
    return sums


def _looped(
    one: Callable[[Any, Any], StepSums], part: Callable[[Any], Any], count: int, variables: Sequence[Any]
) -> StepSums:
    traced: dict[str, Any] = {}  # filled while the body is traced

    def body(k: tf.Tensor, weight: tf.Tensor, vectors: Any, gradients: Any) -> Any:
        with local_only("inside the loop over micro-batches; set loss_communicates = True in the Trainer class"):
            sums = one(part(k), k)
        traced["sums"] = sums
        traced["layout"] = layout = StatLayout(sums.stats)
        new = layout.vectors(sums.stats)
        merged = []
        for old, value, combine in zip(vectors, new, (tf.add, tf.maximum, tf.minimum, lambda a, b: b), strict=True):
            vector = tf.cond(tf.equal(k, 0), lambda v=value: v, lambda o=old, v=value, c=combine: c(o, v))
            vector.set_shape([None])
            merged.append(vector)
        added = [
            g if new_g is None else g + tf.cast(tf.convert_to_tensor(new_g), g.dtype)
            for g, new_g in zip(gradients, sums.gradients, strict=True)
        ]
        return k + 1, weight + tf.cast(sums.weight, weight.dtype), tuple(merged), added

    zeros = [tf.zeros(v.shape, v.dtype) for v in variables]
    empty = tf.zeros([0], tf.float64)
    start = (tf.constant(0), tf.zeros([], tf.float64), (empty,) * 4, zeros)
    shapes = (tf.TensorShape([]), tf.TensorShape([]), (tf.TensorShape([None]),) * 4, [z.shape for z in zeros])
    _, weight, vectors, gradients = tf.while_loop(
        lambda k, *_: k < count, body, start, shape_invariants=shapes, parallel_iterations=1
    )
    sums, layout = traced["sums"], traced["layout"]
    return StepSums(
        gradients=[None if new is None else g for g, new in zip(gradients, sums.gradients, strict=True)],
        weight=tf.cast(weight, sums.weight.dtype),
        stats=layout.stats(vectors, {name: stat.value.dtype for name, stat in sums.stats.items()}),
        variables=variables,
        scale=sums.scale,  # of the outer graph: `one` closes over it
        nominal=sums.nominal,
    )


def _add(a: StepSums, b: StepSums) -> StepSums:
    if set(a.stats) != set(b.stats):
        raise LockstepError(f"micro-batches report different figures: {sorted(a.stats)} and {sorted(b.stats)}")
    combine: dict[str, Any] = {"mean": tf.add, "sum": tf.add, "derived": tf.add, "max": tf.maximum, "min": tf.minimum}
    stats = {}
    for name, stat in a.stats.items():
        other = b.stats[name]
        value = combine[stat.kind](stat.value, other.value)
        weight = None if stat.weight is None else stat.weight + other.weight
        stats[name] = stat._replace(value=value, weight=weight)
    gradients = []
    for x, y in zip(a.gradients, b.gradients, strict=True):
        x, y = _tensor(x), _tensor(y)
        gradients.append(y if x is None else x if y is None else x + y)
    return dataclasses.replace(a, gradients=gradients, weight=a.weight + b.weight, stats=stats)


def _tensor(gradient: Any) -> tf.Tensor | None:
    return None if gradient is None else tf.convert_to_tensor(gradient)


def row_count(batch: Any) -> tf.Tensor:
    """Number of examples in a batch, int64 scalar: the first dimension of its first part.

    Raises:
      ConfigError: the batch has no parts.
    """
    leaves = tf.nest.flatten(batch)
    if not leaves:
        raise ConfigError("a batch has no parts; the data must give at least one tensor")
    first = leaves[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first, tf.int64)[0]


def power_of_two(terms: int) -> float:
    """The power of two at or below 1 / terms: exact to multiply by, and sums of so many terms become about means."""
    return 2.0 ** -math.ceil(math.log2(max(1, terms)))


def native(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras variable; anything else as it is."""
    import keras

    return variable.value if isinstance(variable, keras.Variable) else variable
