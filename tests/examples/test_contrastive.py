"""The contrastive example: its loss is over all replicas' examples, whatever the number of replicas."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from examples.contrastive import Contrastive, noisy_view
from framework import ConfigError
from input_pipelines import digits, from_arrays
from tests.examples.runs import assert_close, assert_moved, initial, trained, weights
from tests.helpers import settings

IMAGES = digits.load("train")[0][:48]
FIRST, SECOND = noisy_view(IMAGES, seed=1), noisy_view(IMAGES, seed=2)
STEPS, RATE = 8, 0.5


class InOrder(Contrastive):
    """48 pairs in the order of the data."""

    def train_data(self) -> Any:
        return from_arrays((FIRST, SECOND), shuffle=False)


def batch(step: int, size: int) -> np.ndarray:
    return np.arange(step * size, (step + 1) * size) % len(IMAGES)


def numpy_losses(model: Any, rows: np.ndarray, temperature: float = 0.2) -> np.ndarray:
    """Loss of each pair of the whole batch, written out pair by pair."""

    def embed(images: np.ndarray) -> np.ndarray:
        w1, b1, w2, b2 = (np.asarray(w, np.float64) for w in model.get_weights())
        e = np.maximum(images.reshape(len(images), 64) @ w1 + b1, 0.0) @ w2 + b2
        return e / np.linalg.norm(e, axis=1, keepdims=True)

    first, second = embed(FIRST[rows]), embed(SECOND[rows])
    losses = []
    for i in range(len(rows)):
        to_second = np.exp([first[i] @ s / temperature for s in second])
        to_first = np.exp([second[i] @ f / temperature for f in first])
        losses.append(-np.log(to_second[i] / to_second.sum()) / 2 - np.log(to_first[i] / to_first.sum()) / 2)
    return np.array(losses)


def plain_training(model: Any, size: int) -> list[float]:
    """The same training on the whole batch at once, without the framework: no replica, so nothing to gather."""
    losses = []
    for step in range(STEPS):
        rows = batch(step, size)
        with tf.GradientTape() as tape:
            first, second = (tf.math.l2_normalize(model(x[rows]), axis=1) for x in (FIRST, SECOND))
            logits = tf.matmul(first, second, transpose_b=True) / 0.2
            labels = tf.range(size)
            ways = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x) for x in (logits, tf.transpose(logits))]
            loss = tf.reduce_mean(ways)
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
            v.assign(v - RATE * g)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("replicas", "size"), [(1, 12), (2, 12), (3, 10), (4, 2)])
def test_replicas_give_the_loss_and_the_weights_of_the_whole_batch(
    tmp_path: pathlib.Path, replicas: int, size: int
) -> None:
    # 10 examples over 3 replicas are 4, 3 and 3; 2 over 4 leave two replicas without any.
    model = initial(InOrder)
    start = weights(model)
    by_hand = numpy_losses(model, batch(0, size)).mean()
    expected = plain_training(model, size)
    trainer, records = trained(
        InOrder, tmp_path, replicas, global_batch_size=size, train_steps=STEPS, learning_rate=RATE
    )
    losses = [r["loss"] for r in records]
    np.testing.assert_allclose(losses[0], by_hand, rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[0] != pytest.approx(losses[-1], rel=0.01)
    assert_moved(start, weights(trainer.model))
    assert_close(weights(trainer.model), weights(model))


def test_a_loss_within_each_replica_would_be_another(tmp_path: pathlib.Path) -> None:
    # What the gathering is for: the mean over two halves, each looked at alone, is not the loss of the whole.
    model, rows = initial(InOrder), batch(0, 12)
    halves = np.concatenate([numpy_losses(model, half) for half in (rows[:6], rows[6:])]).mean()
    _, records = trained(InOrder, tmp_path, 2, train_steps=1)
    assert abs(records[0]["loss"] - halves) > 0.3


def test_refuses_micro_batches_which_would_change_the_loss() -> None:
    with pytest.raises(ConfigError, match=r"accumulate_steps=2 but this loss compares all examples"):
        InOrder(settings(accumulate_steps=2)).train()


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_gives_the_share_of_right_nearest_neighbours(replicas: int) -> None:
    trainer = Contrastive(settings(num_replicas=replicas, global_batch_size=100))
    found = trainer.evaluate()
    w1, b1, w2, b2 = trainer.model.get_weights()
    known, images = (
        (lambda e: e / np.linalg.norm(e, axis=1, keepdims=True))(np.maximum(x.reshape(-1, 64) @ w1 + b1, 0.0) @ w2 + b2)
        for x in (digits.load("train")[0], digits.load("test")[0])
    )
    right = digits.load("train")[1][np.argmax(images @ known.T, 1)] == digits.load("test")[1]
    assert found["examples"] == 360
    # Two neighbours may be equally near but for rounding: one example more or less.
    assert found["neighbour_accuracy"] == pytest.approx(right.mean(), abs=1.5 / 360)
