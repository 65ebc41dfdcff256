"""Muon: orthogonalised momentum for matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import rules
from framework.optimizers.adam import AdamW
from framework.optimizers.base import Schedule
from framework.optimizers.local import Held, assign, descend

# Matrices that are no hidden layer: looked-up rows and class scores. Found anywhere in a name, in any case.
USUAL_ADAMW = ("(?i)embed", "(?i)head", "(?i)logits")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan 2024: steepest at 0 while singular values end near 1
ITERATIONS = 5


class Muon(AdamW):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024, "Muon: an optimizer for hidden layers").

    For a matrix of n x k, with the gradient g, the momentum mu and the weight decay lambda::

        B <- mu B + g;    X = g + mu B;    X <- X / (|X| + 1e-7)         (transposed if n > k)
        five times:  A = X X';    X <- a X + (b A + c A A) X             (a, b, c = 3.4445, -4.7750, 2.0315)
        w <- w - lr * lambda w - lr * 0.2 sqrt(max(n, k)) * X

    The factor 0.2 sqrt(max(n, k)) gives the step the usual size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM
    training", equation 4), so that one rate and one decay serve both parts. The products are in the variable's dtype,
    and every replica computes all of them.

    The rule: a variable of rank 2 is updated by Muon, unless one of the patterns ``adamw`` is found in its name; any
    other is updated by ``AdamW``. Kernels of convolutions have rank 4 and are AdamW's. An output layer is a matrix like
    any other: give it a name that the patterns fit, or a pattern. The slot of Muon's part is ``momentum``, those of
    AdamW's are ``m`` and ``v``.

    Args:
      learning_rate, weight_decay: as in ``AdamW``, for both parts.
      beta_1, beta_2, epsilon: as in ``AdamW``, for its part alone.
      momentum: mu, from 0 to below 1.
      adamw: regular expressions; None: ``USUAL_ADAMW``, which need not fit anything.
      exclude, rate_multipliers: as in ``LocalOptimizer``.

    Raises:
      ConfigError: an argument is out of range or no regular expression; at ``build``: a pattern fits no variable.
    """

    slot_names = ("momentum", "m", "v")

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        adamw: Sequence[str] | None = None,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            exclude=exclude,
            rate_multipliers=rate_multipliers,
        )
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum={momentum} but it must be from 0 to below 1; for example momentum=0.95")
        self.momentum = float(momentum)
        self.adamw = USUAL_ADAMW if adamw is None else rules.patterns("adamw", adamw)

    def _check_patterns(self, names: Sequence[str]) -> None:
        super()._check_patterns(names)
        if self.adamw is not USUAL_ADAMW:
            rules.check_used("adamw", self.adamw, names)

    def _slot_shapes(self, name: str, shape: tf.TensorShape) -> dict[str, tf.TensorShape]:
        is_hidden = shape.rank == 2 and not rules.fits(self.adamw, name)
        return {"momentum": shape} if is_hidden else {"m": shape, "v": shape}

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        if "momentum" not in held.slots:
            super()._apply(held, gradient, scalars)
            return
        dtype = held.variable.dtype
        mu = tf.constant(self.momentum, dtype)
        momentum = mu * held.slots["momentum"] + gradient
        assign(held.slots["momentum"], momentum)
        step = orthogonalized(tf.ensure_shape(gradient + mu * momentum, held.variable.shape))
        scale = 0.2 * max(held.variable.shape) ** 0.5
        self._decay(held, scalars)
        descend(held.variable, tf.constant(scale, dtype) * scalars["rate"], step)


def orthogonalized(matrix: tf.Tensor) -> tf.Tensor:
    """About U V' of the matrix U S V', ``[n, k]``: its singular values are brought to between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = tf.transpose(matrix) if rows > columns else matrix  # X X' is the smaller product of the two
    x /= tf.norm(x) + tf.constant(1e-7, x.dtype)
    for _ in range(ITERATIONS):
        gram = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * gram + c * tf.matmul(gram, gram), x)
    return tf.transpose(x) if rows > columns else x
