"""What SGD, Adam and AdamW share: slots, the update counter, and the loop over variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers.base import Optimizer, Schedule, check_build, check_update
from framework.optimizers.schedules import as_schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """One variable with what belongs to it; all slots have its shape and dtype."""

    name: str
    variable: tf.Variable
    slots: dict[str, tf.Variable]
    constraint: Callable[[tf.Variable], tf.Tensor] | None


class LocalOptimizer(Optimizer):
    """An optimizer whose update is one or two fused ops on the replica's own copies, through ``variable.handle``.

    A subclass names its slots in ``slot_names`` and writes ``_apply``; scalars that depend on the update come from
    ``_scalars``. Variables are float32 or float64.
    """

    slot_names: tuple[str, ...] = ()

    def __init__(self, learning_rate: float | Schedule) -> None:
        self._schedule = as_schedule(learning_rate)
        self._strategy: tf.distribute.Strategy | None = None
        self._held: list[Held] = []

    def build(self, variables: Sequence[tf.Variable], names: Sequence[str]) -> None:
        check_build(self._strategy is not None, variables, names)
        held = [self._hold(variable, name) for variable, name in zip(variables, names, strict=True)]
        # A plain tf.Variable's aggregation is NONE: in replica context it is counted up locally, also in tf.cond.
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        self._held = held
        self._strategy = tf.distribute.get_strategy()

    def update(self, gradients: Sequence[tf.Tensor | None]) -> None:
        check_update(self._strategy, len(self._held), gradients)
        rate = tf.cast(self.learning_rate(), tf.float64)
        scalars: dict[tf.DType, dict[str, tf.Tensor]] = {}
        for held, gradient in zip(self._held, gradients, strict=True):
            if gradient is None:
                continue
            dtype = held.variable.dtype
            if dtype not in scalars:
                scalars[dtype] = {key: tf.cast(value, dtype) for key, value in self._scalars(rate, dtype).items()}
            self._apply(held, gradient, scalars[dtype])
            if held.constraint is not None:
                held.variable.assign(held.constraint(held.variable))
        self.iterations.assign_add(1)

    def learning_rate(self) -> tf.Tensor:
        return tf.cast(self._schedule(tf.convert_to_tensor(self.iterations)), tf.float32)

    def state(self) -> dict[str, tf.Variable]:
        slots = {f"{slot}/{held.name}": held.slots[slot] for slot in self.slot_names for held in self._held}
        return {"iterations": self.iterations, **slots}

    def _scalars(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        """Numbers of this update for variables of ``dtype``: float64 scalars, cast to ``dtype`` by the caller.

        Args:
          rate: this update's learning rate, float64 scalar.
          dtype: what the numbers will be rounded to.
        """
        del dtype
        return {"rate": rate}

    def _apply(self, held: Held, gradient: tf.Tensor, scalars: dict[str, tf.Tensor]) -> None:
        """Changes the replica's own copy of one variable and its slots."""
        raise NotImplementedError

    def _hold(self, variable: tf.Variable, name: str) -> Held:
        constraint = getattr(variable, "constraint", None)
        if not isinstance(variable, tf.Variable):
            variable = variable.value  # a keras.Variable's tf.Variable
        if variable.dtype not in (tf.float32, tf.float64):
            raise ConfigError(
                f"variable {name!r} is {variable.dtype.name}, but {type(self).__name__} updates float32 and float64; "
                "keep variables in float32, or give a Keras optimizer"
            )
        # The name is for people; state() is what identifies a slot. TensorFlow refuses some characters in names.
        label = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)
        slots = {
            slot: tf.Variable(
                lambda: tf.zeros(variable.shape, variable.dtype),
                dtype=variable.dtype,
                trainable=False,
                name=f"{slot}/{label}",
            )
            for slot in self.slot_names
        }
        return Held(name=name, variable=variable, slots=slots, constraint=constraint)
