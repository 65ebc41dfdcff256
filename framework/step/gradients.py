"""Local sums: one replica's loss, gradients and figures, before anything crosses replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from framework.step.values import LossOutput, Stat, local_sums


@dataclasses.dataclass(frozen=True)
class StepSums:
    """Sums over examples, of one replica or, when ``reduced``, of all of them.

    Attributes:
      gradients: one per variable, the gradient of the *sum* of weighted losses (and of penalty x weight); None where
        the loss does not depend on the variable.
      weight: scalar, sum of the weights: what the gradients are to be divided by, once, after the reduction.
      stats: the figures to report, by name.
      variables: the variables the gradients belong to.
      reduced: whether ``reduce`` has been called.
    """

    gradients: Sequence[tf.Tensor | None]
    weight: tf.Tensor
    stats: dict[str, Stat]
    variables: Sequence[Any]
    reduced: bool = False


def gradients(compute: Callable[[], LossOutput], variables: Sequence[Any]) -> StepSums:
    """Runs ``compute`` under a gradient tape and returns local sums. Call it in replica context.

    Args:
      compute: returns the replica's ``LossOutput``.
      variables: Keras or TensorFlow variables to differentiate for.

    Raises:
      ConfigError: the ``LossOutput`` breaks its rules.
    """
    variables = [native(v) for v in variables]
    with tf.GradientTape() as tape:
        objective, weight, stats = local_sums(compute())
    return StepSums(
        gradients=tape.gradient(objective, variables),
        weight=tf.stop_gradient(weight),
        stats=stats,
        variables=variables,
    )


def native(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras variable; anything else as it is."""
    import keras

    return variable.value if isinstance(variable, keras.Variable) else variable
