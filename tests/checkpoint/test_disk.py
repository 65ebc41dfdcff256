"""A full disk: said with path and size, nothing half written is left, and the earlier checkpoints are as they were."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import LockstepError
from framework.checkpoint import disk
from framework.checkpoint.store import CheckpointStore
from tests.checkpoint.mounts import mounted
from tests.helpers import Toy, settings, store, tree

BIG = {"model/w": np.random.default_rng(0).normal(size=100_000).astype(np.float32)}  # 0.4 MB


@pytest.mark.parametrize("background", [True, False])
def test_what_has_no_room_is_not_begun(tmp_path: pathlib.Path, background: bool) -> None:
    with mounted(tmp_path / "disk", size="1m") as folder:
        made = CheckpointStore(folder=str(folder / "checkpoints"), background=background)
        for step in (1, 2):
            made.save(step, BIG)
        made.wait()
        before = tree(folder)
        with pytest.raises(LockstepError, match=r"no room for the checkpoint of step 3: it needs 0\.47 MB but 0\."):
            made.save(3, BIG)
        assert tree(folder) == before and made.latest() == 2
        assert made.newest().passed_over == {}


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_while_writing_leaves_the_earlier_ones(
    tmp_path: pathlib.Path, background: bool, monkeypatch: Any
) -> None:
    """Others write there too, and quotas are not seen before."""
    monkeypatch.setattr(disk, "require_room", lambda *args: None)
    with mounted(tmp_path / "disk", size="1m") as folder:
        made = CheckpointStore(folder=str(folder / "checkpoints"), background=background)
        for step in (1, 2):
            made.save(step, BIG)
        made.wait()
        before = tree(folder)
        with pytest.raises(LockstepError) as error:
            made.save(3, BIG)
            made.wait()
        text = str(error.value)
        assert text.startswith(f"saving a checkpoint failed: {made.path(3)}: ")
        assert "o space left on device" in text or "ResourceExhausted" in text
        assert "0.4 MB were to be written" in text and text.endswith("whole checkpoints: 1, 2")
        assert tree(folder) == before
        assert sorted(os.listdir(made.folder)) == ["step-00000001", "step-00000002"]


def faked(monkeypatch: Any, where: str) -> None:
    """No space for one of the writes, at the boundary to the system: files of TensorFlow, the manifest, the flush."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "tensorflow":

        def exhausted(**kwargs: Any) -> None:
            pathlib.Path(kwargs["prefix"] + ".data-00000-of-00001.tempstate1").write_bytes(b"half")
            raise tf.errors.ResourceExhaustedError(None, None, "data; No space left on device")

        monkeypatch.setattr(tf.raw_ops, "SaveV2", exhausted)
    else:
        monkeypatch.setattr({"manifest": "framework.checkpoint.manifest.write", "flush": "os.fsync"}[where], full)


@pytest.mark.parametrize("where", ["tensorflow", "manifest", "flush"])
def test_no_space_at_any_stage_leaves_nothing_half_written(
    tmp_path: pathlib.Path, where: str, monkeypatch: Any
) -> None:
    made = CheckpointStore(folder=str(tmp_path), keep=2)
    for step in (1, 2):
        made.save(step, BIG)
    made.wait()
    before = tree(tmp_path)
    faked(monkeypatch, where)
    made.save(3, BIG)
    with pytest.raises(LockstepError, match=r"step-00000003: .*[Nn]o space left on device.*whole checkpoints: 1, 2"):
        made.wait()
    assert tree(tmp_path) == before and len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    made.save(3, BIG)
    made.wait()
    assert made.steps() == [2, 3]


def test_a_run_on_a_full_disk_ends_with_the_reason_and_goes_on_when_there_is_room(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    config = settings(run_dir=tmp_path, train_steps=12, checkpoint_every=4)

    class Filling(Toy):
        def hooks(self) -> Any:
            from framework import AtSteps, Scheduled

            return [Scheduled(AtSteps([6]), lambda step, values: monkeypatch.setattr(disk, "free_bytes", lambda f: 99))]

    with pytest.raises(LockstepError, match=r"no room for the checkpoint of step 8: it needs .* but 9\.9e-05 MB"):
        Filling(config).train()
    assert store(tmp_path).steps() == [4]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "no room" in summary["reason"]
    monkeypatch.undo()
    again = Toy(config)
    again.train()
    assert (again.step, store(tmp_path).steps()) == (12, [4, 8, 12])


def test_a_summary_that_cannot_be_written_does_not_hide_the_first_error(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    def full(path: str, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    class Failing(Toy):
        def hooks(self) -> Any:
            from framework import AtSteps, Scheduled

            def fail(step: int, values: Any) -> None:
                monkeypatch.setattr("framework.loop.files.write_json", full)
                if self.fails:
                    raise RuntimeError("the first")

            return [Scheduled(AtSteps([2]), fail)]

    Failing.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the first"):
        Failing(settings(run_dir=tmp_path / "a")).train()
    monkeypatch.undo()
    Failing.fails = False  # type: ignore[attr-defined]
    with pytest.raises(LockstepError, match=r"summary\.json of run_dir=.* was not written: .*No space left"):
        Failing(settings(run_dir=tmp_path / "b")).train()


def test_room_is_that_of_the_folder_it_would_be_made_in(tmp_path: pathlib.Path) -> None:
    free = disk.free_bytes(str(tmp_path / "not" / "there"))
    assert free is not None and abs(free - (disk.free_bytes(str(tmp_path)) or 0)) < 1e9
    disk.require_room(str(tmp_path), 1, "a byte")


def test_a_file_too_large_for_the_system_is_an_error_and_no_checkpoint(tmp_path: pathlib.Path) -> None:
    """A real refusal of the system without any mount: a limit on the size of files."""
    import resource
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = CheckpointStore(folder=str(tmp_path))
    made.save(1, {"w": np.zeros(10, np.float32)})
    made.wait()
    before, handler = tree(tmp_path), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        made.save(2, BIG)
        with pytest.raises(LockstepError, match=r"step-00000002: .*whole checkpoints: 1"):
            made.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert tree(tmp_path) == before and len(list(tmp_path.iterdir())) == 1
