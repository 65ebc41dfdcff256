"""PyTorch, eager: data resident as tensors, channels last for images, the fused AdamW."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import start
from benchmarks.contender import Reporter
from benchmarks.peers import torch_networks
from benchmarks.workload import Workload

Wrap = Callable[[nn.Module], Any]


def train(workload: Workload, ends: Sequence[int], report: Reporter, wrap: Wrap = lambda model: model) -> None:
    """A contender, see ``benchmarks.contender``.

    Args:
      workload: what it trains.
      ends: steps at which it reports.
      report: takes the reports.
      wrap: makes of the network what is called.
    """
    torch.set_num_threads(workload.threads or len(os.sched_getaffinity(0)))
    steps = Steps(workload, wrap)
    report.facts(parameters=steps.parameters, settings={})
    for end in ends:
        report(end, steps.run_to(end))


def reach(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender of ``benchmarks.goal``: reports the first loss, then what each evaluation tells."""
    torch.set_num_threads(workload.threads or len(os.sched_getaffinity(0)))
    steps = Steps(workload, lambda model: model)
    report.facts(parameters=steps.parameters, settings={})
    report(1, steps.run_to(1))
    for end in ends[1:]:
        steps.run_to(end)
        report(end, steps.evaluate())


class Steps:
    """The training of one process, which takes its rows of each batch.

    Args:
      workload: what is trained.
      wrap: makes of the network what is called.
      rank: of this process.
      world: processes that share a batch.
    """

    def __init__(self, workload: Workload, wrap: Wrap, rank: int = 0, world: int = 1):
        values, order = start.weights(workload.start)
        share = workload.batch // world
        self._order = torch.from_numpy(order[:, rank * share : (rank + 1) * share].copy())
        inputs, labels = (torch.from_numpy(a) for a in start.data(workload))
        if workload.network == "resnet20":
            inputs = inputs.permute(0, 3, 1, 2)  # channels last in memory, as torch's convolutions like it best
        self._inputs, self._labels = (inputs.long() if inputs.dtype == torch.int32 else inputs), labels.long()
        network = torch_networks.build(workload, values)
        self.parameters = sum(p.numel() for p in network.parameters())
        self._optimizer = torch.optim.AdamW(
            network.parameters(), workload.learning_rate, eps=1e-7, weight_decay=workload.weight_decay, fused=True
        )
        self._model, self._done = wrap(network), 0
        self._workload = workload

    def run_to(self, end: int) -> Any:
        """Trains to step ``end`` and returns the mean loss since the last call, a scalar tensor."""
        total, begun = torch.zeros([]), self._done
        for step in range(begun, end):
            rows = self._order[step]
            logits = self._model(self._inputs[rows])
            labels = self._labels[rows]
            loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
        self._done = end
        return total / (end - begun)

    def evaluate(self) -> float:
        """The workload's figure on unseen examples."""
        inputs, labels = (torch.from_numpy(a).long() if a.dtype.kind == "i" else torch.from_numpy(a)
                          for a in start.data(self._workload, "test"))  # fmt: skip
        total = 0.0
        self._model.eval()
        with torch.no_grad():
            for rows in torch.arange(len(inputs)).split(self._workload.batch):
                logits, wanted = self._model(inputs[rows]), labels[rows]
                if self._workload.figure == "accuracy":
                    total += float((logits.argmax(1) == wanted).sum())
                else:
                    loss = functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="sum")
                    total += float(loss) / math.log(2.0)
        self._model.train()
        return total / labels.numel()
