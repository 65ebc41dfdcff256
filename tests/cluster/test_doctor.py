"""The doctor: faults it must find, cures it must name, and the page itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from framework import doctor
from framework.cluster.devices import discover
from framework.cluster.nvml import RecordedNvml

RECORDINGS = Path(__file__).parent / "recordings"
TWO = RECORDINGS / "l40s_pcie_2.json"
BUILD = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}


def fake_tf(version: str = "2.21.0", gpus: int = 0, build: dict[str, Any] = BUILD) -> Any:
    devices = [types.SimpleNamespace(device_type=kind) for kind in ["CPU"] + ["GPU"] * gpus]
    return types.SimpleNamespace(
        __version__=version,
        sysconfig=types.SimpleNamespace(get_build_info=lambda: build),
        config=types.SimpleNamespace(list_physical_devices=lambda: devices),
    )


def fake_keras(version: str = "3.15.1", backend: str = "tensorflow") -> Any:
    return types.SimpleNamespace(__version__=version, backend=types.SimpleNamespace(backend=lambda: backend))


def examine(tf: Any = None, keras: Any = None, recording: Path = TWO, **environ: str) -> doctor.Report:
    return doctor.examine(
        nvml=RecordedNvml(recording), environ=environ, tf=tf or fake_tf(gpus=2), keras=keras or fake_keras()
    )


@pytest.fixture
def no_driver(tmp_path: Path) -> Path:
    path = tmp_path / "none.json"
    path.write_text(json.dumps({"unavailable": "no NVIDIA driver here"}))
    return path


def test_two_gpus_that_tensorflow_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine()
    assert (report.exit_code, report.broken, report.warnings) == (0, (), ())
    assert report.tensorflow_devices == {"CPU": 1, "GPU": 2}
    assert report.choice == "mirrored, replicas: 2 on GPU, because 2 GPUs are used"
    assert report.versions["NVIDIA driver"] == "535.183.01, CUDA 12.2"
    text = report.text()
    assert max(map(len, text.splitlines())) <= 100
    assert "  tensorflow              2.21.0\n  TensorFlow built with   CUDA 12.5.1, cuDNN 9\n" in text
    assert "  GPU0    -     SYS\n" in text
    assert text.endswith("Usable: training can start here.")


@pytest.mark.parametrize("version", ["2.20.1", "2.23.0", "3.0.0", "odd"])
def test_tensorflow_out_of_range_is_broken(version: str) -> None:
    report = examine(tf=fake_tf(version, gpus=2))
    cure = 'run: pip install "tensorflow>=2.21,<2.23"'
    assert report.broken == (f"tensorflow {version} but it must be >=2.21,<2.23; {cure}",)
    assert report.exit_code == 2


@pytest.mark.parametrize("version", ["2.21.0", "2.22.0-rc1", "2.22.3"])
def test_tensorflow_in_range(version: str) -> None:
    assert examine(tf=fake_tf(version, gpus=2)).broken == ()


def test_keras_backend_and_version() -> None:
    report = examine(keras=fake_keras("2.15.0", backend="jax"))
    assert report.exit_code == 2
    assert [line.split(" but")[0] for line in report.broken] == ["keras 2.15.0", "keras backend is jax"]
    assert "unset KERAS_BACKEND" in report.broken[1]


def test_tensorflow_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch, no_driver: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    report = doctor.examine(nvml=RecordedNvml(no_driver), environ={}, keras=fake_keras())
    assert report.broken[0].startswith("tensorflow cannot be imported (ModuleNotFoundError: ")
    assert report.broken[0].endswith("run: pip install lockstep-tf") and "\n" not in report.broken[0]
    assert (report.tensorflow_devices, report.choice, report.exit_code) == (None, None, 2)
    assert "  tensorflow              not measured\n" in report.text()


def test_a_keras_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    report = doctor.examine(nvml=RecordedNvml(TWO), environ={"KERAS_BACKEND": "jax"}, tf=fake_tf(gpus=2))
    assert report.exit_code == 2 and report.broken[0].startswith("keras cannot be imported (ModuleNotFoundError")
    assert report.broken[0].endswith("run: unset KERAS_BACKEND")


def test_malformed_tf_config_is_broken_and_shown() -> None:
    report = examine(TF_CONFIG="{worker")
    assert report.exit_code == 2 and report.broken[0].startswith("TF_CONFIG: not JSON")
    assert report.environment == {"TF_CONFIG": "{worker"}
    assert "cluster: not measured" in report.text()


def test_a_good_tf_config_leads_to_multi_worker() -> None:
    workers = [f"a-rather-long-host-name-{i}.example:2222" for i in range(4)]
    value = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}})
    report = examine(TF_CONFIG=value)
    assert report.choice == "multi_worker, replicas: 2 on GPU, because TF_CONFIG names 4 workers"
    assert report.cluster is not None and "worker 1 of 4" in report.cluster
    shown = report.environment["TF_CONFIG"]
    assert len(shown) == 70 and shown.endswith("...") and value.startswith(shown[:-3])


def test_slurm_variables_are_shown_without_secrets() -> None:
    report = examine(SLURM_JOB_ID="17", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_JWT="eyJhbGci", SLURM_CONF="/x")
    assert report.environment == {
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_*": "2 more, not shown",
    }
    assert "eyJhbGci" not in report.text() + json.dumps(report.to_dict())


def test_kubernetes_and_none() -> None:
    assert doctor.cluster_settings({"JOB_COMPLETION_INDEX": "3", "HOME": "/root"}) == {"JOB_COMPLETION_INDEX": "3"}
    assert doctor.cluster_settings({"HOME": "/root"}) == {}
    assert "Cluster settings in the environment\n  none\n" in examine().text()


# --- driver against TensorFlow -------------------------------------------------------------------------------------


def compare(
    seen: int, build: dict[str, Any] = BUILD, missing: tuple[str, ...] = (), recording: Path = TWO, **environ: str
) -> str:
    return "; ".join(doctor.compare_gpus(discover(RecordedNvml(recording), environ=environ), seen, build, missing))


def test_missing_libraries_are_named_with_the_cure() -> None:
    found = compare(0, missing=("nvidia-cudnn-cu12", "nvidia-nccl-cu12"))
    assert found == (
        "the driver knows 2 GPUs, 2 visible here, but TensorFlow sees 0: CUDA libraries are missing "
        '(nvidia-cudnn-cu12, nvidia-nccl-cu12); run: pip install "lockstep-tf[gpu]"'
    )


def test_tensorflow_without_cuda() -> None:
    found = compare(0, build={"is_cuda_build": False}, missing=("nvidia-cudnn-cu12",))
    assert found.endswith('this TensorFlow was built without CUDA; run: pip install "lockstep-tf[gpu]"')


def test_driver_older_than_tensorflows_cuda() -> None:
    found = compare(0, build=BUILD | {"cuda_version": "13.0"})
    assert "the driver does CUDA 12.2 and TensorFlow needs 13.0; install a newer driver" in found


def test_all_installed_and_still_nothing() -> None:
    assert "do not load" in compare(0) and "lockstep-tf[gpu]" in compare(0)


def test_hidden_gpus_are_not_called_missing() -> None:
    assert compare(0, CUDA_VISIBLE_DEVICES="") == (
        "the driver knows 2 GPUs but CUDA_VISIBLE_DEVICES hides all of them; unset it to use them"
    )
    assert compare(1, CUDA_VISIBLE_DEVICES="1") == ""


def test_one_of_two_gpus() -> None:
    assert compare(1) == (
        "the driver knows 2 GPUs, 2 visible here, but TensorFlow sees 1; "
        "nvidia-smi tells which is busy, lost or too old"
    )


def test_no_driver(no_driver: Path) -> None:
    assert compare(0, recording=no_driver) == ""
    assert compare(1, recording=no_driver) == "TensorFlow sees 1 GPU but the driver: no NVIDIA driver here"


def test_a_warning_does_not_make_the_machine_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_cuda_packages", lambda: ["nvidia-cudnn-cu12"])
    report = examine(tf=fake_tf(gpus=0))
    assert report.exit_code == 0 and "nvidia-cudnn-cu12" in report.warnings[0]
    assert "Worth a look\n  the driver knows 2 GPUs" in report.text()
    assert report.choice == "one_device, replicas: 1 on CPU, because no GPU is visible"


def test_missing_packages_come_from_tensorflows_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1.26", 'nvidia-cudnn-cu12<10.0,>=9.3; extra == "and-cuda"', 'pip>=1; extra == "and-cuda"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(doctor, "_installed", lambda name: "26.0" if name == "pip" else None)
    assert doctor.missing_cuda_packages() == ["nvidia-cudnn-cu12"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_text_and_exit_code_of_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(tf=fake_tf("2.23.0", gpus=2))
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert doctor.main([]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("Versions\n") and "Broken\n  tensorflow 2.23.0 but it must be" in printed


def test_json_of_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "framework.doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "KERAS_BACKEND")},
    )
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["usable"] is True and facts["broken"] == []
    assert facts["versions"]["tensorflow"] == importlib.metadata.version("tensorflow")
    assert facts["tensorflow_devices"]["CPU"] == 1
    assert facts["hardware"]["cpu"]["logical_cores"] >= 1
    assert facts["versions"]["keras"].endswith("backend tensorflow")
