"""A thread that looks at the machine every few seconds: its GPUs through the driver, the rest through psutil."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from framework.cluster.devices import discover
from framework.cluster.nvml import Nvml, NvmlReader, NvmlUnavailable, NvReading

# A record as it is written: plain values, what was not measured left out.
Record = dict[str, Any]


class Host:
    """The machine beside its GPUs. Rates are since the last look, so the first look has none.

    Args:
      clock: seconds that never go back; passed in by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._process = psutil.Process()
        self._before: tuple[float, dict[str, float]] | None = None

    def look(self) -> Record:
        """``cpu`` (share of all cores), ``process_cores`` (busy cores of this process), memory and rates in bytes."""
        now, counters = self._clock(), self._counters()
        memory = psutil.virtual_memory()
        found: Record = {
            "memory_used_bytes": int(memory.total - memory.available),
            "memory_bytes": int(memory.total),
            "process_memory_bytes": int(self._process.memory_info().rss),
        }
        if self._before is not None and now > self._before[0]:
            seconds, old = now - self._before[0], self._before[1]
            rates = {name: (counters[name] - old[name]) / seconds for name in counters if name in old}
            busy, every = rates.pop("busy", None), rates.pop("every", None)
            if busy is not None and every:
                found["cpu"] = min(max(busy / every, 0.0), 1.0)
            found.update({name: max(rate, 0.0) for name, rate in rates.items()})
        self._before = now, counters
        return found

    def _counters(self) -> dict[str, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guests are part of user and nice already.
        every = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        found = {"busy": every - idle, "every": every, "process_cores": own.user + own.system}
        disk, net = psutil.disk_io_counters(), psutil.net_io_counters()
        if disk is not None:
            found |= {"disk_read_bytes_per_s": disk.read_bytes, "disk_written_bytes_per_s": disk.write_bytes}
        if net is not None:
            found |= {"net_sent_bytes_per_s": net.bytes_sent, "net_received_bytes_per_s": net.bytes_recv}
        return found


class Gpus:
    """The GPUs that this process may use. Without driver there are none, and ``problem`` says why.

    Args:
      nvml: the open session.
      visible: (driver's index, number in this process) of each.
      clock: as above.
    """

    def __init__(self, nvml: Nvml, visible: Sequence[tuple[int, int]], clock: Callable[[], float] = time.monotonic):
        self._nvml = nvml
        self._numbers = dict(visible)
        self._clock = clock
        self._before: dict[int, tuple[float, NvReading]] = {}

    def look(self) -> list[Record]:
        """One record a GPU: the fields of ``NvReading``, ``gpu`` (number in this process), NVLink as rates."""
        found = []
        for reading in self._nvml.readings():
            if reading.index not in self._numbers:
                continue
            now = self._clock()
            record: Record = {"gpu": self._numbers[reading.index], **_measured(dataclasses.asdict(reading))}
            then, before = self._before.get(reading.index, (now, reading))
            for way in ("sent", "received"):
                counter = record.pop(f"nvlink_{way}_bytes", None)
                old = getattr(before, f"nvlink_{way}_bytes")
                if counter is not None and old is not None and now > then:
                    record[f"nvlink_{way}_bytes_per_s"] = max(counter - old, 0) / (now - then)
            self._before[reading.index] = now, reading
            found.append(record)
        return sorted(found, key=lambda record: record["gpu"])

    def xids(self) -> list[tuple[int, int]]:
        """(number in this process, XID) of new critical errors; GPUs of others are left out."""
        return [(self._numbers[index], xid) for index, xid in self._nvml.xids() if index in self._numbers]


class DeviceMonitor:
    """Looks at host and GPUs every ``every`` seconds in a thread of its own.

    The thread waits, asks, and hands a record over; the driver's calls let go of Python's lock. What goes wrong in it
    ends the looking, never the training: see ``problem``.

    Args:
      every: seconds.
      sink: is given each record, in the thread.
      nvml: passed in by tests.
      extra: adds to each GPU's record, by its number in this process.
      clock: Unix seconds of the records.
    """

    def __init__(
        self,
        *,
        every: float,
        sink: Callable[[Record], None],
        nvml: Nvml | None = None,
        extra: Callable[[int], Mapping[str, Any]] = lambda gpu: {},
        clock: Callable[[], float] = time.time,
    ):
        self._every = every
        self._sink = sink
        self._nvml = NvmlReader() if nvml is None else nvml
        self._extra = extra
        self._clock = clock
        self._ended = threading.Event()
        self.problem = ""  # why it looks no more
        self.no_gpus = ""  # why there are no GPUs to look at

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Looks while the block runs, at its begin and at its end."""
        self._ended.clear()
        thread = threading.Thread(target=self._run, name="device-monitor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                gpus = self._open(stack)
                host = Host()
                host.look()
                last = False
                while not last:
                    # A first look soon, then one every so often, and one at the end.
                    last = self._ended.wait(self._every)
                    self._sink(self.record(host, gpus))
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _open(self, stack: contextlib.ExitStack) -> Gpus | None:
        try:
            session = stack.enter_context(self._nvml)
            visible = discover(_Kept(session)).gpus or ()
        except NvmlUnavailable as error:
            self.no_gpus = str(error)
            return None
        pairs = [(gpu.index, gpu.cuda_index) for gpu in visible if gpu.cuda_index is not None]
        return Gpus(session, pairs) if pairs else None

    def record(self, host: Host, gpus: Gpus | None) -> Record:
        """One look."""
        found: Record = {"time": self._clock(), "host": host.look(), "gpus": []}
        if gpus is not None:
            found["gpus"] = [{**record, **_measured(self._extra(record["gpu"]))} for record in gpus.look()]
            xids = gpus.xids()
            if xids:
                found["xids"] = [list(pair) for pair in xids]
        return found


class _Kept:
    """An open session that is not closed by who uses it for a while."""

    def __init__(self, session: Nvml):
        self.machine, self.readings, self.xids = session.machine, session.readings, session.xids

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def _measured(values: Mapping[str, Any]) -> Record:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


def curves(record: Record) -> dict[str, float]:
    """The numbers of a record by name, for TensorBoard: ``host/cpu``, ``gpu_0/power_w``."""
    parts = {"host": record["host"], **{f"gpu_{gpu['gpu']}": gpu for gpu in record["gpus"]}}
    found = {}
    for part, values in parts.items():
        for name, value in values.items():
            if isinstance(value, (int, float)) and name not in ("gpu", "index"):
                found[f"{part}/{name}"] = float(value)
    return found
