"""One worker process: its own process group, its output by lines, an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from framework.errors import ConfigError

_PR_SET_PDEATHSIG = 1  # prctl of Linux: the signal a process gets when the thread that started it ends
_LONGEST_LINE = 1 << 16  # bytes; a longer one is cut, so that output without line ends cannot fill the memory


class Child:
    """A worker process.

    It is the leader of a process group of its own: a signal reaches what it started too, and Ctrl-C of a terminal
    reaches it only through the launcher. If the launcher dies, by whatever signal, the kernel kills it.

    Args:
      command: program and arguments.
      env: its environment.
      index: of the worker.

    Raises:
      ConfigError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], index: int):
        self.index = index
        self.code: int | None = None  # once it has ended; -signal if a signal ended it
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]!r} cannot be started ({error.strerror}); for example "
                "python -m framework.launch --workers=2 -- train.py --task=digits"
            ) from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self.streams = (Stream(self._process.stdout.fileno()), Stream(self._process.stderr.fileno()))

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended, -signal for a signal; what it had started and left is killed first."""
        if self.code is None:
            # Looked at, not collected yet: until it is, its number can belong to no other process group.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.signal(signal.SIGKILL)
                self.code = self._process.wait()
        return self.code

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group, unless the worker has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Closes its output."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class Stream:
    """The lines of one output.

    Args:
      descriptor: to read from; it is made non-blocking.
    """

    def __init__(self, descriptor: int):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.ended = False
        self._rest = b""

    def read(self, line: Callable[[bytes], None]) -> bool:
        """Hands each whole line that is there, with its end, to ``line``; at the end what is left; False: nothing."""
        if self.ended:
            return False
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.ended = True
            if self._rest:
                line(self._rest + b"\n")
            self._rest = b""
            return False
        *whole, self._rest = (self._rest + data).split(b"\n")
        for one in whole:
            line(one + b"\n")
        if len(self._rest) > _LONGEST_LINE:
            line(self._rest + b"\n")
            self._rest = b""
        return True


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes the worker: asks the kernel to be killed with its parent."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # no Linux: the keeper alone looks after the workers
        return None

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before this was asked
            os._exit(1)

    return ask
