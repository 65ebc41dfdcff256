"""Adafactor: a second moment kept as row and column means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer, assign, descend


class Adafactor(LocalOptimizer):
    """Adafactor (Shazeer and Stern 2018): algorithm 4 for matrices, algorithm 5 for vectors.

    With the gradient g, the rate lr of the schedule and t = 1 at the first update::

        b = 1 - t^-decay_power                                      (section 7.2: 0.8)
        rank 0 and 1:  v <- b v + (1 - b)(g^2 + epsilon_1)
        rank >= 2:     r <- b r + (1 - b) mean(g^2 + epsilon_1, over the last axis)
                       c <- b c + (1 - b) mean(g^2 + epsilon_1, over the last but one)
                       v = r c / mean(r)
        u = g / sqrt(v);    u <- u / max(1, RMS(u) / clip_threshold)
        w <- w - lr * max(epsilon_2, RMS(w)) * u

    The paper's sums over rows and columns are means here: v is the same, and epsilon_1 means the same for every shape.
    Of a rank above 2 the last two axes are factored and the others kept. The options:

    - the step is relative to RMS(w), unless ``scale_by_parameter=False``: then it is lr * u;
    - the paper's relative step size, min(0.01, 1 / sqrt(t)), is left out: lr is the schedule's alone;
    - there is no first moment, as in the paper's default, and no bias correction: b is 0 at the first update;
    - decay is decoupled, as in ``AdamW``: before the rest, w <- w - lr * weight_decay * w, not scaled by RMS(w), which
      is taken before it. The paper has none.

    Slots are ``v``, or ``v_row`` and ``v_col`` (shapes without the last and without the last but one axis).

    Args:
      learning_rate: a float, or a schedule: int64 scalar tensor (updates made) -> scalar.
      weight_decay: not negative.
      decay_power: above 0.
      clip_threshold: the largest RMS of u, above 0.
      epsilon_1: added to the squared gradient, above 0.
      epsilon_2: the smallest size a variable is taken to have, not negative.
      scale_by_parameter: whether the step is relative to RMS(w).
      exclude, rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range or no regular expression.
    """

    slot_names = ("v", "v_row", "v_col")

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        decay_power: float = 0.8,
        clip_threshold: float = 1.0,
        epsilon_1: float = 1e-30,
        epsilon_2: float = 1e-3,
        scale_by_parameter: bool = True,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, weight_decay=weight_decay, exclude=exclude, rate_multipliers=rate_multipliers
        )
        above = {"decay_power": decay_power, "clip_threshold": clip_threshold, "epsilon_1": epsilon_1}
        for name, value in above.items():
            if not value > 0.0:
                raise ConfigError(f"{name}={value} but it must be above 0; leave it out for the paper's value")
        if not epsilon_2 >= 0.0:
            raise ConfigError(f"epsilon_2={epsilon_2} but it must be at least 0; for example epsilon_2=0.001")
        self.decay_power = float(decay_power)
        self.clip_threshold = float(clip_threshold)
        self.epsilon_1 = float(epsilon_1)
        self.epsilon_2 = float(epsilon_2)
        self.scale_by_parameter = bool(scale_by_parameter)

    def _slot_shapes(self, name: str, shape: tf.TensorShape) -> dict[str, tf.TensorShape]:
        if shape.rank < 2:
            return {"v": shape}
        return {"v_row": shape[:-1], "v_col": shape[:-2] + shape[-1:]}

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        step = tf.cast(self.iterations, tf.float64) + 1.0
        return {**super()._scalars(rate, dtype), "fresh": step**-self.decay_power}  # 1 - b

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        dtype, fresh = held.variable.dtype, scalars["fresh"]
        square = tf.square(gradient) + tf.constant(self.epsilon_1, dtype)
        if "v" in held.slots:
            direction = gradient * tf.math.rsqrt(_average(held.slots["v"], square, fresh))
        else:
            row = _average(held.slots["v_row"], tf.reduce_mean(square, axis=-1), fresh)
            column = _average(held.slots["v_col"], tf.reduce_mean(square, axis=-2), fresh)
            row /= tf.reduce_mean(row, axis=-1, keepdims=True)
            # The roots of the factors, not of their product: that may underflow in float32.
            direction = gradient * tf.math.rsqrt(row)[..., None] * tf.math.rsqrt(column)[..., None, :]
        rate = scalars["rate"]
        if self.scale_by_parameter:
            size = _rms(tf.convert_to_tensor(held.variable))
            rate *= tf.maximum(tf.constant(self.epsilon_2, dtype), size)
        rate /= tf.maximum(tf.ones([], dtype), _rms(direction) / tf.constant(self.clip_threshold, dtype))
        self._decay(held, scalars)
        descend(held.variable, rate, direction)


def _average(slot: tf.Variable, value: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
    """Moves the slot towards ``value`` by the share ``fresh`` and returns what it holds then."""
    new = slot + fresh * (value - slot)
    assign(slot, new)
    return new


def _rms(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(tensor)))
