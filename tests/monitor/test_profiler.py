"""Profiles of the steps that were asked for, beforehand or by a signal or a file, with a marker for each step."""

from __future__ import annotations

import math
import os
import pathlib
import re
import signal
from typing import Any

import pytest

from framework import ConfigError, EveryStep, Scheduled
from framework.monitor.profiler import ON_DEMAND, REQUEST, Profiler
from framework.parse import parse_profile
from tests.helpers import Toy, records, settings


def profiles(run_dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(run_dir.glob("tensorboard/profile/worker-0000/plugins/profile/*/*.xplane.pb"))


def test_a_range_of_steps_is_profiled_with_markers_and_the_rest_is_not_cut(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        run_dir=str(tmp_path), train_steps=40, profile="11:13", steps_per_loop=20, log_every=0, progress="lines"
    )
    trainer = Toy(config)
    ends: list[int] = []
    add = trainer._run._watch.add

    def adds(result: Any, *, compiled: bool) -> None:
        ends.append(trainer.step)
        add(result, compiled=compiled)

    trainer._run._watch.add = adds  # type: ignore[method-assign]
    trainer.train()
    assert ends == [1, 10, 11, 12, 13, 33, 40]
    (profile,) = profiles(tmp_path)
    content = profile.read_bytes()
    assert b"step_num" in content and b"train" in content
    assert "step 10: profiling up to step 13, to " in capsys.readouterr().out
    assert not list(tmp_path.glob("stacks*"))


class Asks(Toy):
    """Asks for a profile after step 5, in the way of the test."""

    ask: Any = None

    def hooks(self) -> Any:
        return [Scheduled(EveryStep(), lambda step, values: type(self).ask() if step == 5 else None)]


@pytest.mark.parametrize("way", ["signal", "file"])
def test_a_signal_or_a_file_asks_for_a_profile_and_for_stacks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("framework.monitor.profiler._LOOK", 0.0)
    (tmp_path / REQUEST).touch()  # an old one, which is not meant

    def ask() -> None:
        if way == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        else:
            os.utime(tmp_path / REQUEST, ns=(1, 1))

    monkeypatch.setattr(Asks, "ask", ask)
    before = signal.getsignal(signal.SIGUSR2)
    Asks(settings(run_dir=str(tmp_path), train_steps=8, tensorboard=False)).train()
    assert signal.getsignal(signal.SIGUSR2) == before
    assert len(profiles(tmp_path)) == 1  # the run ends inside of it
    stacks = (tmp_path / "stacks/worker-0000.txt").read_text()
    assert re.search(r"most recent call first", stacks) and "run.py" in stacks
    assert len(records(tmp_path)) == 8


def test_the_trigger_cuts_before_the_first_and_behind_every_profiled_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("tensorflow.profiler.experimental.start", started.append)
    monkeypatch.setattr("tensorflow.profiler.experimental.stop", lambda: started.append("stop"))
    said: list[str] = []
    one = Profiler(Toy(settings(run_dir=str(tmp_path), train_steps=90, profile="10:12")), say=said.append)
    assert [one.next_step(step) for step in (0, 8, 9, 20)] == [9, 9, math.inf, math.inf]
    assert "steps 10 to 12" in one.describe()
    one.at(9)
    assert one.active and one.next_step(9) == 10 and started == [one.folder]
    one.at(11)
    assert one.active
    one.at(12)
    assert not one.active and started[1:] == ["stop"]
    one._asked = True
    one.at(20)
    assert one.active and one.next_step(20) == 21
    one.at(20 + ON_DEMAND)
    assert not one.active and not one.fires(30, 0.0)


def test_what_cannot_be_profiled_is_refused() -> None:
    assert parse_profile("") is None
    assert parse_profile("2:5") == range(2, 6)
    for wrong in ("5", "1:5", "5:4", "a:b", "2:5000", "-3:4"):
        with pytest.raises(ConfigError, match="profile="):
            parse_profile(wrong)
    with pytest.raises(ConfigError, match="without run_dir"):
        settings(profile="2:3")
    with pytest.raises(ConfigError, match="the run ends before"):
        settings(profile="2:30", run_dir="r")
