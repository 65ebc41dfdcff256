"""N replicas x K micro-batches = one replica x the whole batch, for every kind of model and uneven last batches."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, RunConfig, Trainer
from framework.layers import SyncBatchNormalization
from input_pipelines import from_arrays

STEPS, BATCH, SIZE = 20, 12, 61  # 61 = 5 x 12 + 1: epochs do not fit batches


class Case(Trainer):
    """A small model; subclasses differ in what could go wrong when a batch is split."""

    dtype = "float32"

    def arrays(self) -> Any:
        r = np.random.RandomState(3)
        return r.randn(SIZE, 6).astype(self.dtype), r.randint(0, 3, SIZE)

    def train_data(self) -> Any:
        return from_arrays(self.arrays())

    def layers(self) -> list[Any]:
        return [keras.layers.Dense(8, activation="tanh", dtype=self.dtype)]

    def build_model(self) -> Any:
        return keras.Sequential(
            [keras.Input((6,), dtype=self.dtype), *self.layers(), keras.layers.Dense(3, dtype=self.dtype)]
        )

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y = batch
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=training)))


class Dense(Case):
    pass


class Dense64(Case):
    dtype = "float64"


class Normalised(Case):
    def layers(self) -> list[Any]:
        return [keras.layers.Dense(8, use_bias=False), SyncBatchNormalization(), keras.layers.Activation("tanh")]


class DropoutOff(Case):
    def layers(self) -> list[Any]:
        return [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.0)]


class Masked(Case):
    """Tokens with a mask that leaves some examples without any."""

    def arrays(self) -> Any:
        r = np.random.RandomState(4)
        mask = (np.arange(5)[None] < r.randint(0, 6, SIZE)[:, None]).astype("float32")
        return r.randn(SIZE, 5, 6).astype("float32"), r.randint(0, 3, (SIZE, 5)), mask

    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((5, 6)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y, mask = batch
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=training))
        return LossOutput(loss=loss, weight=mask)


class Embedding(Case):
    def arrays(self) -> Any:
        r = np.random.RandomState(5)
        return r.randint(0, 40, (SIZE, 4)), r.randint(0, 3, SIZE)

    def build_model(self) -> Any:
        layers = [keras.layers.Embedding(40, 5), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])


def run(case: type[Case], replicas: int, micros: int, **changes: Any) -> tuple[list[float], list[np.ndarray]]:
    """Loss of every step and final weights."""
    losses: list[float] = []
    settings = {"train_steps": STEPS, "optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9} | changes
    config = RunConfig(
        global_batch_size=BATCH,
        num_replicas=replicas,
        accumulate_steps=micros,
        device="cpu",
        progress="off",
        **settings,
    )

    class Recording(case):  # type: ignore[valid-type, misc]
        def hooks(self) -> Any:
            from framework import EveryNSteps, Scheduled

            return [Scheduled(EveryNSteps(1), lambda step, values: losses.append(values["loss"]))]

    trainer = Recording(config)
    trainer.train()
    for variable in trainer.model.variables:
        first, *others = trainer.strategy.experimental_local_results(variable.value)
        assert all(np.array_equal(first, other) for other in others), f"replicas differ in {variable.path}"
    return losses, [np.asarray(v) for v in trainer.model.variables]


_whole: dict[Any, Any] = {}


def whole(case: type[Case], micros: int, **changes: Any) -> tuple[list[float], list[np.ndarray]]:
    # Statistics of a batch normalisation are of a micro-batch, so there the reference has the same micro-batches.
    micros = micros if case is Normalised else 1
    key = (case, micros, tuple(changes.items()))
    if key not in _whole:
        _whole[key] = run(case, 1, micros, **changes)
    return _whole[key]


def check(case: type[Case], replicas: int, micros: int, tolerance: float, **changes: Any) -> None:
    losses, weights = run(case, replicas, micros, **changes)
    expected_losses, expected_weights = whole(case, micros, **changes)
    assert len(losses) == len(expected_losses)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    for mine, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


# The whole table runs with -m slow; without, the splits that differ most.
SHORT = {(2, 1), (3, 4), (4, 2)}
SPLITS = [
    pytest.param(n, k, marks=[] if (n, k) in SHORT else [pytest.mark.slow])
    for n, k in itertools.product((1, 2, 3, 4), (1, 2, 4))
]


@pytest.mark.parametrize(("replicas", "micros"), SPLITS)
@pytest.mark.parametrize("case", [Dense, Normalised, DropoutOff, Masked, Embedding])
def test_split_gives_the_whole_batch(case: type[Case], replicas: int, micros: int) -> None:
    check(case, replicas, micros, 1e-5)


@pytest.mark.parametrize(("replicas", "micros"), SPLITS)
def test_split_gives_the_whole_batch_in_float64(replicas: int, micros: int) -> None:
    check(Dense64, replicas, micros, 1e-10)


@pytest.mark.parametrize(("replicas", "micros"), [(2, 1), (3, 4)])
@pytest.mark.parametrize("case", [Dense, Normalised, Masked, Embedding])
@pytest.mark.parametrize("batch", [54, 60])  # 61 examples: a last batch of 7, and one of 1
def test_uneven_last_batch_gives_the_whole_batch(case: type[Case], replicas: int, micros: int, batch: int) -> None:
    losses, weights = run_epoch(case, replicas, micros, batch)
    key = (case, batch, micros if case is Normalised else 1)
    if key not in _whole:
        _whole[key] = run_epoch(case, 1, key[2], batch)
    expected_losses, expected_weights = _whole[key]
    assert len(losses) == 2
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for mine, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def run_epoch(case: type[Case], replicas: int, micros: int, batch: int) -> tuple[list[float], list[np.ndarray]]:
    global BATCH
    before, BATCH = BATCH, batch
    try:
        return run(case, replicas, micros, train_steps=None, train_epochs=1)
    finally:
        BATCH = before
