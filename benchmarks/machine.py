"""What a figure depends on besides the code: machine, versions, commit, environment."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import psutil

PACKAGES = ("tensorflow", "keras", "numpy", "psutil", "torch", "tf-keras", "tf-models-official")
# Variables of the environment that change what is measured.
PREFIXES = ("TF_", "XLA_", "KERAS_", "OMP_", "MKL_", "KMP_", "ONEDNN_", "CUDA_", "NCCL_", "MALLOC_", "GLIBC_", "LD_")

# Of other programs, or only places of files.
OTHERS = ("TF_CLI_", "LD_LIBRARY_PATH")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def circumstances() -> dict[str, Any]:
    """What stands in every result file: date, commit, versions, machine, environment."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(pathlib.Path(__file__).resolve().parent.parent),
        "versions": versions(),
        "machine": machine(),
        "environment": environment(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, operating system."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "platform": platform.platform(),
    }


def load() -> list[float]:
    """Load average over 1, 5 and 15 minutes."""
    return [round(x, 2) for x in psutil.getloadavg()]


def commit(folder: pathlib.Path) -> dict[str, Any]:
    """Commit of the checkout and whether files differ from it; both None outside a checkout."""
    try:
        found = _git(folder, "rev-parse", "HEAD")
        return {"hash": found, "dirty": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"hash": None, "dirty": None}


def environment() -> dict[str, str]:
    """Variables of the environment that TensorFlow and the libraries below it read."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES) and not k.startswith(OTHERS)}


def _git(folder: pathlib.Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
