"""N replicas equal one: losses of 20 steps and the weights after them, for any split, feed and kind of loss."""

from __future__ import annotations

import functools
import tempfile
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, RunConfig, Sum, Trainer, optimizers
from input_pipelines import from_arrays
from tests.helpers import Toy, assert_copies_equal, column, settings


class Problem(Trainer):
    """A problem as a pipeline, a dataset of global batches or a function of InputContext: ``feed`` says which."""

    feed: ClassVar[str] = "pipeline"

    def arrays(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=0.1, momentum=0.5)  # not Adam, which hides a wrong scale

    def train_data(self) -> Any:
        arrays, batch = self.arrays(), self.config.global_batch_size
        if self.feed == "pipeline":
            return from_arrays(arrays, shuffle=False)
        whole = tf.data.Dataset.from_tensor_slices(arrays)
        if self.feed == "dataset":
            return whole.batch(batch)

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return whole.repeat().batch(context.get_per_replica_batch_size(batch))

        return make


class Perceptron(Problem):
    """Dense layers with an L2 penalty; 12 examples."""

    def build_model(self) -> keras.Model:
        hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(3)])

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(1)
        return {"x": random.normal(size=(12, 4)).astype(np.float32), "y": random.integers(0, 3, 12)}

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        logits = model(batch["x"], training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
        hit = tf.equal(tf.argmax(logits, 1), batch["y"])
        return LossOutput(loss=loss, metrics={"accuracy": hit, "rows": Sum(tf.ones_like(loss))})


class Tokens(Problem):
    """Losses [batch, 5] of which only the first few of each row count: from 0 to 5 tokens."""

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((5,), dtype="int32"), keras.layers.Embedding(7, 4), keras.layers.Dense(7)])

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(2)
        return {"tokens": random.integers(0, 7, (12, 5)).astype(np.int32), "length": np.arange(12, dtype=np.int32) % 6}

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        tokens = batch["tokens"]
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.roll(tokens, -1, 1), model(tokens, training=training))
        mask = tf.sequence_mask(batch["length"], 5)
        rows = tf.ones_like(tokens[:, 0])
        return LossOutput(loss=loss, weight=mask, metrics={"tokens": Sum(mask), "rows": Sum(rows)})


class Five(Perceptron):
    """Five examples."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[:5] for name, array in super().arrays().items()}


CASES: dict[str, tuple[type[Problem], dict[str, Any]]] = {
    "perceptron": (Perceptron, {"train_steps": 20, "global_batch_size": 12}),
    "tokens": (Tokens, {"train_steps": 20, "global_batch_size": 6}),
    # 5 examples, batch 4: each pass over the dataset is a batch of 4 and one of 1.
    "five": (Five, {"train_steps": None, "train_epochs": 10, "global_batch_size": 4}),
    # 12 examples, batch 7: 7 over 3 replicas is 3, 2, 2; a batch spans two epochs.
    "seven": (Perceptron, {"train_steps": 20, "global_batch_size": 7}),
}


@functools.cache
def trained(case: str, replicas: int, feed: str) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses and rows of each step, and the weights after the last."""
    task, changes = CASES[case]

    class Fed(task):  # type: ignore[misc, valid-type]
        pass

    Fed.feed, Fed.__name__ = feed, task.__name__
    with tempfile.TemporaryDirectory() as folder:
        config: RunConfig = settings(run_dir=folder, num_replicas=replicas, **changes)
        trainer = Fed(config)
        trainer.train()
        assert_copies_equal(trainer)
        weights = {v.path: v.numpy() for v in trainer.model.variables}
        return column(folder, "loss"), column(folder, "rows"), weights


@pytest.mark.parametrize(
    ("case", "replicas", "feed"),
    [
        *[("perceptron", n, "pipeline") for n in (2, 3, 4)],
        *[("tokens", n, "pipeline") for n in (2, 3)],
        ("tokens", 4, "pipeline"),  # 6 rows over 4 replicas: 2, 2, 1, 1
        *[("five", n, "dataset") for n in (2, 3, 4)],
        *[("seven", n, "pipeline") for n in (2, 3, 4)],
        ("perceptron", 3, "function"),
        ("tokens", 2, "function"),
    ],
)
def test_twenty_steps_on_n_replicas_equal_twenty_on_one(case: str, replicas: int, feed: str) -> None:
    loss, rows, weights = trained(case, replicas, feed)
    one = "dataset" if feed == "dataset" else "pipeline"
    right_loss, right_rows, right_weights = trained(case, 1, one)
    assert len(loss) == 20
    assert rows == right_rows
    np.testing.assert_allclose(loss, right_loss, rtol=1e-5)
    assert right_loss[-1] < right_loss[0]  # it learns, or equality would say little
    for name, value in right_weights.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_whole_set_as_one_batch_is_the_same_through_every_feed() -> None:
    for feed in ("function", "pipeline"):
        np.testing.assert_allclose(
            trained("perceptron", 3, feed)[0], trained("perceptron", 1, "pipeline")[0], rtol=1e-5
        )


def test_uneven_batches_are_split_as_stated() -> None:
    assert trained("five", 2, "dataset")[1] == [4.0, 1.0] * 10
    assert trained("seven", 3, "pipeline")[1] == [7.0] * 20


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("feed", ["pipeline", "dataset"])
def test_b36_five_examples_in_batches_of_4_give_the_losses_of_one_device(
    tmp_path_factory: pytest.TempPathFactory, feed: str, replicas: int
) -> None:
    """Loss w * x for x = 1..5, rate 0.1 and w = 1: 2.5, then w = 0.75 and the loss of the one example is 3.75."""

    class FiveNumbers(Toy):
        xs, rate = np.arange(1, 6, dtype=np.float32), 0.1

        def train_data(self) -> Any:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(4) if feed == "dataset" else super().train_data()

    folder = tmp_path_factory.mktemp("five")
    trainer = FiveNumbers(settings(run_dir=folder, train_steps=None, train_epochs=1, num_replicas=replicas))
    trainer.train()
    assert (trainer.step, trainer.examples_seen) == (2, 5)
    assert column(folder, "loss") == pytest.approx([2.5, 3.75], rel=1e-6)
    assert trainer.model.w.numpy() == pytest.approx(0.25, rel=1e-6)
    assert_copies_equal(trainer)
