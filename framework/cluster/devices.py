"""What this machine has: GPUs and the links between them, CPU, memory, TPU, read without starting TensorFlow.

Importing this module and calling ``discover`` leave TensorFlow's devices untouched, so that logical devices and memory
growth can still be set. None stands for "not measured" everywhere, and is printed so; it never becomes 0.
"""

from __future__ import annotations

import dataclasses
import math
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.cluster.cpu import Cpu, number, read_cpu
from framework.cluster.nvml import NvGpu, NvLinkEnd, NvMachine, Nvml, NvmlReader, NvmlUnavailable

NOT_MEASURED = "not measured"
WIDTH = 100  # columns of the table

# Level of the driver -> words, and the short code that nvidia-smi uses for it.
_LEVELS = {
    "internal": ("same board", "PSB"),
    "single_switch": ("PCIe switch", "PIX"),
    "multiple_switches": ("several PCIe switches", "PXB"),
    "host_bridge": ("PCIe host bridge", "PHB"),
    "same_numa": ("PCIe host bridges of one NUMA node", "NODE"),
    "system": ("across NUMA", "SYS"),
}
# Set on machines with a TPU: by the user, by GKE, by Colab, by a TPU VM.
_TPU_VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR", "TPU_WORKER_ID")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU in the driver's order; memory in bytes; None: not measured.

    ``cuda_index`` is its number in this process (TensorFlow's ``GPU:n``), None for a GPU that is hidden.
    """

    index: int
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None
    uuid: str | None
    pci_bus_id: str | None
    numa_node: int | None
    visible: bool | None
    cuda_index: int | None
    problem: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The way between GPUs ``a`` < ``b``: active NVLinks (None: not measured, 0: none) and the PCIe level."""

    a: int
    b: int
    nvlinks: int | None
    generation: int | None
    via_switch: bool
    level: str | None

    @property
    def words(self) -> str:
        """For people: ``NVLink4 x18 via NVSwitch``, ``PCIe switch``, ``across NUMA``."""
        if self.nvlinks:
            generation = "" if self.generation is None else self.generation
            return f"NVLink{generation} x{self.nvlinks}" + " via NVSwitch" * self.via_switch
        pcie = NOT_MEASURED if self.level is None else _LEVELS[self.level][0]
        return pcie if self.nvlinks == 0 else f"{pcie}, NVLink {NOT_MEASURED}"

    @property
    def code(self) -> str:
        """For a matrix: ``NV18`` or the code of nvidia-smi for the PCIe level; ``?``: not measured."""
        if self.nvlinks:
            return f"NV{self.nvlinks}"
        pcie = "?" if self.level is None else _LEVELS[self.level][1]
        return pcie if self.nvlinks == 0 or pcie == "?" else pcie + "?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A TPU that the environment names. It was not contacted: that would start TensorFlow."""

    address: str | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Everything that ``discover`` found. ``gpus`` is None when the driver could not be asked (``nvidia_problem``)."""

    gpus: tuple[Gpu, ...] | None
    links: tuple[Link, ...]
    cpu: Cpu
    tpu: Tpu | None  # None: not looked for
    driver_version: str | None = None
    cuda_version: str | None = None
    nvidia_problem: str | None = None
    notes: tuple[str, ...] = ()

    def link(self, a: int, b: int) -> Link:
        """The link between two GPUs, in either order; KeyError for a pair that is not there."""
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link
        raise KeyError((a, b))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json`` can write; null: not measured (or not looked for, for the TPU)."""
        cpu = dataclasses.asdict(self.cpu) | {"usable_cores": self.cpu.usable_cores}
        links = [dataclasses.asdict(link) | {"words": link.words} for link in self.links]
        return dataclasses.asdict(self) | {
            "cpu": {key: "no limit" if value == math.inf else value for key, value in cpu.items()},
            "links": links,
        }

    def table(self) -> str:
        """Readable text of at most ``WIDTH`` columns, with a GPU x GPU matrix of links for two GPUs or more."""
        cpu = self.cpu
        numa = NOT_MEASURED
        if cpu.numa_cpus is not None:
            numa = f"{len(cpu.numa_cpus)} node{'s' * (len(cpu.numa_cpus) != 1)}: " + " | ".join(cpu.numa_cpus)
        rows = [
            ("CPU", f"{_say(cpu.model)}, {_say(cpu.physical_cores)} cores, {_say(cpu.logical_cores)} logical"),
            (
                "usable",
                f"{_say(cpu.usable_cores)} cores (affinity {_say(cpu.affinity_cores)}, "
                f"cgroup quota {_say(cpu.quota_cores)})",
            ),
            (
                "memory",
                f"{_gib(cpu.memory_bytes)} total, {_gib(cpu.available_bytes)} available, "
                f"cgroup limit {_gib(cpu.limit_bytes)}",
            ),
            ("NUMA", numa),
        ]
        lines = [line for label, text in rows for line in _row(label, text)]
        if self.gpus is None:
            lines += _row("GPU", f"{NOT_MEASURED}: {self.nvidia_problem}")
        else:
            lines += _row("NVIDIA", f"driver {_say(self.driver_version)}, CUDA {_say(self.cuda_version)}")
            lines += _row(
                "GPU", f"{len(self.gpus)} known to the driver, {_say(_visible_count(self.gpus))} visible here"
            )
            lines += _gpu_lines(self.gpus)
        if self.links:
            lines += _matrix(self.gpus or (), self.links)
        tpu = "not looked for: no TPU_NAME in the environment"
        if self.tpu is not None:
            tpu = f"{self.tpu.address}, not contacted" if self.tpu.problem is None else f"none: {self.tpu.problem}"
        lines += _row("TPU", tpu)
        return "\n".join(lines + [line for note in self.notes for line in _row("note", note)])


def tpu_in_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says that there is a TPU; nothing is asked or imported."""
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in _TPU_VARIABLES)


def discover(
    nvml: Nvml | None = None,
    *,
    proc: str = "/proc",
    sys: str = "/sys",
    dev: str = "/dev",
    environ: Mapping[str, str] | None = None,
    look_for_tpu: bool | None = None,
) -> Hardware:
    """Returns what the machine has; runs no TensorFlow op and initialises no TensorFlow device.

    Args:
      nvml: where NVIDIA devices are read, the driver of this machine if None.
      proc, sys, dev: roots of the kernel's file systems.
      environ: the environment, ``os.environ`` if None.
      look_for_tpu: None looks only when the environment names a TPU. Looking imports TensorFlow.
    """
    environ = os.environ if environ is None else environ
    if look_for_tpu is None:
        look_for_tpu = tpu_in_environment(environ)
    tpu = _tpu(environ, Path(dev)) if look_for_tpu else None
    cpu = read_cpu(Path(proc), Path(sys))
    try:
        with NvmlReader() if nvml is None else nvml as session:
            machine = session.machine()
    except NvmlUnavailable as error:
        return Hardware(gpus=None, links=(), cpu=cpu, tpu=tpu, nvidia_problem=str(error))
    gpus, notes = _gpus(machine, Path(sys), environ)
    return Hardware(
        gpus=gpus,
        links=tuple(_link(machine.gpus[a], machine.gpus[b], level) for (a, b), level in sorted(machine.levels.items())),
        cpu=cpu,
        tpu=tpu,
        driver_version=machine.driver_version,
        cuda_version=machine.cuda_version,
        notes=notes,
    )


# --- GPUs --------------------------------------------------------------------------------------------------------


def _gpus(machine: NvMachine, sys: Path, environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    order, notes = _cuda_order(machine.gpus, chosen)
    names = {gpu.name for gpu in machine.gpus}
    by_number = chosen is None or any(part.strip().isdigit() for part in chosen.split(","))
    if len(names) > 1 and by_number and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "GPUs of different kinds: CUDA numbers the fastest first, this table goes by PCI bus; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same"
        )
    gpus = []
    for gpu in machine.gpus:
        bus_id = _bus_id(gpu.pci_bus_id)
        node = number(sys / "bus/pci/devices" / bus_id / "numa_node") if bus_id else None
        capability = gpu.compute_capability
        gpus.append(
            Gpu(
                index=gpu.index,
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
                uuid=gpu.uuid,
                pci_bus_id=bus_id,
                numa_node=None if node is None or node < 0 else node,  # the kernel writes -1 for "unknown"
                visible=None if order is None else gpu.index in order,
                cuda_index=order.index(gpu.index) if order is not None and gpu.index in order else None,
                problem=gpu.problem,
            )
        )
    return tuple(gpus), tuple(notes)


def _cuda_order(gpus: tuple[NvGpu, ...], chosen: str | None) -> tuple[list[int] | None, list[str]]:
    """The driver's indices in the order CUDA numbers them, and notes; None: cannot be told.

    CUDA reads the list up to the first entry that names no device and hides the rest. An entry is a number or the
    beginning of a UUID.
    """
    if chosen is None:
        return [gpu.index for gpu in gpus], []
    shown = f"CUDA_VISIBLE_DEVICES={chosen!r}"
    order: list[int] = []
    for part in chosen.split(",") if chosen.strip() else []:
        entry = part.strip()
        if entry.startswith("MIG-"):
            return None, [f"{shown} names a part of a GPU (MIG); which GPU that is, is {NOT_MEASURED}"]
        if entry.isdigit():
            named = [gpu.index for gpu in gpus if gpu.index == int(entry)]
        else:
            named = [gpu.index for gpu in gpus if entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry)]
        if len(named) != 1:
            return order, [f"{shown}: {entry!r} names no GPU of this machine; CUDA hides it and all after it"]
        if named[0] not in order:
            order += named
    return order, [f"{shown} hides {len(gpus) - len(order)} of {len(gpus)} GPUs"] if len(order) < len(gpus) else []


def _link(a: NvGpu, b: NvGpu, level: str | None) -> Link:
    """Counts the NVLinks between two GPUs from the ends that each of them sees."""
    nvlinks: int | None = None
    direct: list[NvLinkEnd] = []
    switched: list[NvLinkEnd] = []
    if a.links is not None and b.links is not None:
        ends = [[end for end in gpu.links or () if end.active] for gpu in (a, b)]
        direct = [end for end in ends[0] if end.remote_bus_id and _bus_id(end.remote_bus_id) == _bus_id(b.pci_bus_id)]
        # Through switches every GPU reaches every other one with all its links, so the smaller number counts.
        switched = min(([end for end in side if end.remote_kind == "switch"] for side in ends), key=len)
        nvlinks = len(direct or switched)
        if not nvlinks and all(any(_is_unknown(end) for end in side) for side in ends):
            nvlinks = None  # both have links to nobody knows whom: perhaps to each other
    used = direct or switched
    return Link(
        a=a.index,
        b=b.index,
        nvlinks=nvlinks,
        generation=used[0].generation if used else None,
        via_switch=bool(switched) and not direct,
        level=level,
    )


def _is_unknown(end: NvLinkEnd) -> bool:
    return end.remote_kind is None or (end.remote_kind == "gpu" and end.remote_bus_id is None)


def _bus_id(text: str | None) -> str | None:
    """The driver's ``00000000:1B:00.0`` as the kernel names it, ``0000:1b:00.0``."""
    if text is None or text.count(":") != 2:
        return None
    domain, rest = text.split(":", 1)
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _visible_count(gpus: tuple[Gpu, ...]) -> int | None:
    return None if any(gpu.visible is None for gpu in gpus) else sum(bool(gpu.visible) for gpu in gpus)


# --- TPU ---------------------------------------------------------------------------------------------------------


def _tpu(environ: Mapping[str, str], dev: Path) -> Tpu:
    name = environ.get("TPU_NAME") or "local"
    if name == "local" and not [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]:
        # TensorFlow makes a resolver for a local TPU without looking whether there is one.
        return Tpu(problem=f"TPU_NAME is not set and {dev} has no accel* or vfio/* device of a TPU")
    try:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        return Tpu(address=resolver.master() or name)
    except Exception as error:  # whatever TensorFlow, the network or Google's client raise: the search goes on
        text = (str(error).strip() or "no message").splitlines()[0]
        return Tpu(problem=f"{name}: {type(error).__name__}: {text}")


# --- text --------------------------------------------------------------------------------------------------------


def _say(value: float | str | None) -> str:
    if value is None:
        return NOT_MEASURED
    return "none" if value == math.inf else f"{value:g}" if isinstance(value, float) else str(value)


def _gib(count: float | None) -> str:
    return _say(count) if count is None or count == math.inf else f"{count / 2**30:.1f} GiB"


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<8}", subsequent_indent=" " * 8, break_on_hyphens=False)


def _gpu_lines(gpus: tuple[Gpu, ...]) -> list[str]:
    form = "{:<8}{:<34}{:>13} {:>13} {:>13}  {:<15}"
    lines = []
    for gpu in gpus:
        name = f"GPU{gpu.index}"
        if gpu.problem is not None:
            lines += _row(name, f"{NOT_MEASURED}: {gpu.problem}")
            continue
        seen = "hidden" if gpu.cuda_index is None else f"as GPU:{gpu.cuda_index}"
        values = (_say(gpu.name)[:33], _gib(gpu.memory_bytes), _say(gpu.compute_capability), _say(gpu.numa_node))
        lines.append(form.format(name, *values, NOT_MEASURED if gpu.visible is None else seen).rstrip())
    head = [form.format("", "name", "memory", "compute", "NUMA", "TensorFlow").rstrip()] if gpus else []
    return head + lines


def _matrix(gpus: tuple[Gpu, ...], links: tuple[Link, ...]) -> list[str]:
    codes = {pair: link.code for link in links for pair in ((link.a, link.b), (link.b, link.a))}
    numbers = [gpu.index for gpu in gpus]
    lines = []
    for start in range(0, len(numbers), 14):  # 14 columns of 6 fit beside the label
        columns = numbers[start : start + 14]
        lines.append("links   " + "".join(f"{f'GPU{b}':<6}" for b in columns).rstrip())
        for a in numbers:
            cells = ("-" if a == b else codes.get((a, b), "?") for b in columns)
            lines.append((f"{f'GPU{a}':<8}" + "".join(f"{cell:<6}" for cell in cells)).rstrip())
    legend = dict.fromkeys(f"{link.code} = {link.words}" for link in links)
    return lines + [line for entry in legend for line in _row("", entry)]
