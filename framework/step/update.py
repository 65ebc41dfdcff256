"""The update: divide once, test, clip, and let the optimizer change the replica's own copies."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from framework.errors import ConfigError, LockstepError
from framework.optimizers.base import Optimizer
from framework.step.gradients import StepSums


class Update(NamedTuple):
    """What ``apply`` did; equal on all replicas, because it comes from reduced values."""

    finite: tf.Tensor  # bool scalar: the update was made
    grad_norm: tf.Tensor  # float scalar: global norm of the mean gradients, before clipping
    learning_rate: tf.Tensor  # float32 scalar: the rate of this update


def apply(sums: StepSums, optimizer: Optimizer, *, clip_global_norm: float = 0.0, clip_value: float = 0.0) -> Update:
    """Divides the gradients by the total weight, clips them and updates, if all of them are finite.

    Call it in replica context, after ``reduce``. A step with a non-finite gradient or loss changes nothing: not the
    variables, not the slots, not ``iterations``.

    Args:
      sums: reduced sums. A total weight of 0 gives gradients of 0.
      optimizer: built on ``sums.variables``.
      clip_global_norm: largest norm of all gradients together (Pascanu et al. 2013, section 3.2); 0: off.
      clip_value: largest absolute value of an element; 0: off.

    Raises:
      LockstepError: ``sums`` were not reduced, or the loss depends on none of the variables.
      ConfigError: both clips are asked for.
    """
    if not sums.reduced:
        raise LockstepError("apply() got sums that were not reduced; call reduce(sums) first")
    if clip_global_norm and clip_value:
        raise ConfigError(f"clip_global_norm={clip_global_norm} with clip_value={clip_value}: clip in one way")
    present = [g for g in sums.gradients if g is not None]
    if not present:
        raise LockstepError("the loss depends on none of the variables: every gradient is None")
    # The norm of the mean is the norm of the sum over the weight: no pass over the gradients of its own.
    norm = tf.math.divide_no_nan(_global_norm(present), tf.cast(sums.weight, present[0].dtype))
    finite = tf.math.is_finite(norm) & tf.math.is_finite(sums.weight)
    if "loss" in sums.stats:
        finite &= tf.math.is_finite(sums.stats["loss"].value)
    rate = optimizer.learning_rate()
    # Division and clipping by the norm are one factor, so that they are one pass over the gradients.
    scale = tf.math.divide_no_nan(tf.ones([], norm.dtype), tf.cast(sums.weight, norm.dtype))
    if clip_global_norm:
        limit = tf.cast(clip_global_norm, norm.dtype)
        scale *= limit / tf.maximum(norm, limit)

    def update() -> tf.Tensor:
        gradients = []
        for gradient in sums.gradients:
            if gradient is not None:
                gradient = gradient * tf.cast(scale, gradient.dtype)
                if clip_value:
                    gradient = tf.clip_by_value(gradient, -clip_value, clip_value)
            gradients.append(gradient)
        optimizer.update(gradients)
        return tf.constant(0)

    # A branch and not a multiplication by 0: momentum, decay and counters must not move on a skipped step.
    tf.cond(finite, update, lambda: tf.constant(0))
    return Update(finite, norm, rate)


def _global_norm(tensors: list[tf.Tensor]) -> tf.Tensor:
    dtype = tensors[0].dtype
    # l2_loss is one fused pass: sum(t ** 2) / 2.
    return tf.sqrt(2.0 * tf.add_n([tf.cast(tf.nn.l2_loss(t), dtype) for t in tensors]))
