"""All workers of one attempt: they start together, and the first that fails ends the others."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from framework.launcher.child import Child, Stream
from framework.launcher.keeper import Keeper

_TICK = 0.05  # seconds between two looks at who has ended
_REST = 1.0  # seconds in which the last output of a worker that ended is read; something it left may hold it open
# Codes that no signal and no lost peer can bring about: they say more than an earlier one of another worker.
_TELLING = (2, 3)
_STOPPED = (5, 130)  # ended in good order after SIGTERM, after SIGINT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended.

    Attributes:
      code: exit code of the worker that tells most; 128 + n for a worker that signal n ended; 0: all are done.
      worker: its index; None: all are done.
      marked: whether a worker wrote the mark that was looked for.
    """

    code: int
    worker: int | None = None
    marked: bool = False


class Signals:
    """Signals the launcher got and has to pass on: SIGINT, SIGTERM, and SIGHUP as SIGTERM.

    Attributes:
      got: their numbers, in the order they came.
    """

    _CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.got: list[int] = []

    def __enter__(self) -> Signals:
        self._before = {n: signal.getsignal(n) for n in self._CAUGHT}
        for number, handler in self._before.items():
            if number == signal.SIGHUP and handler == signal.SIG_IGN:  # nohup
                continue
            signal.signal(number, lambda n, _: self.got.append(signal.SIGTERM if n == signal.SIGHUP else n))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Gang:
    """Worker processes that run side by side.

    Args:
      commands: program, arguments and environment of each worker.
      keeper: is told of the process groups.
      signals: what the launcher got; the first is passed on, the second kills.
      logs: one file a worker, for all it writes.
      grace: seconds between SIGTERM and SIGKILL.
      marks: words to look for in the lines of each worker; empty: none.
      echo: takes a line, without prefix, with the worker's index and whether it went to stderr.
    """

    def __init__(
        self,
        *,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        keeper: Keeper,
        signals: Signals,
        logs: Sequence[BinaryIO] = (),
        grace: float = 10.0,
        marks: Sequence[str] = (),
        echo: Callable[[int, bytes, bool], None] | None = None,
    ):
        self._commands, self._keeper, self._signals, self._logs = commands, keeper, signals, logs
        self._grace, self._marks, self._echo = grace, [mark.encode() for mark in marks], echo or _print
        self._children: list[Child] = []
        self._failed: list[Child] = []  # in the order in which they ended
        self._marked = False
        self._asked = False  # a signal asks them to end: no second one, which would break off a save
        self._deadline: float | None = None

    def run(self) -> Outcome:
        """Starts all workers and returns when all have ended; none is left, whatever happens.

        Raises:
          ConfigError: a worker cannot be started.
        """
        try:
            with selectors.DefaultSelector() as selector:
                for index, (command, env) in enumerate(self._commands):
                    child = Child(command, env, index)
                    self._children.append(child)
                    self._keeper.add(child.pid)
                    for place, stream in enumerate(child.streams):
                        selector.register(stream.descriptor, selectors.EVENT_READ, (child, stream, place == 1))
                while any(child.code is None for child in self._children):
                    self._read(selector, _TICK)
                    self._look()
                end = time.monotonic() + _REST
                while selector.get_map() and time.monotonic() < end:
                    self._read(selector, _TICK)
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)
                while child.poll() is None:
                    time.sleep(0.001)
                self._keeper.remove(child.pid)
                child.close()
        return self._outcome()

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> None:
        if not selector.get_map():  # all have closed their output and go on
            time.sleep(seconds)
            return
        for key, _ in selector.select(seconds):
            child, stream, is_error = key.data
            self._pump(child, stream, is_error)
            if stream.ended:
                selector.unregister(key.fileobj)

    def _pump(self, child: Child, stream: Stream, is_error: bool) -> None:
        def line(data: bytes) -> None:
            if self._marks and self._marks[child.index] in data:
                self._marked = True
            if self._logs:
                self._logs[child.index].write(data)
                self._logs[child.index].flush()
            self._echo(child.index, data, is_error)

        stream.read(line)

    def _look(self) -> None:
        """Notes who has ended and passes on what has to be."""
        now = time.monotonic()
        for child in self._children:
            if child.code is None and child.poll():
                self._failed.append(child)
        got = self._signals.got
        if len(got) > 1:
            self._send(signal.SIGKILL)
            return
        if got and not self._asked:
            self._asked = True
            self._send(got[0])
        # A worker that stopped as asked says nothing against the others: the chief may still be writing its checkpoint.
        in_order = bool(got) and all(child.code in _STOPPED for child in self._failed)
        if self._failed and not in_order and self._deadline is None:
            self._deadline = now + self._grace
            if not self._asked:
                self._asked = True
                self._send(signal.SIGTERM)
        if self._deadline is not None and now >= self._deadline:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def _outcome(self) -> Outcome:
        if not self._failed:
            return Outcome(code=0, marked=self._marked)
        worst = next((child for child in self._failed if child.code in _TELLING), self._failed[0])
        code = worst.code or 0
        return Outcome(code=code if code > 0 else 128 - code, worker=worst.index, marked=self._marked)


def _print(index: int, data: bytes, is_error: bool) -> None:
    """A line with the worker's number before it, to where it went."""
    stream = sys.stderr if is_error else sys.stdout
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the workers go on all the same
        stream.buffer.write(b"[%d] " % index + data)
        stream.buffer.flush()
