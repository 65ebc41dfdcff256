"""The narrow boundary to NVIDIA's management library: everything about NVIDIA devices is read through ``Nvml``.

``NvmlReader`` asks the driver through ``pynvml`` (package nvidia-ml-py, optional, imported when opened);
``RecordedNvml`` replays a JSON file of the same shape. Both hand out plain values, and None wherever the driver gave no
answer. Never run on a GPU here; tested against recordings and fakes. The open session is kept between calls, so it can
be asked again and again.
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
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}  # nvmlClocksEventReason*: what holds clocks down though there is work
_SM_CLOCK, _ON_DIE = 1, 0
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0
_SENT, _RECEIVED = 0, 1  # NVML_PCIE_UTIL_*
_NVLINK_SENT, _NVLINK_RECEIVED, _ALL_LINKS = 138, 139, 0xFFFFFFFF  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_*, in KiB
_XID_EVENTS = 0x8

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NvReading:
    """What one GPU does now; None: not measured.

    Attributes:
      index: in the driver's order.
      utilisation: share of the last moment, up to a second, in which a kernel ran, 0..1.
      memory_used_bytes, memory_bytes: by all processes, and in all; who reserves all of it uses all of it.
      temperature_c, power_w, power_limit_w: of the chip, of the board.
      sm_clock_mhz, sm_clock_max_mhz: of the processors.
      throttle: names of ``THROTTLES`` that hold clocks down.
      ecc_corrected, ecc_uncorrected: errors of memory since the driver was loaded.
      pcie_sent_bytes_per_s, pcie_received_bytes_per_s: over the last 20 ms.
      nvlink_sent_bytes, nvlink_received_bytes: of all links, since some time in the past.
      problem: the driver's word where it refuses the whole GPU.
    """

    index: int
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    problem: str | None = None


class Nvml(Protocol):
    """A session with the driver: ``with nvml: nvml.machine()``.

    Entering raises NvmlUnavailable when there is nothing to talk to; leaving always closes the session.
    """

    def __enter__(self) -> Nvml: ...

    def __exit__(self, *exc: object) -> None: ...

    def machine(self) -> NvMachine:
        """Reads driver, GPUs, NVLinks and topology; raises NvmlUnavailable when GPUs cannot even be counted."""
        ...

    def readings(self) -> tuple[NvReading, ...]:
        """Reads what each GPU does now; raises NvmlUnavailable when GPUs cannot even be counted."""
        ...

    def xids(self) -> list[tuple[int, int]]:
        """(GPU, XID) of the critical errors since the session was opened or since the last call."""
        ...


class NvmlReader:
    """The driver of this machine, through ``pynvml``.

    Args:
      module: stands in for the ``pynvml`` module in tests.
    """

    def __init__(self, module: ModuleType | Any = None):
        self._module = module
        self._events: Any = None

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

    def _count(self) -> int:
        try:
            return int(self._module.nvmlDeviceGetCount())
        except self._module.NVMLError as error:
            raise NvmlUnavailable(f"the NVIDIA driver cannot count its GPUs: {error}; try nvidia-smi") from None

    def machine(self) -> NvMachine:
        """See ``Nvml``."""
        nvml = self._module
        count = self._count()
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

    def readings(self) -> tuple[NvReading, ...]:
        """See ``Nvml``."""
        found = []
        for index in range(self._count()):
            try:
                found.append(self._reading(index, self._module.nvmlDeviceGetHandleByIndex(index)))
            except self._module.NVMLError as error:
                found.append(NvReading(index=index, problem=str(error)))
        return tuple(found)

    def xids(self) -> list[tuple[int, int]]:
        """See ``Nvml``; empty where the driver tells no events."""
        nvml, found = self._module, []
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
                for handle in handles:
                    self._ask("nvmlDeviceRegisterEvents", handle, _XID_EVENTS, self._events)
            uuids = [self._ask("nvmlDeviceGetUUID", handle) for handle in handles]
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventType & _XID_EVENTS:
                    uuid = self._ask("nvmlDeviceGetUUID", event.device)
                    found.append((uuids.index(uuid) if uuid in uuids else -1, int(event.eventData)))
        except (nvml.NVMLError, AttributeError):  # none is waiting, or there are no such functions
            return found

    def _reading(self, index: int, handle: Any) -> NvReading:
        rates, memory = self._ask("nvmlDeviceGetUtilizationRates", handle), self._ask("nvmlDeviceGetMemoryInfo", handle)
        # The first name is that of newer drivers.
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        sent, received = (self._field(handle, field) for field in (_NVLINK_SENT, _NVLINK_RECEIVED))
        return NvReading(
            index=index,
            utilisation=None if rates is None else rates.gpu / 100.0,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_bytes=None if memory is None else int(memory.total),
            temperature_c=_times(self._ask("nvmlDeviceGetTemperature", handle, _ON_DIE), 1.0),
            power_w=_times(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_w=_times(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            sm_clock_mhz=_times(self._ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK), 1.0),
            sm_clock_max_mhz=_times(self._ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK), 1.0),
            throttle=None if reasons is None else tuple(name for bit, name in THROTTLES.items() if int(reasons) & bit),
            ecc_corrected=self._ask("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _SINCE_BOOT),
            ecc_uncorrected=self._ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_BOOT),
            pcie_sent_bytes_per_s=_times(self._ask("nvmlDeviceGetPcieThroughput", handle, _SENT), 1e3),
            pcie_received_bytes_per_s=_times(self._ask("nvmlDeviceGetPcieThroughput", handle, _RECEIVED), 1e3),
            nvlink_sent_bytes=sent,
            nvlink_received_bytes=received,
        )

    def _field(self, handle: Any, field: int) -> int | None:
        """A counter of all NVLinks in bytes."""
        values = self._ask("nvmlDeviceGetFieldValues", handle, [(field, _ALL_LINKS)])
        return None if values is None or values[0].nvmlReturn else int(values[0].value.ullVal) * 1024

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
        self._looks = 0

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

    def readings(self) -> tuple[NvReading, ...]:
        """Replays ``readings``, a list of looks that each list the GPUs; the last look is repeated."""
        looks = self._record.get("readings", [[]])
        look = looks[min(self._looks, len(looks) - 1)]
        self._looks += 1
        return tuple(NvReading(**{**one, "throttle": _tuple(one.get("throttle"))}) for one in look)

    def xids(self) -> list[tuple[int, int]]:
        """Replays ``xids``, a list of pairs, once."""
        pairs, self._record["xids"] = self._record.get("xids", []), []
        return [(pair[0], pair[1]) for pair in pairs]


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _times(number: float | None, unit: float) -> float | None:
    return None if number is None else float(number) * unit


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
