"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer, check_share, rounded


class Moments(LocalOptimizer):
    """What optimizers with Adam's two moments share: their settings, slots, bias corrections and the fused op.

    Args:
      learning_rate, weight_decay, exclude, rate_multipliers: as in ``LocalOptimizer``.
      beta_1, beta_2: decay of the moments, from 0 to below 1.
      epsilon: not negative.
    """

    slot_names: tuple[str, ...] = ("m", "v")

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float = 0.0,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, weight_decay=weight_decay, exclude=exclude, rate_multipliers=rate_multipliers
        )
        check_share("beta_1", beta_1)
        check_share("beta_2", beta_2)
        if not epsilon >= 0.0:
            raise ConfigError(f"epsilon={epsilon} but it must be at least 0; for example epsilon=1e-07")
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.epsilon = float(epsilon)

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        first, second = self._corrections(dtype)
        return {**super()._scalars(rate, dtype), "corrected_rate": rate * tf.sqrt(second) / first}

    def _corrections(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """1 - beta_1^t and 1 - beta_2^t of this update: the weights of all past gradients together; float64."""
        # In float32, 1 - 0.999^t is off by 1e-5 of itself in the first updates. So the powers are taken in float64, but
        # of the betas as the ops see them, rounded to dtype: then the weights of past gradients sum to exactly 1.
        step = tf.cast(self.iterations, tf.float64) + 1.0
        first, second = (
            1.0 - tf.constant(rounded(beta, dtype), tf.float64) ** step for beta in (self.beta_1, self.beta_2)
        )
        return first, second

    def _adam(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        dtype = held.variable.dtype
        zero = tf.zeros([], dtype)  # powers of 0 make the op's own correction 1; it is in corrected_rate already
        tf.raw_ops.ResourceApplyAdam(
            var=held.variable.handle,
            m=held.slots["m"].handle,
            v=held.slots["v"].handle,
            beta1_power=zero,
            beta2_power=zero,
            lr=scalars["corrected_rate"],
            beta1=tf.constant(self.beta_1, dtype),
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=gradient,
        )


class Adam(Moments):
    """Adam (Kingma and Ba 2015), in the form just before section 2.1 of the paper, whose epsilon is "epsilon hat".

    With the gradient g and t = 1 at the first update::

        m <- m + (1 - beta_1)(g - m)          v <- v + (1 - beta_2)(g^2 - v)
        w <- w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) * m / (sqrt(v) + epsilon)

    The same as ``tf.keras``'s and Keras 3's. Slots are ``m`` and ``v``; the powers come from ``iterations``, so there
    is nothing else to restore.

    Args:
      learning_rate: a float, or a schedule: int64 scalar tensor (updates made) -> scalar.
      beta_1: decay of the first moment, from 0 to below 1.
      beta_2: decay of the second moment, from 0 to below 1.
      epsilon: added to the root of the second moment, not negative.
      rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            rate_multipliers=rate_multipliers,
        )

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        self._adam(held, gradient, scalars)


class AdamW(Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), per unit of learning rate.

    Before the Adam part of each update, w <- w - lr * weight_decay * w. A variable without a gradient is not decayed.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in ``Adam``.
      weight_decay: not negative.
      exclude: regular expressions; a variable in whose name one is found (``re.search``) is not decayed. For example
        ``("bias", "gamma", "beta")``.
      rate_multipliers: as in ``LocalOptimizer``; the decay is per unit of the multiplied rate.

    Raises:
      ConfigError: an argument is out of range or no regular expression.
    """

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            weight_decay=weight_decay,
            exclude=exclude,
            rate_multipliers=rate_multipliers,
        )

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        self._decay(held, scalars)
        self._adam(held, gradient, scalars)
