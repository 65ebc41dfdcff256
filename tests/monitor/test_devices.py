"""Devices are looked at through fakes and recordings; what they say is a sentence, and only of what was measured."""

from __future__ import annotations

import json
import math
import pathlib
import threading
import types
from typing import Any

import psutil
import pytest

from framework.cluster.nvml import NvmlReader, NvmlUnavailable, NvReading, RecordedNvml
from framework.monitor import advice, device_watch
from framework.monitor.advice import Row, row, sentences
from framework.monitor.devices import DeviceMonitor, Gpus, Host, curves
from tests.helpers import Toy, settings


class Refused(Exception):
    pass


class FakePynvml(types.SimpleNamespace):
    """Two GPUs; the second is lost. Numbers as ``nvml.h`` has them."""

    NVMLError = Refused

    def __init__(self, **changes: Any):
        super().__init__(events=[(0, 0x8, 79)], **changes)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index and self.__dict__.get("lost"):
            raise Refused("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(total=80 << 30, used=60 << 30, free=20 << 30)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == 0
        return 71

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 612_500  # milliwatts

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == 1
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4 | 0x40  # idle, power cap, hardware thermal

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if kind == 0:
            raise Refused("Not Supported")
        return 3

    def nvmlDeviceGetPcieThroughput(self, handle: int, way: int) -> int:
        return (1200, 3400)[way]  # KB/s

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Any) -> Any:
        (field, scope) = fields[0]
        assert scope == 0xFFFFFFFF
        return [types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(ullVal={138: 5, 139: 7}[field]))]

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (0x8, "events")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not self.events:
            raise Refused("Timeout")
        device, kind, data = self.events.pop()
        return types.SimpleNamespace(device=device, eventType=kind, eventData=data)


def test_reader_gives_plain_units_and_none_where_the_driver_refuses() -> None:
    with NvmlReader(FakePynvml()) as nvml:
        assert nvml.readings()[0] == NvReading(
            index=0,
            utilisation=0.97,
            memory_used_bytes=60 << 30,
            memory_bytes=80 << 30,
            temperature_c=71.0,
            power_w=612.5,
            power_limit_w=None,  # the fake has no such function, as an old package
            sm_clock_mhz=1410.0,
            sm_clock_max_mhz=1980.0,
            throttle=("power cap", "hardware thermal"),
            ecc_corrected=None,
            ecc_uncorrected=3,
            pcie_sent_bytes_per_s=1.2e6,
            pcie_received_bytes_per_s=3.4e6,
            nvlink_sent_bytes=5 * 1024,
            nvlink_received_bytes=7 * 1024,
        )


def test_a_lost_gpu_does_not_hide_the_other_and_errors_are_told_once() -> None:
    with NvmlReader(FakePynvml(lost=True)) as nvml:
        first, second = nvml.readings()
        assert first.utilisation == 0.97
        assert second == NvReading(index=1, problem="GPU is lost")
    with NvmlReader(FakePynvml()) as nvml:
        assert nvml.xids() == [(0, 79)]
        assert nvml.xids() == []


def looks(**columns: list[Any]) -> list[dict[str, Any]]:
    count = len(next(iter(columns.values())))
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def rows(*utilisations: float, waits: tuple[float, ...] = (), per_worker: int = 0, **last: Any) -> list[Row]:
    """Rows of one GPU each; ``last``: of the last one."""
    per_worker = per_worker or len(utilisations)
    return [
        Row(
            replica=i,
            worker=i // per_worker,
            gpu=i % per_worker,
            utilisation=value,
            input_wait=waits[i // per_worker] if waits else math.nan,
            **(last if i == len(utilisations) - 1 else {}),
        )
        for i, value in enumerate(utilisations)
    ]


def test_imbalance_is_a_sentence_with_its_cause() -> None:
    said = sentences(rows(0.94, 0.97, 0.95, 0.61, per_worker=2, waits=(0.01, 0.35)))
    assert said == [
        "GPU 1 of worker 1 is at 61% while the others are at 94% to 97%: input-bound worker 1, which waits for input "
        "35% of the time"
    ]
    said = sentences(rows(0.95, 0.95, 0.60, throttled=0.5, reasons=0x44, temperature=91.0, clock=0.55))
    assert said == [
        "GPU 2 is at 60% while the others are at 95%: its clocks were held down at 50% of the looks "
        "(power cap, hardware thermal)",
        "GPU 2: clocks held down at 50% of the looks (power cap, hardware thermal, up to 91 degrees Celsius, at 55% of "
        "its highest clock)",
    ]
    assert "no cause was measured" in sentences(rows(0.95, 0.94, 0.96, 0.50))[0]
    assert sentences(rows(0.95, 0.40)) == [
        "GPU 1 is at 40% while the other is at 95%: no cause was measured; look at its replica's time to the all-reduce"
    ]


@pytest.mark.parametrize("utilisations", [(0.9,), (0.94, 0.97, 0.95, 0.90), (0.2, 0.5, 0.9, 0.75), (math.nan,) * 4])
def test_where_nothing_stands_out_nothing_is_said(utilisations: tuple[float, ...]) -> None:
    assert sentences(rows(*utilisations)) == []


def test_errors_full_memory_and_slow_input_are_told() -> None:
    assert sentences(rows(0.9, 0.9, ecc=2.0)) == [
        "GPU 1: 2 uncorrected errors of memory came up; take it out of service"
    ]
    assert "97% of its memory was needed" in sentences(rows(0.9, 0.9, peak_memory=0.97))[0]
    assert sentences(rows(0.4, 0.42, waits=(0.5,))) == [
        "all GPUs are below 70%, and 50% of the time the steps wait for input: the input is slow"
    ]
    assert sentences(rows(0.4, 0.42, waits=(0.02,))) == []


def test_a_row_of_records_crosses_workers_as_numbers() -> None:
    found = row(
        3,
        1,
        1,
        looks(
            utilisation=[0.5, 0.9, 0.8],
            memory_used_bytes=[10, 30, 20],
            memory_bytes=[40, 40, 40],
            throttle=[[], ["power cap"], ["power brake"]],
            ecc_uncorrected=[4, 4, 6],
            sm_clock_mhz=[1000, 1500, 2000],
            sm_clock_max_mhz=[2000, 2000, 2000],
        ),
        0.25,
    )
    assert (found.utilisation, found.memory, found.clock, found.ecc) == (0.8, 0.75, 0.75, 2.0)
    assert found.throttled == pytest.approx(2 / 3)
    assert found.reasons == 0x84
    assert math.isnan(found.temperature) and math.isnan(found.peak_memory)
    again = Row(**dict(zip(advice.FIELDS, found.numbers)))
    assert sentences([again]) == sentences([found]) != []


def test_host_rates_are_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0])
    read = iter([1000, 5000])
    sent = iter([0, 600])
    idle = iter([100.0, 101.0])
    user = iter([50.0, 53.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: FakeTimes(next(user), 0.0, next(idle)))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: types.SimpleNamespace(read_bytes=next(read), write_bytes=0))
    monkeypatch.setattr(psutil, "net_io_counters", lambda: types.SimpleNamespace(bytes_sent=next(sent), bytes_recv=0))
    host = Host(lambda: next(clock))
    first, second = host.look(), host.look()
    assert "cpu" not in first and first["memory_bytes"] == psutil.virtual_memory().total
    assert second["cpu"] == pytest.approx(3.0 / 4.0)
    assert second["disk_read_bytes_per_s"] == 2000.0
    assert second["net_sent_bytes_per_s"] == 300.0
    assert second["process_memory_bytes"] > 0


class FakeTimes(tuple):
    """Like psutil's: a tuple with names."""

    def __new__(cls, user: float, system: float, idle: float) -> FakeTimes:
        made = super().__new__(cls, (user, system, idle))
        made.idle = idle  # type: ignore[attr-defined]
        return made


def test_nvlink_counters_become_rates_and_hidden_gpus_are_left_out() -> None:
    counters = iter([1000, 5000])

    class Session:
        def readings(self) -> Any:
            return (NvReading(index=0), NvReading(index=3, utilisation=0.5, nvlink_sent_bytes=next(counters)))

        def xids(self) -> Any:
            return [(0, 13), (3, 79)]

    clock = iter([1.0, 3.0])
    gpus = Gpus(Session(), [(3, 0)], lambda: next(clock))  # type: ignore[arg-type]
    assert gpus.look() == [{"gpu": 0, "index": 3, "utilisation": 0.5}]
    assert gpus.look()[0]["nvlink_sent_bytes_per_s"] == 2000.0
    assert gpus.xids() == [(0, 79)]


def recording(tmp_path: pathlib.Path) -> RecordedNvml:
    """Two GPUs of which the second is throttled in the second look."""
    gpus = [{"index": i, "name": "NVIDIA Test", "uuid": f"GPU-{i}", "links": []} for i in range(2)]
    look = [{"index": i, "utilisation": 0.9 - 0.5 * i, "throttle": ["power cap"] * i} for i in range(2)]
    record = {
        "driver_version": "1",
        "cuda_version": "12.4",
        "gpus": gpus,
        "levels": [["self", None], [None, "self"]],
        "readings": [look],
        "xids": [[1, 79]],
    }
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(record))
    return RecordedNvml(path)


def test_monitor_replays_a_recording_in_its_thread(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    taken: list[Any] = []
    monitor = DeviceMonitor(
        every=3600.0,
        sink=lambda record: taken.append((threading.current_thread().name, record)),
        nvml=recording(tmp_path),
        extra=lambda gpu: {"peak_memory_bytes": 10 + gpu},
        clock=lambda: 1.5,
    )
    with monitor.running():
        pass
    ((thread, record),) = taken  # one look at the end, however short the run
    assert thread == "device-monitor"
    assert record["time"] == 1.5 and record["xids"] == [[1, 79]]
    assert record["gpus"][1] == {
        "gpu": 1,
        "index": 1,
        "utilisation": 0.4,
        "throttle": ["power cap"],
        "peak_memory_bytes": 11,
    }
    found = curves(record)
    assert found["gpu_1/utilisation"] == 0.4 and found["gpu_0/peak_memory_bytes"] == 10.0
    assert found["host/memory_bytes"] > 0 and "gpu_1/gpu" not in found
    assert (monitor.problem, monitor.no_gpus) == ("", "")


def test_what_goes_wrong_in_the_thread_ends_the_looking_only(tmp_path: pathlib.Path) -> None:
    def full(record: Any) -> None:
        raise OSError("No space left on device")

    monitor = DeviceMonitor(every=0.001, sink=full, nvml=Without())
    with monitor.running():
        pass
    assert monitor.problem == "OSError: No space left on device"
    assert monitor.no_gpus == "no NVIDIA driver"


class Without:
    """A machine without driver."""

    def __enter__(self) -> Any:
        raise NvmlUnavailable("no NVIDIA driver")

    def __exit__(self, *exc: object) -> None:
        pass


def test_a_run_writes_records_and_says_what_stands_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run_dir = tmp_path / "run"
    config = settings(num_replicas=2, run_dir=str(run_dir), progress="lines", tensorboard=True, straggler_every=2)
    trainer = Toy(config)
    watch = trainer._run._watch
    watch.devices = device_watch.DeviceWatch(trainer, trainer._run.reports, recording(tmp_path))
    run_dir.mkdir()
    # A look of the thread, without waiting for it.
    session = watch.devices._monitor._nvml
    watch.devices._take(watch.devices._monitor.record(Host(), Gpus(session, [(0, 0), (1, 1)])))
    trainer.train()
    printed = capsys.readouterr().out
    assert "warning: GPU 1 reported XID 79" in printed
    # Why, depends on how long this run waits for its input.
    assert printed.count("devices: GPU 1 is at 40% while the other is at 90%: ") == 1
    assert printed.count("clocks held down at 100% of the looks") + printed.count("clocks were held down at 100%") >= 1
    lines = [json.loads(line) for line in (run_dir / "device_metrics/worker-0000.jsonl").read_text().splitlines()]
    assert [one["step"] for one in lines] == [0, 4]
    summary = json.loads((run_dir / "summary.json").read_text())["checks"]["devices"]
    assert summary["records"] == 2
    assert list((run_dir / "tensorboard/devices").glob("*tfevents*"))


@pytest.mark.parametrize("changes", [{"device_metrics_every": 0.0}, {"run_dir": None}])
def test_without_interval_or_folder_there_is_no_thread(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    watch = Toy(settings(**{"run_dir": str(tmp_path), **changes}))._run._watch.devices
    with watch.running():
        assert "device-monitor" not in [thread.name for thread in threading.enumerate()]
    assert watch.summary() == "off"
