"""Time to a goal: who stops when, whose time counts, and who is thrown out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import goal as goals
from benchmarks.goal import Goal, measure
from benchmarks.process import ContenderFailed, StartUp, Window
from benchmarks.workload import Workload

DIGITS = Goal(workload=Workload(data="digits", features=64, hidden=(4,), batch=96, eval_every=10), limit=0.9, most=4)


@dataclasses.dataclass
class Fake:
    """A contender of numbers: what each evaluation tells, and how long it takes to get there."""

    figures: tuple[float, ...]
    seconds: float = 1.0
    first: float = 5.0
    count: int = 0

    def start_up(self) -> StartUp:
        return StartUp(1.0, self.first, 2.3, 90.0, {})

    def window(self) -> Window:
        self.count += 1
        if self.count > len(self.figures):
            raise ContenderFailed("broke")
        figure = self.figures[self.count - 1]
        return Window(step=10 * self.count, steps=10, seconds=self.seconds, cpu_seconds=0.0, loss=figure, rss_mb=1.0)

    def close(self) -> None:
        self.count = 0


def measured(rounds: int = 1, **fakes: Fake) -> dict[str, Any]:
    return measure(DIGITS, list(fakes), rounds, lambda name, goal: fakes[name])


def test_the_time_is_that_of_the_first_step_and_of_the_windows_up_to_the_goal() -> None:
    found = measured(
        rounds=2, trainer=Fake((0.5, 0.8, 0.92, 0.99)), torch=Fake((0.5, 0.8, 0.91, 0.99), seconds=3.0, first=2.0)
    )
    assert found["rejected"] == {}
    assert found["contenders"]["trainer"] == {
        "seconds": {"median": 8.0, "min": 8.0, "max": 8.0, "rounds": [8.0, 8.0]},
        "steps": 30,
    }
    assert found["ratios"]["torch/trainer"]["median"] == pytest.approx(11.0 / 8.0)


def test_who_does_not_reach_it_breaks_or_learns_otherwise_is_thrown_out() -> None:
    found = measured(
        trainer=Fake((0.5, 0.95)), slow=Fake((0.5, 0.8, 0.8, 0.8)), other=Fake((0.6, 0.95)), broken=Fake((0.5,))
    )
    assert found["rejected"] == {
        "slow": "0.9 was not reached in 40 steps: 0.8",
        "other": "evaluation 1 tells 0.6 where the trainer's tells 0.5",
        "broken": "broke",
    }
    assert list(found["contenders"]) == ["trainer"]


def test_bits_are_to_fall_and_an_accuracy_is_to_rise() -> None:
    language = goals.GOALS["language"]
    assert language.reached(2.9) and not language.reached(3.1)
    assert DIGITS.reached(0.9) and not DIGITS.reached(0.89)
    assert DIGITS.ends == [1, 10, 20, 30, 40]


def test_an_unknown_goal_or_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--goals=chess"], ["--against=orbit"]):
        with pytest.raises(SystemExit) as error:
            goals.main(flags)
        assert error.value.code == 2
    assert "goals are digits, language, peers keras_fit, torch" in capsys.readouterr().err
