"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer, check_share, descend


class Lion(LocalOptimizer):
    """Evolved sign momentum (Chen et al. 2023, algorithm 2).

    With the gradient g and the weight decay lambda::

        w <- w - lr (sign(beta_1 m + (1 - beta_1) g) + lambda w)
        m <- m + (1 - beta_2)(g - m)

    Every element moves by lr, so the paper takes a rate 3 to 10 times smaller than AdamW's and a decay as many times
    larger (section 5). The slot is ``m``.

    Args:
      learning_rate: a float, or a schedule: int64 scalar tensor (updates made) -> scalar.
      weight_decay: lambda, per unit of learning rate, not negative.
      beta_1: share of the momentum in the update, from 0 to below 1.
      beta_2: decay of the momentum, from 0 to below 1.
      exclude, rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range or no regular expression.
    """

    slot_names = ("m",)

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, weight_decay=weight_decay, exclude=exclude, rate_multipliers=rate_multipliers
        )
        check_share("beta_1", beta_1)
        check_share("beta_2", beta_2)
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        dtype = held.variable.dtype
        m, one = tf.convert_to_tensor(held.slots["m"]), tf.ones([], dtype)
        beta_1, beta_2 = tf.constant(self.beta_1, dtype), tf.constant(self.beta_2, dtype)
        direction = tf.sign(beta_1 * m + (one - beta_1) * gradient)
        self._decay(held, scalars)
        descend(held.variable, scalars["rate"], direction)
        descend(held.slots["m"], one - beta_2, m - gradient)
