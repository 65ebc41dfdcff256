"""Waits until all workers have come, before TensorFlow's servers start, and names those that have not.

Each worker holds its own port meanwhile, so that a port that another program has is named at once. Worker 0 listens;
the others connect to it and stay until it says ``go``. What crosses are short lines of text:

    worker I -> worker 0    lockstep 2 I N FACTS    its index, the number of workers it knows of, what it says of itself
                            lockstep taken I N      its port is taken, so it will not come
    worker 0 -> worker I    wait 2,3 | gone 2,3 | taken I | no REASON | differ TABLE | go

FACTS and TABLE are JSON: see ``framework.cluster.preflight``.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from framework.cluster.addresses import Cluster, short
from framework.cluster.preflight import differences
from framework.errors import ConfigError, PeerLost

_HELLO, _TAKEN = "lockstep 2", "lockstep taken"
_LONGEST = 200_000  # bytes of a line: 16,384 indices fit
_TICK = 0.2  # seconds between two looks
_TELL = 5.0  # seconds in which a worker whose port is taken tries to tell worker 0
_SILENT = 5.0  # seconds after which what answers at the address of worker 0 and says nothing is not worker 0
_STRANGER = 30.0  # seconds that such a program may be there: an earlier run may be about to end
_SLACK = 2.0  # seconds that the others wait longer than worker 0, which knows best who is missing
_WAIT_LINE = (10.0, 30.0)  # seconds until the first line for people, and between two of them


class PortTaken(ConfigError):
    """The address of this worker is in use by another program; a launcher takes other ports then."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        super().__init__(
            f"{taken_mark(address)}: another program listens on port {port} of this machine; end it, or give another "
            f"port to all workers, for example {host}:{int(port) - 1 if int(port) > 1024 else int(port) + 1024}"
        )


def taken_mark(address: str) -> str:
    """The words by which a launcher knows a worker whose port was taken."""
    return f"the address {address} is taken"


def roll_call(
    cluster: Cluster,
    limit: float,
    facts: Mapping[str, str] | None = None,
    *,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when every worker has called this.

    Args:
      cluster: who takes part, and which of them this process is.
      limit: seconds to wait; 0: for ever, with a line on stderr every half minute.
      facts: what this worker says of itself, which has to be the same on all; see ``framework.cluster.preflight``.
      say: takes the lines for people; stderr if None.
      clock: seconds, rising.

    Raises:
      PortTaken: the port of this worker is in use.
      PeerLost: some did not come within the limit, or cannot because their port is taken, or for half a minute another
        program answers at the address of worker 0; the message names them.
      ConfigError: another worker was told of another number of workers, or what workers say of themselves differs.
    """
    try:
        with _held(cluster.workers[cluster.index]) as listener:
            if cluster.num_workers == 1:
                return
            wait = _Wait(cluster, limit, say or _say, clock)
            if cluster.index == 0:
                _call(cluster, listener, wait, facts or {})
            else:
                _answer(cluster, wait, facts or {})
    except PortTaken:
        if cluster.index:
            _tell(cluster)
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _held(address: str) -> Iterator[socket.socket]:
    """Listens on the port of ``address``, on all interfaces as TensorFlow's server will."""
    port = int(address.rpartition(":")[2])
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except PermissionError as error:
        raise ConfigError(
            f"the port {port} of {address} may not be used ({error.strerror}); for example a port from 1024 on"
        ) from error
    except OSError as error:
        raise PortTaken(address) from error
    with listener:
        yield listener


def _tell(cluster: Cluster) -> None:
    """Tells worker 0 that this one will not come, so that nobody waits for it."""
    end = time.monotonic() + _TELL
    while time.monotonic() < end:
        with contextlib.suppress(OSError), _connection(cluster) as connection:
            connection.sendall(f"{_TAKEN} {cluster.index} {cluster.num_workers}\n".encode())
            return
        time.sleep(_TICK)


def _connection(cluster: Cluster) -> socket.socket:
    """To worker 0."""
    host, _, port = cluster.workers[0].rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=1.0)


def _cannot_come(cluster: Cluster, index: int) -> PeerLost:
    return PeerLost(
        f"{cluster.name(index)} cannot start: its address is taken by another program on its machine; end that, or "
        "give all workers another port for it"
    )


class _Wait:
    """The limit, and lines for people while time goes by."""

    def __init__(self, cluster: Cluster, limit: float, say: Callable[[str], None], clock: Callable[[], float]):
        self._cluster, self._limit, self._say, self._clock = cluster, limit, say, clock
        self._start = clock()
        self._until = self._start + limit
        self._next = _WAIT_LINE[0]

    def look(self, missing: list[int], note: str = "") -> bool:
        """Says who is missing when that is due; True: the limit is reached."""
        now = self._clock()
        waited = now - self._start
        if waited >= self._next:
            self._next = waited + _WAIT_LINE[1]
            self._say(f"waiting for {self._names(missing)}{note}; {waited:.0f} s so far")
        return self._limit > 0 and now >= self._until

    def heard(self) -> None:
        """Worker 0 is there and has its own limit, which cannot have begun later than now: it is the first to end."""
        self._until = max(self._until, self._clock() + self._limit + _SLACK)

    def lost(self, missing: list[int], note: str = "") -> PeerLost:
        """The error that names them."""
        return PeerLost(
            f"{self._names(missing)} did not come within {self._limit:g} s (collective_timeout){note}; start all "
            "workers with the same addresses, and look at the logs of those named"
        )

    def _names(self, missing: list[int]) -> str:
        names = [self._cluster.name(i) for i in missing[:8]]
        return ", ".join(names) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")


class _Peer:
    """One connection: lines come in and go out, and whatever fails closes it."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(5.0)
        self.connection = connection
        self.facts: Mapping[str, str] = {}
        self._data = b""

    def lines(self) -> list[str] | None:
        """Whole lines that have come, after ``select`` said that there is something; None: it is over."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return None
        self._data += data
        *whole, self._data = self._data.split(b"\n")
        if not data or len(self._data) > _LONGEST:
            return None
        return [line.decode("utf-8", "replace") for line in whole]

    def send(self, line: str) -> bool:
        """False: it is over."""
        try:
            self.connection.sendall(line.encode() + b"\n")
        except OSError:
            return False
        return True


def _call(cluster: Cluster, listener: socket.socket, wait: _Wait, facts: Mapping[str, str]) -> None:
    """What worker 0 does."""
    count = cluster.num_workers
    unknown: list[_Peer] = []
    present: dict[int, _Peer] = {}
    told = -1
    away: int | None = None  # a worker that cannot come
    linger = math.inf  # until then the others are told of it
    with contextlib.ExitStack() as stack:
        while len(present) < count - 1:
            missing = [i for i in range(1, count) if i not in present]
            if len(present) != told:
                told = len(present)
                line = f"wait {_joined(missing)}" if away is None else f"taken {away}"
                _drop(present, [i for i, peer in present.items() if not peer.send(line)])
            if away is not None and (missing == [away] or time.monotonic() >= linger):
                raise _cannot_come(cluster, away)
            if wait.look(missing):
                for peer in present.values():
                    peer.send(f"gone {_joined(missing)}")
                raise wait.lost(missing)
            ready = _ready([listener, *(p.connection for p in [*unknown, *present.values()])])
            if listener in ready:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    unknown.append(_Peer(stack.enter_context(connection)))
            for index in [i for i, p in present.items() if p.connection in ready and p.lines() is None]:
                _drop(present, [index])
            for peer in [p for p in unknown if p.connection in ready]:
                lines = peer.lines()
                if lines == []:
                    continue
                unknown.remove(peer)
                said = _hello(lines[0] if lines else "", count)
                if lines and lines[0].startswith(_TAKEN):
                    its = _hello(lines[0].replace(_TAKEN, _HELLO), count)
                    if isinstance(its, int):
                        away, linger, told = its, time.monotonic() + _TELL, -1
                if isinstance(said, int) and lines:
                    peer.facts = _facts(lines[0])
                    present[said] = peer  # a worker that calls again has lost its first connection
                    told = -1
                    continue
                if said:
                    peer.send(f"no {said}")
                peer.connection.close()
        differ = differences({0: facts, **{i: peer.facts for i, peer in present.items()}}, cluster)
        for peer in present.values():
            peer.send(f"differ {json.dumps(differ)}" if differ else "go")
        if differ:
            raise ConfigError(differ)


def _drop(present: dict[int, _Peer], indices: list[int]) -> None:
    for index in indices:
        present.pop(index).connection.close()


def _hello(line: str, count: int) -> int | str:
    """The index a worker says it has, or why it cannot take part; empty: it is no worker."""
    words = line.removeprefix(_HELLO).split(maxsplit=2)[:2]
    if not line.startswith(_HELLO) or len(words) != 2 or not all(w.isascii() and w.isdigit() for w in words):
        return ""
    index, its = words
    if len(its) > 10 or int(its) != count:
        return f"worker 0 knows of {count} workers but worker {index[:10]} of {its[:10]}"
    return int(index) if len(index) <= 10 and 0 < int(index) < count else f"there is no worker {index[:10]}"


def _facts(line: str) -> dict[str, str]:
    """What a worker says of itself in its line; what cannot be read is nothing, and so differs from all others."""
    try:
        value = json.loads(line.removeprefix(_HELLO).split(maxsplit=2)[2])
    except (IndexError, ValueError):
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _answer(cluster: Cluster, wait: _Wait, facts: Mapping[str, str]) -> None:
    """What the other workers do."""
    strange_since: float | None = None
    note: str | None = ""
    while True:
        try:
            with _connection(cluster) as connection:
                note = _listen(cluster, connection, wait, note or "", facts)
        except OSError as error:  # not there yet, or its name is not known yet
            note, strange_since = f" ({error.strerror or error})", None
        if note is None:
            return
        now = time.monotonic()
        if note.startswith(_SAYS):
            strange_since = now if strange_since is None else strange_since
            if now - strange_since >= _STRANGER:
                raise PeerLost(f"{cluster.name(0)} is not there{note}; start it, or end that other program")
        else:
            strange_since = None
        if wait.look([0], note):
            raise wait.lost([0], note)
        time.sleep(_TICK)


_SAYS = " (what answers at its address says "


def _listen(
    cluster: Cluster, connection: socket.socket, wait: _Wait, note: str, facts: Mapping[str, str]
) -> str | None:
    """Goes by what worker 0 says; None: go. Else the connection is over: a note on what is there instead.

    Args:
      note: of the connection before, for the message while nothing has been heard on this one.
    """
    peer = _Peer(connection)
    lines: Any = [] if peer.send(f"{_HELLO} {cluster.index} {cluster.num_workers} {json.dumps(facts)}") else None
    silent_at: float | None = time.monotonic() + _SILENT
    missing = [0]
    while lines is not None:
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "go":
                return None
            if word == "no":
                raise ConfigError(f"{rest}; give all workers the same, for example --workers=a:2222,b:2222")
            if word == "differ":
                raise ConfigError(_table(rest))
            indices = _indices(rest, cluster)
            if word not in ("wait", "gone", "taken") or not indices:
                return f"{_SAYS}{short(line[:40])})"
            if word == "taken":
                raise _cannot_come(cluster, indices[0])
            missing, silent_at = indices, None
            wait.heard()
            if word == "gone":
                raise wait.lost(missing)
        if silent_at is not None and time.monotonic() >= silent_at:
            return f"{_SAYS}nothing)"
        known = note if silent_at is not None else ""
        if wait.look(missing, known):
            raise wait.lost(missing, known)
        lines = peer.lines() if _ready([connection]) else []
    return "" if silent_at is None else f"{_SAYS}nothing)"


def _table(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _ready(sockets: list[socket.socket]) -> list[socket.socket]:
    """Those that have something to read, after a tick at most; any number, unlike ``select.select``."""
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_TICK) if isinstance(key.fileobj, socket.socket)]


def _joined(indices: list[int]) -> str:
    return ",".join(map(str, indices))


def _indices(text: str, cluster: Cluster) -> list[int]:
    words = [word for word in text.split(",") if word.isascii() and word.isdigit() and len(word) < 10]
    return [int(word) for word in words if int(word) < cluster.num_workers]
