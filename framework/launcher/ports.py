"""Free ports of this machine, held until the workers start."""

from __future__ import annotations

import random
import socket

from framework.errors import LockstepError

_HOST = "127.0.0.1"
_FIRST = 10_000
_TRIES = 2_000


class HeldPorts:
    """Ports that are free and stay so while this is open: each is bound.

    They lie below the range from which the kernel takes ports of outgoing connections, so that between ``close`` and
    the worker's own bind only a program that asks for this very number can take one.

    Args:
      count: how many.
      generator: of the numbers to try.

    Raises:
      LockstepError: so many are not free.
    """

    def __init__(self, count: int, generator: random.Random | None = None):
        generator = generator or random.Random()
        self._sockets: list[socket.socket] = []
        for _ in range(_TRIES):
            if len(self._sockets) == count:
                break
            one = socket.socket()
            try:
                one.bind((_HOST, generator.randrange(_FIRST, _end())))
            except OSError:
                one.close()
                continue
            self._sockets.append(one)
        else:
            self.close()
            raise LockstepError(f"no {count} free ports from {_FIRST} to {_end()} on {_HOST}; end what uses them")
        self.addresses = [f"{_HOST}:{one.getsockname()[1]}" for one in self._sockets]

    def close(self) -> None:
        """Lets go of them."""
        for one in self._sockets:
            one.close()


def _end() -> int:
    """The first port of the kernel's range for outgoing connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            return max(int(file.read().split()[0]), _FIRST + 5_000)
    except (OSError, ValueError, IndexError):
        return 32_768
