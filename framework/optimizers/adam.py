"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer


class Adam(LocalOptimizer):
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

    slot_names = ("m", "v")

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **rules: Any,
    ) -> None:
        super().__init__(learning_rate, **rules)
        check_betas(beta_1=beta_1, beta_2=beta_2)
        if not epsilon >= 0.0:
            raise ConfigError(f"epsilon={epsilon} but it must be at least 0; for example epsilon=1e-07")
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.epsilon = float(epsilon)

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        correction_1, correction_2 = self._corrections(dtype)
        return {
            "rate": rate,
            "corrected_rate": rate * tf.sqrt(correction_2) / correction_1,
            "decay": rate * self.weight_decay,
        }

    def _corrections(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """1 - beta^t of this update, float64 scalars: what the sums of the moments' weights are."""
        # In float32, 1 - 0.999^t is off by 1e-5 of itself in the first updates. So the powers are taken in float64, but
        # of the betas as the fused op sees them, rounded to dtype: then the weights of past gradients sum to exactly 1.
        step = tf.cast(self.iterations, tf.float64) + 1.0
        betas = (rounded(self.beta_1, dtype), rounded(self.beta_2, dtype))
        return 1.0 - tf.constant(betas[0], tf.float64) ** step, 1.0 - tf.constant(betas[1], tf.float64) ** step

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
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


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), per unit of learning rate.

    Before the Adam part of each update, w <- w - lr * weight_decay * w. A variable without a gradient is not decayed.

    Args:
      learning_rate, beta_1, beta_2, epsilon: as in ``Adam``.
      weight_decay: not negative.
      exclude: regular expressions; a variable in whose name one is found (``re.search``) is not decayed. For example
        ``("bias", "gamma", "beta")``.

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
    ) -> None:
        super().__init__(learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
        if not weight_decay >= 0.0:
            raise ConfigError(f"weight_decay={weight_decay} but it must be at least 0; for example weight_decay=0.01")
        if isinstance(exclude, str):
            raise ConfigError(f"exclude={exclude!r} but it must be a sequence; write exclude=({exclude!r},)")
        self.weight_decay = float(weight_decay)
        self.exclude = tuple(exclude)
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"exclude={pattern!r} but it must be a regular expression ({error}); for example exclude=('bias',)"
                ) from error

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        return {**super()._scalars(rate, dtype), "decay": rate * self.weight_decay}

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        if self.weight_decay and not any(re.search(pattern, held.name) for pattern in self.exclude):
            # w - c w, not (1 - c) w: in float32, 1 - c keeps only three digits of a c of 1e-5.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=held.variable.handle, alpha=scalars["decay"], delta=tf.convert_to_tensor(held.variable)
            )
        super()._apply(held, gradient, scalars)
