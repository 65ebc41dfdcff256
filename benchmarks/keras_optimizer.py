"""The framework's trainer with Keras 3's AdamW instead of its own: what the fused update ops save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from benchmarks import trainer
from benchmarks.contender import Reporter
from benchmarks.workload import Workload


class KerasUpdated(trainer.Workbench):
    """The same task, updated by a Keras optimizer through the framework's adapter."""

    def build_optimizer(self) -> Any:
        return keras.optimizers.AdamW(
            self.config.learning_rate, weight_decay=self.config.weight_decay, beta_1=0.9, beta_2=0.999, epsilon=1e-7
        )


def train(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender, see ``benchmarks.contender``."""
    trainer.train(workload, ends, report, task=KerasUpdated)
