"""The narrow boundary to NVIDIA's management library: everything about NVIDIA devices is read through ``Nvml``.

``NvmlReader`` asks the driver through ``pynvml`` (package nvidia-ml-py, optional, imported when opened);
``RecordedNvml`` replays a JSON file of the same shape. Both hand out plain values, and None wherever the driver gave no
answer. Never run on a GPU here; tested against recordings and fakes.

A further reading (utilisation, temperature, power) is one more method of ``Nvml`` that returns a frozen dataclass: the
open session is kept between calls, so it can be asked again and again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

# Numbers of nvml.h, written here because older nvidia-ml-py releases lack some of the names.
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}  # NVML_NVLINK_VERSION_* -> generation
_REMOTE_KINDS = {0: "gpu", 1: "other", 2: "switch"}  # NVML_NVLINK_DEVICE_TYPE_*
LEVELS = {
    0: "internal",
    10: "single_switch",
    20: "multiple_switches",
    30: "host_bridge",
    40: "same_numa",
    50: "system",
}  # NVML_TOPOLOGY_*: what a message between two GPUs has to cross, nearest first
_MAX_LINKS = 36

_CURES = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver (libnvidia-ml.so.1 not found); install one from "
    "https://www.nvidia.com/drivers, or start the container with --gpus=all",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed but not loaded; run: sudo modprobe nvidia",
    "NVMLError_LibRmVersionMismatch": "NVIDIA driver library and kernel module have different versions; reboot",
    "NVMLError_NoPermission": "no permission to use the NVIDIA driver; check the rights of /dev/nvidia*",
}


class NvmlUnavailable(RuntimeError):
    """NVIDIA devices cannot be read; the message says why and what to do, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NvLinkEnd:
    """One NVLink as seen from one GPU; None: not measured.

    ``remote_kind`` is "gpu", "switch" or "other"; ``remote_bus_id`` is the far end's PCI bus id.
    """

    active: bool
    generation: int | None = None
    remote_kind: str | None = None
    remote_bus_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NvGpu:
    """One GPU in the driver's order (by PCI bus); memory in bytes; None: not measured.

    ``links`` is empty for a card without NVLink. ``problem`` is the driver's word where it refuses the whole GPU.
    """

    index: int
    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    links: tuple[NvLinkEnd, ...] | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NvMachine:
    """What does not change while the machine runs. ``levels[a, b]``, a < b, is one of ``LEVELS`` or None."""

    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[NvGpu, ...] = ()
    levels: Mapping[tuple[int, int], str | None] = dataclasses.field(default_factory=dict)


class Nvml(Protocol):
    """A session with the driver: ``with nvml: nvml.machine()``.

    Entering raises NvmlUnavailable when there is nothing to talk to; leaving always closes the session.
    """

    def __enter__(self) -> Nvml: ...

    def __exit__(self, *exc: object) -> None: ...

    def machine(self) -> NvMachine:
        """Reads driver, GPUs, NVLinks and topology; raises NvmlUnavailable when GPUs cannot even be counted."""
        ...


class NvmlReader:
    """The driver of this machine, through ``pynvml``.

    Args:
      module: stands in for the ``pynvml`` module in tests.
    """

    def __init__(self, module: ModuleType | Any = None):
        self._module = module

    def __enter__(self) -> Nvml:
        if self._module is None:
            try:
                self._module = importlib.import_module("pynvml")
            except ImportError:
                raise NvmlUnavailable('pynvml is not installed; run: pip install "lockstep-tf[gpu]"') from None
        try:
            self._module.nvmlInit()
        except self._module.NVMLError as error:
            cure = _CURES.get(type(error).__name__, f"the NVIDIA driver answers: {error}; try nvidia-smi")
            raise NvmlUnavailable(cure) from None
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(self._module.NVMLError):  # nothing is lost: all values handed out are copies
            self._module.nvmlShutdown()

    def machine(self) -> NvMachine:
        """See ``Nvml``."""
        nvml = self._module
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NvmlUnavailable(f"the NVIDIA driver cannot count its GPUs: {error}; try nvidia-smi") from None
        handles: dict[int, Any] = {}
        gpus = []
        for index in range(count):
            try:
                handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(self._gpu(index, handles[index]))
            except nvml.NVMLError as error:  # a GPU fallen off the bus must not hide the others
                gpus.append(NvGpu(index=index, problem=str(error)))
        levels = {
            (a, b): LEVELS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]))
            for a in handles
            for b in handles
            if a < b
        }
        return NvMachine(
            driver_version=self._ask("nvmlSystemGetDriverVersion"),
            cuda_version=_cuda_version(self._ask("nvmlSystemGetCudaDriverVersion")),
            gpus=tuple(gpus),
            levels=levels,
        )

    def _ask(self, function: str, *args: Any) -> Any:
        """The driver's answer, or None where driver, card or package cannot give it."""
        ask: Callable[..., Any] | None = getattr(self._module, function, None)
        try:
            return None if ask is None else ask(*args)
        except self._module.NVMLError:
            return None

    def _gpu(self, index: int, handle: Any) -> NvGpu:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        return NvGpu(
            index=index,
            name=self._ask("nvmlDeviceGetName", handle),
            memory_bytes=None if memory is None else int(memory.total),
            compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
            uuid=self._ask("nvmlDeviceGetUUID", handle),
            pci_bus_id=None if pci is None else pci.busId,
            links=self._links(handle),
        )

    def _links(self, handle: Any) -> tuple[NvLinkEnd, ...] | None:
        nvml = self._module
        ends = []
        for link in range(_MAX_LINKS):
            try:
                active = bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                continue  # no such link on this card; a card may number its links with gaps
            except nvml.NVMLError:
                return None
            if not active:
                ends.append(NvLinkEnd(active=False))
                continue
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            ends.append(
                NvLinkEnd(
                    active=True,
                    generation=_GENERATIONS.get(self._ask("nvmlDeviceGetNvLinkVersion", handle, link)),
                    remote_kind=_REMOTE_KINDS.get(self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)),
                    remote_bus_id=None if remote is None else remote.busId,
                )
            )
        return tuple(ends)


class RecordedNvml:
    """Replays a recording: the JSON object that ``NvMachine`` describes, with ``levels`` as a square of level names.

    A file ``{"unavailable": "why"}`` replays a machine without driver. A file that is missing or has another shape
    raises OSError, ValueError, KeyError or TypeError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))

    def __enter__(self) -> Nvml:
        if "unavailable" in self._record:
            raise NvmlUnavailable(self._record["unavailable"])
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def machine(self) -> NvMachine:
        """See ``Nvml``."""
        record = self._record
        rows = record["levels"]
        unknown = {level for row in rows for level in row} - {*LEVELS.values(), "self", None}
        if unknown:
            raise ValueError(f"levels {sorted(unknown)} but they must be of {', '.join(LEVELS.values())}")
        return NvMachine(
            driver_version=record["driver_version"],
            cuda_version=record["cuda_version"],
            gpus=tuple(_recorded_gpu(gpu) for gpu in record["gpus"]),
            levels={(a, b): rows[a][b] for a in range(len(rows)) for b in range(a + 1, len(rows))},
        )


def _recorded_gpu(record: dict[str, Any]) -> NvGpu:
    links, capability = record.get("links"), record.get("compute_capability")
    plain = {key: value for key, value in record.items() if key not in ("links", "compute_capability")}
    return NvGpu(
        **plain,
        links=None if links is None else tuple(NvLinkEnd(**link) for link in links),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def _cuda_version(number: int | None) -> str | None:
    """12040, as the driver writes CUDA 12.4 -> "12.4"."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
