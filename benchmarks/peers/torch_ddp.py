"""PyTorch's ``DistributedDataParallel`` over gloo: a process and a thread for each replica, this one the first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch
from torch import distributed

from benchmarks.contender import Reporter
from benchmarks.peers.torch import Steps
from benchmarks.process import ROOT
from benchmarks.workload import Workload


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``: starts the other processes and trains as the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    others = []
    for rank in range(1, workload.replicas):
        spec = {"workload": workload.to_dict(), "ends": list(ends), "rank": rank, "port": port}
        command = [sys.executable, "-m", "benchmarks.peers.torch_ddp", json.dumps(spec)]
        # Its standard input ends with this process, and it with that.
        others.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
    steps = _join(workload, 0, port)
    report.facts(parameters=steps.parameters, settings={})
    for end in ends:
        report(end, _mean(steps.run_to(end), workload.replicas))
    for process in others:
        process.wait()


def main(argv: Sequence[str]) -> None:
    """Another process than the first."""
    spec = json.loads(argv[0])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    workload = Workload.from_dict(spec["workload"])
    steps = _join(workload, spec["rank"], spec["port"])
    for end in spec["ends"]:
        _mean(steps.run_to(end), workload.replicas)


def _join(workload: Workload, rank: int, port: int) -> Steps:
    torch.set_num_threads(workload.threads or 1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workload.replicas
    )
    return Steps(workload, torch.nn.parallel.DistributedDataParallel, rank, workload.replicas)


def _mean(loss: torch.Tensor, replicas: int) -> torch.Tensor:
    """Over the processes, whose parts are equally large."""
    distributed.all_reduce(loss)
    return loss / replicas


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
