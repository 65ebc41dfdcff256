"""A small process that outlives its launcher by a moment: it kills what the workers started if the launcher is killed.

The kernel kills the workers with the launcher, but not the workers' own children. The keeper reads the process groups
from a pipe; its end comes when the launcher is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Keeper:
    """Process groups that must not outlive this process. Make it before there are threads: it forks."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _keep(read, self._write)
            finally:
                os._exit(0)
        os.close(read)

    def add(self, group: int) -> None:
        """Kill this process group if the launcher dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the keeper."""
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # somebody killed the keeper; the workers still die with the launcher
            os.write(self._write, line.encode())


def _keep(read: int, write: int) -> None:
    os.close(write)
    os.setsid()  # what is sent to the launcher's group is not meant for the keeper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a pipe that reads the launcher's output must see its end with the launcher
        os.dup2(nothing, descriptor)
    groups: set[int] = set()
    with os.fdopen(read) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
