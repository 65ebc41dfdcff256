"""Two hosts on this machine: network namespaces joined by a virtual cable, and a slow connection between two ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

ADDRESSES = ("10.77.86.1", "10.77.86.2")


class Hosts:
    """Two network namespaces, each with one end of the cable and a loopback of its own.

    Attributes:
      addresses: of the two hosts.
    """

    def __init__(self, names: tuple[str, str], ends: tuple[str, str]):
        self._names, self._ends = names, ends
        self.addresses = ADDRESSES

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """``command`` as it is to be called to run on one of the hosts."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def cut(self) -> None:
        """Takes the cable out: nothing arrives any more, and nobody is told."""
        _ip("-n", self._names[1], "link", "set", self._ends[1], "down")

    def mend(self) -> None:
        """Puts it in again."""
        _ip("-n", self._names[1], "link", "set", self._ends[1], "up")


def why_not() -> str:
    """Why there can be no ``two_hosts`` here; empty: there can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"lockstep-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Makes the hosts, and removes them at the end; see ``why_not``."""
    names = (f"lockstep-{os.getpid()}-0", f"lockstep-{os.getpid()}-1")
    ends = (f"ls{os.getpid() % 10**8}a", f"ls{os.getpid() % 10**8}b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, ends)
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class SlowLink:
    """Passes on what comes to a port of this machine to another one, each way so many seconds late.

    Args:
      target: the port of 127.0.0.1 that it leads to.
      delay: seconds; 0 until it is set.
    """

    def __init__(self, target: int, delay: float = 0.0):
        self.delay = delay
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it, with all connections."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # nobody listens there yet
                    here.close()
                    continue
                self._open += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
