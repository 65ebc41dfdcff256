"""``keras.Model.fit`` with 20 steps an execution."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contender import Reporter
from benchmarks.peers import keras_fit
from benchmarks.workload import Workload


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``."""
    keras_fit.train(workload, ends, report, steps_per_execution=20)
