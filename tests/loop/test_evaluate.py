"""Evaluation: every example exactly once, whatever the batch, the number of replicas and the kind of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Sum
from input_pipelines import from_arrays
from tests.helpers import Toy, column, decode_ids, ids_figure, settings


class Ten(Toy):
    """Evaluation of the ids 0..9; each example's loss is its id."""

    xs = np.ones(8, np.float32)
    count = 10
    kind = "pipeline"

    def eval_data(self) -> Any:
        ids, batch = np.arange(self.count, dtype=np.float32), self.config.eval_batch_size
        if self.kind == "pipeline":
            return from_arrays(ids)  # shuffled in training only
        whole = tf.data.Dataset.from_tensor_slices(ids).batch(batch)
        return whole if self.kind == "dataset" else lambda context: whole

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        if training:
            return LossOutput(loss=0.0 * model.w * batch)
        metrics = {"sum": Sum(batch), "ids": ids_figure(tf.minimum(batch, 49.0)), "small": batch < 3}
        return LossOutput(loss=model.w * batch, metrics=metrics)


@pytest.mark.parametrize(
    ("kind", "replicas", "batch"),
    [
        *[("pipeline", 1, b) for b in (1, 3, 10, 64)],
        *[("pipeline", n, b) for n, b in ((2, 4), (3, 7), (4, 3))],
        ("dataset", 1, 4),
        ("dataset", 2, 4),
        ("dataset", 3, 7),
        ("function", 1, 3),
        ("function", 2, 3),
    ],
)
def test_b15_ids_0_to_9_sum_to_45_for_any_batch_and_replicas(kind: str, replicas: int, batch: int) -> None:
    class Kind(Ten):
        pass

    Kind.kind = kind
    trainer = Kind(settings(num_replicas=replicas, eval_batch_size=batch))
    for _ in range(2):  # the second time the same again, and no new trace
        result = trainer.evaluate()
        assert decode_ids(result.pop("ids")) == list(range(10))
        assert result == {
            "loss": pytest.approx(4.5, rel=1e-6),
            "sum": 45.0,
            "small": pytest.approx(0.3, rel=1e-6),
            "examples": 10.0,
        }


@pytest.mark.parametrize("count", [63, 64, 65, 128, 130])
@pytest.mark.parametrize("kind", ["pipeline", "dataset"])
def test_b15_more_batches_than_one_call_of_the_loop_takes(count: int, kind: str) -> None:
    """The compiled loop is called for 64 batches at a time."""

    class Many(Ten):
        pass

    Many.count, Many.kind = count, kind
    result = Many(settings(eval_batch_size=1)).evaluate()
    assert (result["sum"], result["examples"]) == (count * (count - 1) / 2, count)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b15_the_same_within_training_and_after(tmp_path: Any, replicas: int) -> None:
    config = settings(run_dir=tmp_path, eval_every=2, eval_batch_size=3, num_replicas=replicas)
    result = Ten(config).train()
    assert result["eval/sum"] == 45.0
    assert column(tmp_path, "sum", "eval") == [45.0, 45.0]


def test_an_evaluation_does_not_move_the_weights_nor_the_training_data(tmp_path: Any) -> None:
    class Moving(Ten):
        rate = 0.1
        xs = np.arange(1, 17, dtype=np.float32)

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.w * batch)

    losses = []
    for name, every in (("often", 1), ("never", 0)):
        trainer = Moving(settings(run_dir=tmp_path / name, eval_every=every, eval_batch_size=4))
        trainer.train(evaluate=bool(every))
        losses.append((column(tmp_path / name, "loss"), trainer.model.w.numpy()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_c046_a_perfect_model_scores_1_on_every_number_of_replicas(replicas: int) -> None:
    class Perfect(Ten):
        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(
                loss=0 * model.w * batch, metrics={"accuracy": tf.equal(batch, batch), "n": Sum(batch >= 0)}
            )

    result = Perfect(settings(num_replicas=replicas, eval_batch_size=4)).evaluate()
    assert result == {"loss": 0.0, "accuracy": 1.0, "n": 10.0, "examples": 10.0}


def test_c048_a_mean_over_uneven_batches_is_that_of_the_examples() -> None:
    class Uneven(Ten):
        def eval_data(self) -> Any:
            return from_arrays(np.float32([1, 1, 1, 1, 6]))

    assert Uneven(settings(eval_batch_size=4)).evaluate()["loss"] == 2.0  # not (1 + 6) / 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_c052_a_set_smaller_than_a_batch_is_evaluated(replicas: int) -> None:
    class Three(Ten):
        count = 3

    result = Three(settings(eval_batch_size=8, num_replicas=replicas)).evaluate()
    assert (result["sum"], result["examples"]) == (3.0, 3.0)


def test_a_set_whose_weights_are_all_zero_has_no_mean(tmp_path: Any) -> None:
    class Weightless(Ten):
        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model.w * batch, weight=1.0 if training else 0.0)

    result = Weightless(settings(run_dir=tmp_path, eval_batch_size=4)).train()
    assert np.isnan(result["eval/loss"])  # and not 0
    assert column(tmp_path, "loss", "eval") == [None]
