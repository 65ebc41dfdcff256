"""Pieces of a transformer with closed-form gradients: a few ops each, where composed ones take many."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_ROOT = math.sqrt(2.0 / math.pi)
_CUBE = 0.044715


def layer_norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, epsilon: float = 1e-5) -> tf.Tensor:
    """Layer normalisation over the last axis (Ba et al. 2016), computed in float32, in the dtype of ``x``.

    Args:
      x: ``[rows, width]``.
      gamma: ``[width]``, factor.
      beta: ``[width]``, added.
      epsilon: added to the variance.
    """

    @tf.custom_gradient
    def norm(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + epsilon)
        unit = centred * scale

        def gradient(dy: tf.Tensor) -> Any:
            d = dy * gamma
            along = unit * tf.reduce_mean(d * unit, -1, keepdims=True)
            dx = scale * (d - tf.reduce_mean(d, -1, keepdims=True) - along)
            return dx, tf.reduce_sum(dy * unit, 0), tf.reduce_sum(dy, 0)

        return unit * gamma + beta, gradient

    wide = tf.float64 if x.dtype == tf.float64 else tf.float32
    return tf.cast(norm(tf.cast(x, wide), tf.cast(gamma, wide), tf.cast(beta, wide)), x.dtype)


@tf.custom_gradient
def gelu(x: tf.Tensor) -> Any:
    """GELU in its form with a hyperbolic tangent (Hendrycks and Gimpel 2016, section 2), as GPT-2 has it."""
    square = tf.square(x)
    bend = tf.tanh(x * (_ROOT + _ROOT * _CUBE * square))

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        slope = (1.0 - tf.square(bend)) * (_ROOT + 3.0 * _ROOT * _CUBE * square)
        return dy * (0.5 * (1.0 + bend) + 0.5 * x * slope)

    return 0.5 * x * (1.0 + bend), gradient


@tf.custom_gradient
def embed(table: tf.Tensor, ids: tf.Tensor) -> Any:
    """Rows ``[..., width]`` of ``table`` ``[count, width]`` for integer ``ids``; its gradient is dense.

    A table that is also the last layer's kernel has a dense gradient anyway, and TensorFlow would add the two as a list
    of count + ids rows; of a table of positions all rows are used.
    """

    def gradient(dy: tf.Tensor) -> Any:
        rows = tf.reshape(dy, [-1, table.shape[-1]])
        return tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), gradient


def rotate(x: tf.Tensor, positions: tf.Tensor, *, base: float = 10_000.0) -> tf.Tensor:
    """Rotary positions (Su et al. 2021, section 3.4.2): pair i turns by position x base^(-2i / width).

    A pair is number i of the first half and number i of the second.

    Args:
      x: ``[..., places, width]``, an even width.
      positions: integers ``[places]``.
      base: of the wave lengths.
    """
    half = x.shape[-1] // 2
    rates = tf.constant(base ** (-np.arange(half) / half), tf.float32)
    angles = tf.cast(positions, tf.float32)[:, None] * rates
    cos, sin = tf.cast(tf.cos(angles), x.dtype), tf.cast(tf.sin(angles), x.dtype)
    first, second = tf.split(x, 2, -1)
    return tf.concat([first * cos - second * sin, first * sin + second * cos], -1)


def recomputed(function: Callable[..., tf.Tensor], *inputs: tf.Tensor) -> tf.Tensor:
    """``function(*inputs)``, of which only ``inputs`` are kept for the gradients (Chen et al. 2016).

    What it computes on the way is computed again, from the same numbers by the same ops, when the gradients are asked
    for; so they are the same. XLA would join the two passes into one.

    Args:
      function: of the tensors ``inputs`` alone; what else it uses must be the same at its second call.
      *inputs: floating tensors.
    """

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> Any:
            # Not before dy is there, or all activations would be in memory together again; and the copies are other
            # tensors to TensorFlow's graph optimiser, which would else join equal ops of the two passes.
            with tf.control_dependencies([dy]):
                again = [tf.identity(x) for x in inputs]
            with tf.GradientTape() as tape:
                tape.watch(again)
                y = function(*again)
            return tape.gradient(y, again, dy)

        return function(*inputs), gradient

    return run(*inputs)
