"""The framework's side: its ``Trainer`` with default settings on a workload, driven by a hook."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from benchmarks.contender import Reporter
from benchmarks.workload import Workload, arrays, build_model, set_threads
from framework import AtSteps, Hook, LossOutput, RunConfig, Scheduled, Trainer
from input_pipelines import from_arrays


class Workbench(Trainer):
    """The workload as a task; one long ``train`` call, cut at the steps that are reported."""

    def __init__(self, config: RunConfig, workload: Workload, ends: Sequence[int], report: Reporter):
        super().__init__(config)
        self._workload, self._ends, self._report = workload, ends, report

    def build_model(self) -> keras.Model:
        return build_model(self._workload)

    def train_data(self) -> Any:
        return from_arrays(arrays(self._workload))

    def eval_data(self) -> Any:
        return from_arrays(arrays(self._workload, "test")) if self._workload.eval_every else None

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        inputs, labels = batch
        logits = model(inputs, training=training)
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def hooks(self) -> Sequence[Scheduled]:
        return [Scheduled(AtSteps(self._ends), lambda step, values: self._report(step, values["loss"]))]


class Seeker(Workbench):
    """The same, evaluated every ``eval_every`` steps; reports the first loss, then what each evaluation tells."""

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        inputs, labels = batch
        logits = model(inputs, training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        right = tf.equal(tf.argmax(logits, -1, labels.dtype), labels)
        return LossOutput(loss=loss, metrics={"accuracy": right, "bits_per_byte": loss / math.log(2.0)})

    def hooks(self) -> Sequence[Scheduled]:
        return [Scheduled(AtSteps([1]), Told(self._workload.figure, self._report))]


class Told(Hook):
    """Reports the loss at its own step, and one figure of each evaluation."""

    def __init__(self, figure: str, report: Reporter):
        self._figure, self._report = figure, report

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Hook``."""
        self._report(step, values["loss"])

    def evaluated(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """See ``Hook``."""
        self._report(step, values[self._figure])


def reach(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender of ``benchmarks.goal``."""
    train(workload, ends, report, Seeker)


def train(workload: Workload, ends: Sequence[int], report: Reporter, task: type[Workbench] = Workbench) -> None:
    """Trains to the last of ``ends`` and reports at each of them. A contender, see ``benchmarks.contender``."""
    set_threads(workload)
    with _run_dir(workload) as run_dir:
        config = RunConfig(
            run_dir=run_dir,
            train_steps=ends[-1],
            global_batch_size=workload.batch,
            seed=workload.seed,
            device="cpu",
            num_replicas=workload.replicas,
            optimizer="adamw",
            learning_rate=workload.learning_rate,
            weight_decay=workload.weight_decay,
            eval_every=workload.eval_every,
            checkpoint_every=workload.checkpoint_every,
            progress="off",
        )
        trainer = task(config, workload, ends, report)
        default = RunConfig().to_dict()
        settings = {k: v for k, v in config.to_dict().items() if v != default[k] and k != "run_dir"}
        report.facts(parameters=sum(v.shape.num_elements() for v in trainer.trainable_variables), settings=settings)
        trainer.train()


@contextlib.contextmanager
def _run_dir(workload: Workload) -> Iterator[str | None]:
    if not workload.checkpoint_every:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder
