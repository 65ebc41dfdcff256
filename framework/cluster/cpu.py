"""Processor and main memory of this machine, and how much of them this process may use, from the kernel's files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cpu:
    """Processor and main memory; bytes and cores; None: not measured, ``math.inf``: no limit is set.

    ``affinity_cores`` and ``quota_cores`` are what the scheduler and the cgroup let this process use; ``numa_cpus`` has
    one list of core numbers a NUMA node, as the kernel writes it (``0-55,112-167``).
    """

    model: str | None
    physical_cores: int | None
    logical_cores: int | None
    affinity_cores: int | None
    quota_cores: float | None
    memory_bytes: int | None
    available_bytes: int | None
    limit_bytes: float | None
    numa_cpus: tuple[str, ...] | None

    @property
    def usable_cores(self) -> float | None:
        """Cores' worth of time that this process can get; can be a fraction; None when affinity is not measured."""
        if self.affinity_cores is None:
            return None
        return float(min(self.affinity_cores, math.inf if self.quota_cores is None else self.quota_cores))


def read_cpu(proc: Path, sys: Path) -> Cpu:
    """What the kernel tells under ``proc`` and ``sys``."""
    info = _read(proc / "cpuinfo")
    blocks = [dict(_pairs(block)) for block in info.split("\n\n")] if info else []
    blocks = [block for block in blocks if "processor" in block]
    cores: set[tuple[str | None, str | None]] = {(block.get("physical id"), block.get("core id")) for block in blocks}
    if not cores or (None, None) in cores:  # Arm kernels do not write them there
        siblings = (sys / "devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
        cores = {("", text) for path in siblings if (text := _read(path))}
    memory = dict(_pairs(_read(proc / "meminfo")))
    allowed = dict(_pairs(_read(proc / "self/status"))).get("Cpus_allowed_list")
    nodes = sorted((sys / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    lists = [_read(node / "cpulist") for node in nodes]
    return Cpu(
        model=next((block["model name"] for block in blocks if "model name" in block), None),
        physical_cores=len(cores) or None,
        logical_cores=len(blocks) or None,
        affinity_cores=None if allowed is None else _count(allowed),
        quota_cores=_tightest("cpu", _quota, proc, sys),
        memory_bytes=_kib(memory.get("MemTotal")),
        available_bytes=_kib(memory.get("MemAvailable")),
        limit_bytes=_tightest("memory", _memory_limit, proc, sys),
        numa_cpus=tuple(text for text in lists if text) or None,
    )


def _tightest(controller: str, limit: Callable[[Path], float | None], proc: Path, sys: Path) -> float | None:
    """The smallest limit of the cgroups this process is in, ``math.inf`` for none, None for not measured."""
    root = sys / "fs/cgroup"
    found: list[float | None] = []
    for line in (_read(proc / "self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mounts = [root / names, root / controller] if names else [root, root / "unified"]
        for mount in mounts:
            if not names and controller in (_read(mount / "cgroup.controllers") or "").split():
                found.append(math.inf)  # the root group has no limit file of its own
            # A limit of any group above binds too. Inside a container the path can be the host's: then only the
            # mount itself, which is the container's group, can be read.
            folder = mount / path.lstrip("/")
            while folder != mount:
                found.append(limit(folder))
                folder = folder.parent
            found.append(limit(mount))
    return min((value for value in found if value is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Cores' worth of time a cgroup may use: version 2, else version 1."""
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) == 2:
        return math.inf if words[0] == "max" else int(words[0]) / int(words[1])
    quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    if quota is None or not period:
        return None
    return math.inf if quota < 0 else quota / period


def _memory_limit(folder: Path) -> float | None:
    """Bytes a cgroup may use: version 2, else version 1, which writes a number near 2**63 for no limit."""
    if _read(folder / "memory.max") == "max":
        return math.inf
    limit = number(folder / "memory.max")
    if limit is None:
        limit = number(folder / "memory.limit_in_bytes")
    return math.inf if limit is not None and limit >= 2**62 else limit


def _pairs(text: str | None) -> Iterable[tuple[str, str]]:
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The whole number in a file; None if there is none."""
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _kib(text: str | None) -> int | None:
    """``"1024 kB"`` in bytes."""
    return None if text is None else int(text.split()[0]) * 1024


def _count(cores: str) -> int:
    """``"0-3,8"`` -> 5."""
    ends = [part.partition("-") for part in cores.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
