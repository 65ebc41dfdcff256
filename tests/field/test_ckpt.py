"""Field cases CKPT: what is on the disk after saves, restarts, full disks and changed models."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import train
from framework import ConfigError, LockstepError, LossOutput, RunConfig, Trainer, optimizers
from framework.checkpoint import find
from input_pipelines import from_arrays
from tests.checkpoint.mounts import mounted
from tests.conftest import ROOT
from tests.helpers import Toy, assert_copies_equal, copies, saved, settings, store, tree

# --- C064: the disk is full ------------------------------------------------------------------------------------------


class Heavy(Toy):
    """0.4 MB of weights."""

    def build_model(self) -> Any:
        model = super().build_model()
        model.much = tf.Variable(tf.random.stateless_normal([100_000], (1, 2)), trainable=False)
        return model


@pytest.mark.parametrize("room_is_asked", [True, False])
def test_c064_a_full_disk_at_the_third_save(tmp_path: pathlib.Path, room_is_asked: bool, monkeypatch: Any) -> None:
    if not room_is_asked:  # a quota, or others that write there too
        monkeypatch.setattr("framework.checkpoint.disk.require_room", lambda *args: None)
    with mounted(tmp_path / "disk", size="1100k") as disk:
        run_dir = disk / "run"
        with pytest.raises(LockstepError) as error:
            Heavy(settings(run_dir=run_dir, train_steps=9, checkpoint_every=3)).train()
        text = str(error.value)
        assert str(run_dir) in text and "MB" in text and error.value.exit_code != 0
        assert ("no room for the checkpoint of step 9" in text) == room_is_asked
        assert store(run_dir).steps() == [3, 6] and find.newest(store(run_dir).folder).passed_over == {}
        assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"


# --- C065, C066, C067: two workers -----------------------------------------------------------------------------------


def gang(
    run_workers: Callable[..., Any], out: pathlib.Path, run_dir: pathlib.Path, *pairs: str
) -> tuple[list[Any], list[Any]]:
    """Two workers to their end: what each saw, and how the processes ended."""
    out.mkdir(exist_ok=True)
    args = [str(out), str(run_dir), *pairs]
    done = run_workers(2, *args, script="tests/field/ckpt_worker.py", timeout=120)
    assert all(one.code in (0, 2) for one in done), "".join(one.stderr[-2000:] for one in done)
    return [json.loads((out / f"worker-{i}.json").read_text()) for i in range(2)], done


def test_c065_c066_c067_two_workers_save_restart_and_refuse_to_part(
    tmp_path: pathlib.Path, run_workers: Callable[..., Any]
) -> None:
    run_dir = tmp_path / "run"
    # C065, C066: every step is saved, by a model with normalisation and a metric; all workers go through the save.
    seen, done = gang(
        run_workers, tmp_path / "1", run_dir, "train_steps=20", "checkpoint_every=1", "keep_checkpoints=9"
    )
    assert [d.code for d in done] == [0, 0], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    assert store(run_dir).steps() == list(range(12, 21)) and store(run_dir).newest().passed_over == {}
    names = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert names == {f"step-{step:08d}" for step in range(12, 21)}
    watched = {"device_metrics", "heartbeats", "report.html", "stragglers.jsonl"}
    rest = {p.name for p in run_dir.iterdir()} - watched
    assert rest == {"checkpoints", "config.json", "metrics.jsonl", "summary.json"}
    assert seen[0]["state"] == seen[1]["state"]

    # C067: both go on from step 20 with the same weights and slots.
    again, done = gang(run_workers, tmp_path / "2", run_dir, "train_steps=23")
    assert [d.code for d in done] == [0, 0], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    for worker in again:
        assert (worker["began"]["step"], worker["step"]) == (20, 23)
        assert worker["began"]["state"] == seen[0]["state"]
    assert again[0]["state"] == again[1]["state"]
    assert "going on from the checkpoint of step 20, example 160" in done[0].stdout

    # C067: a worker that cannot see the file stops all of them, and is named with the path.
    before = tree(run_dir)
    parted, done = gang(run_workers, tmp_path / "3", run_dir, "train_steps=26", "own_folder=1")
    assert [d.code for d in done] == [2, 2]
    path = f"{run_dir}-of-worker-1/checkpoints/step-00000023"
    for worker in parted:
        assert worker["error"].startswith("worker 1 does not see the checkpoint of step 23 that worker 0 goes on from")
        assert f"at {path}: manifest.json cannot be read (No such file or directory)" in worker["error"]
    assert tree(run_dir) == before


@pytest.mark.slow
def test_c067_what_the_chief_refuses_stops_all_workers(tmp_path: pathlib.Path, run_workers: Callable[..., Any]) -> None:
    run_dir = tmp_path / "run"
    seen, done = gang(run_workers, tmp_path / "1", run_dir, "train_steps=3", 'resume="must"')
    assert [d.code for d in done] == [2, 2]
    right = f"resume=must but run_dir={run_dir} has no checkpoint; pass --resume=auto"
    assert [worker["error"] for worker in seen] == [right, f"{right} (says worker 0)"]
    assert not run_dir.exists()


@pytest.mark.slow
def test_two_workers_start_from_the_same_other_weights(tmp_path: pathlib.Path, run_workers: Callable[..., Any]) -> None:
    other, run_dir = tmp_path / "other", tmp_path / "run"
    gang(run_workers, tmp_path / "1", other, "train_steps=2")
    pairs = ["train_steps=1", f'init_from="{other}"', "learning_rate=0"]
    seen, done = gang(run_workers, tmp_path / "2", run_dir, *pairs)
    assert [d.code for d in done] == [0, 0], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    assert "initial weights: 8 variables from" in done[0].stdout
    right = saved(other, 2)["model/sequential/dense/kernel"].ravel().tolist()
    for worker in seen:
        assert worker["began"]["step"] == 0 and worker["began"]["state"]["optimizer/iterations"] == [0]
        assert worker["began"]["state"]["model/sequential/dense/kernel"] == right


# --- C068: a second run in the folder --------------------------------------------------------------------------------


def test_c068_a_run_with_another_config_does_not_delete_the_first_ones(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=2)).train()
    before = tree(tmp_path)
    for changes in ({"seed": 1}, {"optimizer": "lion"}, {"resume": "never"}):
        with pytest.raises(ConfigError, match=r"run_dir=.* has a"):
            Toy(settings(run_dir=tmp_path, train_steps=8, keep_checkpoints=1, **changes)).train()
    assert tree(tmp_path) == before


def test_c068_another_task_on_the_command_line_is_refused_by_its_name(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--device=cpu", "--mode=train", "--train_steps=2", "--progress=off", f"--run_dir={tmp_path}"]
    assert train.main(["train.py", "--task=digits", "--hidden=4", "--warmup_steps=0", *args]) == 0
    before = tree(tmp_path)
    capsys.readouterr()
    assert train.main(["train.py", "--task=synthetic", *args, "--train_steps=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has a run that was started with other settings: task digits -> synthetic" in line
    assert "--resume_anyway" in line and tree(tmp_path) == before


# --- C069: how many are kept -----------------------------------------------------------------------------------------


def test_c069_five_of_eight_then_two_after_a_restart(tmp_path: pathlib.Path) -> None:
    config = settings(run_dir=tmp_path, train_steps=8, checkpoint_every=1, keep_checkpoints=5)
    Toy(config).train()
    assert store(tmp_path).steps() == [4, 5, 6, 7, 8]
    Toy(config.replace(train_steps=9, keep_checkpoints=2)).train()
    assert store(tmp_path).steps() == [8, 9]


def test_c069_every_nth_and_the_best_are_kept_besides(tmp_path: pathlib.Path) -> None:
    class Rising(Toy):
        xs, rate = np.full(4, -1.0, np.float32), 1.0  # the evaluation's loss is the weight, 2 after step 1

        def eval_data(self) -> Any:
            return from_arrays(np.ones(4, np.float32), shuffle=False)

    config = settings(
        run_dir=tmp_path,
        train_steps=9,
        eval_every=1,
        checkpoint_every=1,
        keep_checkpoints=1,
        keep_every=4,
        keep_best="loss:min",
    )
    Rising(config).train()
    assert store(tmp_path).steps() == [1, 4, 8, 9]


def test_figures_that_come_after_the_checkpoint_of_their_step_are_in_it(tmp_path: pathlib.Path) -> None:
    """The data ends, at a length nobody knew, just where a checkpoint was due; the last evaluation comes after it."""

    class Ending(Toy):
        def train_data(self) -> Any:
            data = tf.data.Dataset.from_tensor_slices(np.ones(12, np.float32)).batch(4)
            return data.filter(lambda x: True)

        def eval_data(self) -> Any:
            return from_arrays(np.ones(4, np.float32), shuffle=False)

    config = settings(run_dir=tmp_path, train_steps=-1, checkpoint_every=3, keep_best="loss:min")
    Ending(config).train()
    assert store(tmp_path).steps() == [3] and store(tmp_path, best=("loss", "min")).best_step() == 3


# --- C070: partial restore -------------------------------------------------------------------------------------------


class Stack(Trainer):
    """Dense layers of the given widths and names."""

    layers: Any = (("one", 4), ("two", 2))
    options: Any = None

    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(n, name=name) for name, n in self.layers)])

    def build_optimizer(self) -> Any:
        return optimizers.Adam(learning_rate=0.01)

    def train_data(self) -> Any:
        return from_arrays(np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.reduce_sum(model(batch) ** 2, 1))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((("one", 4), ("two", 2), ("three", 2)), "missing in the checkpoint: model/sequential/three/kernel"),
        ((("one", 5), ("two", 2)), "model/sequential/one/kernel: shape (3, 4) in the checkpoint, (3, 5) in this model"),
        ((("one", 4), ("other", 2)), "not in this model: model/sequential/two/kernel"),
    ],
)
def test_c070_another_model_is_refused_and_a_part_is_loaded_only_when_asked(
    tmp_path: pathlib.Path, layers: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(Stack):
        pass

    Other.layers = layers
    Stack(settings(run_dir=tmp_path / "run")).train()
    with pytest.raises(ConfigError) as error:
        Other(settings(run_dir=tmp_path / "run", train_steps=8)).train()
    assert f"  {said}" in str(error.value).splitlines()
    names = [name for name, _ in layers if (name, dict(layers)[name]) not in Stack.layers]
    exclude = ",".join([*names, "two"] if names == ["other"] else names + ["two"] * (names == ["one"]))
    part = settings(run_dir=tmp_path / "part", init_from=str(tmp_path / "run"), init_exclude=exclude, progress="lines")
    if names == ["one"]:  # its width reaches the next layer too, and nothing would be left
        with pytest.raises(ConfigError, match="leave no variable"):
            Other(part).train()
        return
    Other(part).train()
    out = capsys.readouterr().out
    assert "initial weights: " in out and "kept as they were made: " in out


# --- C071, C072, C073: slots -----------------------------------------------------------------------------------------

_STEP_4 = """
import sys
import framework
from tests.field.test_ckpt import Stack
from tests.helpers import settings
trainer = Stack(settings(run_dir=sys.argv[1], train_steps=4))
trainer.train()
print("step", trainer.step)
"""


def test_c071_a_new_process_goes_on_with_the_optimizers_state_bit_for_bit(tmp_path: pathlib.Path) -> None:
    Stack(settings(run_dir=tmp_path / "unbroken", train_steps=4)).train()
    Stack(settings(run_dir=tmp_path / "run", train_steps=3)).train()
    command = [sys.executable, "-c", _STEP_4, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("step 4\n"), done.stderr[-2000:]
    left, right = saved(tmp_path / "unbroken", 4), saved(tmp_path / "run", 4)
    assert sorted(left) == sorted(right) and any(n.startswith("optimizer/m/") for n in left)
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize(("replicas", "own"), [((1, 2), True), ((2, 1), True), ((1, 2), False)])
def test_c072_slots_on_another_number_of_replicas(tmp_path: pathlib.Path, replicas: tuple[int, int], own: bool) -> None:
    class Task(Stack):
        def build_optimizer(self) -> Any:
            return super().build_optimizer() if own else keras.optimizers.Adam(0.01)

    Task(settings(run_dir=tmp_path, train_steps=3, num_replicas=replicas[0])).train()
    right = saved(tmp_path, 3)
    other = Task(settings(run_dir=tmp_path, train_steps=3, num_replicas=replicas[1]))
    other.train()  # nothing is left to do, so what was restored is there to be looked at
    assert_copies_equal(other)
    state = copies(other)[0]
    assert len(copies(other)) == replicas[1] and state["optimizer/iterations"] == 3
    for name, value in state.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize(("inside", "first"), [(True, "state"), (True, "train"), (False, "train")])
def test_c073_restoring_inside_and_outside_the_scope(tmp_path: pathlib.Path, inside: bool, first: str) -> None:
    import contextlib

    Stack(settings(run_dir=tmp_path, train_steps=3)).train()
    other = Stack(settings(run_dir=tmp_path, train_steps=5, num_replicas=2))
    with other.strategy.scope() if inside else contextlib.nullcontext():
        if first == "state":
            other.state()
        other.train()
    assert other.step == 5
    assert_copies_equal(other)


# --- C074: names, not positions --------------------------------------------------------------------------------------


def test_c074_swapped_variables_of_one_shape_are_matched_by_name(tmp_path: pathlib.Path) -> None:
    class Pair(tf.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, tf.Variable([0.0, 0.0]))

    class Task(Toy):
        names, rate = "ab", 1.0

        def build_model(self) -> Any:
            return Pair(self.names)

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=-(model.a[0] + 2.0 * model.b[0]) + 0.0 * batch)

    class Swapped(Task):
        names = "ba"

    class Renamed(Task):
        names = "abc"

    Task(settings(run_dir=tmp_path, train_steps=1)).train()
    other = Swapped(settings(run_dir=tmp_path, train_steps=1))
    other.train()
    values = {name: float(v.numpy()[0]) for name, v in other.state().items() if name.startswith("model/")}
    assert values == {"model/a": 1.0, "model/b": 2.0}
    with pytest.raises(ConfigError, match="missing in the checkpoint: model/c"):
        Renamed(settings(run_dir=tmp_path, train_steps=2)).train()


# --- C117: what a user made ------------------------------------------------------------------------------------------


def test_c117_a_users_own_schedule_and_optimizer_need_no_registry(tmp_path: pathlib.Path) -> None:
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.1 * 0.5 ** tf.cast(step, tf.float32)

    class Mine(keras.optimizers.Adam):
        pass

    class Task(Stack):
        def build_optimizer(self) -> Any:
            return Mine(Halving())

    config = RunConfig(**{**settings().to_dict(), "num_replicas": 2})
    Task(config.replace(run_dir=str(tmp_path / "unbroken"), train_steps=4)).train()
    Task(config.replace(run_dir=str(tmp_path / "run"), train_steps=2)).train()
    Task(config.replace(run_dir=str(tmp_path / "run"), train_steps=4)).train()
    left, right = saved(tmp_path / "unbroken", 4), saved(tmp_path / "run", 4)
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)
