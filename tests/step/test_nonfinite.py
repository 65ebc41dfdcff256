"""A NaN or infinity in one replica's rows: all replicas do the same, the message names it, nothing is poisoned."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import CheckFailed, ConfigError, LossOutput, RunConfig, Trainer
from framework.loop.saving import Saving
from input_pipelines import from_arrays
from tests.helpers import Toy, assert_copies_equal, column, copies, records, saved, settings

ROWS = 2  # of each replica and step
PRECISIONS = {
    "float32": {},
    "float16": {"precision": "mixed_float16"},
    "float16 fixed": {"precision": "mixed_float16", "loss_scale": 64.0},
}
Bad = dict[int, tuple[int, float]]  # batch, from 1 -> replica and value


class Net(Trainer):
    """Everything that a NaN could settle in: weights, moving statistics, momentum, an average."""

    xs: Any

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Activation("tanh")]
        return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, dtype="float32")])

    def train_data(self) -> Any:
        return from_arrays(self.xs, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        # Small, so that the first loss scale fits; what remains is the injected value's fault.
        return LossOutput(loss=0.05 * tf.square(model(batch, training=training) - 1.0)[:, 0])


def rows(replicas: int, batches: list[int], bad: Bad | None = None) -> np.ndarray:
    """Rows of the numbered batches; of a bad one, the first row of one replica is spoiled."""
    size = ROWS * replicas
    xs = np.random.RandomState(1).randn(20 * size, 3).astype(np.float32)
    for batch, (replica, value) in (bad or {}).items():
        xs[(batch - 1) * size + replica * ROWS, 1] = value
    return np.concatenate([xs[(b - 1) * size : b * size] for b in batches])


def net(xs: np.ndarray, replicas: int, **changes: Any) -> Net:
    usual = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05, "ema_decay": 0.9, "steps_per_loop": 1}
    config = settings(**{**usual, "num_replicas": replicas, "global_batch_size": ROWS * replicas, **changes})
    trainer = Net(config)
    trainer.xs = xs
    return trainer


def assert_sound(trainer: Trainer) -> dict[str, np.ndarray]:
    assert_copies_equal(trainer)
    state = copies(trainer)[0]
    for name, value in state.items():
        assert np.isfinite(value).all(), f"{name} is not finite"
    return state


@functools.cache
def trained_on(replicas: int, precision: str, batches: tuple[int, ...]) -> dict[str, np.ndarray]:
    """State after a run that never sees a bad batch."""
    trainer = net(rows(replicas, list(batches)), replicas, train_steps=len(batches), **PRECISIONS[precision])
    trainer.train()
    return assert_sound(trainer)


def assert_state_is(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if name != "loss_scale_good_steps":  # good ones in a row: a bad step starts the count again
            np.testing.assert_array_equal(state[name], value, err_msg=name)


def spoiled(replicas: int) -> Bad:
    """NaN and infinity in each replica in turn, in batches 2, 3, 5, 6 (and 8, 9)."""
    places = [(r, value) for r in range(replicas) for value in (np.nan, np.inf)]
    return dict(zip([2, 3, 5, 6, 8, 9], places, strict=False))


CASES = [(2, "float32"), pytest.param(2, "float16 fixed", marks=pytest.mark.slow), (3, "float16")]


@pytest.mark.parametrize(("replicas", "precision"), CASES)
def test_stop_raises_at_each_bad_batch_and_leaves_the_state_of_before(replicas: int, precision: str) -> None:
    bad = spoiled(replicas)
    last = max(bad) + 1
    good = [b for b in range(1, last + 1) if b not in bad]
    xs = rows(replicas, list(range(1, last + 1)), bad)
    trainer = net(xs, replicas, train_steps=len(good), **PRECISIONS[precision])
    for batch, (replica, _) in bad.items():
        done = len([b for b in good if b < batch])
        with pytest.raises(CheckFailed) as error:
            trainer.train()
        message = str(error.value)
        assert f"step {done + 1}: replica {replica} is not finite: loss" in message
        assert not any(f"replica {other} is" in message for other in range(replicas) if other != replica)
        assert trainer.step == done
        assert_sound(trainer)
    trainer.train()
    assert_state_is(assert_sound(trainer), trained_on(replicas, precision, tuple(good)))


@pytest.mark.parametrize(("replicas", "precision"), CASES)
def test_skip_gives_what_the_good_batches_alone_give(replicas: int, precision: str, capsys: Any) -> None:
    bad = spoiled(replicas)
    last = max(bad) + 1
    trainer = net(
        rows(replicas, list(range(1, last + 1)), bad),
        replicas,
        train_steps=last,
        on_nonfinite="skip",
        progress="lines",
        **PRECISIONS[precision],
    )
    trainer.train()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == len(bad)
    for line, (batch, (replica, _)) in zip(warnings, bad.items(), strict=True):
        assert line.startswith(f"warning: step {batch}: replica {replica} is not finite: loss")
        assert line.count("is not finite") == 1
    assert trainer.step == last
    state = assert_sound(trainer)
    good = tuple(b for b in range(1, last + 1) if b not in bad)
    assert state["optimizer/iterations"] == len(good)
    assert_state_is(state, trained_on(replicas, precision, good))


def roll_back(replicas: int, run_dir: pathlib.Path, monkeypatch: Any, precision: str = "float32") -> Net:
    """Checkpoints at 0, 2, 4, 6; batch 4 fails as step 4, and batch 7 as step 5."""
    bad: Bad = {4: (0, np.nan), 7: (replicas - 1, np.inf)}
    trainer = net(
        rows(replicas, list(range(1, 12)), bad),
        replicas,
        run_dir=str(run_dir),
        train_steps=6,
        checkpoint_every=2,
        on_nonfinite="rollback",
        progress="lines",
        **PRECISIONS[precision],
    )
    back: list[int] = []
    original = Saving.go_back

    def go_back(self: Saving) -> int:
        step = original(self)
        tensors = saved(run_dir, step)
        for one in copies(trainer):
            for name, value in one.items():
                np.testing.assert_array_equal(value, tensors[name], err_msg=name)
        back.append(step)
        return step

    monkeypatch.setattr(Saving, "go_back", go_back)
    trainer.train()
    assert back == [2, 4]
    return trainer


@pytest.mark.parametrize(("replicas", "precision"), CASES)
def test_rollback_returns_to_the_checkpoint_and_goes_on_behind_the_bad_batch(
    replicas: int, precision: str, tmp_path: pathlib.Path, monkeypatch: Any, capsys: Any
) -> None:
    trainer = roll_back(replicas, tmp_path, monkeypatch, precision)
    out = capsys.readouterr().out
    assert "warning: step 4: replica 0 is not finite" in out
    assert f"warning: step 5: replica {replicas - 1} is not finite" in out
    assert out.count("is not finite") == 2
    size = ROWS * replicas
    assert f"went back to step 2; the data goes on at example {4 * size}" in out
    assert f"went back to step 4; the data goes on at example {7 * size}" in out
    # Steps 3 and 4 are of batches 5 and 6, steps 5 and 6 of batches 8 and 9.
    assert_state_is(assert_sound(trainer), trained_on(replicas, precision, (1, 2, 5, 6, 8, 9)))
    assert (trainer.step, trainer.examples_seen) == (6, 9 * size)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["nonfinite_steps"], summary["rollbacks"]) == (2, 2)


def test_rollback_leaves_one_record_for_each_step(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    roll_back(2, tmp_path / "back", monkeypatch)
    assert column(tmp_path / "back", "step") == [1, 2, 3, 4, 5, 6]
    straight = net(rows(2, [1, 2, 5, 6, 8, 9]), 2, train_steps=6, run_dir=str(tmp_path / "straight"))
    straight.train()
    assert column(tmp_path / "back", "loss") == column(tmp_path / "straight", "loss")


def test_rollback_without_a_run_dir_is_refused() -> None:
    with pytest.raises(ConfigError, match="rollback without run_dir"):
        RunConfig(on_nonfinite="rollback", train_steps=1)


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("budget", [0, 1])
def test_one_more_than_the_budget_stops_the_run(action: str, budget: int, tmp_path: pathlib.Path) -> None:
    bad: Bad = {2: (1, np.nan), 3: (0, np.nan)}
    trainer = net(
        rows(2, list(range(1, 9)), bad),
        2,
        run_dir=str(tmp_path),
        train_steps=6,
        on_nonfinite=action,
        nonfinite_budget=budget,
    )
    with pytest.raises(CheckFailed, match=f"{budget + 1} such steps are more than nonfinite_budget={budget}") as error:
        trainer.train()
    assert f"replica {1 - budget} is not finite" in str(error.value)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["nonfinite_steps"] == budget + 1
    assert_sound(trainer)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_budget_that_is_just_enough_lets_the_run_end(action: str, tmp_path: pathlib.Path) -> None:
    bad: Bad = {2: (1, np.nan), 3: (0, np.nan)}
    xs = rows(2, list(range(1, 9)), bad)
    trainer = net(xs, 2, run_dir=str(tmp_path), train_steps=4, on_nonfinite=action, nonfinite_budget=2)
    trainer.train()
    assert trainer.step == 4


# --- a loss that is finite, with a gradient that is not ---------------------------------------------------------------


class Root(Toy):
    """Loss sqrt(w x): at x = 0 it is 0, and its gradient 0 / 0."""

    rate = 0.1

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.sqrt(model.w * batch))


def test_a_bad_gradient_of_a_finite_loss_is_named_and_the_step_keeps_its_figures(tmp_path: pathlib.Path) -> None:
    trainer = Root(settings(num_replicas=2, on_nonfinite="skip", run_dir=str(tmp_path), train_steps=2))
    trainer.xs = np.float32([1, 4, 0, 9, 1, 1, 1, 1])
    trainer.train()
    assert column(tmp_path, "loss")[0] == pytest.approx((1 + 2 + 0 + 3) / 4)  # w is 1
    assert records(tmp_path)[0]["nonfinite"] == 1
    assert copies(trainer)[1]["model/w"] == pytest.approx(1 - 0.1 * 0.5)  # of step 2 alone: d sqrt(w)/dw = 1/2


def test_a_bad_gradient_names_replica_and_variable() -> None:
    trainer = Root(settings(num_replicas=2))
    trainer.xs = np.float32([1, 4, 0, 9])
    with pytest.raises(CheckFailed, match=r"step 1: replica 1 is not finite: gradient of w;"):
        trainer.train()


def test_a_scale_falls_to_1_before_a_bad_gradient_is_held_against_the_data(tmp_path: pathlib.Path) -> None:
    trainer = Root(
        settings(num_replicas=2, precision="mixed_float16", train_steps=30, run_dir=str(tmp_path), on_nonfinite="stop")
    )
    trainer.xs = np.float32([1, 4, 0, 9])
    with pytest.raises(CheckFailed, match=r"step 16: replica 1 is not finite: gradient of w;"):
        trainer.train()
    # 2 ** 15 is halved fifteen times; each record shows the scale after its step.
    assert column(tmp_path, "loss_scale")[:15] == [2.0 ** (15 - i) for i in range(1, 16)]
    assert copies(trainer)[1]["model/w"] == 1.0


class Large(Toy):
    """The loss is x; w has a gradient of 0."""

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=0.0 * model.w + batch)


def test_an_overflow_of_the_sum_alone_is_told_apart() -> None:
    """2e38 is finite on each replica, but the sum of two is more than float32 holds."""
    trainer = Large(settings(num_replicas=2, global_batch_size=2))
    trainer.xs = np.float32([2e38, 2e38])
    with pytest.raises(CheckFailed, match="step 1: every replica is finite, but the sum over replicas overflows"):
        trainer.train()


@pytest.mark.parametrize("replicas", [1, 2])
def test_bad_rows_in_one_of_several_micro_batches(replicas: int) -> None:
    """The replica is named whichever of its micro-batches went wrong."""
    xs = rows(2, [1, 2, 3])
    xs[4:8][3] = np.nan  # batch 2, second micro-batch
    trainer = net(xs, replicas, global_batch_size=4, train_steps=3, accumulate_steps=2)
    with pytest.raises(CheckFailed, match=r"step 2: replica [01] is not finite: loss nan") as error:
        trainer.train()
    assert str(error.value).count("is not finite") == 1
    assert_sound(trainer)
