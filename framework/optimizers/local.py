"""What the framework's own optimizers share: slots, the update counter, rules by name, and the loop over variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import rules
from framework.optimizers.base import Gradient, Optimizer, Schedule, check_names, check_update, dense
from framework.optimizers.schedules import as_schedule


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Held:
    """One variable with what belongs to it.

    Attributes:
      name: what it is known by in ``state()`` and in the rules.
      variable: the ``tf.Variable`` that is updated.
      slots: by the slot's name; of the variable's dtype, and of its shape unless the optimizer says otherwise.
      constraint: applied after each update; None: there is none.
      multiplier: of the learning rate; at 0 the variable and its slots are left alone.
      excluded: it is not decayed, and LARS and LAMB give it no trust ratio.
    """

    name: str
    variable: tf.Variable
    slots: dict[str, tf.Variable]
    constraint: Callable[[tf.Variable], tf.Tensor] | None
    multiplier: float = 1.0
    excluded: bool = False


class LocalOptimizer(Optimizer):
    """An optimizer whose update is a few ops on the replica's own copies, through ``variable.handle``.

    A subclass names its slots in ``slot_names`` and writes ``_apply``; scalars that depend on the update come from
    ``_scalars``, slots of another shape than the variable's from ``_slot_shapes``. Variables are float32 or float64.

    ``build`` may be called again, in the same strategy's scope, when layers were frozen or unfrozen: a variable that is
    known keeps its slots, objects and values; one that is new gets slots of zeros; one that is no longer listed is not
    updated, but its slots stay in ``state()``, so that checkpoints have the same content before and after, and a layer
    that is unfrozen again goes on where it was. Functions traced before it must be traced again. Bias corrections go by
    ``iterations``, the same for all: with Adam's usual betas a variable that joins late takes steps of up to 6.6 times
    the rate at first (in its 12th update), so give it a small multiplier, or the rate a warm-up.

    Args:
      learning_rate: a float, or a schedule: int64 scalar tensor (updates made) -> scalar.
      weight_decay: per unit of learning rate, not negative; what it means is the subclass's.
      exclude: regular expressions; a variable in whose name one is found (``re.search``) is not decayed, and LARS and
        LAMB give it no trust ratio. A usual value is ``("bias", "gamma", "beta")``: biases and normalisation.
      rate_multipliers: regular expression -> factor of the learning rate; the first that is found in a variable's name
        counts. At 0 the variable and its slots are left alone; its gradient still counts in a norm to clip by.
        ``learning_rate()`` is the rate before the factor.

    Raises:
      ConfigError: an argument is out of range or no regular expression; at ``build``: a pattern fits no variable.
    """

    slot_names: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        exclude: Sequence[str] = (),
        rate_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        self._schedule = as_schedule(learning_rate)
        if not weight_decay >= 0.0:
            raise ConfigError(f"weight_decay={weight_decay} but it must be at least 0; for example weight_decay=0.01")
        self.weight_decay = float(weight_decay)
        self.exclude = rules.patterns("exclude", exclude)
        self.rate_multipliers = rules.multipliers(rate_multipliers or {})
        self._strategy: tf.distribute.Strategy | None = None
        self._known: dict[str, Held] = {}  # all that were ever built
        self._held: list[Held] = []  # those that update() is given gradients for, in that order

    def build(self, variables: Sequence[tf.Variable], names: Sequence[str], *, frozen: Sequence[str] = ()) -> None:
        check_names(variables, names)
        strategy = tf.distribute.get_strategy()
        if self._strategy not in (None, strategy):
            raise ConfigError(
                f"build() under {type(strategy).__name__}, but the optimizer was first built under "
                f"{type(self._strategy).__name__}; build it in the scope of the same strategy object"
            )
        self._check_patterns(list(dict.fromkeys([*self._known, *names, *frozen])))
        held = [self._hold(variable, name) for variable, name in zip(variables, names, strict=True)]
        if self._strategy is None:
            # A plain tf.Variable's aggregation is NONE: in replica context it is counted up locally, also in tf.cond.
            self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        self._known.update({item.name: item for item in held})
        self._held = held
        self._strategy = strategy

    def update(self, gradients: Sequence[Gradient]) -> None:
        check_update(self._strategy, len(self._held), gradients)
        rate = tf.cast(self.learning_rate(), tf.float64)
        scalars: dict[tuple[tf.DType, float], dict[str, tf.Tensor]] = {}
        for held, gradient in zip(self._held, gradients, strict=True):
            if gradient is None or held.multiplier == 0.0:
                continue
            dtype, factor = held.variable.dtype, held.multiplier
            if (dtype, factor) not in scalars:
                own = self._scalars(rate if factor == 1.0 else rate * factor, dtype)
                scalars[dtype, factor] = {key: tf.cast(value, dtype) for key, value in own.items()}
            self._apply(held, gradient if self.takes_sparse else dense(gradient, held.variable), scalars[dtype, factor])
            if held.constraint is not None:
                held.variable.assign(held.constraint(held.variable))
        self.iterations.assign_add(1)

    def learning_rate(self) -> tf.Tensor:
        return tf.cast(self._schedule(tf.convert_to_tensor(self.iterations)), tf.float32)

    def state(self) -> dict[str, tf.Variable]:
        slots = {
            f"{slot}/{held.name}": held.slots[slot]
            for slot in self.slot_names
            for held in self._known.values()
            if slot in held.slots
        }
        return {"iterations": self.iterations, **slots}

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        """Numbers of this update for variables of ``dtype``: float64 scalars, cast to ``dtype`` by the caller.

        Args:
          rate: this update's learning rate for these variables, float64 scalar.
          dtype: what the numbers will be rounded to.
        """
        del dtype
        return {"rate": rate, "decay": rate * self.weight_decay}

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        """Changes the replica's own copy of one variable and its slots."""
        raise NotImplementedError

    def _slot_shapes(self, name: str, shape: tf.TensorShape) -> dict[str, tf.TensorShape]:
        """The slots of a variable, each with its shape; their names are among ``slot_names``."""
        del name
        return dict.fromkeys(self.slot_names, shape)

    def _decays(self, held: Held) -> bool:
        return self.weight_decay > 0.0 and not held.excluded

    def _decay(self, held: Held, scalars: dict[str, tf.Tensor]) -> None:
        """Decoupled decay, which ``_apply`` begins with: w <- w - lr * weight_decay * w, unless w is excluded."""
        if self._decays(held):
            # w - c w, not (1 - c) w: in float32, 1 - c keeps only three digits of a c of 1e-5.
            descend(held.variable, scalars["decay"], tf.convert_to_tensor(held.variable))

    def _check_patterns(self, names: Sequence[str]) -> None:
        rules.check_used("exclude", self.exclude, names)
        rules.check_used("rate_multipliers", self.rate_multipliers, names)

    def _hold(self, variable: tf.Variable, name: str) -> Held:
        constraint = getattr(variable, "constraint", None)
        if not isinstance(variable, tf.Variable):
            variable = variable.value  # a keras.Variable's tf.Variable
        known = self._known.get(name)
        if known is not None and known.variable is variable:
            return known
        if known is not None or any(held.variable is variable for held in self._known.values()):
            raise ConfigError(
                f"build() again with name {name!r} for another variable than before, or with a known variable renamed "
                f"to it: slots are known by name; give every variable its name of before, or make a new "
                f"{type(self).__name__}"
            )
        if variable.dtype not in (tf.float32, tf.float64):
            raise ConfigError(
                f"variable {name!r} is {variable.dtype.name}, but {type(self).__name__} updates float32 and float64; "
                "keep variables in float32, or give a Keras optimizer"
            )
        # The name is for people; state() is what identifies a slot. TensorFlow refuses some characters in names.
        label = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)
        slots = {
            slot: tf.Variable(
                lambda shape=shape: tf.zeros(shape, variable.dtype),
                dtype=variable.dtype,
                trainable=False,
                name=f"{slot}/{label}",
            )
            for slot, shape in self._slot_shapes(name, variable.shape).items()
        }
        return Held(
            name=name,
            variable=variable,
            slots=slots,
            constraint=constraint,
            multiplier=rules.multiplier(self.rate_multipliers, name),
            excluded=rules.fits(self.exclude, name),
        )


def descend(variable: tf.Variable, rate: tf.Tensor, delta: tf.Tensor) -> None:
    """variable <- variable - rate * delta on the replica's own copy, as one fused op."""
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=delta)


def assign(variable: tf.Variable, value: tf.Tensor) -> None:
    """variable <- value on the replica's own copy, whatever the variable's aggregation."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def rounded(value: float, dtype: tf.DType) -> float:
    """``value`` as an op of ``dtype`` sees it."""
    return float(dtype.as_numpy_dtype(value))


def check_share(name: str, value: float) -> None:
    """Raises ConfigError unless ``value`` can be the share of the old in a moving average."""
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{name}={value} but it must be from 0 to below 1; for example {name}=0.9")
