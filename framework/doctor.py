"""What this machine has, what TensorFlow sees of it and what a run would do: ``python -m framework.doctor``.

Ends with 0 when training can start and with 2 when something needed is broken; every broken thing comes with its cure.
``--json`` prints the same facts as one JSON object. Nothing is trained and no device is initialised.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from framework.cluster import cluster as clusters
from framework.cluster import strategy
from framework.cluster.devices import NOT_MEASURED, WIDTH, Hardware, discover
from framework.cluster.nvml import Nvml
from framework.config import RunConfig
from framework.errors import ConfigError

TENSORFLOW_RANGE = ((2, 21), (2, 23))  # from the first, up to and without the second
GPU_CURE = 'pip install "lockstep-tf[gpu]"'

# The variables that say who takes part. Others of Slurm are only counted: some hold secrets (SLURM_JWT).
_CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NNODES",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_GPUS",
    "KUBERNETES_SERVICE_HOST",
    "JOB_COMPLETION_INDEX",
    "TPU_NAME",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All facts of one look; None: not measured, because what it needs is broken."""

    versions: Mapping[str, str | None]
    hardware: Hardware
    tensorflow_devices: Mapping[str, int] | None
    environment: Mapping[str, str]
    cluster: str | None
    choice: str | None
    warnings: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: training can start; 2: something needed is broken."""
        return 2 if self.broken else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``json`` can write."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"hardware": self.hardware.to_dict(), "usable": not self.broken}

    def text(self) -> str:
        """The page for people, at most ``WIDTH`` columns wide."""
        devices = NOT_MEASURED
        if self.tensorflow_devices is not None:
            devices = ", ".join(f"{count} {kind}" for kind, count in self.tensorflow_devices.items())
        parts = [
            _section("Versions", [f"{name:<24}{value or NOT_MEASURED}" for name, value in self.versions.items()]),
            "Hardware\n" + textwrap.indent(self.hardware.table(), "  "),
            _section("TensorFlow sees", [devices]),
            _section(
                "Cluster settings in the environment",
                [f"{name:<24}{value}" for name, value in self.environment.items()] or ["none"],
            ),
            _section(
                "A run without flags",
                [self.cluster or f"cluster: {NOT_MEASURED}", f"strategy: {self.choice or NOT_MEASURED}"],
            ),
        ]
        if self.warnings:
            parts.append(_section("Worth a look", self.warnings))
        parts.append(_section("Broken", self.broken) if self.broken else "Usable: training can start here.")
        return "\n\n".join(parts)


def examine(
    *, nvml: Nvml | None = None, environ: Mapping[str, str] | None = None, tf: Any = None, keras: Any = None
) -> Report:
    """Looks at everything and raises nothing for what is broken.

    Args:
      nvml: where NVIDIA devices are read, the driver of this machine if None.
      environ: the environment, ``os.environ`` if None.
      tf, keras: the modules, imported if None.
    """
    environ = os.environ if environ is None else environ
    broken: list[str] = []
    tf = _imported("tensorflow", "pip install lockstep-tf", broken) if tf is None else tf
    # Keras imports its backend at once, so another backend that is not installed shows as a failed import.
    foreign = environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow"
    cure = "unset KERAS_BACKEND" if foreign else "pip install lockstep-tf"
    keras = _imported("keras", cure, broken) if keras is None else keras
    hardware = discover(nvml, environ=environ)
    build: Mapping[str, Any] = {} if tf is None else tf.sysconfig.get_build_info()
    versions = {
        "python": platform.python_version(),
        "tensorflow": None if tf is None else tf.__version__,
        "TensorFlow built with": _build_words(build) if tf is not None else None,
        "keras": None if keras is None else f"{keras.__version__}, backend {keras.backend.backend()}",
        "numpy": _installed("numpy"),
        "NVIDIA driver": hardware.driver_version and f"{hardware.driver_version}, CUDA {hardware.cuda_version}",
    }
    broken += _version_faults(tf, keras)

    devices: dict[str, int] | None = None
    warnings: list[str] = []
    if tf is not None:
        kinds = [device.device_type for device in tf.config.list_physical_devices()]
        devices = {kind: kinds.count(kind) for kind in dict.fromkeys(["CPU", "GPU", *kinds])}
        warnings += compare_gpus(hardware, devices["GPU"], build, missing_cuda_packages())
    if hardware.tpu is not None and hardware.tpu.problem is not None:
        warnings.append(f"a TPU is named in the environment but not found: {hardware.tpu.problem}")

    who = choice = None
    try:
        config = RunConfig()
        cluster = clusters.resolve(config, environ)
        who = cluster.describe()
        tasks = environ.get("SLURM_NTASKS", "")
        if tasks.isdigit() and int(tasks) > 1 and not cluster.workers:
            warnings.append(
                f"SLURM_NTASKS={tasks} but no cluster follows from the settings: every task would train alone; "
                "start it with srun, set TF_CONFIG, or pass --workers and --worker_index"
            )
        if devices is not None:
            has_tpu = hardware.tpu is not None and hardware.tpu.problem is None
            chosen = strategy.choose(config, cluster, devices["GPU"], has_tpu)
            size = f"{chosen.num_replicas} on {chosen.device.upper()}" if chosen.num_replicas else "all TPU cores"
            choice = f"{chosen.kind}, replicas: {size}, because {chosen.reason}"
    except ConfigError as error:
        broken.append(str(error))
    return Report(
        versions=versions,
        hardware=hardware,
        tensorflow_devices=devices,
        environment=cluster_settings(environ),
        cluster=who,
        choice=choice,
        warnings=tuple(warnings),
        broken=tuple(broken),
    )


def compare_gpus(hardware: Hardware, seen: int, build: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
    """What is wrong where driver and TensorFlow disagree about GPUs, with the cure; empty when they agree.

    Args:
      hardware: what the driver says.
      seen: GPUs that TensorFlow lists.
      build: ``tf.sysconfig.get_build_info()``.
      missing: packages with CUDA libraries that TensorFlow asks for and that are not installed.
    """
    if hardware.gpus is None:
        return [f"TensorFlow sees {_gpus(seen)} but the driver: {hardware.nvidia_problem}"] if seen else []
    known, visible = len(hardware.gpus), [gpu.visible for gpu in hardware.gpus].count(True)
    if any(gpu.visible is None for gpu in hardware.gpus):
        return []
    says = f"the driver knows {_gpus(known)}"
    if known and not visible:
        return [f"{says} but CUDA_VISIBLE_DEVICES hides all of them; unset it to use them"]
    if seen == visible:
        return []
    says = f"{says}, {visible} visible here, but TensorFlow sees {seen}"
    if seen:
        return [f"{says}; nvidia-smi tells which is busy, lost or too old"]
    if not build.get("is_cuda_build"):
        return [f"{says}: this TensorFlow was built without CUDA; run: {GPU_CURE}"]
    if missing:
        return [f"{says}: CUDA libraries are missing ({', '.join(missing)}); run: {GPU_CURE}"]
    needs, has = _major(build.get("cuda_version")), _major(hardware.cuda_version)
    if needs is not None and has is not None and has < needs:
        return [
            f"{says}: the driver does CUDA {hardware.cuda_version} and TensorFlow needs {build['cuda_version']}; "
            "install a newer driver from https://www.nvidia.com/drivers"
        ]
    return [
        f"{says}: all CUDA packages are installed but do not load; TensorFlow's log on stderr says which; {GPU_CURE}"
    ]


def missing_cuda_packages() -> list[str]:
    """Packages that ``tensorflow[and-cuda]`` asks for and that are not installed."""
    try:
        wanted = importlib.metadata.requires("tensorflow") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in wanted if "and-cuda" in line]
    return [name for name in names if _installed(name) is None]


def cluster_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment that say who takes part, long values shortened."""
    found = {name: _short(environ[name]) for name in _CLUSTER_VARIABLES if name in environ}
    others = [name for name in environ if name.startswith("SLURM_") and name not in found]
    return found | ({"SLURM_*": f"{len(others)} more, not shown"} if others else {})


def _imported(name: str, cure: str, broken: list[str]) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a half-installed package can raise anything
        text = (str(error).strip() or "no message").splitlines()[0]
        broken.append(f"{name} cannot be imported ({type(error).__name__}: {text}); run: {cure}")
        return None


def _version_faults(tf: Any, keras: Any) -> list[str]:
    faults = []
    low, high = TENSORFLOW_RANGE
    if tf is not None and not low <= _two(tf.__version__) < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        faults.append(f'tensorflow {tf.__version__} but it must be {wanted}; run: pip install "tensorflow{wanted}"')
    if keras is not None and _two(keras.__version__) < (3, 0):
        faults.append(f"keras {keras.__version__} but it must be 3 or newer; run: pip install -U keras")
    if keras is not None and keras.backend.backend() != "tensorflow":
        faults.append(f"keras backend is {keras.backend.backend()} but it must be tensorflow; unset KERAS_BACKEND")
    return faults


def _build_words(build: Mapping[str, Any]) -> str:
    if not build.get("is_cuda_build"):
        return "no CUDA"
    return f"CUDA {build.get('cuda_version', NOT_MEASURED)}, cuDNN {build.get('cudnn_version', NOT_MEASURED)}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _two(version: str) -> tuple[int, int]:
    """``"2.22.0-rc1"`` -> ``(2, 22)``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _major(version: str | None) -> int | None:
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else None


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _short(value: str, limit: int = 70) -> str:
    value = " ".join(value.split())
    return value if len(value) <= limit else value[: limit - 3] + "..."


def _section(title: str, lines: Sequence[str]) -> str:
    wrap = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([title, *(part for line in lines for part in wrap.wrap(line))])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the page, or JSON with ``--json``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m framework.doctor", description="What this machine can do.")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON object")
    as_json = parser.parse_args(argv).json
    report = examine()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
