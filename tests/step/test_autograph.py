"""AutoGraph: users may write ``if`` and ``for`` over tensors anywhere, and nothing of the framework is converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from framework import LossOutput, Trainer
from input_pipelines import from_arrays
from tests.helpers import Toy, ToyWithEval, settings


def doubled_if_large(x: tf.Tensor) -> tf.Tensor:
    """A helper of the user's, called by converted code: it is converted too."""
    if tf.reduce_sum(x) > 4.0:
        return 2.0 * x
    return x


class Written(ToyWithEval):
    """Python control flow over tensors in each method that is traced."""

    xs = np.float32([1, 1, 4, 4])
    eval_xs = np.float32([1, 4])

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        total = tf.zeros([])
        for row in batch:
            total += row
        x = doubled_if_large(batch) if total > 0.0 else tf.zeros_like(batch)
        return LossOutput(loss=model.w * x)

    def train_step(self, batch: Any) -> Any:
        if tf.reduce_max(batch) > 100.0:
            batch = batch * 0.0
        sums = self.reduce(self.gradients(batch))
        self.apply(sums)
        return sums

    def eval_step(self, batch: Any) -> Any:
        count = 0.0
        for _ in tf.range(len(batch)):
            count += 1.0
        return {"rows": (count, 1.0)}


@pytest.mark.parametrize(("replicas", "micros", "loss"), [(1, 1, 5.0), (2, 1, (1 + 1 + 8 + 8) / 4), (1, 2, 18 / 4)])
def test_users_write_python_over_tensors(replicas: int, micros: int, loss: float) -> None:
    trainer = Written(settings(num_replicas=replicas, accumulate_steps=micros, train_steps=1))
    # One batch of 1, 1, 4, 4 is large as a whole; of its halves only the second is.
    assert trainer.train(evaluate=False)["loss"] == pytest.approx(loss)
    assert trainer.evaluate()["rows"] == 2.0 / replicas


def test_a_method_of_a_subclass_may_call_the_frameworks() -> None:
    class Calls(Toy):
        def train_step(self, batch: Any) -> Any:
            if tf.reduce_sum(batch) > 1e9:
                batch = -batch
            return super().train_step(batch)

    assert Calls(settings(train_steps=2)).train()["loss"] == pytest.approx((5 + 6 + 7 + 8) / 4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_of_the_framework_is_converted(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    before = api._convert_actual

    def recorded(entity: Any, context: Any) -> Any:
        converted.append(f"{entity.__module__}.{entity.__qualname__}")
        return before(entity, context)

    monkeypatch.setattr(api, "_convert_actual", recorded)
    Written(settings(num_replicas=replicas, train_steps=1)).train()
    assert any(name.endswith("Written.compute_loss") for name in converted)  # the recording works
    assert [n for n in converted if n.startswith(("framework", "input_pipelines"))] == []


def test_input_is_not_converted_either(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Any] = []
    monkeypatch.setattr(api, "_convert_actual", lambda entity, context: converted.append(entity))
    from framework import BatchPlan

    for batch in (4, 5):
        plan = BatchPlan(global_batch_size=batch, num_replicas=2, local_replicas=2)
        next(iter(from_arrays(np.float32([1, 2, 3])).batches(plan)))
    assert converted == []


def test_a_step_of_the_base_class_is_the_frameworks() -> None:
    assert Trainer.train_step.__module__.startswith("framework.")
