"""The ledger of a run's time: seconds by class, and what was not measured left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Ledger:
    """Adds up seconds by class on a monotonic clock.

    Args:
      clock: seconds that never go back; passed in by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._began: float | None = None
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """Starts the total, unless something was booked before."""
        if self._began is None:
            self._began = self._clock()

    def add(self, name: str, seconds: float) -> None:
        """Books ``seconds`` that were measured elsewhere, and have just ended."""
        if self._began is None:
            self._began = self._clock() - seconds
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Books the time of the block, also when it raises."""
        self.start()
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def seconds(self) -> dict[str, float]:
        """Seconds by class and in total since ``start``."""
        total = {} if self._began is None else {"total": self._clock() - self._began}
        return {**self._seconds, **total}

    def shares(self) -> dict[str, float]:
        """Each class as a share of the total, 0..1; empty before ``start``."""
        seconds = self.seconds()
        total = seconds.pop("total", 0.0)
        return {name: value / total for name, value in seconds.items()} if total else {}
