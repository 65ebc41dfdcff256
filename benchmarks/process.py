"""The parent's end of a contender: starts its process, asks for windows, ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.workload import Workload

# The folder that holds the package, so that the child finds it from wherever the parent was started.
ROOT = pathlib.Path(__file__).resolve().parent.parent


class ContenderFailed(Exception):
    """A contender's process ended, or was ended, before it answered."""


@dataclasses.dataclass(frozen=True)
class StartUp:
    """From the start of the process to the first step's loss read; never part of a rate."""

    import_s: float  # until TensorFlow and the contender are imported
    first_step_s: float  # until the loss of the first step, traced and compiled, was read
    loss: float  # of the first step
    rss_mb: float
    facts: dict[str, Any]  # parameters, settings


@dataclasses.dataclass(frozen=True)
class Window:
    """Some steps in a row, from leave to run until their loss was read from the device."""

    step: int  # the last of them
    steps: int
    seconds: float
    cpu_seconds: float  # of all threads of the process: less disturbed by what else runs on the machine
    loss: float  # mean over the window
    rss_mb: float  # memory of the process after it


class ContenderProcess:
    """One contender in a fresh process; between windows it stands still.

    Args:
      name: a peer, or a module of ``benchmarks`` with a function ``train``.
      workload: what it trains.
      ends: steps at which it is to report, the first of which is 1.
      limit: seconds for one answer; then the process is killed.
      function: of the module; ``train``, or ``reach`` for ``benchmarks.goal``.
    """

    def __init__(
        self, name: str, workload: Workload, ends: Sequence[int], *, limit: float = 300.0, function: str = "train"
    ):
        self._name, self._limit = name, limit
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        environment.update(PEERS[name].environment if name in PEERS else {})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        spec = {
            "contender": name,
            "function": function,
            "workload": workload.to_dict(),
            "ends": list(ends),
            "started": time.monotonic(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def start_up(self) -> StartUp:
        """Waits for the first step."""
        message = self._answer()
        return StartUp(**{f.name: message[f.name] for f in dataclasses.fields(StartUp)})

    def window(self) -> Window:
        """Lets the contender run one window and waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        message = self._answer()
        return Window(**{f.name: message[f.name] for f in dataclasses.fields(Window)})

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        expired = threading.Event()

        def kill() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(self._limit, kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace")[-2000:]
        why = f"gave no answer in {self._limit:g} s" if expired.is_set() else f"ended with code {code}"
        raise ContenderFailed(f"contender {self._name} {why}\n{tail}")
