"""Layers that know about replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from framework.errors import ConfigError
from framework.step.autograph import own


class SyncBatchNormalization(keras.layers.Layer):
    """Batch normalisation over the examples of all replicas (Ioffe and Szegedy 2015; statistics as on one device).

    The mean is the sum over all replicas divided by the count over all replicas, and the variance the mean of squared
    distances from it, in a second reduction: unlike E[x^2] - E[x]^2 it cannot cancel or become negative. Replicas
    may hold different numbers of examples, or none. Moving statistics use the same (biased) variance on all replicas,
    as Keras does. Under ``--accumulate_steps`` the statistics are of each micro-batch, over all replicas.

    Args:
      momentum: share of the moving statistics that stays at each update.
      epsilon: added to the variance.
      center: whether to add ``beta``.
      scale: whether to multiply by ``gamma``.

    Input and output: ``[batch, ..., channels]``; statistics are float32 or wider.
    """

    synchronized = True

    def __init__(
        self, *, momentum: float = 0.99, epsilon: float = 1e-3, center: bool = True, scale: bool = True, **kwargs: Any
    ):
        super().__init__(**kwargs)
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"momentum={momentum} but it must be from 0 to 1; for example momentum=0.99")
        self.momentum, self.epsilon, self.center, self.scale = momentum, epsilon, center, scale

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes ``gamma``, ``beta`` and the moving statistics, each ``[channels]``."""
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(shape=shape, name="gamma", initializer="ones") if self.scale else None
        self.beta = self.add_weight(shape=shape, name="beta", initializer="zeros") if self.center else None
        self.moving_mean = self.add_weight(
            shape=shape, name="moving_mean", initializer="zeros", trainable=False, autocast=False
        )
        self.moving_variance = self.add_weight(
            shape=shape, name="moving_variance", initializer="ones", trainable=False, autocast=False
        )

    def call(self, inputs: Any, training: bool = False) -> tf.Tensor:
        """Normalises with the batch's statistics while training, else with the moving ones."""
        wide = tf.cast(inputs, tf.float64 if inputs.dtype == "float64" else tf.float32)
        if training and self.trainable:
            mean, variance, count = synchronized_moments(wide)
            for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                old = tf.convert_to_tensor(moving.value)
                new = old * self.momentum + tf.cast(value, old.dtype) * (1.0 - self.momentum)
                moving.assign(tf.where(count > 0, new, old))
        else:
            mean, variance = (tf.cast(v.value, wide.dtype) for v in (self.moving_mean, self.moving_variance))
        factor = tf.math.rsqrt(variance + self.epsilon)
        if self.gamma is not None:
            factor = factor * tf.cast(self.gamma.value, wide.dtype)
        result = (wide - mean) * factor
        if self.beta is not None:
            result = result + tf.cast(self.beta.value, wide.dtype)
        return tf.cast(result, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """See ``keras.layers.Layer``."""
        own = {name: getattr(self, name) for name in ("momentum", "epsilon", "center", "scale")}
        return {**super().get_config(), **own}


@own
def synchronized_moments(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean and variance ``[channels]`` of ``[batch, ..., channels]`` over all replicas, and the count they are of.

    In replica context they are of all replicas together, and so is their gradient; elsewhere of ``value`` alone.
    Without any example both are 0.
    """
    axes = list(range(value.shape.rank - 1))
    count = tf.cast(tf.size(value) / tf.maximum(1, tf.shape(value)[-1]), value.dtype)
    total, count = _over_replicas([tf.reduce_sum(value, axes), count])
    mean = tf.math.divide_no_nan(total, count)
    (squares,) = _over_replicas([tf.reduce_sum(tf.square(value - mean), axes)])
    return mean, tf.math.divide_no_nan(squares, count), count


def _over_replicas(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensors
    # Its gradient is the all-reduce of the gradients: each replica's loss depends on everybody's examples.
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))
