"""What a step reports: weighted sums that can be added over examples, micro-batches, replicas and steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What ``compute_loss`` returns for one replica's batch.

    Attributes:
      loss: one loss per example, ``[batch]``, or per element, ``[batch, ...]``; any float dtype. Never a mean.
      weight: weight of each loss, of the loss's shape or with 1 where it is to be repeated; None means ones. The
        reported loss is sum(loss x weight) / sum(weight) over the global batch.
      metrics: name -> value ``[batch, ...]`` (weighted like the loss) or a pair (value, weight), reported in the same
        way; or ``Sum``, ``Max`` or ``Min`` of a value for another reduction.
      penalty: a scalar added once to the mean loss, whatever the number of replicas. None: the sum of the Keras
        model's own ``losses`` (its regularisers), if it has any.
    """

    loss: Any
    weight: Any = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    penalty: Any = None


@dataclasses.dataclass(frozen=True)
class Sum:
    """A metric reported as the plain sum of ``value`` over all elements of the global batch (then over steps)."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Max:
    """A metric reported as the largest element of ``value`` over the global batch (then over steps)."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Min:
    """A metric reported as the smallest element of ``value`` over the global batch (then over steps)."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Derived:
    """A metric computed at the very end from sums: an area under a curve, a confusion matrix.

    Attributes:
      sums: tensors of any shape, sums over this replica's examples; they are added over replicas and steps.
      finish: the sums as float64 arrays, in their order -> the figure, or figures by name.
    """

    sums: Sequence[Any]
    finish: Callable[[Sequence[np.ndarray]], float | Mapping[str, float]]


class Stat(NamedTuple):
    """One reported figure as tensors that can be reduced: ``mean`` is value / weight at the very end."""

    kind: str  # mean | sum | max | min | last | derived
    value: tf.Tensor  # a scalar, or flat: the sums of ``derived``, and what only crosses replicas
    weight: tf.Tensor | None = None  # of a mean
    reduced: bool = False  # whether it already is over all replicas
    finish: Callable[[np.ndarray], float | Mapping[str, float]] | None = None  # of ``derived``, from its flat value


def local_sums(output: LossOutput) -> tuple[tf.Tensor, tf.Tensor, dict[str, Stat]]:
    """Turns one replica's ``LossOutput`` into sums.

    Returns:
      The objective to differentiate, sum(loss x weight) + penalty x sum(weight): divided by the total weight after
      the reduction it is the mean loss plus the penalty once. Then the sum of weights, and the figures by name, with
      ``loss`` first. All scalars, float32 or wider.

    Raises:
      ConfigError: a shape breaks the rules of ``LossOutput``.
    """
    if not isinstance(output, LossOutput):
        raise ConfigError(
            f"compute_loss returned {type(output).__name__} but it must return a framework.LossOutput; "
            "for example LossOutput(loss=per_example_losses)"
        )
    loss = _wide(output.loss)
    if loss.shape.rank == 0:
        raise ConfigError(
            "compute_loss returned a scalar loss but it must be one loss per example, [batch] or [batch, ...]; "
            "make the loss with reduction=None (Keras: reduction='none') and let the framework divide"
        )
    total, weight = _weighted(loss, output.weight, "loss")
    objective = total
    if output.penalty is not None:
        penalty = tf.cast(output.penalty, total.dtype)
        if penalty.shape.rank != 0:
            raise ConfigError(f"penalty has shape {penalty.shape} but it must be a scalar; sum it first")
        objective = total + penalty * weight
    stats = {"loss": Stat("mean", objective, weight)}
    for name, metric in output.metrics.items():
        if name in RESERVED:
            raise ConfigError(f"metric name {name!r} is used by the framework; call it something else")
        stats[name] = _metric(name, metric, output.weight)
    return objective, weight, stats


# Names of the framework's own figures in a record.
RESERVED = frozenset(
    [
        "step",
        "phase",
        "time",
        "loss",
        "learning_rate",
        "grad_norm",
        "nonfinite",
        "examples",
        "examples_per_second",
        "step_ms",
        "input_wait",
        "tflops",
        "mfu",
    ]
)


def _metric(name: str, metric: Any, loss_weight: Any) -> Stat:
    if isinstance(metric, Sum):
        return Stat("sum", tf.reduce_sum(_wide(metric.value)))
    if isinstance(metric, Max):
        return Stat("max", tf.reduce_max(_wide(metric.value)))  # -inf for a replica without examples
    if isinstance(metric, Min):
        return Stat("min", tf.reduce_min(_wide(metric.value)))
    if isinstance(metric, Derived):
        return _derived(name, metric)
    value, weight = metric if isinstance(metric, tuple) else (metric, loss_weight)
    value = _wide(value)
    if value.shape.rank == 0:
        raise ConfigError(
            f"metric {name!r} is a scalar but it must be one value per example; "
            "or name its reduction: framework.Sum, Max or Min"
        )
    return Stat("mean", *_weighted(value, weight, f"metric {name!r}"))


def _derived(name: str, metric: Derived) -> Stat:
    parts = [_wide(part) for part in metric.sums]
    shapes = [part.shape.as_list() for part in parts]
    if any(None in shape for shape in shapes):
        raise ConfigError(f"metric {name!r} has sums of shapes {shapes} but they must be known; sum over the examples")
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def finish(flat: np.ndarray) -> float | Mapping[str, float]:
        return metric.finish([part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)])

    return Stat("derived", tf.concat([tf.reshape(part, [-1]) for part in parts], 0), finish=finish)


def _wide(value: Any) -> tf.Tensor:
    """As float32 or float64: sums are never kept in half precision."""
    value = tf.convert_to_tensor(value)
    return value if value.dtype in (tf.float32, tf.float64) else tf.cast(value, tf.float32)


def _weighted(value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum of value x weight, sum of weight)."""
    if weight is None:
        return tf.reduce_sum(value), tf.cast(tf.size(value), value.dtype)
    weight = tf.cast(weight, value.dtype)
    if weight.shape.rank not in (0, value.shape.rank):
        # Aligning from the right, as NumPy does, would pair a weight per example with positions when the sizes agree.
        raise ConfigError(
            f"the weight of {what} has shape {weight.shape} but {what} has {value.shape}; give it the same rank, "
            "for example weight[:, None] for one weight per example"
        )
    weight = tf.broadcast_to(weight, tf.shape(value))
    return tf.reduce_sum(value * weight), tf.reduce_sum(weight)


def as_stats(output: Any, what: str) -> dict[str, Stat]:
    """The figures in what a user's step returned: a ``StepSums``, a ``LossOutput`` or a mapping of named figures.

    Raises:
      ConfigError: a figure does not name its reduction.
    """
    if isinstance(output, LossOutput):
        return local_sums(output)[2]
    stats = getattr(output, "stats", output)
    if not isinstance(stats, Mapping):
        raise ConfigError(
            f"{what} returned {type(output).__name__} but it must return sums: what gradients() and reduce() give, "
            "a LossOutput, or a dict of (sum, weight) pairs, Sum, Max or Min"
        )
    return {name: _as_stat(name, value, what) for name, value in stats.items()}


def _as_stat(name: str, value: Any, what: str) -> Stat:
    if isinstance(value, Stat):
        return value
    if isinstance(value, (Sum, Max, Min, Derived)):
        return _metric(name, value, None)
    if isinstance(value, tuple) and len(value) == 2:
        return Stat("mean", tf.reduce_sum(_wide(value[0])), tf.reduce_sum(_wide(value[1])))
    raise ConfigError(
        f"{what} returned {name!r} without saying how it is reduced over replicas; return a pair (sum, weight), or "
        "framework.Sum, Max or Min"
    )


class StatLayout:
    """Order of the figures in the flat vectors that cross steps; made once, while tracing."""

    def __init__(self, stats: Mapping[str, Stat]):
        self.kinds = {name: stat.kind for name, stat in stats.items()}
        self._means = self._of("mean")
        self._sums = self._of("mean", "sum")
        self._derived = {n: (int(stats[n].value.shape[0]), stats[n].finish) for n in self._of("derived")}

    def _of(self, *kinds: str) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def vectors(self, stats: Mapping[str, Stat]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """float64 vectors: sums, then weights of means, then sums of derived figures; maxima; minima; last values."""
        sums = _stack([stats[n].value for n in self._sums] + [stats[n].weight for n in self._means])
        if self._derived:
            sums = tf.concat([sums, *(tf.cast(stats[n].value, tf.float64) for n in self._derived)], 0)
        rest = [[stats[n].value for n in self._of(kind)] for kind in ("max", "min", "last")]
        return (sums, *map(_stack, rest))

    def _parts(self, sums: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """By name: values of sums, weights of means, flat sums of derived figures."""
        weights = len(self._sums)
        start = weights + len(self._means)
        flat = {}
        for name, (size, _) in self._derived.items():
            flat[name], start = sums[start : start + size], start + size
        values = {name: sums[i] for i, name in enumerate(self._sums)}
        return values, {name: sums[weights + i] for i, name in enumerate(self._means)}, flat

    def stats(self, vectors: Sequence[tf.Tensor], dtypes: Mapping[str, tf.DType]) -> dict[str, Stat]:
        """The figures as ``Stat``s again, from what ``vectors`` gave, of the given dtypes."""
        sums, *rest = vectors
        values, weights, flat = self._parts(sums)
        result = {}
        for kind, part in zip(("max", "min", "last"), rest, strict=True):
            for i, name in enumerate(self._of(kind)):
                result[name] = Stat(kind, tf.cast(part[i], dtypes[name]))
        for name, value in values.items():
            weight = tf.cast(weights[name], dtypes[name]) if name in weights else None
            result[name] = Stat(self.kinds[name], tf.cast(value, dtypes[name]), weight)
        for name, value in flat.items():
            size, finish = self._derived[name]
            result[name] = Stat("derived", tf.ensure_shape(tf.cast(value, dtypes[name]), [size]), finish=finish)
        return {name: result[name] for name in self.kinds}

    def figures(self, vectors: Sequence[Any]) -> dict[str, float]:
        """Final figures as Python floats, from what ``vectors`` gave, added up; a mean over no weight is NaN."""
        sums, *rest = vectors
        raw, weights, flat = self._parts(np.asarray(sums, np.float64))
        values: dict[str, Any] = {name: float(value) for name, value in raw.items()}
        for name, weight in weights.items():
            values[name] = values[name] / float(weight) if weight else float("nan")
        for kind, part in zip(("max", "min", "last"), rest, strict=True):
            values.update(zip(self._of(kind), (float(x) for x in part), strict=True))
        for name, value in flat.items():
            finish = self._derived[name][1]
            assert finish is not None
            values[name] = finish(value)
        found: dict[str, float] = {}
        for name in self.kinds:
            if isinstance(values[name], Mapping):
                found.update({f"{name}/{key}": float(value) for key, value in values[name].items()})
            else:
                found[name] = float(values[name])
        return found


def _stack(parts: Sequence[tf.Tensor | None]) -> tf.Tensor:
    if not parts:
        return tf.zeros([0], tf.float64)
    tensors = [tf.convert_to_tensor(p) for p in parts]
    if len({t.dtype for t in tensors}) == 1:
        return tf.cast(tf.stack(tensors), tf.float64)
    return tf.stack([tf.cast(t, tf.float64) for t in tensors])
