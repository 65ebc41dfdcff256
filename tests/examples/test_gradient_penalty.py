"""The gradient penalty example: differentiated twice, per example, so any split of the batch gives the same."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from examples.gradient_penalty import GradientPenalty
from input_pipelines import digits, from_arrays
from tests.examples.runs import assert_close, assert_moved, initial, trained, weights
from tests.helpers import settings

IMAGES, LABELS = (a[:60] for a in digits.load("train"))
WHOLE: dict[int, Any] = {}


class InOrder(GradientPenalty):
    """60 examples in the order of the data."""

    def train_data(self) -> Any:
        return from_arrays((IMAGES, LABELS), shuffle=False)


def numpy_loss(values: list[np.ndarray], strength: float = 1.0, rows: int = 12) -> tuple[float, np.ndarray]:
    """Mean loss of the first rows and the gradient of each cross-entropy at its image, ``[rows, 64]``; float64."""
    w1, b1, w2, b2 = (np.asarray(v, np.float64) for v in values)
    x, y = IMAGES[:rows].reshape(rows, 64).astype(np.float64), np.eye(10)[LABELS[:rows]]
    hidden = x @ w1 + b1
    logits = np.maximum(hidden, 0.0) @ w2 + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    slopes = ((p - y) @ w2.T * (hidden > 0)) @ w1.T
    return float((-np.log((p * y).sum(1)) + strength * (slopes**2).sum(1)).mean()), slopes


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_first_step_is_the_one_worked_out_in_numpy(tmp_path: pathlib.Path, replicas: int) -> None:
    before = initial(InOrder).get_weights()
    trainer, records = trained(InOrder, tmp_path, replicas, train_steps=1)
    loss, slopes = numpy_loss(before)
    assert records[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert records[0]["slope"] == pytest.approx(np.linalg.norm(slopes, axis=1).mean(), rel=1e-5)
    # The second differentiation: the step along random directions against central differences of the NumPy loss, so
    # close together that no hidden unit switches in between.
    step = [(a - b) / -0.1 for a, b in zip(trainer.model.get_weights(), before)]
    random = np.random.default_rng(0)
    for _ in range(3):
        way = [random.normal(size=w.shape) for w in before]
        ends = [numpy_loss([w + h * d for w, d in zip(before, way)])[0] for h in (1e-8, -1e-8)]
        assert sum((s * d).sum() for s, d in zip(step, way)) == pytest.approx((ends[0] - ends[1]) / 2e-8, rel=1e-3)


@pytest.mark.parametrize(("replicas", "micros"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_any_split_of_the_batch_gives_the_same(tmp_path: pathlib.Path, replicas: int, micros: int) -> None:
    settings = {"train_steps": 20, "global_batch_size": 16}
    if not WHOLE:
        WHOLE[0] = trained(InOrder, tmp_path / "whole", 1, **settings)
    whole, expected = WHOLE[0]
    trainer, records = trained(InOrder, tmp_path, replicas, accumulate_steps=micros, **settings)
    for name in ("loss", "slope", "accuracy"):
        np.testing.assert_allclose([r[name] for r in records], [r[name] for r in expected], rtol=1e-5)
    assert_moved(weights(initial(InOrder)), weights(trainer.model))
    assert_close(weights(trainer.model), weights(whole.model))


def test_the_penalty_makes_the_loss_flatter_at_the_images(tmp_path: pathlib.Path) -> None:
    class Strong(InOrder):
        def __init__(self, config: Any) -> None:
            super().__init__(config, strength=10.0)

    class Without(InOrder):
        def __init__(self, config: Any) -> None:
            super().__init__(config, strength=0.0)

    settings = {"train_steps": 200, "global_batch_size": 30, "learning_rate": 0.05, "log_every": 200}
    slopes = [trained(kind, tmp_path, 1, **settings)[1][-1]["slope"] for kind in (Strong, Without)]
    assert slopes[0] < 0.7 * slopes[1]


def test_the_attack_moves_each_pixel_by_the_sign_of_its_slope() -> None:
    class Seen(InOrder):
        def eval_data(self) -> Any:
            return from_arrays((IMAGES, LABELS))

    trainer = Seen(settings(num_replicas=2, global_batch_size=9), attack=0.3)
    found = trainer.evaluate()
    w1, b1, w2, b2 = values = trainer.model.get_weights()
    moved = IMAGES.reshape(60, 64) + 0.3 * np.sign(numpy_loss(values, rows=60)[1])
    answers = np.argmax(np.maximum(moved @ w1 + b1, 0.0) @ w2 + b2, 1)
    assert found["attacked_accuracy"] == pytest.approx((answers == LABELS).mean())
    assert found["attacked_accuracy"] < found["accuracy"]
