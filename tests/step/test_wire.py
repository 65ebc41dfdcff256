"""Gradients in half precision on the wire: rounding within its bound, no overflow, nothing else rounded."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Reduction, Trainer, gradients, optimizers, reduce
from framework.step.reduce import all_reduce_sum
from input_pipelines import from_arrays
from tests.helpers import assert_copies_equal, copies, mirrored, per_replica, settings

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of one rounding
WIDTH = 50
X = np.random.RandomState(0).randn(8, WIDTH).astype(np.float32)


class Linear(Trainer):
    """Loss <w, x>: its gradient is the mean of the rows."""

    xs: Any = X

    def build_model(self) -> Any:
        model = tf.Module()
        model.w = tf.Variable(tf.zeros([WIDTH]))
        return model

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=1.0)

    def train_data(self) -> Any:
        return from_arrays(self.xs, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.linalg.matvec(batch, model.w))


def step(wire: str, replicas: int = 2, xs: np.ndarray = X, **changes: Any) -> tuple[Linear, np.ndarray]:
    """The gradient that one step on all of ``xs`` applied."""
    usual = {"num_replicas": replicas, "gradient_dtype": wire, "global_batch_size": len(xs), "train_steps": 1}
    trainer = Linear(settings(**{**usual, **changes}))
    trainer.xs = xs
    trainer.train()
    assert_copies_equal(trainer)
    return trainer, -copies(trainer)[0]["model/w"]


@pytest.mark.parametrize("wire", UNIT)
def test_the_error_is_at_most_that_of_rounding_each_part_and_the_sum(wire: str) -> None:
    _, got = step(wire)
    u, parts = UNIT[wire], [X[:4].astype(np.float64).sum(0), X[4:].astype(np.float64).sum(0)]
    right = (parts[0] + parts[1]) / 8
    bound = (u * (abs(parts[0]) + abs(parts[1])) + u * (1 + u) * abs(parts[0] + parts[1])) / 8
    error = abs(got - right)
    assert (error <= bound + 1e-6).all()
    assert error.max() > 1e-5  # it did cross in half precision


@pytest.mark.parametrize("wire", UNIT)
def test_with_one_replica_nothing_is_rounded(wire: str) -> None:
    np.testing.assert_array_equal(step(wire, 1)[1], step("float32", 1)[1])


def test_sums_too_large_for_float16_cross_scaled() -> None:
    """16 rows of 30,000 sum to 480,000 where float16 ends at 65,504; their mean fits."""
    xs = np.full([16, WIDTH], 30000.0, np.float32)
    _, got = step("float16", xs=xs)
    np.testing.assert_allclose(got, 30000.0, rtol=2 * UNIT["float16"])


def test_without_the_scale_they_would_overflow() -> None:
    def replica(x: tf.Tensor) -> tf.Tensor:
        with_scale, without = (
            reduce(gradients(lambda: LossOutput(loss=w * x), [w]), Reduction(wire=tf.float16, wire_scale=scale))
            for scale in (2.0**-5, 1.0)
        )
        return tf.stack([with_scale.gradients[0], without.gradients[0], without.weight, without.stats["loss"].value])

    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(1.0)
    rows = per_replica(strategy, [np.full(10, 8000.0, np.float32), np.full(12, 8000.0, np.float32)])
    results = tf.function(lambda x: strategy.run(replica, args=(x,)))(rows)
    for one in strategy.experimental_local_results(results):
        scaled, unscaled, weight, loss = one.numpy()
        assert scaled == pytest.approx(176000.0, rel=1e-3)
        assert np.isinf(unscaled)
        assert (weight, loss) == (22.0, 176000.0)  # sums that are no gradients keep their dtype


def test_weights_and_figures_keep_their_digits() -> None:
    """2,049 is no float16 and no bfloat16."""
    xs = np.zeros([2049, WIDTH], np.float32)
    xs[0] = 2049.0
    trainer, got = step("bfloat16", xs=xs, log_every=1)
    np.testing.assert_allclose(got, 1.0, rtol=3 * UNIT["bfloat16"])
    assert trainer.examples_seen == 2049
    # Divided by 2,049 itself: bfloat16's neighbours of the gradient are 2,048 and 2,064.
    assert got[0] in np.float32([2048.0 / 2049.0, 2064.0 / 2049.0])


def test_float64_gradients_are_not_rounded() -> None:
    value = 1.0 + 2.0**-40
    strategy = mirrored(2)

    def replica(x: tf.Tensor) -> tf.Tensor:
        sums = gradients(lambda: LossOutput(loss=v * x), [v])
        return reduce(sums, Reduction(wire=tf.bfloat16)).gradients[0]

    with strategy.scope():
        v = tf.Variable(1.0, dtype=tf.float64)
    results = tf.function(lambda x: strategy.run(replica, args=(x,)))(per_replica(strategy, [np.float64([value])] * 2))
    assert float(strategy.experimental_local_results(results)[0]) == 2 * value


def test_the_plan_of_packs_is_in_config_json_and_printed_when_asked(tmp_path: pathlib.Path, capsys: Any) -> None:
    trainer, _ = step("bfloat16", run_dir=str(tmp_path), show_packs=True)
    packs = json.loads((tmp_path / "config.json").read_text())["all_reduce_packs"]
    assert packs == trainer.stepper.packs
    assert packs[0] == {"dtype": "bfloat16", "tensors": 1, "bytes": 2 * WIDTH}
    assert {p["dtype"] for p in packs} == {"bfloat16", "float32"}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pack ")]
    assert lines[0] == f"pack 0: 1 tensors, {2 * WIDTH / 1e6:.3f} MB, bfloat16"
    assert len(lines) == len(packs)


def test_packs_are_not_printed_unless_asked(capsys: Any) -> None:
    step("float32")
    assert "pack" not in capsys.readouterr().out


def test_a_reduction_of_other_sums_keeps_their_dtype() -> None:
    strategy = mirrored(2)
    results = tf.function(
        lambda x: strategy.run(lambda y: all_reduce_sum([y], Reduction(wire=tf.bfloat16))[0], args=(x,))
    )(per_replica(strategy, [np.float32(2049.0), np.float32(0.0)]))
    assert [float(v) for v in strategy.experimental_local_results(results)] == [2049.0] * 2
