"""The framework as worker processes with one replica each: this one is worker 0, and starts the others."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import partners
from benchmarks.contender import Reporter
from benchmarks.workload import Workload


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``; ``workload.replicas`` is the number of workers."""
    addresses = [f"127.0.0.1:{port}" for port in partners.free_ports(workload.replicas)]
    spec = {"workload": workload.to_dict(), "ends": list(ends)}
    for index in range(1, workload.replicas):
        partners.start("benchmarks.workers", spec, TF_CONFIG=_tf_config(addresses, index))
    os.environ["TF_CONFIG"] = _tf_config(addresses, 0)
    _train(workload, ends, report)


def main(argv: Sequence[str]) -> None:
    """Another worker than the first."""
    partners.end_with_first()
    spec = json.loads(argv[0])
    _train(Workload.from_dict(spec["workload"]), spec["ends"], Silent())


class Silent:
    """Stands for a ``Reporter`` in workers whose figures nobody reads."""

    def facts(self, **facts: Any) -> None:
        """Nothing."""

    def __call__(self, step: int, loss: Any) -> None:
        """Nothing."""


def _train(workload: Workload, ends: Sequence[int], report: Any) -> None:
    from benchmarks import trainer

    trainer.train(dataclasses.replace(workload, replicas=1), ends, report)


def _tf_config(addresses: Sequence[str], index: int) -> str:
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})


if __name__ == "__main__":
    main(sys.argv[1:])
