"""Ctrl-C and SIGTERM: asked once they end the run in good order, asked again at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class StopSignals:
    """What a signal asked for.

    Attributes:
      status: ``interrupted`` (Ctrl-C) or ``preempted`` (SIGTERM); None: nothing came.
    """

    def __init__(self) -> None:
        self.status: str | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside the block, in the main thread only: Python allows no other."""
        self.status = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            del frame
            if self.status is not None:
                raise KeyboardInterrupt
            self.status = "interrupted" if number == signal.SIGINT else "preempted"

        before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
