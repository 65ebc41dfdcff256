"""The moving average of the weights: from the initial ones on, used by evaluation, saved, and never trained on."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Trainer
from framework.step.state import WeightAverage
from input_pipelines import from_arrays
from tests.helpers import ToyWithEval, assert_copies_equal, column, copies, mirrored, saved, settings

DECAY, RATE = 0.75, 0.5


class Toy(ToyWithEval):
    """The gradient is the mean of x; the evaluation's loss is the weight it is made with."""

    rate = RATE
    xs = np.float32([1, 3, 2, 2, 0, 4, 6, 2, 1, 1, 1, 1])  # means 2, 3, 1


def walk(steps: int, skip: tuple[int, ...] = ()) -> list[tuple[float, float]]:
    """(weight, average) after each step, from means 2, 3, 1."""
    w = average = 1.0
    values = []
    for step in range(1, steps + 1):
        if step not in skip:
            w -= RATE * [2, 3, 1][(step - 1) % 3]
            average = DECAY * average + (1 - DECAY) * w
        values.append((w, average))
    return values


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_evaluation_uses_the_average_and_training_its_own_weights(replicas: int, tmp_path: pathlib.Path) -> None:
    trainer = Toy(settings(num_replicas=replicas, ema_decay=DECAY, train_steps=3, eval_every=1, run_dir=str(tmp_path)))
    trainer.train()
    right = walk(3)
    assert column(tmp_path, "loss", "eval") == pytest.approx([average for _, average in right], rel=1e-6)
    assert_copies_equal(trainer)
    state = copies(trainer)[0]
    assert (state["model/w"], state["ema/w"]) == pytest.approx(right[-1], rel=1e-6)
    # Loss of step t is (weight before it) x mean: of the trained weight, not of the average.
    before = [1.0, *(w for w, _ in right[:2])]
    assert column(tmp_path, "loss") == pytest.approx([w * m for w, m in zip(before, [2, 3, 1], strict=True)], rel=1e-6)


def test_evaluation_leaves_every_variable_bit_for_bit() -> None:
    class Net(Trainer):
        def build_model(self) -> Any:
            return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])

        def train_data(self) -> Any:
            return from_arrays(np.random.RandomState(0).randn(8, 2).astype(np.float32))

        def eval_data(self) -> Any:
            return self.train_data()

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=tf.square(model(batch) - 1.0)[:, 0])

    trainer = Net(settings(num_replicas=2, ema_decay=0.9, optimizer="adamw", learning_rate=0.1))
    trainer.train(evaluate=False)
    before = copies(trainer)
    loss = trainer.evaluate()["loss"]
    for one, other in zip(before, copies(trainer), strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)
    with trainer.averaged_weights():
        kernel = trainer.model.layers[0].kernel.numpy()
        np.testing.assert_array_equal(kernel, before[0]["ema/" + trainer.model.layers[0].kernel.path])
        assert trainer.evaluate()["loss"] == pytest.approx(loss)


def test_the_average_goes_on_after_a_resume(tmp_path: pathlib.Path) -> None:
    for steps in (2, 3):
        trainer = Toy(settings(num_replicas=2, ema_decay=DECAY, train_steps=steps, run_dir=str(tmp_path)))
        trainer.train()
    assert (trainer.step, copies(trainer)[1]["ema/w"]) == (3, pytest.approx(walk(3)[-1][1], rel=1e-6))
    assert saved(tmp_path, 2)["ema/w"] == pytest.approx(walk(2)[-1][1], rel=1e-6)


def test_an_evaluation_alone_uses_the_saved_average(tmp_path: pathlib.Path) -> None:
    config = settings(num_replicas=2, ema_decay=DECAY, train_steps=3, run_dir=str(tmp_path))
    Toy(config).train(evaluate=False)
    assert Toy(config).evaluate()["loss"] == pytest.approx(walk(3)[-1][1], rel=1e-6)


def test_a_skipped_step_does_not_move_the_average() -> None:
    trainer = Toy(settings(num_replicas=2, ema_decay=DECAY, train_steps=3, on_nonfinite="skip"))
    trainer.xs = Toy.xs.copy()
    trainer.xs[5] = np.nan  # step 2, replica 0
    trainer.train()
    state = copies(trainer)[1]
    assert (state["model/w"], state["ema/w"]) == pytest.approx(walk(3, skip=(2,))[-1], rel=1e-6)


def test_without_decay_there_is_no_average_and_the_block_does_nothing() -> None:
    trainer = Toy(settings(num_replicas=2))
    assert not any(name.startswith("ema/") for name in trainer.state())
    with trainer.averaged_weights():
        assert copies(trainer)[0]["model/w"] == 1.0


def test_weights_come_back_when_the_block_raises() -> None:
    with mirrored(2).scope():
        w = tf.Variable(1.0)
        average = WeightAverage(0.5)
        average.add({"w": w})
    average.state()["ema/w"].assign(7.0)
    with pytest.raises(RuntimeError, match="stop"), average.swapped():
        assert [float(v) for v in mirrored(2).experimental_local_results(w)] == [7.0, 7.0]
        raise RuntimeError("stop")
    assert [float(v) for v in mirrored(2).experimental_local_results(w)] == [1.0, 1.0]


def test_unfrozen_weights_get_an_average_from_then_on() -> None:
    class Net(Trainer):
        def build_model(self) -> Any:
            self.first = keras.layers.Dense(2, trainable=False, name="first")
            return keras.Sequential([keras.Input((2,)), self.first, keras.layers.Dense(1)])

        def train_data(self) -> Any:
            return from_arrays(np.ones([8, 2], np.float32))

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=tf.square(model(batch) - 1.0)[:, 0])

    trainer = Net(settings(num_replicas=2, ema_decay=0.9, optimizer="sgd"))
    trainer.build()
    trainer.first.trainable = True
    trainer.refresh()
    assert "ema/" + trainer.first.kernel.path in trainer.state()
