"""Devices: recordings, a fake ``pynvml`` and fake /proc and /sys; expected values are written by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from framework.cluster import nvml as nvml_module
from framework.cluster.devices import Hardware, discover
from framework.cluster.nvml import NvGpu, NvLinkEnd, NvMachine, Nvml, NvmlReader, NvmlUnavailable, RecordedNvml

RECORDINGS = Path(__file__).parent / "recordings"
H100 = RECORDINGS / "h100_nvswitch_8.json"
L40S = RECORDINGS / "l40s_pcie_2.json"


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return str(root)


def cores(*places: tuple[int, int]) -> str:
    """/proc/cpuinfo of logical cores at (socket, core)."""
    return "\n\n".join(
        f"processor\t: {i}\nmodel name\t: Xeon Test 1\nphysical id\t: {socket}\ncore id\t\t: {core}"
        for i, (socket, core) in enumerate(places)
    )


@pytest.fixture
def look(tmp_path: Path) -> Any:
    """``discover`` on a machine whose kernel says only what the test writes."""

    def look(
        nvml: Nvml | Path = L40S, proc: dict[str, str] | None = None, sys: dict[str, str] | None = None, **environ: str
    ) -> Hardware:
        return discover(
            RecordedNvml(nvml) if isinstance(nvml, Path) else nvml,
            proc=write(tmp_path / "proc", proc or {}),
            sys=write(tmp_path / "sys", sys or {}),
            dev=str(tmp_path / "dev"),
            environ=environ,
        )

    return look


class Made:
    """An ``Nvml`` of values that the test makes."""

    def __init__(self, *gpus: NvGpu, **levels: str):
        pairs: dict[tuple[int, int], str | None] = {(int(k[1]), int(k[2])): v for k, v in levels.items()}
        self.made = NvMachine(driver_version="1", cuda_version="12.5", gpus=gpus, levels=pairs)

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def machine(self) -> NvMachine:
        return self.made


# --- recordings ----------------------------------------------------------------------------------------------------


def test_eight_gpus_on_nvswitch(look: Any) -> None:
    node = {f"bus/pci/devices/0000:{bus}:00.0/numa_node": "0" for bus in ("1b", "43", "52", "61")}
    node |= {f"bus/pci/devices/0000:{bus}:00.0/numa_node": "1" for bus in ("9d", "c3", "d1", "df")}
    found = look(H100, sys=node)
    assert (found.driver_version, found.cuda_version) == ("550.90.07", "12.4")
    assert len(found.gpus) == 8 and len(found.links) == 28
    last = found.gpus[7]
    assert (last.name, last.memory_bytes, last.compute_capability) == ("NVIDIA H100 80GB HBM3", 85520809984, "9.0")
    assert (last.pci_bus_id, last.numa_node, last.visible, last.cuda_index) == ("0000:df:00.0", 1, True, 7)
    assert [gpu.numa_node for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {link.words for link in found.links} == {"NVLink4 x18 via NVSwitch"}
    assert (found.link(3, 0).level, found.link(3, 4).level) == ("same_numa", "system")


def test_table_of_eight_gpus_has_the_matrix_and_fits(look: Any) -> None:
    lines = look(H100).table().splitlines()
    assert max(map(len, lines)) <= 100
    start = lines.index("links   GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7")
    assert lines[start + 1] == "GPU0    -     NV18  NV18  NV18  NV18  NV18  NV18  NV18"
    assert lines[start + 8] == "GPU7    NV18  NV18  NV18  NV18  NV18  NV18  NV18  -"
    assert lines[start + 9] == "        NV18 = NVLink4 x18 via NVSwitch"
    assert "GPU     8 known to the driver, 8 visible here" in lines
    gpu0 = next(line for line in lines if line.startswith("GPU0    NVIDIA"))
    assert " ".join(gpu0.split()) == "GPU0 NVIDIA H100 80GB HBM3 79.6 GiB 9.0 not measured as GPU:0"


def test_two_gpus_over_pcie(look: Any) -> None:
    found = look(L40S)
    link = found.link(0, 1)
    assert (link.words, link.code, link.nvlinks) == ("across NUMA", "SYS", 0)
    lines = found.table().splitlines()
    assert "GPU0    -     SYS" in lines and "GPU1    SYS   -" in lines
    assert "        SYS = across NUMA" in lines


def test_sixteen_gpus_fit_in_two_blocks(look: Any) -> None:
    gpus = [NvGpu(index=i, name="V100", uuid=f"GPU-{i}", links=()) for i in range(16)]
    source = Made()
    source.made = NvMachine(gpus=tuple(gpus), levels={(a, b): "system" for b in range(16) for a in range(b)})
    lines = look(source).table().splitlines()
    assert max(map(len, lines)) <= 100
    assert "links   GPU14 GPU15" in lines


def test_recording_with_an_unknown_level_is_refused(tmp_path: Path) -> None:
    record = json.loads(L40S.read_text()) | {"levels": [["self", "near"], ["near", "self"]]}
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="near"):
        RecordedNvml(tmp_path / "r.json").machine()


# --- links between two GPUs ----------------------------------------------------------------------------------------


def ends(*remotes: str | None, kind: str | None = "gpu", active: bool = True) -> tuple[NvLinkEnd, ...]:
    return tuple(NvLinkEnd(active=active, generation=3, remote_kind=kind, remote_bus_id=bus) for bus in remotes)


def pair(first: tuple[NvLinkEnd, ...] | None, second: tuple[NvLinkEnd, ...] | None) -> Made:
    a = NvGpu(index=0, name="A100", pci_bus_id="00000000:07:00.0", links=first)
    b = NvGpu(index=1, name="A100", pci_bus_id="00000000:0F:00.0", links=second)
    return Made(a, b, p01="single_switch")


@pytest.mark.parametrize(
    ("first", "second", "words", "code"),
    [
        # 2 of 3 links go to the other GPU; the kernel's and the driver's spelling of a bus id are the same bus
        (ends("00000000:0F:00.0", "0000:0f:00.0", "00000000:2F:00.0"), ends("00000000:07:00.0"), "NVLink3 x2", "NV2"),
        (ends(*["s"] * 12, kind="switch"), ends(*["s"] * 10, kind="switch"), "NVLink3 x10 via NVSwitch", "NV10"),
        (ends("00000000:0F:00.0", active=False), (), "PCIe switch", "PIX"),
        ((), (), "PCIe switch", "PIX"),
        (None, (), "PCIe switch, NVLink not measured", "PIX?"),
        (ends(None, kind=None), ends(None, kind=None), "PCIe switch, NVLink not measured", "PIX?"),
        (ends("00000000:2F:00.0"), ends("00000000:3F:00.0"), "PCIe switch", "PIX"),
    ],
    ids=["direct", "switch", "inactive", "none", "unread", "unknown-ends", "to-third-gpus"],
)
def test_link_words(look: Any, first: Any, second: Any, words: str, code: str) -> None:
    link = look(pair(first, second)).link(0, 1)
    assert (link.words, link.code) == (words, code)


def test_link_of_unmeasured_level(look: Any) -> None:
    two = [NvGpu(index=i, name="A100", links=()) for i in range(2)]
    source = Made(*two)
    source.made = NvMachine(gpus=tuple(two), levels={(0, 1): None})
    assert (look(source).link(0, 1).words, look(source).link(0, 1).code) == ("not measured", "?")


# --- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "numbers", "note"),
    [
        ("1", [None, 0], "hides 1 of 2 GPUs"),
        ("1,0", [1, 0], None),
        ("", [None, None], "hides 2 of 2 GPUs"),
        ("GPU-f8a3164e", [None, 0], "hides 1 of 2 GPUs"),
        ("GPU-51c0e7a2-4d9b-4f36-a8e1-0b72c5d9f6a4", [0, None], "hides 1 of 2 GPUs"),
        ("0,7,1", [0, None], "'7' names no GPU"),
        ("-1", [None, None], "'-1' names no GPU"),
        ("GPU-", [None, None], "'GPU-' names no GPU"),  # fits both, so it names neither
    ],
)
def test_cuda_visible_devices(look: Any, value: str, numbers: list[int | None], note: str | None) -> None:
    found = look(L40S, CUDA_VISIBLE_DEVICES=value)
    assert [gpu.cuda_index for gpu in found.gpus] == numbers
    assert [gpu.visible for gpu in found.gpus] == [number is not None for number in numbers]
    assert len(found.notes) == (note is not None)
    assert note is None or (note in found.notes[0] and repr(value) in found.notes[0])
    assert f"2 known to the driver, {2 - numbers.count(None)} visible here" in found.table()


def test_a_part_of_a_gpu_leaves_visibility_unmeasured(look: Any) -> None:
    found = look(L40S, CUDA_VISIBLE_DEVICES="MIG-1f2e")
    assert [gpu.visible for gpu in found.gpus] == [None, None]
    assert "2 known to the driver, not measured visible here" in found.table()
    assert "MIG" in found.notes[0]


def test_mixed_gpus_are_told_about_the_order_of_numbers(look: Any) -> None:
    mixed = Made(NvGpu(index=0, name="T4", links=()), NvGpu(index=1, name="A100", links=()), p01="system")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in look(mixed).notes[0]
    assert look(mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID").notes == ()


# --- the driver, through a fake pynvml -----------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class FakePynvml(types.SimpleNamespace):
    """Two GPUs with two NVLinks each between them, as the functions of ``pynvml`` tell it; ``faults`` raise."""

    NVMLError, NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    NVMLError_InvalidArgument = NVMLError_InvalidArgument
    buses = ("00000000:07:00.0", "00000000:0F:00.0")

    def __init__(self, **faults: Exception):
        super().__init__(faults=faults, calls=[])
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlSystemGetDriverVersion": lambda: "550.54.15",
            "nvmlSystemGetCudaDriverVersion": lambda: 12040,
            "nvmlDeviceGetName": lambda h: "NVIDIA A100-SXM4-40GB",
            "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(total=42949672960, free=1, used=2),
            "nvmlDeviceGetCudaComputeCapability": lambda h: (8, 0),
            "nvmlDeviceGetUUID": lambda h: f"GPU-{h}",
            "nvmlDeviceGetPciInfo": lambda h: types.SimpleNamespace(busId=self.buses[h]),
            "nvmlDeviceGetNvLinkState": self.link_state,
            "nvmlDeviceGetNvLinkVersion": lambda h, n: 4,
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, n: 0,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda h, n: types.SimpleNamespace(busId=self.buses[1 - h]),
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 40,
        }
        for name, answer in answers.items():
            setattr(self, name, self.function(name, answer))

    def function(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.faults:
                raise self.faults[name]
            return answer(*args)

        return call

    def link_state(self, handle: int, link: int) -> int:
        if link > 3:
            raise NVMLError_InvalidArgument
        return int(link < 2)


def test_reader_reads_everything_and_shuts_down(look: Any) -> None:
    fake = FakePynvml()
    found = look(NvmlReader(fake))
    assert (found.driver_version, found.cuda_version) == ("550.54.15", "12.4")
    assert [(gpu.name, gpu.memory_bytes) for gpu in found.gpus] == [("NVIDIA A100-SXM4-40GB", 40 * 2**30)] * 2
    assert [(gpu.compute_capability, gpu.uuid) for gpu in found.gpus] == [("8.0", "GPU-0"), ("8.0", "GPU-1")]
    assert (found.link(0, 1).words, found.link(0, 1).level) == ("NVLink3 x2", "same_numa")
    assert fake.calls[0] == "nvmlInit" and fake.calls[-1] == "nvmlShutdown" and fake.calls.count("nvmlInit") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NVMLError_LibraryNotFound(), "no NVIDIA driver"),
        (NVMLError_DriverNotLoaded(), "modprobe nvidia"),
        (NVMLError("Unknown Error"), "Unknown Error"),
    ],
)
def test_no_driver_is_one_line_and_the_rest_goes_on(look: Any, error: NVMLError, words: str) -> None:
    fake = FakePynvml(nvmlInit=error)
    found = look(NvmlReader(fake), proc={"cpuinfo": cores((0, 0), (0, 1))})
    assert found.gpus is None and words in found.nvidia_problem and "\n" not in found.nvidia_problem
    assert fake.calls == ["nvmlInit"]  # nothing was opened, so nothing is closed
    assert "GPU     not measured: " in found.table()
    assert found.cpu.physical_cores == 2


def test_without_pynvml_the_message_says_how_to_get_it(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    found = look(NvmlReader())
    assert found.gpus is None
    assert found.nvidia_problem == 'pynvml is not installed; run: pip install "lockstep-tf[gpu]"'


def test_what_the_card_cannot_say_is_none_and_the_rest_is_there(look: Any) -> None:
    names = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor")
    fake = FakePynvml(**{name: NVMLError_NotSupported() for name in names})
    del fake.nvmlSystemGetCudaDriverVersion  # an old nvidia-ml-py
    found = look(NvmlReader(fake))
    assert [(gpu.name, gpu.memory_bytes) for gpu in found.gpus] == [("NVIDIA A100-SXM4-40GB", None)] * 2
    assert found.cuda_version is None
    assert (found.link(0, 1).nvlinks, found.link(0, 1).level) == (0, None)  # a card without NVLink
    assert fake.calls[-1] == "nvmlShutdown"


def test_unreadable_nvlinks_are_not_zero_links(look: Any) -> None:
    found = look(NvmlReader(FakePynvml(nvmlDeviceGetNvLinkState=NVMLError("Unknown Error"))))
    assert found.link(0, 1).nvlinks is None


def test_a_lost_gpu_does_not_hide_the_other(look: Any) -> None:
    fake = FakePynvml()
    handle = fake.nvmlDeviceGetHandleByIndex

    def lost(index: int) -> int:
        if index == 0:
            raise NVMLError_GpuIsLost("GPU is lost")
        return handle(index)

    fake.nvmlDeviceGetHandleByIndex = lost
    found = look(NvmlReader(fake))
    assert [(gpu.name, gpu.problem) for gpu in found.gpus] == [(None, "GPU is lost"), ("NVIDIA A100-SXM4-40GB", None)]
    assert "GPU0    not measured: GPU is lost" in found.table().splitlines()


def test_session_is_closed_when_counting_fails() -> None:
    fake = FakePynvml(nvmlDeviceGetCount=NVMLError("Unknown Error"), nvmlShutdown=NVMLError("Uninitialized"))
    with pytest.raises(NvmlUnavailable, match="cannot count"), NvmlReader(fake) as session:
        session.machine()
    assert fake.calls == ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"]


def test_numbers_and_functions_are_those_of_the_installed_pynvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in vars(FakePynvml()):
        assert name in ("faults", "calls") or callable(getattr(pynvml, name))
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert [getattr(pynvml, f"NVML_TOPOLOGY_{name}") for name in levels] == list(nvml_module.LEVELS)
    assert (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH) == (0, 2)
    versions = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_NVLINK_VERSION_")}
    generations = {value: int(name.split("_")[3]) for name, value in versions.items() if value}
    assert generations == nvml_module._GENERATIONS
    assert all(issubclass(getattr(pynvml, name), pynvml.NVMLError) for name in nvml_module._CURES)


# --- CPU and memory ------------------------------------------------------------------------------------------------

TWO_SOCKETS = cores(*[(socket, core) for socket in (0, 1) for core in (0, 1)] * 2)  # 2 x 2 cores of 2 threads


def test_cpu_of_two_sockets_with_a_quota_of_one_and_a_half_cores(look: Any) -> None:
    found = look(
        proc={
            "cpuinfo": TWO_SOCKETS,
            "meminfo": "MemTotal:       16777216 kB\nMemFree: 5 kB\nMemAvailable:    8388608 kB",
            "self/status": "Name:\tpython\nCpus_allowed_list:\t0-1,4-5,7",
            "self/cgroup": "0::/slice/box",
        },
        sys={
            "fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids",
            "fs/cgroup/slice/cpu.max": "150000 100000",  # a limit of the group above binds too
            "fs/cgroup/slice/box/cpu.max": "max 100000",
            "fs/cgroup/slice/memory.max": "max",
            "fs/cgroup/slice/box/memory.max": "4294967296",
            "devices/system/node/node0/cpulist": "0-1,4-5",
            "devices/system/node/node1/cpulist": "2-3,6-7",
        },
    ).cpu
    assert (found.model, found.physical_cores, found.logical_cores) == ("Xeon Test 1", 4, 8)
    assert (found.affinity_cores, found.quota_cores, found.usable_cores) == (5, 1.5, 1.5)
    assert (found.memory_bytes, found.available_bytes, found.limit_bytes) == (16 * 2**30, 8 * 2**30, 4 * 2**30)
    assert found.numa_cpus == ("0-1,4-5", "2-3,6-7")


def test_cgroup_version_1_in_a_container(look: Any) -> None:
    found = look(
        proc={
            "self/status": "Cpus_allowed_list:\t0-3",
            # the host's paths, which cannot be seen from inside
            "self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/",
        },
        sys={
            "fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
            "fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",  # the kernel's "no limit"
        },
    )
    assert (found.cpu.quota_cores, found.cpu.usable_cores, found.cpu.limit_bytes) == (2.5, 2.5, math.inf)
    assert "usable  2.5 cores (affinity 4, cgroup quota 2.5)" in found.table().splitlines()
    assert found.to_dict()["cpu"]["limit_bytes"] == "no limit"


def test_no_quota_is_told_from_an_unreadable_one(look: Any) -> None:
    status = {"self/status": "Cpus_allowed_list:\t0-3"}
    unread = look(proc=status)
    assert (unread.cpu.quota_cores, unread.cpu.usable_cores) == (None, 4.0)
    assert "usable  4 cores (affinity 4, cgroup quota not measured)" in unread.table()
    root = look(proc=status | {"self/cgroup": "0::/"}, sys={"fs/cgroup/cgroup.controllers": "cpu memory"})
    assert (root.cpu.quota_cores, root.cpu.limit_bytes) == (math.inf, math.inf)
    assert "cgroup quota none" in root.table() and "cgroup limit none" in root.table()


def test_nothing_readable_is_written_as_not_measured(look: Any) -> None:
    found = look()
    lines = found.table().splitlines()
    assert lines[0] == "CPU     not measured, not measured cores, not measured logical"
    assert lines[2] == "memory  not measured total, not measured available, cgroup limit not measured"
    assert lines[3] == "NUMA    not measured"
    assert found.cpu.usable_cores is None and found.to_dict()["cpu"]["numa_cpus"] is None


def test_arm_cores_are_counted_from_sys(look: Any) -> None:
    lists = {
        f"devices/system/cpu/cpu{i}/topology/thread_siblings_list": "0,2" if i % 2 == 0 else "1,3" for i in range(4)
    }
    found = look(proc={"cpuinfo": "\n\n".join(f"processor\t: {i}\nBogoMIPS\t: 50.0" for i in range(4))}, sys=lists)
    assert (found.cpu.physical_cores, found.cpu.logical_cores, found.cpu.model) == (2, 4, None)


# --- TensorFlow stays untouched ------------------------------------------------------------------------------------


def test_neither_import_nor_discovery_imports_tensorflow() -> None:
    code = (
        "import sys; from framework.cluster import devices; devices.discover(environ={});"
        "print([m for m in ('tensorflow', 'keras') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_tpu_is_resolved_without_starting_tensorflow() -> None:
    code = (
        "from framework.cluster.devices import discover\n"
        "print(discover(environ={'TPU_NAME': 'grpc://10.0.0.1:8470'}).tpu)\n"
        "import tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "print(len(tf.config.list_logical_devices('CPU')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["Tpu(address='grpc://10.0.0.1:8470', problem=None)", "2"]


def test_a_tpu_is_looked_for_only_when_asked_or_named(look: Any, tmp_path: Path) -> None:
    assert look().tpu is None
    asked = discover(RecordedNvml(L40S), dev=str(tmp_path), environ={}, look_for_tpu=True)
    assert asked.tpu is not None and asked.tpu.address is None
    assert asked.tpu.problem == f"TPU_NAME is not set and {tmp_path} has no accel* or vfio/* device of a TPU"
    assert "TPU     none: TPU_NAME is not set" in asked.table()


def test_a_failing_resolver_is_one_line(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tpu: str) -> None:
        raise RuntimeError(f"no TPU called {tpu}\nand a long tail")

    resolvers = types.SimpleNamespace(TPUClusterResolver=refuse)
    fake = types.SimpleNamespace(distribute=types.SimpleNamespace(cluster_resolver=resolvers))
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    assert look(TPU_NAME="pod-7").tpu.problem == "pod-7: RuntimeError: no TPU called pod-7"
