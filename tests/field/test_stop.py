"""Field cases C096 and C099, and a limit of time: workers that stop, or are lost, and what the others do."""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from framework.loop.signals import StopSignals
from tests.field.stop_worker import STEPS
from tests.helpers import Toy, column, saved, settings


@pytest.mark.parametrize(
    "moment",
    ["step", pytest.param("evaluation", marks=pytest.mark.slow), pytest.param("compile", marks=pytest.mark.slow)],
)
def test_c099_a_signal_to_one_worker_saves_one_step_and_ends_both_with_5(
    run_workers: Callable[..., list[Any]], tmp_path: pathlib.Path, moment: str
) -> None:
    first, second = run_workers(2, str(tmp_path), moment, script="tests/field/stop_worker.py", timeout=150)
    assert (first.code, second.code) == (5, 5), first.stderr[-2000:] + second.stderr[-2000:]
    assert "another worker got a signal" in first.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("preempted", {"step": 14, "evaluation": 21, "compile": 2}[moment])
    # The same command goes on, to the weights of a run that was never stopped.
    again = run_workers(2, str(tmp_path), "none", script="tests/field/stop_worker.py", timeout=150)
    assert [a.code for a in again] == [0, 0], again[0].stderr[-2000:]
    steps = column(tmp_path / "run", "step")
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_c096_a_worker_that_dies_is_named_and_the_run_goes_on_from_its_checkpoint(
    run_workers: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    first, second = run_workers(2, str(tmp_path), "kill", script="tests/field/stop_worker.py", timeout=150)
    assert (first.code, second.code) == (4, -signal.SIGKILL), first.stderr[-3000:]
    assert "worker 1 (127.0.0.1:" in first.stdout and "is lost or stopped, last seen at step " in first.stdout
    assert "step 10 is saved; start all workers again" in first.stdout
    again = run_workers(2, str(tmp_path), "none", script="tests/field/stop_worker.py", timeout=150)
    assert [a.code for a in again] == [0, 0], again[0].stderr[-2000:]
    assert column(tmp_path / "run", "step") == list(range(1, STEPS + 1))


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_of_time_ends_one_worker_at_the_next_inner_loop() -> None:
    clock = Clock()
    signals = StopSignals(2.0, clock)
    trainer = Toy(settings())
    with signals.listening():
        assert signals.decide(trainer, 0.0) is None
        clock.now = 119.0
        assert signals.decide(trainer, 0.0) is None
        clock.now = 120.0
        assert signals.decide(trainer, 0.0) == ("stopped_early", "stopped at step 0: max_minutes=2 are over")
    with signals.listening():  # of the next call of train
        assert signals.decide(trainer, 0.0) is None


def test_a_run_that_was_out_of_time_goes_on_with_the_same_command(tmp_path: pathlib.Path) -> None:
    config = settings(run_dir=tmp_path, train_steps=40, max_minutes=1e-9, steps_per_loop=4)
    stopped = Toy(config)
    stopped.train()
    assert 0 < stopped.step < 40
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped_early"
    Toy(config.replace(max_minutes=0.0)).train()
    Toy(settings(run_dir=tmp_path / "whole", train_steps=40)).train()
    assert column(tmp_path, "step") == list(range(1, 41))
    for name, value in saved(tmp_path / "whole", 40).items():
        np.testing.assert_array_equal(saved(tmp_path, 40)[name], value, err_msg=name)
