"""Field cases NUM: mixed precision and values that are not finite."""

from __future__ import annotations

import json
import pathlib
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import CheckFailed, LossOutput, Trainer, optimizers
from input_pipelines import from_arrays
from tests.helpers import Toy, ToyWithEval, assert_copies_equal, column, copies, records, settings

X = np.random.RandomState(0).randn(40, 4).astype(np.float32)


class Net(Trainer):
    keras = False

    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])

    def build_optimizer(self) -> Any:
        return keras.optimizers.SGD(0.1) if self.keras else optimizers.SGD(learning_rate=0.1)

    def train_data(self) -> Any:
        return from_arrays(X, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        # Small, so that the first loss scale fits whatever the number of replicas.
        return LossOutput(loss=0.05 * tf.square(tf.cast(model(batch), tf.float32) - 1.0)[:, 0])


@pytest.mark.parametrize("own", [True, False])
def test_c057_loss_scaling_works_on_two_replicas_in_the_compiled_loop(own: bool) -> None:
    states = []
    for replicas in (1, 2):
        trainer = Net(settings(num_replicas=replicas, precision="mixed_float16", train_steps=5, steps_per_loop=5))
        trainer.keras = not own
        trainer.train()
        assert_copies_equal(trainer)
        states.append(copies(trainer)[0])
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=2.0**-8, atol=2.0**-10, err_msg=name)
    assert [v for n, v in states[1].items() if n.rpartition("/")[2].startswith("iteration")] == [5]


class Overflowing(Toy):
    """In float16 a row of 60,000 times a scale of 2**15 / 4 is too much, the loss itself is not."""

    rate: ClassVar[Any] = staticmethod(lambda n: tf.where(n < 4, 1e-3, 1e-4))
    start = 0.5

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        half = self.compute_dtype
        return LossOutput(loss=tf.cast(model.w, half) * tf.cast(batch, half))


@pytest.mark.parametrize("replicas", [1, 2])
def test_c058_updates_are_counted_and_an_overflow_is_not_one(replicas: int, tmp_path: pathlib.Path) -> None:
    trainer = Overflowing(
        settings(num_replicas=replicas, precision="mixed_float16", train_steps=6, run_dir=str(tmp_path))
    )
    trainer.xs = np.float32([1.0] * 8 + [1, 1, 1, 60000.0] + [1.0] * 12)  # step 3
    trainer.train()
    assert trainer.step == 6
    for one in copies(trainer):
        assert one["optimizer/iterations"] == 5
        assert one["loss_scale"] == 2.0**14
        # Four updates at 1e-3 and the fifth at 1e-4, of gradient 1.
        assert one["model/w"] == pytest.approx(0.5 - 4e-3 - 1e-4, rel=1e-5)
    assert column(tmp_path, "learning_rate") == pytest.approx([1e-3] * 5 + [1e-4])
    assert column(tmp_path, "loss_scale") == [2.0**15] * 2 + [2.0**14] * 4
    assert [r.get("nonfinite", 0) for r in records(tmp_path)] == [0, 0, 1, 0, 0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["nonfinite_steps"] == 1


class Spoiled(Net):
    row: ClassVar[int] = 0

    def train_data(self) -> Any:
        xs = X.copy()
        xs[self.row, 1] = np.nan
        return from_arrays(xs, shuffle=False)


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_c060_a_nan_feature_at_step_4(action: str, replica: int, tmp_path: pathlib.Path, capsys: Any) -> None:
    config = settings(num_replicas=2, run_dir=str(tmp_path), train_steps=6, on_nonfinite=action, checkpoint_every=2)
    trainer = Spoiled(config.replace(progress="lines"))
    trainer.row = 3 * 4 + 2 * replica  # type: ignore[misc]
    what = f"step 4: replica {replica} is not finite: loss nan, gradient of sequential/dense/kernel"
    if action == "stop":
        with pytest.raises(CheckFailed, match=what):
            trainer.train()
        assert trainer.step == 3
    else:
        trainer.train()
        assert f"warning: {what}" in capsys.readouterr().out
        assert trainer.step == 6
    assert_copies_equal(trainer)
    state = copies(trainer)[1]
    assert all(np.isfinite(v).all() for v in state.values())
    assert state["optimizer/iterations"] == {"stop": 3, "skip": 5, "rollback": 6}[action]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["nonfinite_steps"] == 1
    assert summary["rollbacks"] == (action == "rollback")


class Undefined(ToyWithEval):
    """A metric that no example of the first evaluation has a value for."""

    rate = 1.0
    xs = np.ones(4, np.float32)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        has = tf.cast(tf.fill(tf.shape(batch), model.w < 0.0), tf.float32)  # w: 1, then 0, then -1
        return LossOutput(loss=model.w * batch, metrics={"score": (tf.ones_like(batch), has)})


@pytest.mark.parametrize("replicas", [1, 2])
def test_c062_an_undefined_metric_is_recorded_as_such_and_the_run_goes_on(replicas: int, tmp_path: Any) -> None:
    trainer = Undefined(
        settings(num_replicas=replicas, train_steps=2, eval_every=1, run_dir=str(tmp_path), keep_best="score:max")
    )
    figures = trainer.train()
    assert column(tmp_path, "score", "eval") == [None, 1.0]
    assert column(tmp_path, "loss", "eval") == [0.0, -1.0]
    assert figures["eval/score"] == 1.0


class UndefinedValue(Undefined):
    """The same, but the metric itself is NaN."""

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        score = tf.where(tf.fill(tf.shape(batch), model.w < 0.0), 1.0, np.nan)
        return LossOutput(loss=model.w * batch, metrics={"score": score})


@pytest.mark.parametrize("replicas", [1, 2])
def test_c062_a_metric_that_is_nan_does_not_take_the_loss_with_it(replicas: int, tmp_path: pathlib.Path) -> None:
    UndefinedValue(settings(num_replicas=replicas, train_steps=2, eval_every=1, run_dir=str(tmp_path))).train()
    assert column(tmp_path, "score", "eval") == [None, 1.0]
    assert column(tmp_path, "loss", "eval") == [0.0, -1.0]
    assert column(tmp_path, "loss") == [1.0, 0.0]
