"""Stop and go on: losses, weights, rates and the examples seen are those of an unbroken run."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import (
    AtSteps,
    BatchPlan,
    ConfigError,
    LossOutput,
    Preempted,
    RunConfig,
    Scheduled,
    Sum,
    Trainer,
    optimizers,
)
from input_pipelines import from_arrays
from tests.helpers import (
    Ids,
    Toy,
    ToyWithEval,
    assert_copies_equal,
    column,
    ids_by_step,
    ids_figure,
    saved,
    settings,
    store,
    tree,
)


class Net(Trainer):
    """A small perceptron with AdamW, a warm-up and a cosine; the first feature of an example is its id."""

    def build_model(self) -> keras.Model:
        layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    def train_data(self) -> Any:
        x = np.random.default_rng(5).normal(size=(40, 3)).astype(np.float32)
        x[:, 0] = np.arange(40)
        return from_arrays({"x": x, "y": x[:, 1] * x[:, 2]})

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        ids = batch["x"][:, 0]
        error = model(batch["x"] / [40.0, 1.0, 1.0])[:, 0] - batch["y"]
        return LossOutput(loss=error**2, metrics={"ids": ids_figure(ids), "rows": Sum(tf.ones_like(ids))})


def net_config(run_dir: pathlib.Path, **changes: Any) -> RunConfig:
    usual = {"train_steps": 12, "global_batch_size": 10, "learning_rate": 0.01, "weight_decay": 0.1}
    return settings(**{**usual, "run_dir": run_dir, "schedule": "cosine", "warmup_steps": 3, **changes})


def stopped(task: type[Trainer], config: RunConfig, at: int) -> None:
    """Runs ``task`` to step ``at`` as a command that is preempted there: same config, SIGTERM."""

    class Stopped(task):  # type: ignore[misc, valid-type]
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(AtSteps([at]), lambda step, values: os.kill(os.getpid(), signal.SIGTERM))]

    trainer = Stopped(config)
    with pytest.raises(Preempted, match=f"asked to stop at step {at}; the same command goes on from there"):
        trainer.train()
    assert trainer.step == at
    assert json.loads(pathlib.Path(str(config.run_dir), "summary.json").read_text())["status"] == "preempted"


FIGURES = ("step", "loss", "learning_rate", "grad_norm", "ids")


def assert_same_run(one: pathlib.Path, other: pathlib.Path, last: int) -> None:
    """The records of two runs agree in every figure but time and speed, and the final checkpoints bit for bit."""
    for name in FIGURES:
        assert column(one, name) == column(other, name), name
    left, right = saved(one, last), saved(other, last)
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a ``Net`` that ran its 12 steps at one go on one replica."""
    folder = tmp_path_factory.mktemp("unbroken")
    Net(net_config(folder)).train()
    return folder


@pytest.mark.parametrize(("at", "every"), [(1, 0), (3, 3), (10, 4)])
def test_c078_a_run_stopped_at_k_goes_on_bit_for_bit(
    tmp_path: pathlib.Path, unbroken: pathlib.Path, at: int, every: int
) -> None:
    config = net_config(tmp_path, checkpoint_every=every)
    stopped(Net, config, at)
    assert store(tmp_path).latest() == at
    again = Net(config)
    again.train()
    assert (again.step, again.examples_seen) == (12, 120)
    assert_same_run(unbroken, tmp_path, 12)
    assert column(tmp_path, "step") == list(range(1, 13))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_a_run_stopped_three_times_goes_on_bit_for_bit(tmp_path: pathlib.Path, unbroken: pathlib.Path) -> None:
    for at in (2, 5, 11):
        stopped(Net, net_config(tmp_path), at)
    Net(net_config(tmp_path)).train()
    assert_same_run(unbroken, tmp_path, 12)


def test_a_run_killed_after_a_checkpoint_repeats_only_the_steps_since(
    tmp_path: pathlib.Path, unbroken: pathlib.Path
) -> None:
    """An error at step 7 loses the steps after the checkpoint of step 4; no record is left twice."""

    class Killed(Net):
        def hooks(self) -> Sequence[Scheduled]:
            def kill(step: int, values: Any) -> None:
                raise RuntimeError("power cut")

            return [Scheduled(AtSteps([7]), kill)]

    config = net_config(tmp_path, checkpoint_every=4)
    with pytest.raises(RuntimeError, match="power cut"):
        Killed(config).train()
    assert store(tmp_path).latest() == 4
    Net(config).train()
    assert_same_run(unbroken, tmp_path, 12)


def test_c077_the_rate_after_a_resume_is_that_of_its_update(tmp_path: pathlib.Path) -> None:
    config = net_config(tmp_path, train_steps=20, warmup_steps=5, learning_rate=1.0, weight_decay=0.0)
    stopped(Net, config, 8)
    Net(config).train()
    up = [0.2, 0.4, 0.6, 0.8, 1.0]
    down = [0.5 * (1 + np.cos(np.pi * i / 15)) for i in range(15)]
    assert column(tmp_path, "learning_rate") == pytest.approx(up + down, rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 10), (2, 10)), ((3, 10), (1, 10)), ((1, 10), (2, 5)), ((2, 4), (1, 8))]
)
def test_other_replicas_or_another_batch_size_go_on_in_the_same_stream(
    tmp_path: pathlib.Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Ids come in the order of an unbroken stream, whatever the split: 4 steps before, 8 after."""
    (replicas_1, batch_1), (replicas_2, batch_2) = before, after
    config = settings(run_dir=tmp_path, train_steps=4, num_replicas=replicas_1, global_batch_size=batch_1)
    Ids(config).train()
    again = Ids(config.replace(train_steps=12, num_replicas=replicas_2, global_batch_size=batch_2))
    again.train()
    seen = ids_by_step(tmp_path)
    assert [len(ids) for ids in seen] == [batch_1] * 4 + [batch_2] * 8
    assert again.examples_seen == 4 * batch_1 + 8 * batch_2
    unbroken = stream(config.seed, 4 * batch_1 + 8 * batch_2)
    at = 0
    for ids in seen:
        assert ids == sorted(unbroken[at : at + len(ids)])
        at += len(ids)


def stream(seed: int, count: int) -> list[int]:
    """The ids of the first ``count`` examples of ``Ids``, from a run of its pipeline alone."""
    plan = BatchPlan(global_batch_size=1, seed=seed)
    return [int(x[0]) for x in from_arrays(Ids.xs).batches(plan).take(count).as_numpy_iterator()]


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (2, 3)])
def test_c072_weights_and_slots_survive_another_number_of_replicas(
    tmp_path: pathlib.Path, replicas: tuple[int, int]
) -> None:
    config = net_config(tmp_path, train_steps=None, schedule="constant", num_replicas=replicas[0])
    one = Net(config)
    one.train(3)
    before = saved(tmp_path, 3)
    other = Net(config.replace(num_replicas=replicas[1]))
    assert other.step == 0
    other.train(1)
    assert other.step == 4
    one.train(1)
    after = saved(tmp_path, 4)
    assert before["optimizer/iterations"] == 3 and after["optimizer/iterations"] == 4
    assert_copies_equal(other)
    for name, variable in one.state().items():
        np.testing.assert_allclose(variable.numpy(), other.state()[name].numpy(), rtol=1e-5, atol=1e-7, err_msg=name)


class IdsDataset(Ids):
    """The ids in order, as a dataset of batches of 3: 14 batches a pass, the last of one row."""

    def train_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices(self.xs).batch(3)


class IdsFunction(Ids):
    """The same from a function of InputContext: each replica's batches are one row in turn, so a step is N rows."""

    def train_data(self) -> Any:
        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(self.xs).batch(1)

        return make


@pytest.mark.parametrize(("replicas", "at"), [(1, 4), (2, 17), (1, 14)])
def test_c080_c081_a_dataset_goes_on_at_its_batch(tmp_path: pathlib.Path, replicas: int, at: int) -> None:
    config = settings(run_dir=tmp_path, train_steps=None, train_epochs=2, global_batch_size=3, num_replicas=replicas)
    stopped(IdsDataset, config, at)
    again = IdsDataset(config)
    again.train()
    assert (again.step, again.examples_seen) == (28, 80)
    one_pass = [list(range(i, min(i + 3, 40))) for i in range(0, 40, 3)]
    assert ids_by_step(tmp_path) == one_pass * 2


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_function_of_the_input_context_goes_on_at_its_batch(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(run_dir=tmp_path, train_steps=None, train_epochs=1, num_replicas=replicas)
    stopped(IdsFunction, config, 5)
    again = IdsFunction(config)
    again.train()
    assert again.examples_seen == 40
    n = replicas
    assert ids_by_step(tmp_path) == [list(range(i, min(i + n, 40))) for i in range(0, 40, n)]


def test_c081_a_resume_at_the_end_of_a_pass_does_not_leave_out_the_next(tmp_path: pathlib.Path) -> None:
    class Four(Ids):
        shuffle = False

    for at in (4, 8):  # 40 examples, batch 10: 4 steps a pass
        stopped(Four, settings(run_dir=tmp_path, train_steps=12, global_batch_size=10), at)
    Four(settings(run_dir=tmp_path, train_steps=12, global_batch_size=10)).train()
    assert ids_by_step(tmp_path) == [list(range(10 * i, 10 * i + 10)) for i in range(4)] * 3


@pytest.mark.parametrize(
    ("first", "then", "steps", "seen"),
    [
        # 40 examples are one epoch. 20 of them in 2 steps of 10; the other 20 in 1 step of 20, or in 4 of 5.
        (10, 20, 3, 40),
        (10, 5, 6, 40),
    ],
)
def test_an_epoch_ends_with_its_examples_though_the_batch_size_was_changed(
    tmp_path: pathlib.Path, first: int, then: int, steps: int, seen: int
) -> None:
    config = settings(run_dir=tmp_path, train_steps=2, train_epochs=1, global_batch_size=first)
    Ids(config).train()
    again = Ids(config.replace(train_steps=None, global_batch_size=then))
    again.train()
    ids = [i for step in ids_by_step(tmp_path) for i in step]
    assert sorted(ids) == list(range(40))
    assert (again.step, again.examples_seen) == (steps, seen)


def test_steps_beyond_the_epochs_of_the_config_are_counted_in_the_position(tmp_path: pathlib.Path) -> None:
    config = settings(run_dir=tmp_path, train_steps=None, train_epochs=1, global_batch_size=10)
    trainer = Ids(config)
    trainer.train(6)
    assert (trainer.step, trainer.examples_seen) == (6, 60)
    trainer.train(2)
    seen = ids_by_step(tmp_path)
    assert sorted(i for step in seen[4:] for i in step) == list(range(40))  # the second epoch


@pytest.mark.parametrize(("resume", "there"), [("must", False), ("never", True)])
def test_a_resume_that_is_forbidden_or_impossible_is_refused(tmp_path: pathlib.Path, resume: str, there: bool) -> None:
    if there:
        Toy(settings(run_dir=tmp_path)).train()
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"resume={resume} but run_dir={tmp_path} has"):
        Toy(settings(run_dir=tmp_path, resume=resume, train_steps=8)).train()
    assert tree(tmp_path) == before


def test_resume_never_does_not_stand_in_the_way_of_a_second_call(tmp_path: pathlib.Path) -> None:
    trainer = Toy(settings(run_dir=tmp_path, resume="never"))
    trainer.train(2)
    trainer.train(2)
    assert trainer.step == 4


def test_c070_a_checkpoint_of_another_model_is_refused_with_every_name(tmp_path: pathlib.Path) -> None:
    class Wide(Net):
        def build_model(self) -> keras.Model:
            dense = [keras.layers.Dense(7, activation="tanh", name="dense"), keras.layers.Dense(1, name="out")]
            return keras.Sequential([keras.Input((3,)), *dense])

    Net(net_config(tmp_path, train_steps=4)).train()
    before = tree(tmp_path)
    other = Wide(net_config(tmp_path))
    with pytest.raises(ConfigError) as error:
        other.train()
    text = str(error.value)
    assert text.startswith(
        f"the checkpoint {store(tmp_path).path(4)} does not fit this model; use the one it was written"
    )
    lines = text.splitlines()[1:]
    for line in (
        "  missing in the checkpoint: model/sequential/out/kernel",
        "  missing in the checkpoint: optimizer/m/sequential/out/bias",
        "  not in this model: model/sequential/dense_1/kernel",
        "  not in this model: optimizer/v/sequential/dense_1/bias",
        "  model/sequential/dense/kernel: shape (3, 5) in the checkpoint, (3, 7) in this model",
        "  optimizer/m/sequential/dense/bias: shape (5,) in the checkpoint, (7,) in this model",
    ):
        assert line in lines, text
    assert len(lines) == len(set(lines)) == 6 + 6 + 6  # two variables with two slots each: lacking, unused, misshapen
    assert tree(tmp_path) == before


def test_another_optimizer_is_refused_by_the_names_of_its_slots(tmp_path: pathlib.Path) -> None:
    class Heavy(Toy):
        def build_optimizer(self) -> Any:
            return optimizers.SGD(learning_rate=0.0, momentum=0.5)

    Toy(settings(run_dir=tmp_path)).train()
    with pytest.raises(ConfigError, match=r"missing in the checkpoint: optimizer/momentum/w"):
        Heavy(settings(run_dir=tmp_path, train_steps=8)).train()


def test_an_evaluation_alone_reads_the_newest_checkpoint_and_changes_none(tmp_path: pathlib.Path) -> None:
    class Falling(ToyWithEval):
        xs, rate = np.ones(8, np.float32), 0.25

    Falling(settings(run_dir=tmp_path, train_steps=3, checkpoint_every=1)).train(evaluate=False)
    before = tree(tmp_path / "checkpoints")
    fresh = Falling(settings(run_dir=tmp_path))
    assert fresh.evaluate() == {"loss": 0.25, "examples": 4.0}
    assert fresh.step == 3
    assert tree(tmp_path / "checkpoints") == before
    assert column(tmp_path, "step", "eval") == [3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_signal_ends_the_run_at_a_step_that_is_saved(
    tmp_path: pathlib.Path, number: signal.Signals, replicas: int
) -> None:
    class Stopped(Toy):
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(AtSteps([3]), lambda step, values: os.kill(os.getpid(), number))]

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer = Stopped(settings(run_dir=tmp_path, train_steps=50, num_replicas=replicas))
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Preempted):
        trainer.train()
    assert trainer.step == 3 and store(tmp_path).steps() == [3]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == ("interrupted" if number == signal.SIGINT else "preempted")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
