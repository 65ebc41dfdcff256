"""Stop when an evaluation is good enough (or bad enough)."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

from framework.errors import ConfigError
from framework.hooks.hook import Hook, Values
from framework.parse import parse_condition

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_SIGNS = {"<": operator.lt, ">": operator.gt}


class EarlyStop(Hook):
    """Sets ``reason`` when ``metric sign limit`` holds at an evaluation, e.g. ``EarlyStop("loss", "<", 0.1)``.

    Evaluation values are reduced ones, so all workers decide alike. NaN and a metric that is left out at a later
    evaluation never stop a run.

    Args:
      metric: a metric's name, or ``NAME/metric`` for the evaluation set NAME. The bare name will do where only one set
        has it.
      sign: ``<`` or ``>``.
      limit: a finite number.

    Raises:
      ConfigError: an argument is refused; or, from ``evaluated``, the first evaluation has figures but not this metric
        (which set lacks it may be known only when the first of several is evaluated again), or several sets have it
        under the bare name.
    """

    reason: str | None
    """None, or why to stop, in one line: ``eval loss 0.08 < 0.1 at step 40``."""

    def __init__(self, metric: str, sign: str, limit: float):
        if not metric:
            raise ConfigError("metric='' but it must name an evaluation metric; for example metric='loss'")
        if sign not in _SIGNS:
            raise ConfigError(f"sign={sign!r} but it must be one of {', '.join(_SIGNS)}")
        if not math.isfinite(limit):
            raise ConfigError(f"limit={limit!r} but it must be finite; for example limit=0.1")
        self.metric, self.sign, self.limit = metric, sign, float(limit)
        self.reason = None
        self._sets: dict[str, list[str]] = {}  # set -> its metrics by full name
        self._found_in: str | None = None  # the set that has the metric

    def begin(self, trainer: Trainer) -> None:
        self.reason = None  # a run that goes on after a stop goes on to the next evaluation

    def evaluated(self, step: int, name: str, values: Values) -> None:
        full = {f"{name}/{key}" if name else key: key for key in values}
        key = full.get(self.metric, self.metric)
        self._check(name, list(full), found=key in values, bare=bool(name) and self.metric not in full)
        if key not in values:
            return
        value = float(values[key])
        if self.reason is None and _SIGNS[self.sign](value, self.limit):
            shown = f"{value:.4g}"
            if not _SIGNS[self.sign](float(shown), self.limit):
                shown = repr(value)  # 0.09999999 is below 0.1, which "0.1 < 0.1" would not say
            phase = f"eval/{name}" if name else "eval"
            self.reason = f"{phase} {key} {shown} {self.sign} {self.limit:g} at step {step}"

    def _check(self, name: str, there: list[str], *, found: bool, bare: bool) -> None:
        """Refuses a metric that the evaluations do not have, or have more than once."""
        again = name in self._sets
        if there:
            self._sets[name] = there
        if found:
            if self._found_in is not None and self._found_in != name and bare:
                raise ConfigError(f"metric={self.metric!r} but several evaluation sets have it; {self._choose()}")
            self._found_in = name
        elif self._found_in is None and there and (again or not name or self.metric.startswith(f"{name}/")):
            raise ConfigError(f"metric={self.metric!r} but no evaluation has it; {self._choose()}")

    def _choose(self) -> str:
        return "use one of " + ", ".join(full for names in self._sets.values() for full in names)


def check_condition(stop_when: str, known: list[str]) -> None:
    """Refuses, before training, to stop by a figure that no evaluation gives."""
    condition = parse_condition(stop_when)
    if condition is None:
        return
    if not known:
        raise ConfigError(f"stop_when={stop_when} without evaluation: there is nothing to look at; leave it out")
    if not any(name == condition[0] or name.endswith("/" + condition[0]) for name in known):
        raise ConfigError(f"stop_when={stop_when} but the evaluation gives {', '.join(known)}; name one of these")
