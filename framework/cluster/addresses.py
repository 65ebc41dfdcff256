"""The value that says who takes part, the addresses in it, and lists of hosts in the form ``gpu[001-003,007]``."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable

from framework.errors import ConfigError

MOST = 16_384  # workers of one run; a typing error such as [1-10000000000] must not fill the memory
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_LONGEST = 200  # characters of a value that a message repeats


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes of one run, in the order of their index; worker 0 is the chief."""

    workers: tuple[str, ...] = ()  # host:port each; empty: this process alone, no server
    index: int = 0
    source: str = "none"

    @property
    def num_workers(self) -> int:
        """Number of worker processes, at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files. No decision about the training may depend on it."""
        return self.index == 0

    @property
    def local_index(self) -> int:
        """Number of this worker among those with the same host."""
        hosts = [address.rpartition(":")[0] for address in self.workers[: self.index + 1]]
        return hosts[:-1].count(hosts[-1]) if hosts else 0

    def describe(self) -> str:
        """One line for people: who takes part and which of them this process is."""
        if not self.workers:
            return "cluster: this process alone"
        return f"cluster: worker {self.index} of {self.num_workers} ({', '.join(self.workers)}), from {self.source}"

    def name(self, index: int) -> str:
        """``worker 1 (host:2222)``."""
        return f"worker {index} ({self.workers[index]})"


def short(value: object) -> str:
    """``repr`` of a value for a message, the middle of a long one left out."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def whole_number(text: str) -> int | None:
    """The number that ASCII digits stand for, below 10**10; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


def expand(text: str, refuse: Callable[[str], ConfigError]) -> list[str]:
    """The names in a comma separated list in which digits in brackets stand for several.

    ``gpu[001-003,007],cpu5`` is gpu001, gpu002, gpu003, gpu007, cpu5; several brackets in a name are all combinations,
    the last one running fastest. Brackets with a colon inside are an IPv6 address and stay.

    Args:
      text: the list.
      refuse: makes the error from what is wrong.

    Raises:
      ConfigError: made by ``refuse``: brackets that do not close, ranges that are no numbers or fall, an empty name, or
        more than ``MOST`` names.
    """
    names: list[str] = []
    for part in _split(text, refuse):
        pieces: list[list[str]] = []
        count = 1
        # What re.split gives: text, inside of brackets, text, inside of brackets, ..., text.
        for place, piece in enumerate(_BRACKETS.split(part)):
            if place % 2 == 0:
                pieces.append([piece])
            elif ":" in piece:
                pieces.append([f"[{piece}]"])
            else:
                pieces.append(_numbers(piece, refuse))
            count *= len(pieces[-1])
            if len(names) + count > MOST:
                raise refuse(f"more than {MOST} names follow from it")
        names += ["".join(chosen) for chosen in itertools.product(*pieces)]
    return names


def _split(text: str, refuse: Callable[[str], ConfigError]) -> Iterable[str]:
    """Cuts at the commas outside of brackets."""
    part, depth = "", 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise refuse("its brackets do not fit")
        if letter == "," and not depth:
            yield _whole(part, refuse)
            part = ""
        else:
            part += letter
    if depth:
        raise refuse("a bracket is not closed")
    yield _whole(part, refuse)


def _whole(part: str, refuse: Callable[[str], ConfigError]) -> str:
    if not part.strip():
        raise refuse("it has an empty name, ''")
    return part.strip()


def _numbers(text: str, refuse: Callable[[str], ConfigError]) -> list[str]:
    """``001-003,007`` -> 001, 002, 003, 007, as wide as the first number of each range."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = whole_number(first), whole_number(last if dash else first)
        if low is None or high is None or high < low:
            raise refuse(f"[{short(text)[1:-1]}] is no list of numbers and rising ranges")
        if len(found) + high - low >= MOST:
            raise refuse(f"more than {MOST} names follow from it")
        found += [f"{number:0{len(first)}d}" for number in range(low, high + 1)]
    return found


def check_host(name: str, refuse: Callable[[str], ConfigError]) -> None:
    """Raises the ConfigError that ``refuse`` makes unless ``name`` can be a host's."""
    if not _HOST.fullmatch(name):
        raise refuse(f"{short(name)} is no name of a host")


def check_addresses(addresses: tuple[str, ...], key: str, sample: str) -> None:
    """Raises ConfigError, with ``key`` and ``sample``, unless all addresses are distinct ``host:port``."""
    if not addresses:
        raise ConfigError(f"{key} names no worker; for example {sample}")
    seen: set[str] = set()
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or any(c.isspace() for c in address) or not (port.isascii() and port.isdigit()):
            raise ConfigError(f"{key} has the address {short(address)} but it must be host:port; for example {sample}")
        if len(port) > 5 or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{key} has the port {port[:20]} in {short(address)}; ports run from 1 to 65535; for example {sample}"
            )
        if address in seen:
            raise ConfigError(
                f"{key} has the address {short(address)} twice; each worker needs its own; for example {sample}"
            )
        seen.add(address)
    if len(addresses) > MOST:
        raise ConfigError(f"{key} names {len(addresses)} workers; at most {MOST} can take part; for example {sample}")
