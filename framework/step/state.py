"""Non-trainable state that replicas hold: moving statistics, counters, maxima; equal on all of them after each step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from framework.errors import ConfigError
from framework.step.values import Stat

RULES = ("mean", "sum", "max", "first")


class ReplicaState:
    """The non-trainable variables of a model, and how the copies that a step leaves on the replicas become one.

    ``mean``: weighted by examples (moving statistics; the rule of floating variables unless told otherwise). ``max``:
    the largest. ``sum``: the old value plus the changes of all replicas. ``first``: replicas change their copies alike,
    nothing is sent (the rule of other variables).

    Args:
      variables: name -> variable.
      rules: regular expression on the name -> rule; the first that is found counts.

    Raises:
      ConfigError: a rule that is none, or that fits no variable.
    """

    def __init__(self, variables: Mapping[str, tf.Variable], rules: Mapping[str, str]):
        for pattern, rule in rules.items():
            if rule not in RULES:
                raise ConfigError(f"replica_state[{pattern!r}]={rule!r} but it must be one of {', '.join(RULES)}")
            if not any(re.search(pattern, name) for name in variables):
                raise ConfigError(
                    f"replica_state[{pattern!r}] fits no non-trainable variable; there are "
                    f"{', '.join(variables) or 'none'}"
                )
        self._variables = dict(variables)
        self._rules = {name: self._rule(name, v, rules) for name, v in variables.items()}

    @staticmethod
    def _rule(name: str, variable: tf.Variable, rules: Mapping[str, str]) -> str:
        given = next((rule for pattern, rule in rules.items() if re.search(pattern, name)), None)
        return given or ("mean" if variable.dtype.is_floating else "first")

    def read(self) -> dict[str, tf.Tensor]:
        """This replica's values, before the forward pass."""
        return {name: v.read_value() for name, v in self._variables.items()}

    def sums(self, before: Mapping[str, tf.Tensor], rows: tf.Tensor) -> dict[str, Stat]:
        """What crosses the replicas after the forward pass; ``rows`` examples were seen here."""
        result = {}
        for name, variable in self._variables.items():
            rule, value = self._rules[name], variable.read_value()
            if rule == "mean":
                # The change and not the value: what no replica touched stays as it is, to the last bit. Statistics over
                # no example are NaN, which times 0 is NaN.
                count = tf.cast(rows, value.dtype)
                change = tf.where(count > 0, value - before[name], tf.zeros_like(value))
                result[name] = Stat("mean", change * count, count)
            elif rule == "max":
                result[name] = Stat("max", _reducible(value))
            elif rule == "sum":
                result[name] = Stat("sum", _reducible(value - before[name]))
        return result

    def keep_unless(self, there: tf.Tensor, before: Mapping[str, tf.Tensor]) -> None:
        """Unless ``there`` (bool scalar: there were examples), puts ``before`` back where statistics became NaN.

        Finite ones stay: those of a synchronised normalisation are of the other replicas' examples.
        """
        for name, value in before.items():
            if value.dtype.is_floating:
                now = self._variables[name].read_value()
                self._variables[name].assign(tf.where(there | tf.math.is_finite(now), now, value))

    def commit(self, before: Mapping[str, tf.Tensor], reduced: Mapping[str, Stat]) -> None:
        """Writes the common values into this replica's copies."""
        for name, stat in reduced.items():
            variable, value = self._variables[name], stat.value
            if stat.kind == "mean":
                assert stat.weight is not None
                value = before[name] + tf.math.divide_no_nan(value, stat.weight)
            elif stat.kind == "sum":
                value = before[name] + tf.cast(value, variable.dtype)
            variable.assign(tf.cast(value, variable.dtype))

    def undo(self, before: Mapping[str, tf.Tensor]) -> None:
        """Puts the values from before the forward pass back: the step does not count."""
        for name, value in before.items():
            self._variables[name].assign(value)


def _reducible(value: tf.Tensor) -> tf.Tensor:
    """As int64 if it is an integer: TensorFlow keeps int32 on the host, where it does not reduce."""
    return tf.cast(value, tf.int64) if value.dtype.is_integer else value


class LossScale:
    """Scale of the loss for float16 gradients (Micikevicius et al. 2018, section 3.2).

    Dynamic: halved at each step with a non-finite gradient, which makes no update; doubled after ``growth_steps`` good
    ones in a row; at least 1. Fixed: constant.

    Args:
      initial: the first scale.
      dynamic: whether it moves.
      growth_steps: good steps before it is doubled.
    """

    def __init__(self, initial: float, *, dynamic: bool, growth_steps: int = 2000):
        self.dynamic = dynamic
        self._growth_steps = growth_steps
        self._scale = tf.Variable(initial, dtype=tf.float32, trainable=False, name="loss_scale")
        self._good = tf.Variable(0, dtype=tf.int64, trainable=False, name="loss_scale_good_steps")

    def value(self) -> tf.Tensor:
        """The present scale, float32 scalar."""
        return self._scale.read_value()

    def can_fall(self) -> tf.Tensor:
        """Whether a non-finite step may still be the scale's fault."""
        return (self._scale.read_value() > 1.0) if self.dynamic else tf.constant(False)

    def good_step(self) -> None:
        """Counts an update; in replica context."""
        if self.dynamic:
            good = self._good.read_value() + 1
            grow = good >= self._growth_steps
            scale = self._scale.read_value()
            self._scale.assign(tf.where(grow & (scale < 2.0**31), scale * 2.0, scale))
            self._good.assign(tf.where(grow, tf.zeros_like(good), good))

    def bad_step(self, overflow: tf.Tensor) -> None:
        """Counts a skipped step, for whose ``overflow`` (bool scalar) the scale is lowered; in replica context."""
        if self.dynamic:
            scale = self._scale.read_value()
            self._scale.assign(tf.where(overflow, tf.maximum(scale / 2.0, 1.0), scale))
            self._good.assign(tf.zeros([], tf.int64))

    def state(self) -> dict[str, tf.Variable]:
        """Variables of a checkpoint by name."""
        return {"loss_scale": self._scale, "loss_scale_good_steps": self._good}


class WeightAverage:
    """Exponential moving average of the trainable weights, from their initial values on (Polyak and Juditsky 1992).

    Args:
      decay: the average keeps this share of itself at each update.
    """

    def __init__(self, decay: float):
        self._decay = decay
        self._variables: dict[str, tf.Variable] = {}
        self._averages: dict[str, tf.Variable] = {}

    def add(self, variables: Mapping[str, tf.Variable]) -> None:
        """Starts averages of trainable variables (by name) that have none, from their present values."""
        new = {name: v for name, v in variables.items() if name not in self._averages}
        self._variables.update(new)
        self._averages |= {
            name: tf.Variable(v.read_value(), dtype=v.dtype, trainable=False, name="ema") for name, v in new.items()
        }

    def restart(self) -> None:
        """Starts all averages again from the present values; outside of replica context."""
        for name, variable in self._variables.items():
            self._averages[name].assign(variable.read_value())

    def update(self) -> None:
        """Moves the averages after an update; in replica context."""
        for name, variable in self._variables.items():
            average = self._averages[name]
            average.assign_sub((1.0 - self._decay) * (average.read_value() - variable.read_value()))

    def state(self) -> dict[str, tf.Variable]:
        """Variables of a checkpoint by name."""
        return {f"ema/{name}": average for name, average in self._averages.items()}

    def swapped(self) -> Swap:
        """A context manager inside which the model's variables hold the averages."""
        return Swap([(v, self._averages[name]) for name, v in self._variables.items()])


class Swap:
    """Gives variables other values inside a ``with`` block; outside of replica context."""

    def __init__(self, pairs: Sequence[tuple[tf.Variable, tf.Variable]]):
        self._pairs = pairs
        self._kept: list[Any] = []

    def __enter__(self) -> None:
        self._kept = [variable.read_value() for variable, _ in self._pairs]
        for variable, other in self._pairs:
            variable.assign(other.read_value())

    def __exit__(self, *_: object) -> None:
        for (variable, _), value in zip(self._pairs, self._kept, strict=True):
            variable.assign(value)
        self._kept = []
