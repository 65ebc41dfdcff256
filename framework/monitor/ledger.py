"""The ledger of a run's time: every second belongs to exactly one phase, also over restarts.

A process is in one phase at a time, so its phases sum to its wall time. Other processes of the same run, those before a
restart, are told by what they left in the run folder (``framework.monitor.heartbeat``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

# Phases, in the order in which they are shown. ``down`` lies between two processes and is no phase of either.
PHASES = {
    "start_up": "before the first step: imports, building, opening data",
    "recovery": "reading a checkpoint to go on from",
    "compile": "the first step, which is traced and compiled",
    "train": "steps, without waiting for input",
    "input_wait": "steps in which the devices waited for the next batch",
    "again": "steps that had been done before a restart, and were lost",
    "evaluate": "evaluation",
    "checkpoint": "training stands still for a save",
    "checks": "comparisons of replicas between steps",
    "other": "all else: records, the task's hooks, the caller's own code",
    "down": "no process of the run was there",
}


class Ledger:
    """Adds up seconds by phase on a monotonic clock, and knows when there last was progress.

    Args:
      clock: seconds that never go back; passed in by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._began = self._mark = self._moved = clock()
        self._seconds: dict[str, float] = {}
        self._stack = ["start_up"]
        self._longest: dict[str, tuple[int, float]] = {}
        self._unit = 1.0
        self.step = 0  # steps done, for those who look on

    def backdate(self, seconds: float) -> None:
        """Counts ``seconds`` before this ledger was made as start-up: the program's own start."""
        self._began -= max(seconds, 0.0)
        self._mark -= max(seconds, 0.0)

    # --- phases --------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The present one."""
        return self._stack[-1]

    def start(self) -> None:
        """Ends the start-up: from now on what belongs to no named phase is ``other``."""
        self._settle()
        self._stack[0] = "other"

    @contextlib.contextmanager
    def timed(self, name: str, *, units: float = 1.0) -> Iterator[None]:
        """The block is the phase ``name``; the one around it stops meanwhile.

        Args:
          name: of the phase.
          units: how much the block does until the next ``beat``, e.g. steps: what it may take grows with it.
        """
        self._settle()
        self.beat()
        self._stack.append(name)
        self._unit = units
        try:
            yield
        finally:
            self._settle()
            self.beat()
            self._stack.pop()
            self._unit = 1.0

    def move(self, seconds: float, source: str, target: str) -> None:
        """Books ``seconds`` of the phase ``source`` as ``target``; never more than there are."""
        self._settle()
        seconds = min(max(seconds, 0.0), self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._mark
        self._mark = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in their usual order, and ``total``, which is their sum."""
        now = self._clock()
        found = dict(self._seconds)
        found[self.phase] = found.get(self.phase, 0.0) + now - self._mark
        known = [name for name in PHASES if found.get(name)]
        return {name: found[name] for name in [*known, *(n for n in found if n not in PHASES)]} | {
            "total": now - self._began
        }

    # --- progress ------------------------------------------------------------------------------------------------

    def beat(self, *, units: float | None = None) -> None:
        """There was progress. ``units``: how much is done until the next beat, see ``timed``."""
        now = self._clock()
        times, longest = self._longest.get(self.phase, (0, 0.0))
        self._longest[self.phase] = (times + 1, max(longest, (now - self._moved) / max(self._unit, 1.0)))
        self._moved = now
        if units is not None:
            self._unit = units

    def excuse(self, seconds: float) -> None:
        """For so long there could be no progress: the process was stopped, or somebody looks on in a debugger."""
        self._moved += seconds

    def idle(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._moved

    def usual(self) -> tuple[int, float]:
        """How often there was progress in the present phase, and the longest time it took for as much as now."""
        times, longest = self._longest.get(self.phase, (0, 0.0))
        return times, longest * max(self._unit, 1.0)


def summed(parts: list[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by phase of several processes together, in the usual order, with ``total``."""
    names = {name for part in parts for name in part}
    order = [*(n for n in PHASES if n in names), *sorted(names - set(PHASES))]
    return {name: sum(part.get(name, 0.0) for part in parts) for name in order}


def sentence(seconds: Mapping[str, float]) -> str:
    """One line for people: the total, the share that made new steps, the phases by size; empty if no time went by."""
    total = seconds.get("total", 0.0)
    if total <= 0.0:
        return ""
    parts = sorted(((v, n) for n, v in seconds.items() if n != "total" and v / total >= 0.005), reverse=True)
    shares = ", ".join(f"{name.replace('_', ' ')} {value / total:.0%}" for value, name in parts)
    return f"time: {total:.1f} s, {seconds.get('train', 0.0) / total:.0%} of it new steps: {shares}"
