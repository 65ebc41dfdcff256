"""The folder of a run: one run at a time, refused where it cannot be one, and missed when it goes."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from framework import AtSteps, ConfigError, LockstepError, Scheduled
from framework.loop import folder as folders
from framework.loop.folder import LOCK, RunFolder
from tests.checkpoint.mounts import mounted
from tests.conftest import ROOT
from tests.helpers import Toy, ToyWithEval, column, settings, store, tree

# --- one at a time ---------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: pathlib.Path) -> None:
    with RunFolder(str(tmp_path)).claim() as mine:
        assert mine
        with pytest.raises(ConfigError, match=rf"is in use by another run \(process {os.getpid()} on .*, since 2"):
            Toy(settings(run_dir=tmp_path)).train()
        with RunFolder(str(tmp_path)).claim(required=False) as other:
            assert not other
    assert list(tmp_path.iterdir()) == []
    Toy(settings(run_dir=tmp_path)).train()
    assert LOCK not in [p.name for p in tmp_path.iterdir()]


def test_a_killed_process_frees_the_folder(tmp_path: pathlib.Path) -> None:
    code = "import sys, time\nfrom framework.loop.folder import RunFolder\n"
    code += "with RunFolder(sys.argv[1]).claim(): print('held', flush=True); time.sleep(60)\n"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on"), RunFolder(str(tmp_path)).claim():
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert (tmp_path / LOCK).exists()
        with RunFolder(str(tmp_path)).claim() as mine:
            assert mine
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_removed_between_opening_and_locking_is_no_lock(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """The run before ends in just that moment: the file is made again, and a third run finds it held."""
    flock, seen = folders._flock, []

    def late(descriptor: int) -> bool:
        if not seen:
            os.unlink(tmp_path / LOCK)
        seen.append(descriptor)
        return flock(descriptor)

    monkeypatch.setattr(folders, "_flock", late)
    with RunFolder(str(tmp_path)).claim() as mine:
        assert mine and len(seen) == 2 and (tmp_path / LOCK).exists()
        with pytest.raises(ConfigError, match="in use"), RunFolder(str(tmp_path)).claim():
            pass


def test_where_there_are_no_locks_a_warning_is_printed(
    tmp_path: pathlib.Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    Toy(settings(run_dir=tmp_path)).train()
    assert "warning: the file system of run_dir has no locks" in capsys.readouterr().out
    assert store(tmp_path).steps() == [4]


def test_an_evaluation_of_a_run_that_is_going_on_writes_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(run_dir=tmp_path, progress="lines")
    ToyWithEval(config).train(evaluate=False)
    with RunFolder(str(tmp_path)).claim():
        before = tree(tmp_path)
        trainer = ToyWithEval(config)
        assert trainer.evaluate() == {"loss": 1.0, "examples": 4.0}
        assert "is in use or read-only: nothing is written to it" in capsys.readouterr().out
        assert tree(tmp_path) == before
    trainer.evaluate()
    assert column(tmp_path, "step", "eval") == [4]


def test_an_evaluation_of_a_trainer_that_trained_keeps_out_of_a_run_that_has_begun_since(
    tmp_path: pathlib.Path,
) -> None:
    trainer = ToyWithEval(settings(run_dir=tmp_path, keep_best="loss:min", tensorboard=True))
    trainer.train()
    with RunFolder(str(tmp_path)).claim():
        before = tree(tmp_path)
        assert trainer.evaluate()["loss"] == 1.0
        assert tree(tmp_path) == before


def test_an_evaluation_from_a_hook_is_of_the_same_run(tmp_path: pathlib.Path) -> None:
    class Asking(ToyWithEval):
        def hooks(self) -> Any:
            return [Scheduled(AtSteps([2]), lambda step, values: self.evaluate() and None)]

    Asking(settings(run_dir=tmp_path)).train(evaluate=False)
    assert column(tmp_path, "step", "eval") == [2]


# --- what cannot be a run's folder -----------------------------------------------------------------------------------


def test_a_read_only_file_system_is_refused(tmp_path: pathlib.Path) -> None:
    with mounted(tmp_path / "disk", read_only=True) as disk:
        for run_dir in (disk, disk / "run"):
            with pytest.raises(ConfigError, match=rf"run_dir={run_dir} but {disk} may not be written \(Read-only"):
                Toy(settings(run_dir=run_dir)).train()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_folder_that_may_not_be_written_is_refused_with_the_systems_reason(
    tmp_path: pathlib.Path, monkeypatch: Any, number: int
) -> None:
    """Also where asking first says yes: root, quotas, file systems of the network."""

    def no(self: RunFolder) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RunFolder, "_lock", no)
    with pytest.raises(ConfigError, match=rf"may not be written \({os.strerror(number)}\)"):
        Toy(settings(run_dir=tmp_path / "a" / "b")).train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"config": 3}'])
def test_a_config_json_that_is_not_a_runs_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not one of a run"):
        Toy(settings(run_dir=tmp_path)).train()
    assert tree(tmp_path).keys() == {"config.json"} and (tmp_path / "config.json").read_text() == text


def test_checkpoints_of_something_else_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ckpt-1.index").write_text("x")
    with pytest.raises(ConfigError, match=r"checkpoints that are not of this framework \(ckpt-1\.index\)"):
        Toy(settings(run_dir=tmp_path)).train()


def test_other_files_beside_a_run_are_no_hindrance(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log.txt").write_text("of the shell")
    Toy(settings(run_dir=tmp_path, resume="never")).train()
    assert (tmp_path / "log.txt").read_text() == "of the shell" and store(tmp_path).steps() == [4]


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "summary.json", "tensorboard"])
def test_resume_never_refuses_what_any_run_left(tmp_path: pathlib.Path, left: str) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    for path in tmp_path.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "tensorboard").mkdir(exist_ok=True) if left == "tensorboard" else None
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"resume=never but run_dir={tmp_path} has the files of a run \({left}\)"):
        Toy(settings(run_dir=tmp_path, resume="never")).train()
    assert tree(tmp_path) == before


# --- gone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
@pytest.mark.parametrize("at", [2, 6])
def test_a_folder_that_goes_while_the_run_writes_ends_it_and_is_not_made_again(
    tmp_path: pathlib.Path, how: str, at: int
) -> None:
    run_dir, moved = tmp_path / "run", tmp_path / "moved"

    class Losing(Toy):
        def hooks(self) -> Any:
            def lose(step: int, values: Any) -> None:
                shutil.rmtree(run_dir) if how == "deleted" else run_dir.rename(moved)
                if how == "replaced":
                    run_dir.mkdir()

            return [Scheduled(AtSteps([at]), lose)]

    trainer = Losing(settings(run_dir=run_dir, train_steps=6, checkpoint_every=4, checkpoint_in_background=False))
    with pytest.raises(LockstepError, match=rf"run_dir={run_dir} is gone: it was deleted, moved or replaced"):
        trainer.train()
    assert trainer.step <= at + 1
    assert run_dir.exists() == (how == "replaced")
    if how == "replaced":
        assert list(run_dir.iterdir()) == []  # it is another's: nothing was written to it, and it was not removed
    if how != "deleted":
        assert store(moved).steps() == ([4] if at == 6 else [])
