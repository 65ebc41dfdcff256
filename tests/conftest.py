"""What all tests share: four logical CPU devices, and processes that cannot outlive their test."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import pytest

from framework.launcher.ports import HeldPorts

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOGICAL_CPUS = 4


def pytest_configure(config: pytest.Config) -> None:
    # The process that only hands out tests to xdist's workers needs no TensorFlow.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import tensorflow as tf

    # Possible only before the first op of the process, hence here.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is asked of several numbers of replicas is asked of 2, and of the others in the slow set only."""
    asked: dict[str, dict[Any, list[pytest.Item]]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is not None and "replicas" in spec.params:
            asked.setdefault(item.nodeid.partition("[")[0], {}).setdefault(spec.params["replicas"], []).append(item)
    for by_number in asked.values():
        if 2 in by_number:
            for item in [one for number, some in by_number.items() if number != 2 for one in some]:
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """What a module leaves behind stays (graphs, caches), and is millions of objects: not looked through ever again.

    Without it the collector took half a minute in the middle of a test once a process had some GB of graphs.
    """
    yield
    gc.collect()
    gc.freeze()


class Finished(NamedTuple):
    """A process that ended: its exit code (-signal if killed) and what it wrote."""

    code: int
    stdout: str
    stderr: str


def _ports(count: int) -> list[int]:
    # All are held at once, so they differ; and no outgoing connection takes one while a worker loads TensorFlow.
    held = HeldPorts(count)
    held.close()
    return [int(address.rpartition(":")[2]) for address in held.addresses]


def _alive(groups: set[int]) -> list[int]:
    """Processes of the given process groups that still run; a zombie only waits for its parent."""
    alive = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) in groups:
                alive.append(process.pid)
    return alive


def _run_all(
    commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], folder: pathlib.Path, timeout: float
) -> list[Finished]:
    """Runs processes side by side to their end; kills them, with their children, at the limit or on any error."""
    base = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    outputs = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(len(commands))]
    deadline = time.monotonic() + timeout
    try:
        for command, env, (out, err) in zip(commands, envs, outputs):
            # Files, not pipes: a process that fills a pipe nobody reads would stop, and its peers with it.
            with out.open("wb") as stdout, err.open("wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**base, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0.01))
        grace = time.monotonic() + 5.0  # a child may need a moment to see that its parent has gone
        while (left := _alive({p.pid for p in processes})) and time.monotonic() < grace:
            time.sleep(0.1)
        assert not left, f"left running by {commands}: {left}"
    except subprocess.TimeoutExpired:
        ends = [err.read_text(errors="replace")[-2000:] for _, err in outputs if err.exists()]
        pytest.fail(f"still running after {timeout} s: {commands}\n" + "\n---\n".join(ends))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [
        Finished(process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"))
        for process, (out, err) in zip(processes, outputs)
    ]


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """``free_ports(n)``: n different TCP ports of 127.0.0.1 that are free now."""
    return _ports


@pytest.fixture
def run_cli(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """``run_cli(args, timeout=120, env={})``: ``python train.py ARGS`` from the checkout, to its end."""

    def run(args: Sequence[str], *, timeout: float = 120, env: Mapping[str, str] | None = None) -> Finished:
        folder = tmp_path_factory.mktemp("cli")
        return _run_all([[sys.executable, "train.py", *args]], [env or {}], folder, timeout)[0]

    return run


@pytest.fixture
def run_workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Finished]]:
    """``run_workers(n, *args, script="train.py", timeout=180, env={})``: n workers on this machine, with TF_CONFIG."""

    def run(
        n: int, *args: str, script: str = "train.py", timeout: float = 180, env: Mapping[str, str] | None = None
    ) -> list[Finished]:
        workers = [f"127.0.0.1:{port}" for port in _ports(n)]
        envs = [
            {
                **(env or {}),
                "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}),
            }
            for i in range(n)
        ]
        return _run_all([[sys.executable, script, *args]] * n, envs, tmp_path_factory.mktemp("workers"), timeout)

    return run
