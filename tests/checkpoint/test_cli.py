"""``python -m framework.checkpoint``: what it says, and 0, 1 or 2."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from framework.checkpoint.__main__ import main
from framework.checkpoint.store import CheckpointStore


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run folder with the checkpoints of steps 3 and 6."""
    made = CheckpointStore(folder=str(tmp_path / "run" / "checkpoints"), background=False, run="abcd")
    same = {"model/b": np.zeros([2, 3], np.float32), "run/step": np.int64(0)}
    made.save(3, {**same, "model/w": np.float32([1.0, 2.0, 3.0]), "model/old": np.int64(1)}, {"loss": 0.25})
    made.save(6, {**same, "model/w": np.float32([1.0, 2.5, 1.0]), "model/new": np.int64(1)})
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], code: int, *args: Any) -> list[str]:
    assert main([str(a) for a in args]) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code == 2)
    return (out + err).splitlines()


def damage(run: pathlib.Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / "data.index"
    path.write_bytes(path.read_bytes().swapcase())


def test_ls(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 0, "ls", run)
    assert [line.split()[0] for line in lines] == ["step-00000003", "step-00000006"]
    assert "4 variables" in lines[0] and lines[0].endswith("loss 0.25")


def test_verify(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all("whole: 2 files" in line for line in said(capsys, 0, "verify", run))
    damage(run, 6)
    assert len(said(capsys, 0, "ls", run)) == 2  # the sizes are right
    lines = said(capsys, 1, "verify", run / "checkpoints")
    assert "whole" in lines[0] and lines[1].startswith("step-00000006  damaged: data.index is not what was written")
    assert len(said(capsys, 0, "verify", run / "checkpoints" / "step-00000003")) == 1
    (run / "checkpoints" / "step-00000006" / "data.index").unlink()
    assert "data.index cannot be read" in said(capsys, 1, "ls", run)[1]


def test_show(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 0, "show", run)
    assert "step-00000006: step 6" in lines[0] and lines[0].endswith("written by run abcd")
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["model/b", "float32", "[2, 3]"],
        ["model/new", "int64", "[]"],
        ["model/w", "float32", "[3]"],
        ["run/step", "int64", "[]"],
    ]
    damage(run, 6)
    lines = said(capsys, 0, "show", run)
    assert lines[0].startswith("passed over step-00000006: data.index") and "step 3" in lines[1]


def test_diff(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (run / "checkpoints" / f"step-{s:08d}" for s in (3, 6))
    assert said(capsys, 0, "diff", one, one) == [f"{one} and {one} are the same"]
    assert said(capsys, 1, "diff", one, other) == [
        f"only in {one}: model/old",
        f"only in {other}: model/new",
        "model/w: 2 of 3 values differ, by at most 2",
        "3 common variables, 3 differences",
    ]


def test_diff_of_equal_values_and_of_another_shape(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = CheckpointStore(folder=str(tmp_path), background=False)
    for step, value in ((1, [1.0, np.nan]), (2, [1.0, np.nan]), (3, [1.0])):
        made.save(step, {"w": np.float32(value)})
    one, two, three = (made.path(step) for step in (1, 2, 3))
    assert said(capsys, 0, "diff", one, two) == ["1 common variables, 0 differences"]
    assert said(capsys, 1, "diff", one, three)[0] == "w: float32 [2] against float32 [1]"


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_nothing_to_look_at_ends_with_2(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a folder" in said(capsys, 2, command, tmp_path / "none")[0]
    assert "has no checkpoint" in said(capsys, 2, command, tmp_path)[0]
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
