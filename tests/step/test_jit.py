"""``jit=on``: XLA over the local gradients gives the numbers it gives without."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, EveryNSteps, LossOutput, Scheduled, Trainer
from framework.layers import SyncBatchNormalization
from input_pipelines import from_arrays
from tests.helpers import assert_copies_equal, copies, settings

X = np.random.RandomState(0).randn(40, 5).astype(np.float32)
Y = np.random.RandomState(1).randint(0, 3, 40)


class Dense(Trainer):
    norm: Any = None

    def build_model(self) -> Any:
        norm = [self.norm()] if self.norm else []
        hidden = keras.layers.Dense(8, activation="tanh")
        return keras.Sequential([keras.Input((5,)), hidden, *norm, keras.layers.Dense(3)])

    def train_data(self) -> Any:
        return from_arrays((X, Y))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y = batch
        logits = model(x, training=training)
        hit = tf.equal(tf.argmax(logits, 1, y.dtype), y)
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), metrics={"accuracy": hit})

    def hooks(self) -> Any:
        self.losses: list[float] = []
        return [Scheduled(EveryNSteps(1), lambda step, values: self.losses.append(values["loss"]))]


class Normalised(Dense):
    norm = keras.layers.BatchNormalization


class Synchronised(Dense):
    norm = SyncBatchNormalization


class Dropped(Dense):
    norm = functools.partial(keras.layers.Dropout, 0.5)


@functools.cache
def train(kind: type[Dense], replicas: int, jit: str, **changes: Any) -> Dense:
    usual = {"num_replicas": replicas, "global_batch_size": 8, "train_steps": 6, "optimizer": "sgd"}
    trainer = kind(settings(**{**usual, "learning_rate": 0.1, "jit": jit, **changes}))
    trainer.results = trainer.train()  # type: ignore[attr-defined]
    assert_copies_equal(trainer)
    return trainer


def assert_same(mine: Dense, right: Dense, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(mine.losses, right.losses, rtol=tolerance)
    assert mine.results == pytest.approx(right.results, rel=tolerance)  # type: ignore[attr-defined]
    for name, value in copies(right)[0].items():
        np.testing.assert_allclose(copies(mine)[0][name], value, rtol=1e-4, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", [Dense, Normalised])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_numbers_are_those_without(kind: type[Dense], replicas: int) -> None:
    assert_same(train(kind, replicas, "on"), train(kind, replicas, "off"))
    assert train(kind, replicas, "on").stepper.jit is True


@pytest.mark.slow
def test_with_micro_batches_of_uneven_size() -> None:
    changes = {"accumulate_steps": 3, "global_batch_size": 7}
    assert_same(train(Dense, 2, "on", **changes), train(Dense, 2, "off", **changes))


@pytest.mark.slow
def test_with_an_embedding_whose_gradient_is_sparse() -> None:
    class Embedded(Dense):
        def build_model(self) -> Any:
            layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
            return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])

        def train_data(self) -> Any:
            return from_arrays((np.random.RandomState(2).randint(0, 50, (40, 5)), Y))

    assert_same(train(Embedded, 2, "on"), train(Embedded, 2, "off"))


@pytest.mark.slow
def test_dropout_masks_differ_between_steps_and_replicas_stay_equal() -> None:
    trainer = train(Dropped, 2, "on")
    assert len(set(trainer.losses)) == len(trainer.losses)
    assert np.isfinite(trainer.losses).all()


def test_a_forward_pass_that_communicates_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"jit=on but the model reduces over replicas.*--jit=off"):
        train(Synchronised, 2, "on")


def test_auto_says_what_it_chose_and_why() -> None:
    trainer = Dense(settings(num_replicas=2, jit="auto"))
    (line,) = [line for line in trainer.describe() if line.startswith("jit:")]
    assert line.startswith(f"jit: {'on' if trainer.stepper.jit else 'off'} (") and len(line) > 20
    assert not any(line.startswith("jit:") for line in Dense(settings(jit="off")).describe())
