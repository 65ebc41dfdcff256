"""When a hook runs: small objects asked with step and time, so that tests never sleep.

A trigger is asked ``fires(step, seconds)`` whenever the loop has stopped, and says True at most once for one step. It
tells the loop where to stop with ``next_step``. ``begin`` sets a trigger to the step a run starts or resumes at; a
trigger that was never begun is set by the first question.
"""

from __future__ import annotations

import bisect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from framework.errors import ConfigError, LockstepError


class Trigger:
    """Says whether a hook runs at ``step``. The loop cuts its inner loop at ``next_step``."""

    def begin(self, step: int, seconds: float | None = None) -> None:
        """Forgets earlier firings: steps count from ``step``, time from ``seconds`` (monotonic; None: first look)."""

    def next_step(self, step: int) -> float:
        """The next step after ``step`` at which the loop must stop for this trigger; ``math.inf``: none."""
        raise NotImplementedError

    def fires(self, step: int, seconds: float) -> bool:
        """Whether the hook runs now, after ``step`` updates, at monotonic time ``seconds``."""
        raise NotImplementedError


class _OncePerStep(Trigger):
    """What the triggers here have in common: none fires twice for a step, nor for the step a run begins at."""

    _fired_at: int | None = None

    def begin(self, step: int, seconds: float | None = None) -> None:
        # The step a run resumes at was dealt with by the run that made it: a checkpoint just read is not saved again.
        self._fired_at = step

    def fires(self, step: int, seconds: float) -> bool:
        if step == self._fired_at or not self._due(step, seconds):
            return False
        self._fired_at = step
        return True

    def _due(self, step: int, seconds: float) -> bool:
        raise NotImplementedError


class Never(_OncePerStep):
    """Never fires: for a hook that lives from evaluations and the end of training alone."""

    def next_step(self, step: int) -> float:
        return math.inf

    def _due(self, step: int, seconds: float) -> bool:
        return False


class EveryNSteps(_OncePerStep):
    """Fires at the multiples of ``n`` updates, counted from step 0 also after a resume at any step.

    Raises:
      ConfigError: ``n`` is no whole number of at least 1.
    """

    def __init__(self, n: int):
        self.n = _count("n", n, "n=100")

    def next_step(self, step: int) -> float:
        return (step // self.n + 1) * self.n

    def _due(self, step: int, seconds: float) -> bool:
        return step > 0 and step % self.n == 0


class AtSteps(_OncePerStep):
    """Fires at the listed steps, in whatever order they are listed.

    Raises:
      ConfigError: the list is empty or holds anything but whole numbers of at least 1.
    """

    def __init__(self, steps: Iterable[int]):
        self.steps = tuple(sorted({_count("steps", step, "steps=[100, 200]") for step in steps}))
        if not self.steps:
            raise ConfigError("steps=[] but at least one step must be listed; use Never() for none")

    def next_step(self, step: int) -> float:
        index = bisect.bisect_right(self.steps, step)
        return self.steps[index] if index < len(self.steps) else math.inf

    def _due(self, step: int, seconds: float) -> bool:
        return step in self.steps


class EverySeconds(_OncePerStep):
    """Fires when ``seconds`` have passed since it last fired, or since ``begin`` or else the first look.

    It never cuts the loop: it is looked at when the loop stops for another reason, so it fires up to one inner loop
    late. Use it only for what is local to one process (a console line, a heartbeat file). Clocks of workers differ, so
    workers would disagree about the step at which it fires, and anything that communicates would hang.

    Raises:
      ConfigError: ``seconds`` is not a finite number above 0.
    """

    def __init__(self, seconds: float):
        number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if not (number and 0.0 < seconds < math.inf):
            raise ConfigError(f"seconds={seconds!r} but it must be a finite number above 0; for example seconds=60.0")
        self.seconds = float(seconds)
        self._since: float | None = None

    def begin(self, step: int, seconds: float | None = None) -> None:
        super().begin(step, seconds)
        self._since = seconds

    def next_step(self, step: int) -> float:
        return math.inf

    def _due(self, step: int, seconds: float) -> bool:
        if self._since is None:
            self._since = seconds
        if seconds - self._since < self.seconds:
            return False
        self._since = seconds
        return True


class EveryStep(_OncePerStep):
    """Fires at every step, and makes sure that it saw every one.

    ``begin(step)`` sets the base: the next step must be ``step + 1``. Without it the first question sets the base.

    Raises:
      LockstepError: from ``fires``, at a step that does not follow the one before it.
    """

    def next_step(self, step: int) -> float:
        return step + 1

    def _due(self, step: int, seconds: float) -> bool:
        last = self._fired_at
        if last is not None and step != last + 1:
            raise LockstepError(
                f"step {step} came after step {last} but a hook with EveryStep must see every step: let the loop stop "
                "at next_step, and call begin(step) after going back to an earlier step"
            )
        return True


class When(Trigger):
    """Fires where ``trigger`` fires and ``condition(step)`` holds.

    The condition is asked only at steps where the trigger fires. A firing that it forbids is used up: ``EverySeconds``
    counts anew from there. Workers decide alike only if it looks at nothing but the step and reduced values.
    """

    def __init__(self, trigger: Trigger, condition: Callable[[int], bool]):
        self.trigger = trigger
        self.condition = condition

    def begin(self, step: int, seconds: float | None = None) -> None:
        self.trigger.begin(step, seconds)

    def next_step(self, step: int) -> float:
        return self.trigger.next_step(step)

    def fires(self, step: int, seconds: float) -> bool:
        # The trigger first: EveryStep must be asked at every step, whatever the condition says.
        return self.trigger.fires(step, seconds) and bool(self.condition(step))


def _count(name: str, value: Any, example: str) -> int:
    """Returns a whole number of at least 1 as an ``int``, or raises ConfigError naming the argument."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} but it must be a whole number of at least 1; for example {example}")
    return int(value)
