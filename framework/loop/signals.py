"""What ends a run early from outside: Ctrl-C, SIGTERM, SIGUSR1, a time limit; agreed over all workers."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

# SIGUSR1 is what Slurm sends ahead of a time limit with --signal=USR1@60.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))

# What a worker tells the others. Their sum says which it was: there are fewer workers than that.
_SIGNAL, _OUT_OF_TIME = 1.0, 65536.0


class StopSignals:
    """What asked the run to end. The first signal ends it in good order, a second one at once.

    Args:
      max_minutes: of one call of ``train``; 0: no limit.
      clock: seconds that never go back; passed in by tests.
    """

    def __init__(self, max_minutes: float = 0.0, clock: Callable[[], float] = time.monotonic):
        self._limit = max_minutes * 60.0
        self._max_minutes = max_minutes
        self._clock = clock
        self._began = clock()
        self._status: str | None = None  # interrupted (Ctrl-C) or preempted (SIGTERM, SIGUSR1)
        self._asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside the block, in the main thread only: Python allows no other."""
        self._status, self._asked, self._began = None, False, self._clock()
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            del frame
            if self._status is not None:
                raise KeyboardInterrupt
            self._status = "interrupted" if number == signal.SIGINT else "preempted"

        before = {n: signal.signal(n, ask) for n in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def decide(self, trainer: Trainer, asked: float) -> tuple[str, str] | None:
        """Status and reason to end with behind the present step; None: go on.

        One worker alone decides. Of several, one that is to end says so to the others with the sums of its next step,
        and all end behind that step: ``asked`` is what they said with the last one.
        """
        late = bool(self._limit) and self._clock() - self._began >= self._limit
        if trainer.cluster.num_workers > 1:
            if not asked:
                if (late or self._status) and not self._asked:
                    self._asked = True
                    trainer.stepper.ask_to_stop(_SIGNAL if self._status else _OUT_OF_TIME)
                return None
            late = asked >= _OUT_OF_TIME
            if not late and self._status is None:
                return "preempted", f"stopped at step {trainer.step}: another worker got a signal"
        if self._status is not None:
            return self._status, f"stopped at step {trainer.step} by a signal"
        if late:
            return "stopped_early", f"stopped at step {trainer.step}: max_minutes={self._max_minutes:g} are over"
        return None
