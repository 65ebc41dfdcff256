"""The update: divide once, test, clip, and let the optimizer change the replica's own copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.optimizers.base import Optimizer, dense
from framework.step.autograph import own
from framework.step.gradients import StepSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """How mean gradients are clipped, after the reduction: see ``apply``. At most one way, or ConfigError."""

    global_norm: float = 0.0
    norm: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        asked = [f"clip_{name}={value}" for name, value in vars(self).items() if value]
        if len(asked) > 1:
            raise ConfigError(f"{' with '.join(asked)}: clip in one way; leave the others out")


class Update(NamedTuple):
    """What ``apply`` did; equal on all replicas, because it comes from reduced values."""

    finite: tf.Tensor  # bool scalar: the update was made
    grad_norm: tf.Tensor  # float scalar: global norm of the mean gradients, before clipping
    learning_rate: tf.Tensor  # float32 scalar: the rate of this update


@own
def apply(
    sums: StepSums,
    optimizer: Optimizer,
    *,
    clip_global_norm: float = 0.0,
    clip_norm: float = 0.0,
    clip_value: float = 0.0,
    on_update: Callable[[], None] | None = None,
    on_skip: Callable[[], None] | None = None,
) -> Update:
    """Divides the gradients by the total weight, clips them and updates, if all of them are finite.

    Call it in replica context, after ``reduce``. A step with a non-finite gradient or loss changes nothing: not the
    variables, not the slots, not ``iterations``.

    Args:
      sums: reduced sums. A total weight of 0 gives gradients of 0.
      optimizer: built on ``sums.variables``.
      clip_global_norm: largest norm of all gradients together (Pascanu et al. 2013, section 3.2); 0: off.
      clip_norm: largest norm of each variable's gradient; 0: off.
      clip_value: largest absolute value of an element; 0: off.
      on_update: traced into the branch that updates, after the optimizer; local changes only.
      on_skip: traced into the other branch.

    Raises:
      LockstepError: ``sums`` were not reduced, or the loss depends on none of the variables.
      ConfigError: more than one clip is asked for.
    """
    clip = Clip(global_norm=clip_global_norm, norm=clip_norm, value=clip_value)
    if not sums.reduced:
        raise LockstepError("apply() got sums that were not reduced; call reduce(sums) first")
    present = [g for g in sums.gradients if g is not None]
    if not present:
        raise LockstepError("the loss depends on none of the variables: every gradient is None")
    dtype = _values(present[0]).dtype
    # Division by the weight, the loss scale and clipping by the global norm are one factor, so that they are one pass
    # over the gradients. The norm of the mean is the norm of the sum times the factor.
    divisor = tf.cast(sums.weight, dtype)
    if sums.scale is not None:
        divisor *= tf.cast(sums.scale * sums.nominal, dtype)
    factor = tf.math.divide_no_nan(tf.ones([], dtype), divisor)
    norm = _global_norm(present, dtype) * tf.abs(factor)
    finite = tf.math.is_finite(norm) & tf.math.is_finite(sums.weight)
    if "loss" in sums.stats:
        finite &= tf.math.is_finite(sums.stats["loss"].value)
    if clip.global_norm:
        limit = tf.cast(clip.global_norm, dtype)
        factor *= limit / tf.maximum(norm, limit)
    rate = optimizer.learning_rate()

    def update() -> tf.Tensor:
        pairs = zip(sums.gradients, sums.variables, strict=True)
        optimizer.update([None if g is None else _final(g, v, factor, clip, optimizer) for g, v in pairs])
        if on_update is not None:
            on_update()
        return tf.constant(0)

    def skip() -> tf.Tensor:
        if on_skip is not None:
            on_skip()
        return tf.constant(0)

    # A branch and not a multiplication by 0: momentum, decay and counters must not move on a skipped step.
    tf.cond(finite, update, skip)
    return Update(finite, norm, rate)


def _final(gradient: Any, variable: Any, factor: tf.Tensor, clip: Clip, optimizer: Optimizer) -> Any:
    """The gradient as the optimizer gets it: mean, clipped, sparse only if the optimizer takes that."""
    values = _values(gradient) * tf.cast(factor, _values(gradient).dtype)
    if clip.value:
        values = tf.clip_by_value(values, -clip.value, clip.value)
    elif clip.norm:
        norm = tf.sqrt(2.0 * tf.nn.l2_loss(values))
        values = values * (clip.norm / tf.maximum(norm, tf.cast(clip.norm, norm.dtype)))
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    sparse = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return sparse if optimizer.takes_sparse else dense(sparse, variable)


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _global_norm(gradients: list[Any], dtype: tf.DType) -> tf.Tensor:
    # l2_loss is one fused pass: sum(t ** 2) / 2. Indices of sparse gradients are unique, so their rows are the whole.
    # Not tf.add_n: TensorFlow may turn that into a temporary variable to save memory, which fails in a loop.
    return tf.sqrt(2.0 * tf.reduce_sum(tf.stack([tf.cast(tf.nn.l2_loss(_values(g)), dtype) for g in gradients])))
