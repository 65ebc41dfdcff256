"""Stochastic gradient descent, with momentum and Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, LocalOptimizer, descend


class SGD(LocalOptimizer):
    """Gradient descent with classical or Nesterov momentum, as in Sutskever et al. 2013 (equations 1 to 4).

    With the gradient g, the rate lr and the momentum mu::

        momentum = 0:     w <- w - lr g
        momentum > 0:     v <- mu v - lr g;    w <- w + v
        Nesterov:         v <- mu v - lr g;    w <- w + mu v - lr g

    The velocity holds the rates of past updates, so a falling rate does not rescale it. The Nesterov form is
    the paper's, written for the point at which the gradient is taken, as in Keras. The slot is ``momentum``; there is
    none when momentum is 0; then ``tf.IndexedSlices`` change only the rows they name, which is the same sum.

    Args:
      learning_rate: a float, or a schedule: int64 scalar tensor (updates made) -> scalar.
      momentum: from 0 to 1.
      nesterov: needs a momentum.
      rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        momentum: float = 0.0,
        nesterov: bool = False,
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(learning_rate=learning_rate, rate_multipliers=rate_multipliers)
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"momentum={momentum} but it must be from 0 to 1; for example momentum=0.9")
        if nesterov and momentum == 0.0:
            raise ConfigError("nesterov=True with momentum=0.0: Nesterov needs a momentum; for example momentum=0.9")
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov)
        self.slot_names = ("momentum",) if momentum else ()
        self.takes_sparse = not momentum

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            tf.raw_ops.ResourceScatterSub(
                resource=held.variable.handle, indices=gradient.indices, updates=scalars["rate"] * gradient.values
            )
            return
        if not self.momentum:
            descend(held.variable, scalars["rate"], gradient)
            return
        # ResourceApplyMomentum is the other form, with the rate outside of the velocity.
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=held.variable.handle,
            accum=held.slots["momentum"].handle,
            lr=scalars["rate"],
            grad=gradient,
            momentum=tf.constant(self.momentum, held.variable.dtype),
            use_nesterov=self.nesterov,
        )
