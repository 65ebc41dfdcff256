"""SimCLR: the loss against NumPy, over replicas with unequal parts, and what the probe may not change."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from models.simclr import nt_xent, simclr
from models.simclr_task import SimClr
from tests.helpers import mirrored, per_replica, settings


def by_hand(first: np.ndarray, second: np.ndarray, heat: float) -> np.ndarray:
    """Equation 1 and algorithm 1 of the paper, pair by pair."""
    z = np.concatenate([first, second]).astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    n = len(first)
    term = []
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        others = sum(np.exp(z[i] @ z[k] / heat) for k in range(2 * n) if k != i)
        term.append(-np.log(np.exp(z[i] @ z[partner] / heat) / others))
    return (np.array(term[:n]) + np.array(term[n:])) / 2


def test_the_loss_is_that_of_the_paper_and_its_gradient_that_of_one_replica() -> None:
    numbers = np.random.default_rng(0)
    first, second = (numbers.normal(size=[5, 4]).astype(np.float32) for _ in range(2))
    second += 2 * first

    def run(replicas: int, bounds: list[int]) -> tuple[np.ndarray, np.ndarray]:
        strategy = mirrored(replicas)
        parts = [(first[a:b], second[a:b]) for a, b in itertools.pairwise(bounds)]

        @tf.function
        def step(values: Any) -> Any:
            def one(a: tf.Tensor, b: tf.Tensor) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch([a, b])
                    loss, _ = nt_xent(a, b, 0.5)
                    total = tf.reduce_sum(loss)
                return loss, tape.gradient(total, [a, b])

            return strategy.run(one, args=values)

        loss, gradients = step(per_replica(strategy, parts))
        joined = [np.concatenate([t.numpy() for t in strategy.experimental_local_results(g)]) for g in gradients]
        return np.concatenate([t.numpy() for t in strategy.experimental_local_results(loss)]), np.array(joined)

    alone, slope = run(1, [0, 5])
    np.testing.assert_allclose(alone, by_hand(first, second, 0.5), rtol=1e-5)
    split, split_slope = run(2, [0, 3, 5])
    np.testing.assert_allclose(split, alone, rtol=1e-5)
    np.testing.assert_allclose(split_slope, slope, atol=1e-6)


def test_the_probe_changes_no_feature() -> None:
    model = simclr(8, image_size=8, channels=1, classes=10, width=4)
    with tf.GradientTape() as tape:
        _, logits = model(tf.random.stateless_normal([4, 8, 8, 1], (1, 2)), training=True)
        loss = tf.reduce_sum(logits**2)
    variables = model.trainable_variables
    found = {v.path for v, g in zip(variables, tape.gradient(loss, [v.value for v in variables])) if g is not None}
    assert found == {"probe/kernel", "probe/bias"}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"accumulate_steps": 2}, {}, "accumulate_steps=2 but this loss compares all examples"),
        ({}, {"temperature": 0.0}, r"temperature=0\.0 but it must be above 0"),
        ({}, {"color": 3.0}, r"color=3\.0"),
        ({}, {"depth": 9}, "depth=9 but it must be 6n"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assert SimClr(settings(**config), **options).model


@pytest.mark.slow
def test_an_export_gives_the_features_below_the_embedding(tmp_path: Any) -> None:
    task = SimClr(settings(run_dir=tmp_path / "run", train_steps=1), depth=8, width=4)
    result = task.train()
    assert result["eval/examples"] == 360 and 0.0 <= result["eval/accuracy"] <= 1.0
    served = tf.saved_model.load(task.export() + "/saved_model").signatures["serving_default"]
    assert served(inputs=tf.zeros([3, 8, 8, 1], tf.uint8))["outputs"].shape == [3, 64]
