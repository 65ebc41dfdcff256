"""PyTorch's ``DistributedDataParallel`` over gloo: a process and a thread for each replica, this one the first."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
from torch import distributed

from benchmarks import partners
from benchmarks.contender import Reporter
from benchmarks.peers.torch import Steps
from benchmarks.workload import Workload


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``: starts the other processes and trains as the first."""
    [port] = partners.free_ports(1)
    for rank in range(1, workload.replicas):
        spec = {"workload": workload.to_dict(), "ends": list(ends), "rank": rank, "port": port}
        partners.start("benchmarks.peers.torch_ddp", spec)
    steps = _join(workload, 0, port)
    report.facts(parameters=steps.parameters, settings={})
    for end in ends:
        report(end, _mean(steps.run_to(end), workload.replicas))


def main(argv: Sequence[str]) -> None:
    """Another process than the first."""
    partners.end_with_first()
    spec = json.loads(argv[0])
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


if __name__ == "__main__":
    main(sys.argv[1:])
