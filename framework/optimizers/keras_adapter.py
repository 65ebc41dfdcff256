"""Any Keras optimizer as one of the framework's: an update with reduced gradients, on the replica's own copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import keras_local
from framework.optimizers.base import Gradient, Optimizer, check_names, check_update, dense


class KerasOptimizer(Optimizer):
    """A Keras optimizer that updates locally, with gradients that were already reduced.

    It may be any ``keras.optimizers.Optimizer``, also a user's subclass with a user's ``LearningRateSchedule``: the
    object is used as given and never rebuilt from its config. Its ``clipnorm``, ``global_clipnorm``, ``clipvalue`` and
    ``weight_decay`` act on reduced gradients. With ``use_ema`` the averages are in ``state()`` as ``average/<name>``;
    the model gets them when ``optimizer.finalize_variable_values`` is called. ``tf.IndexedSlices`` are made dense, for
    an optimizer that moves only the rows they name is another optimizer.

    ``build`` may be called again with some of the variables of the first time, when layers were frozen, and again with
    all of them. Keras cannot make slots for more: build on all variables first, and freeze afterwards.

    From ``build`` on the object belongs to the framework: its ``apply`` no longer reduces, so ``fit`` must not use it.

    Args:
      optimizer: not yet built.

    Raises:
      ConfigError: it is no Keras optimizer, is already built, holds another optimizer, uses a feature that the
        framework has in another place (accumulation, loss scale), or this version of Keras lacks what is relied on.
    """

    def __init__(self, optimizer: Any) -> None:
        _check_optimizer(optimizer)
        keras_local.check_keras(optimizer)
        self.optimizer = optimizer
        self._strategy: tf.distribute.Strategy | None = None
        self._known: dict[str, Any] = {}  # those it was built on
        self._variables: list[Any] = []  # those that update() is given gradients for, in that order
        self._state: dict[str, tf.Variable] = {}

    def build(self, variables: Sequence[tf.Variable], names: Sequence[str], *, frozen: Sequence[str] = ()) -> None:
        del frozen  # there are no rules by name
        check_names(variables, names)
        if self._strategy is not None:
            self._variables = self._select(variables, names)
            return
        _check_optimizer(self.optimizer)
        held = [
            variable if isinstance(variable, keras.Variable) else keras_local.View(variable, name)
            for variable, name in zip(variables, names, strict=True)
        ]
        made = keras_local.localize(self.optimizer, held)
        self._state = _named(self.optimizer, made, dict(zip(map(id, held), names, strict=True)))
        self._known = dict(zip(names, held, strict=True))
        self._variables = held
        self.iterations = self.optimizer.iterations.value
        self._strategy = tf.distribute.get_strategy()

    def update(self, gradients: Sequence[Gradient]) -> None:
        check_update(self._strategy, len(self._variables), gradients)
        pairs = [pair for pair in zip(gradients, self._variables, strict=True) if pair[0] is not None]
        if pairs:
            self.optimizer.apply(
                [dense(gradient, variable) for gradient, variable in pairs], [variable for _, variable in pairs]
            )
        else:
            self.iterations.assign_add(1)  # apply([]) does not count

    def learning_rate(self) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(self.optimizer.learning_rate), tf.float32)

    def state(self) -> dict[str, tf.Variable]:
        return dict(self._state)

    def _select(self, variables: Sequence[Any], names: Sequence[str]) -> list[Any]:
        new = [
            name
            for variable, name in zip(variables, names, strict=True)
            if name not in self._known or _native(self._known[name]) is not _native(variable)
        ]
        if new:
            raise ConfigError(
                f"build() of {type(self.optimizer).__name__} again, with variables {new} that it was not built on: a "
                "Keras optimizer cannot get new slots; build it on all variables first and freeze layers afterwards, "
                "or use an optimizer of framework.optimizers"
            )
        return [self._known[name] for name in names]


def as_optimizer(optimizer: Any) -> Optimizer:
    """A framework optimizer as it is, a Keras optimizer in its adapter; ConfigError for anything else."""
    return optimizer if isinstance(optimizer, Optimizer) else KerasOptimizer(optimizer)


def _check_optimizer(optimizer: Any) -> None:
    """Raises ConfigError for what the adapter cannot run, with the value, the rule and the cure."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} is a {kind}, but it must be an optimizer object of framework.optimizers or "
            "keras.optimizers; for example framework.optimizers.SGD(learning_rate=0.1)"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            f"optimizer={kind}: it checks and scales gradients across replicas, which is the step's work; "
            "pass its inner_optimizer"
        )
    if isinstance(optimizer, keras.optimizers.MultiOptimizer) or _holds_optimizer(optimizer):
        raise ConfigError(
            f"optimizer={kind} holds other Keras optimizers, which would reduce gradients a second time; "
            "pass one optimizer, or override train_step and apply several"
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} in the Keras optimizer: the step "
            "accumulates before the all-reduce; leave it out, and pass --accumulate_steps or a larger "
            "--global_batch_size"
        )
    if optimizer.loss_scale_factor is not None:
        raise ConfigError(
            f"loss_scale_factor={optimizer.loss_scale_factor} in the Keras optimizer: the gradients it gets are not "
            "scaled; leave it out"
        )
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ConfigError(
            f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency} in the Keras optimizer: it overwrites "
            "weights across replicas within a step; leave it out and keep use_ema alone"
        )
    if optimizer.built:
        raise ConfigError(
            f"optimizer={kind} is already built, but its slots must be made in the strategy's scope for the model's "
            "variables; pass a new one, for example type(optimizer).from_config(optimizer.get_config())"
        )


def _holds_optimizer(optimizer: Any) -> bool:
    for value in vars(optimizer).values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(item, keras.optimizers.Optimizer) for item in inside):
            return True
    return False


def _named(optimizer: Any, made: Sequence[keras_local.Made], name_of: dict[int, str]) -> dict[str, tf.Variable]:
    """The optimizer's variables by names that do not depend on Keras's counters of automatic names.

    A slot made for a model variable is ``<slot>/<variable name>``. Any other is named after the attribute that holds
    it: ``u_product``, or ``r/<variable name>`` in a list with one entry for each model variable.

    Args:
      optimizer: the built Keras optimizer.
      made: the slots it made for model variables.
      name_of: the name of each model variable by the Keras variable's ``id``, in the order given to ``build``.
    """
    wanted = {id(slot): f"{kind}/{name_of[id(variable)]}" for slot, kind, variable in made}
    for variable, name in keras_local.held_variables(optimizer, list(name_of.values())):
        wanted.setdefault(id(variable), name)
    wanted[id(optimizer.iterations)] = "iterations"
    state: dict[str, tf.Variable] = {}
    for variable in optimizer.variables:
        plain = wanted.get(id(variable), "unnamed")
        name, number = plain, 1
        while name in state:
            number += 1
            name = f"{plain}_{number}"
        state[name] = variable.value
    return state


def _native(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable
