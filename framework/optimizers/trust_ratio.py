"""LARS and LAMB: the step of each variable is scaled to the size of the variable, for large batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.adam import Moments
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer, descend


class LARS(LocalOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, equation 6 and algorithm 1).

    With the gradient g, the rate lr, the momentum mu, the trust coefficient eta and the weight decay lambda::

        ratio = eta |w| / (|g| + lambda |w|)
        v <- mu v - lr * ratio * (g + lambda w);    w <- w + v

    Norms are over one variable; where |w| or |g| is 0 the ratio is 1. A variable that ``exclude`` fits has the ratio 1
    and lambda 0: it is updated by SGD with momentum. ``exclude`` is empty unless given; it is common practice to
    exclude biases and normalisation. The decay is part of what the momentum sums, unlike AdamW's. The slot is
    ``momentum``.

    Args:
      learning_rate: a float, or a schedule; usually far above that of SGD, for its effect is scaled by eta.
      weight_decay: lambda, not negative.
      momentum: from 0 to 1.
      trust_coefficient: eta, above 0.
      exclude: as in ``LocalOptimizer``; for example ``("bias", "gamma", "beta")``.
      rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range or no regular expression.
    """

    slot_names = ("momentum",)

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate, weight_decay=weight_decay, exclude=exclude, rate_multipliers=rate_multipliers
        )
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"momentum={momentum} but it must be from 0 to 1; for example momentum=0.9")
        if not trust_coefficient > 0.0:
            raise ConfigError(f"trust_coefficient={trust_coefficient} but it must be above 0; for example 0.001")
        self.momentum = float(momentum)
        self.trust_coefficient = float(trust_coefficient)

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        dtype = held.variable.dtype
        rate, decay = scalars["rate"], tf.constant(self.weight_decay, dtype)
        if not held.excluded:
            weights = tf.convert_to_tensor(held.variable)
            size, slope = norm(weights), norm(gradient)
            trust = tf.constant(self.trust_coefficient, dtype)
            rate *= ratio(trust * size, slope + decay * size, (size > 0.0) & (slope > 0.0))
            if self._decays(held):
                gradient += decay * weights
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=held.variable.handle,
            accum=held.slots["momentum"].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, dtype),
            use_nesterov=False,
        )


class LAMB(Moments):
    """Layer-wise adaptive moments for batch training (You et al. 2020, algorithm 2, with phi the identity).

    With the gradient g, the weight decay lambda and t = 1 at the first update::

        m <- m + (1 - beta_1)(g - m)          v <- v + (1 - beta_2)(g^2 - v)
        r = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)
        w <- w - lr * |w| / |r + lambda w| * (r + lambda w)

    Norms are over one variable; where one of the two is 0 their ratio is taken as 1. A variable that ``exclude`` fits
    has the ratio 1 and lambda 0: it is updated by Adam. ``exclude`` is empty unless given, as in the algorithm; it is
    common practice to exclude biases and normalisation. Slots are ``m`` and ``v``.

    Args:
      learning_rate, beta_1, beta_2: as in ``Adam``.
      weight_decay: lambda, not negative.
      epsilon: added to the root of the corrected second moment, not negative.
      exclude: as in ``LocalOptimizer``; for example ``("bias", "gamma", "beta")``.
      rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range or no regular expression.
    """

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
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

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        first, second = self._corrections(dtype)
        return {"rate": rate, "correction_1": first, "correction_2": second}

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        dtype = held.variable.dtype
        m, v = held.slots["m"], held.slots["v"]
        one = tf.ones([], dtype)
        # m - c (m - g): the form of the fused Adam, in which a constant gradient leaves a filled moment alone.
        descend(m, one - tf.constant(self.beta_1, dtype), m - gradient)
        descend(v, one - tf.constant(self.beta_2, dtype), v - tf.square(gradient))
        root = tf.sqrt(v / scalars["correction_2"]) + tf.constant(self.epsilon, dtype)
        step = m / scalars["correction_1"] / root
        rate = scalars["rate"]
        if not held.excluded:
            weights = tf.convert_to_tensor(held.variable)
            if self._decays(held):
                step += tf.constant(self.weight_decay, dtype) * weights
            size, length = norm(weights), norm(step)
            rate *= ratio(size, length, (size > 0.0) & (length > 0.0))
        descend(held.variable, rate, step)


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Euclidean norm of all elements."""
    return tf.sqrt(2.0 * tf.nn.l2_loss(tensor))  # one fused pass: sum(t ** 2) / 2


def ratio(above: tf.Tensor, below: tf.Tensor, defined: tf.Tensor) -> tf.Tensor:
    """above / below where ``defined``, else 1."""
    return tf.where(defined, tf.math.divide_no_nan(above, below), tf.ones_like(above))
