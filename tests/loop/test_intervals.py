"""When the outer loop stops, and what it does there: records, evaluations, checkpoints, hooks, early stop."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from framework import AtSteps, ConfigError, EveryNSteps, EveryStep, Hook, LossOutput, Scheduled, Trainer, When
from framework.hooks import Values
from tests.helpers import Toy, ToyWithEval, Weight, column, records, settings, store, tree


class Numbered(ToyWithEval):
    """Batch s holds the two numbers 2s - 1 and 2s; the weight stays 1, so their mean is the loss."""

    xs = np.arange(1, 25, dtype=np.float32)


def events(folder: pathlib.Path, tag: str) -> list[tuple[int, float]]:
    """Points of a tag in an event folder."""
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in found.Tensors(tag)]


def tags(folder: pathlib.Path) -> list[str]:
    """Tags in an event folder."""
    return sorted(EventAccumulator(str(folder)).Reload().Tags()["tensors"])


@pytest.mark.parametrize(("replicas", "background"), [(1, True), (1, False), (2, True), (3, False)])
def test_b01_four_checkpoints_and_a_restore_of_the_last(
    tmp_path: pathlib.Path, replicas: int, background: bool
) -> None:
    class Falling(Toy):  # the gradient is 2, so each step moves w by -0.5 * 2
        xs, start, rate = np.full(8, 2.0, np.float32), 0.0, 0.5

    config = settings(
        run_dir=tmp_path,
        train_steps=20,
        checkpoint_every=5,
        log_every=0,
        num_replicas=replicas,
        checkpoint_in_background=background,
    )
    Falling(config).train()
    assert store(tmp_path).steps() == [5, 10, 15, 20]
    assert {s: store(tmp_path).load(s)["model/w"] for s in (5, 10, 15, 20)} == {5: -5, 10: -10, 15: -15, 20: -20}
    again = Falling(config)
    assert again.train() == {}
    assert (again.step, again.model.w.numpy(), again.optimizer.iterations.numpy()) == (20, -20.0, 20)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_b02_evaluations_at_6_and_10_and_five_train_records(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=10,
        global_batch_size=2,
        eval_every=6,
        steps_per_loop=2,
        log_every=2,
        num_replicas=replicas,
    )
    result = Numbered(config).train()
    assert column(tmp_path, "step", "eval") == [6, 10]
    assert column(tmp_path, "step") == [2, 4, 6, 8, 10]
    # Each record is the mean over the four numbers of its two steps: 1..4, 5..8, ...
    assert column(tmp_path, "loss") == pytest.approx([2.5, 6.5, 10.5, 14.5, 18.5], rel=1e-6)
    assert result == pytest.approx({"loss": 18.5, "eval/loss": 1.0, "eval/examples": 4.0}, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_b03_inner_loop_is_cut_at_intervals(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=10,
        steps_per_loop=10,
        eval_every=5,
        checkpoint_every=5,
        log_every=100,
        num_replicas=replicas,
    )
    Numbered(config).train()
    assert column(tmp_path, "step", "eval") == [5, 10]
    assert store(tmp_path).steps() == [5, 10]
    assert column(tmp_path, "step") == [10]


@pytest.mark.parametrize("steps_per_loop", [1, 3, 100, 0])
def test_every_interval_is_met_whatever_the_length_of_the_inner_loop(
    tmp_path: pathlib.Path, steps_per_loop: int
) -> None:
    seen: list[int] = []

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(AtSteps([1, 6]), lambda step, values: seen.append(step))]

    config = settings(
        run_dir=tmp_path,
        train_steps=11,
        global_batch_size=2,
        steps_per_loop=steps_per_loop,
        log_every=4,
        eval_every=5,
        checkpoint_every=3,
    )
    Hooked(config).train()
    assert column(tmp_path, "step") == [4, 8, 11]
    assert column(tmp_path, "loss") == pytest.approx([4.5, 12.5, 19.5], rel=1e-6)  # 1..8, 9..16, 17..22
    assert column(tmp_path, "step", "eval") == [5, 10, 11]
    assert store(tmp_path, keep=9).steps() == [3, 6, 9, 11]
    assert seen == [1, 6]


@pytest.mark.parametrize("goal", [4, 2])
def test_b04_a_step_at_the_target_runs_nothing_and_writes_nothing(tmp_path: pathlib.Path, goal: int) -> None:
    Numbered(settings(run_dir=tmp_path)).train()
    before = tree(tmp_path)
    traced: list[int] = []

    class Counting(Numbered):
        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            traced.append(1)
            return super().compute_loss(model, batch, training=training)

    again = Counting(settings(run_dir=tmp_path, train_steps=goal))
    assert again.train() == {}
    assert again.step == 4 and again.examples_seen == 16 and not traced
    assert tree(tmp_path) == before
    assert again.evaluate()["loss"] == 1.0  # a final evaluation is still possible


@pytest.mark.parametrize("name", ["steps_per_loop", "log_every", "eval_every", "checkpoint_every"])
def test_b06_a_negative_length_or_interval_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=-1 but it must be at least 0"):
        settings(**{name: -1})


def test_b06_neither_train_nor_eval_data_is_refused_at_construction() -> None:
    class Empty(Trainer):
        def build_model(self) -> Any:
            return Weight()

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            raise AssertionError

    with pytest.raises(ConfigError, match="Empty has neither train_data nor eval_data"):
        Empty(settings())


@pytest.mark.parametrize("steps", [0, -3])
def test_b06_a_number_of_further_steps_below_1_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"train\(steps={steps}\)"):
        Toy(settings()).train(steps)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b07_an_evaluation_with_the_loss_alone_does_not_crash(tmp_path: pathlib.Path, replicas: int) -> None:
    result = Numbered(settings(run_dir=tmp_path, num_replicas=replicas, tensorboard=True)).train()
    assert result["eval/loss"] == 1.0
    [record] = records(tmp_path, "eval")
    assert set(record) == {"step", "phase", "time", "loss", "examples"}
    assert events(tmp_path / "tensorboard" / "eval", "loss") == [(4, 1.0)]


class TwoSets(Toy):
    def eval_data(self) -> Any:
        near, far = Numbered(self.config), Numbered(self.config)
        far.eval_xs = np.float32([3, 5])
        return {"near": near.eval_data(), "far": far.eval_data()}

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch, metrics={"big": batch > 4})


@pytest.mark.parametrize("replicas", [1, 3])
def test_b08_several_eval_sets_have_a_folder_each_with_all_tags(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(run_dir=tmp_path, num_replicas=replicas, eval_every=2, tensorboard=True)
    result = TwoSets(config).train()
    right = {
        "near": {"loss": 1.0, "big": 0.0, "examples": 4.0},
        "far": {"loss": 4.0, "big": 0.5, "examples": 2.0},
    }
    folder = tmp_path / "tensorboard" / "eval"
    assert sorted(p.name for p in folder.iterdir()) == ["far", "near"]
    for name, figures in right.items():
        for tag, value in figures.items():
            assert result[f"eval/{name}/{tag}"] == value
            assert events(folder / name, tag) == [(2, value), (4, value)]
            assert column(tmp_path, tag, f"eval/{name}") == [value, value]
    assert TwoSets(config).evaluate() == {f"{n}/{t}": v for n, figures in right.items() for t, v in figures.items()}


def test_b09_without_tensorboard_there_is_no_event_file(tmp_path: pathlib.Path) -> None:
    Numbered(settings(run_dir=tmp_path, tensorboard=False)).train()
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoints",
        "config.json",
        "device_metrics",
        "heartbeats",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    }


def test_b09_without_a_run_folder_nothing_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Numbered(settings(tensorboard=True, checkpoint_every=2, eval_every=2)).train()
    assert list(tmp_path.iterdir()) == []


class Writing(Toy):
    """Writes the mean of the batch as a summary of its own; batch s holds the number s."""

    xs = np.repeat(np.arange(1, 25, dtype=np.float32), 4)

    def train_step(self, batch: Any) -> Any:
        tf.summary.scalar("seen", tf.reduce_mean(batch))
        return super().train_step(batch)


@pytest.mark.parametrize(("replicas", "steps_per_loop"), [(1, 3), (2, 5), (3, 1)])
def test_b11_a_scalar_of_the_step_is_there_only_at_the_interval(
    tmp_path: pathlib.Path, replicas: int, steps_per_loop: int
) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=14,
        log_every=4,
        steps_per_loop=steps_per_loop,
        num_replicas=replicas,
        tensorboard=True,
    )
    Writing(config).train()
    folder = tmp_path / "tensorboard" / "train"
    [tag] = [t for t in tags(folder) if "seen" in t]  # one, not one a replica
    assert [step for step, _ in events(folder, tag)] == [4, 8, 12]
    assert [value for _, value in events(folder, tag)] == [4.0, 8.0, 12.0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_b11_a_scalar_of_the_step_has_the_tag_it_was_given(tmp_path: pathlib.Path, replicas: int) -> None:
    Writing(settings(run_dir=tmp_path, num_replicas=replicas, tensorboard=True)).train()
    assert "seen" in tags(tmp_path / "tensorboard" / "train")


def test_b11_a_scalar_of_the_step_is_written_in_a_second_call_too(tmp_path: pathlib.Path) -> None:
    trainer = Writing(settings(run_dir=tmp_path, train_steps=8, log_every=2, tensorboard=True))
    trainer.train(4)
    trainer.train(4)
    folder = tmp_path / "tensorboard" / "train"
    [tag] = [t for t in tags(folder) if "seen" in t]
    assert events(folder, tag) == [(2, 2.0), (4, 4.0), (6, 6.0), (8, 8.0)]


def test_a_run_is_marked_as_started_once_and_not_at_each_step(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path, train_steps=6, tensorboard=True)).train()
    [file] = (tmp_path / "tensorboard" / "train").iterdir()
    logged = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(file))]
    assert sum(e.HasField("session_log") for e in logged) <= 2  # one mark is written twice, see hooks/tensorboard.py
    assert events(tmp_path / "tensorboard" / "train", "loss")[-1][0] == 6


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_with_tensorboard_can_be_resumed(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(run_dir=tmp_path, train_steps=3, tensorboard=True, num_replicas=replicas)
    Toy(config).train()
    Toy(config.replace(train_steps=6)).train()
    folder = tmp_path / "tensorboard" / "train"
    points = [p for f in sorted(folder.iterdir()) for p in events_of_file(f)]
    assert sorted(points) == [1, 2, 3, 4, 5, 6]


def events_of_file(file: pathlib.Path) -> list[int]:
    """Steps of the points of tag ``loss`` in one event file."""
    logged = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(file))]
    return [e.step for e in logged for v in e.summary.value if v.tag == "loss"]


class Replaced(Toy):
    """Each call of ``train_data`` gives other data: all 1, then all 2, ..."""

    asked = 0
    as_dataset = False

    def train_data(self) -> Any:
        self.asked += 1
        self.xs = np.full(12, self.asked, np.float32)
        return tf.data.Dataset.from_tensor_slices(self.xs).batch(4) if self.as_dataset else super().train_data()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_b12_data_replaced_between_two_calls_is_used(replicas: int) -> None:
    trainer = Replaced(settings(train_steps=None, num_replicas=replicas))
    assert [dict(trainer.train(3))["loss"] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (trainer.step, trainer.examples_seen, trainer.asked) == (9, 36, 3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b12_a_dataset_replaced_between_two_calls_is_used(replicas: int) -> None:
    class AsDataset(Replaced):
        as_dataset = True

    trainer = AsDataset(settings(train_steps=None, num_replicas=replicas))
    assert [dict(trainer.train(3))["loss"] for _ in range(2)] == [1.0, 2.0]
    assert trainer.step == 6


class Falling(ToyWithEval):
    """w falls from 1 by 0.1 a step, and is the evaluation loss."""

    xs, rate = np.ones(8, np.float32), 0.1


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_b13_an_early_stop_ends_before_the_last_step_and_says_why(tmp_path: pathlib.Path, replicas: int) -> None:
    config = settings(run_dir=tmp_path, train_steps=20, eval_every=2, stop_when="loss<0.1", num_replicas=replicas)
    trainer = Falling(config)
    result = trainer.train()
    assert trainer.step == 10  # 0.2 at step 8, 0.0 at step 10
    assert column(tmp_path, "step", "eval") == [2, 4, 6, 8, 10]
    assert store(tmp_path).steps() == [10]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("stopped_early", 10)
    assert "loss" in summary["reason"] and "< 0.1 at step 10" in summary["reason"]
    assert result["eval/loss"] == pytest.approx(0.0, abs=1e-6)


def test_b13_an_early_stop_at_no_evaluation_leaves_the_run_alone(tmp_path: pathlib.Path) -> None:
    Falling(settings(run_dir=tmp_path, train_steps=4, eval_every=2, stop_when="loss<0.1")).train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize("replicas", [1, 2])
def test_b17_a_hook_with_a_condition_runs_only_when_it_holds(replicas: int) -> None:
    ran: list[tuple[int, float]] = []

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            trigger = When(EveryNSteps(2), lambda step: step % 3 == 0)
            return [Scheduled(trigger, lambda step, values: ran.append((step, values["loss"])))]

    Hooked(settings(train_steps=12, global_batch_size=2, steps_per_loop=5, num_replicas=replicas)).train()
    assert [step for step, _ in ran] == [6, 12]
    # Each has the steps since it last ran: the numbers 1..12, then 13..24.
    assert [loss for _, loss in ran] == pytest.approx([6.5, 18.5], rel=1e-6)


def test_hooks_see_the_steps_since_they_last_ran_each_at_its_own_pace() -> None:
    seen: dict[str, list[tuple[int, float]]] = {"each": [], "third": []}

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            return [
                Scheduled(EveryStep(), lambda step, values: seen["each"].append((step, values["loss"]))),
                Scheduled(EveryNSteps(3), lambda step, values: seen["third"].append((step, values["loss"]))),
            ]

    Hooked(settings(train_steps=7, global_batch_size=2, steps_per_loop=4, log_every=0)).train()
    assert seen["each"] == [(s, 2 * s - 0.5) for s in range(1, 8)]
    assert seen["third"] == [(3, 3.5), (6, 9.5)]


class Noting(Hook):
    def __init__(self, notes: list[tuple[Any, ...]]) -> None:
        self._notes = notes

    def begin(self, trainer: Trainer) -> None:
        self._notes.append((id(self), "begin", trainer.step))

    def __call__(self, step: int, values: Values) -> None:
        self._notes.append((id(self), "call", step))

    def evaluated(self, step: int, name: str, values: Mapping[str, float]) -> None:
        self._notes.append((id(self), "evaluated", step, name, values["loss"]))

    def end(self, step: int, status: str) -> None:
        self._notes.append((id(self), "end", step, status))


def test_a_hook_is_told_of_begin_steps_evaluations_and_end_in_order() -> None:
    notes: list[tuple[Any, ...]] = []
    hook = Noting(notes)

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(EveryNSteps(2), hook)]

    Hooked(settings(eval_every=3)).train()
    assert [n[1:] for n in notes] == [
        ("begin", 0),
        ("call", 2),
        ("evaluated", 3, "", 1.0),
        ("call", 4),
        ("evaluated", 4, "", 1.0),
        ("end", 4, "done"),
    ]


def test_the_hook_that_began_is_the_one_told_of_evaluations() -> None:
    notes: list[tuple[Any, ...]] = []
    made: list[Noting] = []

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            made.append(Noting(notes))  # kept, so that no two have one id
            return [Scheduled(EveryNSteps(2), made[-1])]

    Hooked(settings()).train()
    assert "evaluated" in [n[1] for n in notes]
    assert len({n[0] for n in notes}) == 1


@pytest.mark.parametrize("fails_at", ["begin", "call"])
def test_an_error_of_a_hook_ends_the_run_and_every_hook_that_began(tmp_path: pathlib.Path, fails_at: str) -> None:
    notes: list[tuple[Any, ...]] = []

    class Failing(Hook):
        def begin(self, trainer: Trainer) -> None:
            if fails_at == "begin":
                raise ValueError("no such disk")

        def __call__(self, step: int, values: Values) -> None:
            raise ValueError("no such disk")

    class Hooked(Numbered):
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(EveryNSteps(1), Noting(notes)), Scheduled(EveryNSteps(2), Failing())]

    with pytest.raises(ValueError, match="no such disk"):
        Hooked(settings(run_dir=tmp_path)).train()
    last = 0 if fails_at == "begin" else 2
    assert notes[-1][1:] == ("end", last, "failed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["reason"]) == ("failed", last, "ValueError: no such disk")


def test_a_second_call_of_train_goes_on_with_step_and_data(tmp_path: pathlib.Path) -> None:
    trainer = Numbered(settings(run_dir=tmp_path, train_steps=6, global_batch_size=2))
    trainer.train(2)
    assert trainer.step == 2
    trainer.train()
    assert trainer.step == 6
    trainer.train(1)
    assert (trainer.step, trainer.examples_seen) == (7, 14)
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7]
    assert column(tmp_path, "loss") == [2 * s - 0.5 for s in range(1, 8)]
    assert store(tmp_path).steps() == [2, 6, 7]


def test_final_figures_are_python_floats_by_name() -> None:
    result = Numbered(settings(eval_every=2)).train()
    assert sorted(result) == ["eval/examples", "eval/loss", "loss"]
    assert all(type(v) is float for v in result.values())
    assert Numbered(settings()).train(evaluate=False).keys() == {"loss"}


def test_a_run_of_no_given_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"neither train_steps nor train_epochs is given; pass --train_steps"):
        Toy(settings(train_steps=None)).train()
