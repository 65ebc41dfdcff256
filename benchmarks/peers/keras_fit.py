"""``keras.Model.fit``, with Keras's own AdamW, loss and ``MirroredStrategy``, on a ``tf.data`` pipeline."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from benchmarks.bare import batches
from benchmarks.contender import Reporter
from benchmarks.workload import Workload, arrays, build_model, set_threads


class Windows(keras.callbacks.Callback):
    """Reports at the ends of windows.

    Args:
      done: steps before this call of ``fit``.
      ends: steps at which to report.
      report: takes the reports.
    """

    def __init__(self, done: int, ends: Sequence[int], report: Reporter):
        super().__init__()
        self._done, self._ends, self._report = done, ends, report
        self._sum, self._steps = 0.0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """``loss`` is the mean since ``fit`` began; a window's is the difference of two sums."""
        step = batch + 1
        if self._done + step in self._ends:
            total = float(logs["loss"]) * step
            self._report(self._done + step, (total - self._sum) / (step - self._steps))
            self._sum, self._steps = total, step


def train(workload: Workload, ends: Sequence[int], report: Reporter, steps_per_execution: int = 1) -> None:
    """A contender, see ``benchmarks.contender``. The first step runs alone; so does, with many, the first window."""
    if any(end % steps_per_execution for end in ends[1:]):
        raise ValueError(f"windows end at {ends[1:]} but fit runs {steps_per_execution} steps at a time")
    tf.config.set_visible_devices([], "GPU")
    set_threads(workload)
    keras.utils.set_random_seed(workload.seed)
    with _scope(workload):
        model = build_model(workload)
        model.compile(
            optimizer=keras.optimizers.AdamW(workload.learning_rate, weight_decay=workload.weight_decay, epsilon=1e-7),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    report.facts(parameters=sum(v.value.shape.num_elements() for v in model.trainable_variables), settings={})
    cuts = [0, 1, ends[1], ends[-1]] if steps_per_execution > 1 else [0, 1, ends[-1]]
    for i, (low, high) in enumerate(itertools.pairwise(cuts)):
        if i == 2:
            model.steps_per_execution = steps_per_execution
            model.make_train_function(force=True)
        data = batches(workload, first=low, parts=1)
        model.fit(data, steps_per_epoch=high - low, epochs=1, verbose=0, callbacks=[Windows(low, ends, report)])


class Evaluations(keras.callbacks.Callback):
    """Reports the first loss, then what each evaluation tells."""

    def __init__(self, workload: Workload, every: int, report: Reporter):
        super().__init__()
        self._workload, self._every, self._report = workload, every, report
        self._first = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Of the very first step only."""
        if self._first:
            self._first = False
            self._report(1, logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch here is the steps between two evaluations."""
        accuracy = self._workload.figure == "accuracy"
        figure = logs["val_accuracy"] if accuracy else logs["val_loss"] / math.log(2.0)
        self._report((epoch + 1) * self._every, figure)


def reach(workload: Workload, ends: Sequence[int], report: Reporter) -> None:
    """A contender of ``benchmarks.goal``: one call of ``fit`` that evaluates after each of its epochs."""
    tf.config.set_visible_devices([], "GPU")
    set_threads(workload)
    keras.utils.set_random_seed(workload.seed)
    model = build_model(workload)
    model.compile(
        optimizer=keras.optimizers.AdamW(workload.learning_rate, weight_decay=workload.weight_decay, epsilon=1e-7),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"] if workload.figure == "accuracy" else [],
    )
    report.facts(parameters=sum(v.value.shape.num_elements() for v in model.trainable_variables), settings={})
    every = ends[1]
    model.fit(
        batches(workload, parts=1),
        steps_per_epoch=every,
        epochs=len(ends) - 1,
        validation_data=arrays(workload, "test"),
        validation_batch_size=workload.batch,
        verbose=0,
        callbacks=[Evaluations(workload, every, report)],
    )


def _scope(workload: Workload) -> Any:
    if workload.replicas == 1:
        return contextlib.nullcontext()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * workload.replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(workload.replicas)]).scope()
