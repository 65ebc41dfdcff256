"""What the step asks of an optimizer: slots built in the scope, then updates of the replica's own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# A learning rate as a function of the number of updates made (int64 scalar tensor) -> float32 scalar tensor.
Schedule = Callable[[tf.Tensor], tf.Tensor]


class Optimizer:
    """Base of the framework's optimizers.

    An optimizer never communicates: ``update`` runs in replica context, gets gradients that were already reduced,
    and changes the replica's own copies of variables and slots. It may run inside ``tf.cond``.
    """

    iterations: tf.Variable  # int64 scalar: updates made so far; skipped steps do not count

    def build(self, variables: Sequence[tf.Variable], names: Sequence[str]) -> None:
        """Creates ``iterations`` and all slots; call it in the strategy's scope, before any tracing.

        Args:
          variables: the variables that ``update`` will be given, in the same order.
          names: a unique name for each; slots are saved as ``<slot>/<name>``.
        """
        raise NotImplementedError

    def update(self, gradients: Sequence[tf.Tensor | None]) -> None:
        """Applies one update in replica context and adds 1 to ``iterations``.

        Args:
          gradients: reduced gradients, one for each variable given to ``build``, of the variable's shape and dtype.
            None leaves that variable and its slots alone.
        """
        raise NotImplementedError

    def learning_rate(self) -> tf.Tensor:
        """The rate the next update uses, float32 scalar, from this replica's ``iterations``."""
        raise NotImplementedError

    def state(self) -> dict[str, tf.Variable]:
        """Every variable that a checkpoint must hold, by name; includes ``iterations``."""
        raise NotImplementedError
