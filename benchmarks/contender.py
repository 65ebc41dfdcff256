"""A contender in a process of its own: ``python -m benchmarks.contender SPEC`` with a JSON object.

It trains, and after each window of steps it tells its parent how long the window took, then waits for leave to run the
next. So contenders in several processes can take turns, window by window, with nothing else running meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from benchmarks.peers import PEERS

# Reads a message; empty at the end of the stream.
Receive: TypeAlias = Callable[[], str]
Send: TypeAlias = Callable[[dict[str, Any]], None]


class Reporter:
    """Closes windows and reports them. A contender calls it after its first step and after each window.

    Args:
      send: takes the messages to the parent.
      receive: blocks until the parent wants the next window.
      memory: gives the memory of this process in MB.
      started: when the process was started, by ``clock``.
      clock: monotonic seconds that parent and child share.
      cpu_clock: seconds of all threads of this process together.
    """

    def __init__(
        self,
        *,
        send: Send,
        receive: Receive,
        memory: Callable[[], float],
        started: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        self._send, self._receive, self._memory = send, receive, memory
        self._clock, self._cpu_clock = clock, cpu_clock
        self._started = started
        self._imported = clock() - started
        self._facts: dict[str, Any] = {}
        self._step = 0
        self._opened, self._cpu_opened = 0.0, 0.0

    def facts(self, **facts: Any) -> None:
        """What must be equal for all contenders (``parameters``), and ``settings`` that differ from default."""
        self._facts.update(facts)

    def __call__(self, step: int, loss: Any) -> None:
        """Closes the window that ends with ``step``.

        Args:
          step: steps done since the beginning of the run.
          loss: mean loss over the window, a number or a tensor: it is read here, which waits for the device, before
            the clock is.
        """
        value = float(loss)
        now = self._clock()
        message: dict[str, Any] = {"step": step, "loss": value, "rss_mb": self._memory()}
        if self._step:
            cpu = self._cpu_clock() - self._cpu_opened
            message.update(steps=step - self._step, seconds=now - self._opened, cpu_seconds=cpu)
        else:
            message.update(import_s=self._imported, first_step_s=now - self._started, facts=self._facts)
        self._send(message)
        self._step = step
        if not self._receive():
            raise SystemExit("the parent went away")
        self._opened, self._cpu_opened = self._clock(), self._cpu_clock()


# Trains a workload and reports at each of the given steps; the first is 1, the step that traces and compiles.
Contender: TypeAlias = Callable[[Any, Sequence[int], Reporter], None]


def load(name: str, function: str = "train") -> Contender:
    """The contender ``name``: a function of a peer's module, or of ``benchmarks.NAME``."""
    module = importlib.import_module(PEERS[name].module if name in PEERS else f"benchmarks.{name}")
    return getattr(module, function)


def cpu_seconds() -> float:
    """Processor time of this process and of those that it started and that still run."""
    import psutil

    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = child.cpu_times()
            total += used.user + used.system
    return total


def resident_mb() -> float:
    """Memory of this process that is in RAM, in MB."""
    import psutil

    return psutil.Process().memory_info().rss / 1e6


def main(argv: Sequence[str]) -> None:
    """Runs one contender. SPEC: ``contender``, ``function``, ``workload``, ``ends`` (steps of reports), ``started``."""
    spec = json.loads(argv[0])
    # Messages get the real standard output; whatever a library prints goes to standard error.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contender = load(spec["contender"], spec["function"])

    from benchmarks.workload import Workload

    reporter = Reporter(
        send=lambda message: print(json.dumps(message), file=channel, flush=True),
        receive=sys.stdin.readline,
        memory=resident_mb,
        cpu_clock=cpu_seconds,
        started=spec["started"],
    )
    contender(Workload.from_dict(spec["workload"]), spec["ends"], reporter)


if __name__ == "__main__":
    main(sys.argv[1:])
