"""What the step asks of an optimizer: slots built in the scope, then updates of the replica's own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from framework.errors import ConfigError

# A reduced gradient; None where the loss does not depend on the variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# A learning rate as a function of the number of updates made (int64 scalar tensor) -> float32 scalar tensor.
Schedule = Callable[[tf.Tensor], tf.Tensor]


class Optimizer:
    """Base of the framework's optimizers.

    An optimizer never communicates: ``update`` runs in replica context, gets gradients that were already reduced,
    and changes the replica's own copies of variables and slots. It may run inside ``tf.cond``.
    """

    iterations: tf.Variable  # int64 scalar: updates made so far; skipped steps do not count
    # Whether ``update`` uses IndexedSlices as they are. If not, it makes them dense itself: the result is the same.
    takes_sparse: bool = False

    def build(self, variables: Sequence[tf.Variable], names: Sequence[str], *, frozen: Sequence[str] = ()) -> None:
        """Creates ``iterations`` and all slots; call it in the strategy's scope, before any tracing.

        Call it again, with all variables that are to be updated from now on, when that set has changed.

        Args:
          variables: the variables that ``update`` will be given, in the same order. A ``keras.Variable`` may be given
            in place of the ``tf.Variable`` it holds: its constraint, if it has one, is then applied after each update.
          names: a unique name for each; slots are saved as ``<slot>/<name>``.
          frozen: names of variables that are not updated now but may be later: rules by name may fit them alone.

        Raises:
          ConfigError: names are missing or repeated, a rule by name fits no variable, the optimizer cannot hold a
            variable, or cannot be built again for these variables.
        """
        raise NotImplementedError

    def update(self, gradients: Sequence[Gradient]) -> None:
        """Applies one update in replica context and adds 1 to ``iterations``.

        Args:
          gradients: reduced gradients, one for each variable given to ``build``, of the variable's shape and dtype.
            None leaves that variable and its slots alone. ``tf.IndexedSlices`` have unique, sorted indices and mean the
            dense gradient with zeros elsewhere: moments decay and weights are decayed in all rows.

        Raises:
          RuntimeError: it is called before ``build``, or not in replica context of the strategy it was built under.
          ValueError: the number of gradients is not the number of variables.
        """
        raise NotImplementedError

    def learning_rate(self) -> tf.Tensor:
        """The rate the next update uses, float32 scalar, from this replica's ``iterations``."""
        raise NotImplementedError

    def state(self) -> dict[str, tf.Variable]:
        """Every variable that a checkpoint must hold, by name; includes ``iterations``."""
        raise NotImplementedError


def check_names(variables: Sequence[tf.Variable], names: Sequence[str]) -> None:
    """Raises ConfigError unless each variable has its own name."""
    if len(variables) != len(names):
        raise ConfigError(f"{len(variables)} variables but {len(names)} names; give each variable one name")
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ConfigError(f"names={repeated} repeat, but slots are saved by name; give each variable its own name")


def check_update(strategy: tf.distribute.Strategy | None, expected: int, gradients: Sequence[Gradient]) -> None:
    """Raises unless ``update`` may run here: built under ``strategy``, now in its replica context.

    Anywhere else a mirrored variable's handle is the first replica's, and an update would make the copies differ.
    """
    if strategy is None:
        raise RuntimeError("update() before build(); call build(variables, names) in the strategy's scope")
    if tf.distribute.in_cross_replica_context() or tf.distribute.get_strategy() is not strategy:
        raise RuntimeError(
            f"update() outside the replica context of {type(strategy).__name__}, under which the optimizer was built; "
            "call it in a function given to strategy.run, and build() in the same strategy's scope"
        )
    if len(gradients) != expected:
        raise ValueError(f"{len(gradients)} gradients for {expected} variables; give one, or None, for each variable")


def dense(gradient: Gradient, variable: Any) -> tf.Tensor | None:
    """``gradient`` in the variable's shape: IndexedSlices with zeros in all other rows, anything else as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # Not tf.convert_to_tensor: it needs dense_shape, and warns of the memory.
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
