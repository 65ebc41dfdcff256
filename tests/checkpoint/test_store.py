"""A folder of checkpoints: whole or not there, the newest and the best kept, errors that surface."""

from __future__ import annotations

import json
import math
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, EveryStep, LockstepError, Scheduled
from framework.checkpoint import manifest
from framework.checkpoint.manifest import MANIFEST
from framework.checkpoint.restore import assign
from framework.checkpoint.store import CheckpointStore
from tests.helpers import Toy, mirrored, settings, store, tree

VALUES = {"model/w": np.float32([1.5, -2.0]), "run/step": np.int64(3)}


def filled(folder: pathlib.Path, steps: Any, **options: Any) -> CheckpointStore:
    """A store with a checkpoint for each step; ``figures`` gives those of a step."""
    figures = options.pop("figures", {})
    made = CheckpointStore(folder=str(folder / "checkpoints"), **options)
    for step in steps:
        made.save(step, {**VALUES, "run/step": np.int64(step)}, figures.get(step))
    made.wait()
    return made


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_tensors_come_back_bit_for_bit_under_their_names(tmp_path: pathlib.Path, background: bool) -> None:
    values = {
        "a": np.float32([[1.1, math.nan, -math.inf]]),
        "b/c": np.int64(2**62),
        "d e": tf.constant([1.0, 2.0], tf.bfloat16),
        "f": np.float64(0.1),
        "g": np.zeros([0, 3], np.float32),
        "h": tf.constant([True, False]),
    }
    made = CheckpointStore(folder=str(tmp_path), background=background)
    made.save(7, values)
    made.wait()
    read = CheckpointStore(folder=str(tmp_path)).load(7)
    assert sorted(read) == sorted(values)
    for name, value in values.items():
        right = np.asarray(value)
        assert read[name].dtype == right.dtype and read[name].shape == right.shape
        assert read[name].tobytes() == right.tobytes()


def test_files_are_tensorflows_own_format(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [3])
    assert made.path(3) == str(tmp_path / "checkpoints" / "step-00000003")
    reader = tf.train.load_checkpoint(made.path(3) + "/data")
    assert reader.get_variable_to_shape_map() == {"model/w": [2], "run/step": []}
    np.testing.assert_array_equal(reader.get_tensor("model/w"), VALUES["model/w"])


def test_checkpoints_of_a_run_can_be_read_without_the_framework(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints" / "step-00000004" / "data"))
    names = {"model/w", "optimizer/iterations", "run/step", "run/examples", "run/epoch", "run/batches"}
    assert set(reader.get_variable_to_shape_map()) == names
    assert (reader.get_tensor("run/step"), reader.get_tensor("run/examples")) == (4, 16)


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 3_000_000_000])
def test_steps_of_any_size_are_found_again_in_order(tmp_path: pathlib.Path, step: int) -> None:
    made = filled(tmp_path, [5, step])
    assert made.steps() == sorted({5, step})
    assert made.latest() == max(5, step)


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: pathlib.Path) -> None:
    assert CheckpointStore(folder=str(tmp_path / "none")).latest() is None
    assert CheckpointStore(folder=str(tmp_path)).steps() == []


def test_a_step_saved_again_replaces_the_old_one(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [3])
    made.save(3, {"other": np.float32(1.0)})
    made.wait()
    assert made.steps() == [3] and list(made.load(3)) == ["other"]


def test_the_folder_holds_nothing_but_checkpoints(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [1, 2])
    assert sorted(p.name for p in pathlib.Path(made.folder).iterdir()) == ["step-00000001", "step-00000002"]
    names = [p.name for p in pathlib.Path(made.path(1)).iterdir()]
    assert sorted(names) == ["data.data-00000-of-00001", "data.index", MANIFEST]
    value = json.loads(pathlib.Path(made.path(1), MANIFEST).read_text())
    assert value["step"] == 1
    sizes = {n: pathlib.Path(made.path(1), n).stat().st_size for n in names if n != MANIFEST}
    assert {n: file["size"] for n, file in value["files"].items()} == sizes
    right = {"model/w": {"shape": [2], "dtype": "float32"}, "run/step": {"shape": [], "dtype": "int64"}}
    assert value["variables"] == right


@pytest.mark.parametrize("what", ["no manifest", "torn manifest", "temporary", "file", "other name"])
def test_what_is_no_whole_checkpoint_is_passed_over(tmp_path: pathlib.Path, what: str) -> None:
    made = filled(tmp_path, [4, 9])
    newest = pathlib.Path(made.path(9))
    if what == "no manifest":
        (newest / MANIFEST).unlink()
    elif what == "torn manifest":
        (newest / MANIFEST).write_bytes((newest / MANIFEST).read_bytes()[:-3])
    elif what == "temporary":
        newest.rename(newest.with_name(".tmp-00000009-1234"))
    elif what == "file":
        for path in newest.iterdir():
            path.unlink()
        newest.rmdir()
        newest.write_text("")
    else:
        newest.rename(newest.with_name("step-9"))
    assert made.steps() == [4]
    np.testing.assert_array_equal(made.load(4)["model/w"], VALUES["model/w"])


@pytest.mark.parametrize("what", ["missing", "cut"])
def test_a_checkpoint_whose_data_is_not_as_the_manifest_says_is_passed_over(tmp_path: pathlib.Path, what: str) -> None:
    made = filled(tmp_path, [4, 9])
    data = pathlib.Path(made.path(9), "data.data-00000-of-00001")
    if what == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        data.unlink()
    assert made.latest() == 4


def test_data_that_cannot_be_read_is_an_error_with_the_folder(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [4])
    pathlib.Path(made.path(4), "data.index").write_bytes(b"nothing")
    with pytest.raises(LockstepError, match=r"cannot read checkpoint .*step-00000004"):
        made.load(4)


def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path, checkpoint_every=2)).train()
    pathlib.Path(store(tmp_path).path(4), MANIFEST).unlink()
    again = Toy(settings(run_dir=tmp_path))
    again.train()
    assert again.step == 4 and store(tmp_path).steps() == [2, 4]


def flip(path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_a_run_names_what_it_passes_over_and_goes_on_from_the_one_before(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(run_dir=tmp_path, checkpoint_every=1, progress="lines")
    Toy(config).train()
    paths = {step: pathlib.Path(store(tmp_path).path(step)) for step in (1, 2, 3, 4)}
    flip(paths[4] / "data.data-00000-of-00001", 0)
    flip(paths[3] / MANIFEST, 40)
    capsys.readouterr()
    again = Toy(config.replace(keep_checkpoints=2))
    again.train()
    out = capsys.readouterr().out
    assert f"warning: passed over the checkpoint {paths[4]}: data.data-00000-of-00001 is not what was written" in out
    assert f"warning: passed over the checkpoint {paths[3]}: manifest.json is not what was written" in out
    assert "going on from the checkpoint of step 2, example 8" in out and again.step == 4
    assert store(tmp_path).newest().passed_over == {} and store(tmp_path).steps() == [3, 4]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} >= {"step-00000003.aside-1", "step-00000004.aside-1"}


@pytest.mark.parametrize("resume", ["auto", "must", "never"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(
    tmp_path: pathlib.Path, resume: str
) -> None:
    Toy(settings(run_dir=tmp_path, checkpoint_every=2)).train()
    for step in (2, 4):
        flip(pathlib.Path(store(tmp_path).path(step), "data.index"), 5)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"none is whole: step-00000004: data\.index .*; step-00000002: data\.index"):
        Toy(settings(run_dir=tmp_path, resume=resume)).train()
    assert tree(tmp_path) == before


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_c069_the_newest_k_are_kept_and_a_smaller_k_catches_up(tmp_path: pathlib.Path) -> None:
    assert filled(tmp_path, range(1, 9), keep=5).steps() == [4, 5, 6, 7, 8]
    assert filled(tmp_path, [9], keep=2).steps() == [8, 9]
    assert filled(tmp_path, [10], keep=1).steps() == [10]


LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: math.nan, 6: 4.0}


@pytest.mark.parametrize(("direction", "best"), [("min", 2), ("max", 6)])
def test_the_best_is_kept_besides_the_newest(tmp_path: pathlib.Path, direction: str, best: int) -> None:
    figures = {step: {"loss": loss, "other": -loss} for step, loss in LOSSES.items()}
    made = filled(tmp_path, range(1, 7), keep=2, best=("loss", direction), figures=figures)
    assert made.best_step() == best
    assert made.steps() == sorted({best, 5, 6})


def test_of_equals_the_first_is_the_best(tmp_path: pathlib.Path) -> None:
    figures = {step: {"loss": 1.0} for step in (1, 2, 3)}
    made = filled(tmp_path, [1, 2, 3], keep=1, best=("loss", "min"), figures=figures)
    assert made.best_step() == 1 and made.steps() == [1, 3]
    assert not made.would_be_best({"loss": 1.0})
    assert made.would_be_best({"loss": 0.99})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(tmp_path: pathlib.Path, value: float) -> None:
    for direction in ("min", "max"):
        made = filled(tmp_path / direction, [1], best=("loss", direction), figures={1: {"loss": value}})
        assert made.best_step() is None
        assert not made.would_be_best({"loss": value})
        assert made.would_be_best({"loss": 1e30})


def test_c062_a_figure_that_is_left_out_is_not_the_best_and_no_error(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [1, 2, 3], best=("f1", "max"), figures={1: {"loss": 1.0}, 3: {"f1": 0.25}})
    assert made.best_step() == 3
    assert not made.would_be_best({"loss": 1.0})


def test_a_new_best_lets_the_old_one_go(tmp_path: pathlib.Path) -> None:
    figures = {1: {"loss": 2.0}, 2: {"loss": 3.0}, 3: {"loss": 1.0}, 4: {"loss": 5.0}}
    made = filled(tmp_path, [1, 2, 3, 4], keep=1, best=("loss", "min"), figures=figures)
    assert made.steps() == [3, 4]


def test_best_is_known_to_a_new_process(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, [1, 2, 3], best=("loss", "min"), figures={2: {"loss": 1.0}, 3: {"loss": 4.0}})
    again = filled(tmp_path, [4, 5], keep=1, best=("loss", "min"), figures={4: {"loss": 1.5}})
    assert again.best_step() == 2 and again.steps() == [2, 5]


def test_every_nth_is_kept_for_good(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, range(1, 10), keep=2, every=3)
    assert made.steps() == [3, 6, 8, 9]


def test_a_best_that_is_still_being_written_counts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = CheckpointStore._write

    def late(self: CheckpointStore, *args: Any) -> None:
        go_on.wait(timeout=60)
        write(self, *args)

    monkeypatch.setattr(CheckpointStore, "_write", late)
    made = CheckpointStore(folder=str(tmp_path), best=("loss", "min"))
    made.save(1, VALUES, {"loss": 1.0})
    assert not made.would_be_best({"loss": 1.5}) and made.would_be_best({"loss": 0.5})
    go_on.set()
    made.wait()
    assert not made.would_be_best({"loss": 1.5}) and made.would_be_best({"loss": 0.5})


# --- only what this run wrote ----------------------------------------------------------------------------------------


def test_c068_checkpoints_of_another_run_are_never_removed(tmp_path: pathlib.Path) -> None:
    filled(tmp_path, [1, 2, 3], run="aaaa")
    made = filled(tmp_path, [4, 5, 6], run="bbbb", keep=1)
    assert made.steps() == [1, 2, 3, 6]


def test_c068_a_checkpoint_of_another_run_in_the_way_gets_another_name(tmp_path: pathlib.Path) -> None:
    other = filled(tmp_path, [3], run="aaaa")
    before = tree(other.path(3))
    made = filled(tmp_path, [3], run="bbbb")
    assert made.steps() == [3] and manifest.read(made.path(3)).run == "bbbb"
    assert tree(f"{made.path(3)}.aside-1") == before


def test_a_damaged_checkpoint_in_the_way_is_kept_under_another_name(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [3])
    for number in (1, 2):
        data = pathlib.Path(made.path(3), "data.data-00000-of-00001")
        data.write_bytes(data.read_bytes()[:-1])
        again = filled(tmp_path, [3])
        assert again.steps() == [3]
        assert pathlib.Path(f"{made.path(3)}.aside-{number}").is_dir()


def test_what_a_killed_process_left_is_removed_and_that_of_another_run_is_not(tmp_path: pathlib.Path) -> None:
    made = filled(tmp_path, [1, 2], run="aaaa")
    folder = pathlib.Path(made.folder)
    for name in (".tmp-00000003-aaaa-77", ".tmp-00000003-bbbb-77", ".old-00000001-aaaa-77", "notes", ".tmp-x"):
        (folder / name).mkdir()
        (folder / name / "data.index").write_text("half")
    assert made.clean() == [".old-00000001-aaaa-77", ".tmp-00000003-aaaa-77"]
    left = sorted(p.name for p in folder.iterdir())
    assert left == [".tmp-00000003-bbbb-77", ".tmp-x", "notes", "step-00000001", "step-00000002"]


def test_a_checkpoint_whose_successor_never_came_is_put_back(tmp_path: pathlib.Path) -> None:
    """A kill between the two renames of a step that is saved again."""
    made = filled(tmp_path, [1, 2])
    right = tree(made.path(2))
    pathlib.Path(made.path(2)).rename(pathlib.Path(made.folder, ".old-00000002--77"))
    assert made.steps() == [1]
    assert made.clean() == [".old-00000002--77"]
    assert made.steps() == [1, 2] and tree(made.path(2)) == right


# --- errors ----------------------------------------------------------------------------------------------------------


def blocked(folder: pathlib.Path) -> CheckpointStore:
    """A store whose folder cannot be made: there is a file in its place."""
    (folder / "checkpoints").write_text("in the way")
    return CheckpointStore(folder=str(folder / "checkpoints"))


@pytest.mark.parametrize("call", ["save", "wait"])
def test_b43_an_error_in_the_background_comes_up_at_the_next_call_and_once(tmp_path: pathlib.Path, call: str) -> None:
    made = blocked(tmp_path)
    made.save(1, VALUES)
    with pytest.raises(LockstepError, match=r"saving a checkpoint failed: .*checkpoints") as error:
        made.save(2, VALUES) if call == "save" else made.wait()
    assert isinstance(error.value.__cause__, OSError)
    made.check()  # told once
    made.wait()


def test_b43_a_check_tells_of_a_save_that_has_failed_and_does_not_wait(tmp_path: pathlib.Path) -> None:
    made = blocked(tmp_path)
    made.check()
    made.save(1, VALUES)
    assert made._saving is not None
    made._saving.result()
    with pytest.raises(LockstepError, match="saving a checkpoint failed"):
        made.check()


def test_b43_a_save_that_fails_at_once_says_so(tmp_path: pathlib.Path) -> None:
    made = blocked(tmp_path)
    made._background = False
    with pytest.raises((LockstepError, OSError), match="checkpoints"):
        made.save(1, VALUES)


def test_a_failed_save_leaves_the_others_and_no_torn_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filled(tmp_path, [1, 2])
    before = tree(tmp_path)

    def full(folder: str) -> None:
        raise OSError(28, "No space left on device", folder)

    monkeypatch.setattr("framework.checkpoint.store.sync_tree", full)
    made.save(3, VALUES)
    with pytest.raises(LockstepError, match="No space left on device"):
        made.wait()
    assert made.steps() == [1, 2] and tree(tmp_path) == before
    monkeypatch.undo()
    made.save(3, VALUES)
    made.wait()
    assert made.latest() == 3


class Obstructed(Toy):
    """After step 1 a file stands where the checkpoints are to go."""

    def hooks(self) -> Any:
        def obstruct(step: int, values: Any) -> None:
            if step == 1:
                pathlib.Path(str(self.config.run_dir), "checkpoints").write_text("in the way")

        return [Scheduled(EveryStep(), obstruct)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("background", [True, False])
def test_b43_a_failed_save_ends_the_run_at_the_next_save_at_the_latest(
    tmp_path: pathlib.Path, background: bool, replicas: int
) -> None:
    config = settings(
        run_dir=tmp_path,
        train_steps=20,
        checkpoint_every=3,
        checkpoint_in_background=background,
        num_replicas=replicas,
    )
    trainer = Obstructed(config)
    with pytest.raises((LockstepError, OSError), match="checkpoints"):
        trainer.train()
    assert 3 <= trainer.step <= 6
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "checkpoints" in summary["reason"]


def test_b43_a_save_that_failed_in_the_background_ends_the_run_at_the_next_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CheckpointStore, *args: Any) -> None:
        raise OSError(5, "Input/output error", self.folder)

    class Patient(Toy):
        def hooks(self) -> Any:
            def look(step: int, values: Any) -> None:
                saving = self._run.saving._store._saving  # type: ignore[union-attr]
                if saving is not None:
                    saving.result()

            return [Scheduled(EveryStep(), look)]

    monkeypatch.setattr(CheckpointStore, "_write", fail)
    trainer = Patient(settings(run_dir=tmp_path, train_steps=50, checkpoint_every=20))
    with pytest.raises(LockstepError, match=r"saving a checkpoint failed: .*Input/output error"):
        trainer.train()
    assert trainer.step in (20, 21)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_save_that_is_running_when_the_run_ends_by_an_error_is_finished(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    write = CheckpointStore._write

    def slow(self: CheckpointStore, *args: Any) -> None:
        time.sleep(0.3)
        write(self, *args)

    class Ending(Toy):
        def hooks(self) -> Any:
            def end(step: int, values: Any) -> None:
                if step == 3:
                    raise error

            return [Scheduled(EveryStep(), end)]

    monkeypatch.setattr(CheckpointStore, "_write", slow)
    with pytest.raises(error):
        Ending(settings(run_dir=tmp_path, checkpoint_every=2)).train()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert store(tmp_path).newest().passed_over == {}


def test_there_is_one_snapshot_in_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are read for a save only when the save before is written."""
    write, running = CheckpointStore._write, []

    def slow(self: CheckpointStore, *args: Any) -> None:
        running.append(1)
        time.sleep(0.05)
        write(self, *args)
        running.pop()

    class Watched(Toy):
        def state(self) -> Any:
            assert not running
            return super().state()

    monkeypatch.setattr(CheckpointStore, "_write", slow)
    Watched(settings(run_dir=tmp_path, train_steps=6, checkpoint_every=1)).train()
    assert store(tmp_path).steps() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("background", [True, False])
def test_b43_a_failed_save_at_the_end_is_an_error_of_the_run(tmp_path: pathlib.Path, background: bool) -> None:
    with pytest.raises((LockstepError, OSError), match="checkpoints"):
        Obstructed(settings(run_dir=tmp_path, checkpoint_in_background=background)).train()


def test_b43_a_run_whose_last_save_failed_is_not_summed_up_as_done(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LockstepError):
        Obstructed(settings(run_dir=tmp_path)).train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_snapshot_is_of_the_step_it_was_taken_at(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates made while the file is still being written do not get into it."""
    go_on = threading.Event()
    write = CheckpointStore._write

    def late(self: CheckpointStore, *args: Any) -> None:
        go_on.wait(timeout=60)
        write(self, *args)

    class Falling(Toy):
        xs, rate = np.ones(8, np.float32), 0.25

        def hooks(self) -> Any:
            return [Scheduled(EveryStep(), lambda step, values: step == 4 and go_on.set())]

    monkeypatch.setattr(CheckpointStore, "_write", late)
    Falling(settings(run_dir=tmp_path, checkpoint_every=3)).train()
    assert {s: float(store(tmp_path).load(s)["model/w"]) for s in (3, 4)} == {3: 0.25, 4: 0.0}


# --- restore ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_restored_values_are_on_every_copy(replicas: int) -> None:
    strategy = mirrored(replicas)
    with strategy.scope():
        variables = {"a": tf.Variable([1.0, 2.0]), "n": tf.Variable(0, dtype=tf.int64)}
    assign(variables, {"a": np.float32([7, 8]), "n": np.int64(5)}, "here")
    for name, right in (("a", [7, 8]), ("n", 5)):
        copies = strategy.experimental_local_results(variables[name])
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), right)


def test_c070_everything_that_does_not_fit_is_listed_and_nothing_is_written() -> None:
    variables = {n: tf.Variable(tf.zeros([2])) for n in ("fits", "wide", "double", "lacking")}
    values = {
        "fits": np.ones(2, np.float32),
        "wide": np.ones(3, np.float32),
        "double": np.ones(2, np.float64),
        "unused": np.ones(2, np.float32),
    }
    with pytest.raises(ConfigError) as error:
        assign(variables, values, "/runs/a/step-00000004")
    assert str(error.value).splitlines() == [
        "the checkpoint /runs/a/step-00000004 does not fit this model; use the one it was written with, or another "
        "run_dir:",
        "  missing in the checkpoint: lacking",
        "  not in this model: unused",
        "  double: dtype float64 in the checkpoint, float32 in this model",
        "  wide: shape (3,) in the checkpoint, (2,) in this model",
    ]
    assert all(not np.any(v.numpy()) for v in variables.values())


def test_c074_values_are_matched_by_name_and_not_by_order() -> None:
    first = {"a": tf.Variable(0.0), "b": tf.Variable(0.0)}
    swapped = {"b": tf.Variable(0.0), "a": tf.Variable(0.0)}
    for variables in (first, swapped):
        assign(variables, {"a": np.float32(1.0), "b": np.float32(2.0)}, "here")
        assert (variables["a"].numpy(), variables["b"].numpy()) == (1.0, 2.0)
