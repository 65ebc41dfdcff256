"""Keras optimizers made local: all that relies on private names of Keras is in this file.

A Keras 3 optimizer sums gradients over replicas inside ``apply``, has no switch for it, and updates through merge
calls, which are illegal inside ``tf.cond``. ``localize`` replaces the class of the user's object by a subclass of it
in which these steps are local. Keras may change them, so ``check_keras`` looks for the names before anything relies
on them: a silent miss would reduce gradients twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from framework.errors import ConfigError

# The class that adds distribution to Keras's own BaseOptimizer: keras.src.backend.tensorflow.optimizer.TFOptimizer.
TFOptimizer: Any = keras.optimizers.Optimizer.__bases__[0]

OVERRIDDEN = ("_all_reduce_sum_gradients", "_backend_update_step", "_apply_weight_decay", "add_variable_from_reference")
USED = ("_use_weight_decay", "apply", "build")
OPTIMIZER_ATTRIBUTES = ("_distribution_strategy", "_variables", "_trainable_variables")
VARIABLE_ATTRIBUTES = ("_initialize", "_value", "_aggregation")

# A slot, its kind ("momentum"), and the model variable it was made for.
Made = tuple[Any, str, Any]


class LocalUpdates(TFOptimizer):
    """The steps of Keras's ``TFOptimizer`` that talk to other replicas, made local.

    As a second base it comes, in the method resolution order, after the user's class and ``keras.optimizers.Optimizer``
    and before ``TFOptimizer``: an optimizer that overrides one of these itself (Nadam) gets here through ``super()``.
    """

    _made: list[Made]  # an attribute of the class made for one optimizer: Keras tracks lists set on the object

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        variable = super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        self._made.append((variable, name or "var", reference_variable))
        return variable

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, _unwrap(variable), learning_rate)

    def _apply_weight_decay(self, variables: Any) -> None:
        if self.weight_decay is None:
            return
        for variable in map(_unwrap, variables):
            if self._use_weight_decay(variable):
                rate = tf.cast(self.learning_rate, variable.dtype)
                variable.assign_sub(variable * tf.cast(self.weight_decay, variable.dtype) * rate)


class View(keras.Variable):
    """A ``tf.Variable`` as the Keras variable that optimizers expect: with a path, and a name without slashes."""

    def __init__(self, variable: tf.Variable, path: str) -> None:
        self._viewed = variable
        self._given_path = path
        super().__init__(
            initializer=lambda *_, **__: None,  # never called: _initialize takes the variable as it is
            shape=variable.shape,
            dtype=variable.dtype.name,
            trainable=False,
            name=path.rpartition("/")[2] or "variable",
        )

    def _initialize(self, value: Any) -> None:
        del value
        self._value = self._viewed

    @property
    def path(self) -> str:
        return self._given_path

    @property
    def constraint(self) -> Any:
        """The viewed variable's."""
        return self._viewed.constraint


def check_keras(optimizer: Any) -> None:
    """Raises ConfigError if Keras lacks a name that this file relies on."""
    missing = [f"TFOptimizer.{name}" for name in (*OVERRIDDEN, *USED) if not hasattr(TFOptimizer, name)]
    missing += [f"optimizer.{name}" for name in OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
    missing += [f"Variable.{name}" for name in VARIABLE_ATTRIBUTES if not hasattr(optimizer.iterations, name)]
    if missing:
        raise ConfigError(
            f"Keras {keras.__version__} with backend {keras.backend.backend()} lacks {', '.join(missing)}, which the "
            "adapter for Keras optimizers relies on; use Keras 3.15 with TensorFlow, or an optimizer of "
            "framework.optimizers"
        )


def localize(optimizer: Any, variables: Sequence[Any]) -> list[Made]:
    """Makes a Keras optimizer local and builds it in the present strategy's scope.

    Args:
      optimizer: a Keras optimizer, not built.
      variables: Keras variables to build it for.

    Returns:
      The slots it made for model variables.
    """
    made: list[Made] = []
    kind = type(optimizer)
    # Module and name stay, so that Keras saves the object as of the class the user knows.
    known_as = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
    optimizer.__class__ = type(kind.__name__, (kind, LocalUpdates), {**known_as, "_made": made})
    # Keras keeps the strategy in whose scope the object was constructed; the slots are for this one.
    optimizer._distribution_strategy = tf.distribute.get_strategy()
    _make_assignable(optimizer.variables)
    optimizer.build(list(variables))
    _make_assignable(optimizer.variables)
    return made


def held_variables(optimizer: Any, names: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Keras variables in the optimizer's attributes, each with a name made from the attribute's.

    Args:
      optimizer: a built Keras optimizer.
      names: names of the model variables; a list of as many slots is taken to be in their order.
    """
    for attribute, value in vars(optimizer).items():
        # Keras's lists of all variables do not tell what they are; _self_* is TensorFlow's own tracking.
        if attribute in ("_variables", "_trainable_variables") or attribute.startswith("_self_"):
            continue
        slot = attribute.strip("_")
        if isinstance(value, keras.Variable):
            yield value, slot
        elif isinstance(value, dict):
            yield from ((item, f"{slot}/{key}") for key, item in value.items() if isinstance(item, keras.Variable))
        elif isinstance(value, (list, tuple)):
            keys = names if len(value) == len(names) else range(len(value))
            yield from ((v, f"{slot}/{k}") for k, v in zip(keys, value, strict=True) if isinstance(v, keras.Variable))


def _make_assignable(variables: Sequence[Any]) -> None:
    """Lets Keras variables be assigned in replica context without a merge call.

    Keras gives ``iteration`` and ``learning_rate`` the aggregation only_first_replica. The Keras variable stays, so
    that all who hold it see the change; the ``tf.Variable`` in it is replaced by one made in the present scope.
    """
    for variable in variables:
        if variable.aggregation != "none":
            old = variable.value
            variable._value = tf.Variable(old.numpy(), dtype=old.dtype, trainable=False, name=variable.name)
            variable._aggregation = "none"


def _unwrap(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable
