"""PyTorch with ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.contender import Reporter
from benchmarks.peers import torch as eager
from benchmarks.workload import Workload


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``."""
    eager.train(workload, ends, report, wrap=torch.compile)
