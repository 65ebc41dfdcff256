"""The ledger: every second of a run belongs to one phase, and progress is known."""

from __future__ import annotations

import math

import pytest

from framework.monitor.ledger import PHASES, Ledger, sentence, summed


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(ledger: Ledger, clock: Clock, name: str, seconds: float) -> None:
    with ledger.timed(name):
        clock.now += seconds


def test_b44_a_timed_block_of_10_percent_is_reported_as_10_percent(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.start()
    for _ in range(5):
        spend(ledger, clock, "checkpoint", 1.0)
        clock.now += 9.0
    assert ledger.seconds() == {"checkpoint": 5.0, "other": 45.0, "total": 50.0}


def test_b44_phases_sum_to_the_total_whatever_happens(clock: Clock) -> None:
    ledger = Ledger(clock)
    clock.now += 2.0
    with ledger.timed("recovery"):
        clock.now += 3.0
    ledger.start()
    spend(ledger, clock, "compile", 1.5)
    with pytest.raises(ValueError), ledger.timed("evaluate"):
        clock.now += 2.5
        raise ValueError
    with ledger.timed("evaluate"):
        clock.now += 1.0
        spend(ledger, clock, "checkpoint", 4.0)  # inside: the evaluation stands still meanwhile
        clock.now += 1.0
    spend(ledger, clock, "train", 8.0)
    ledger.move(3.0, "train", "input_wait")
    ledger.move(1e9, "checkpoint", "checks")  # never more than there is
    clock.now += 0.25
    found = ledger.seconds()
    assert found == {
        **{"start_up": 2.0, "recovery": 3.0, "compile": 1.5, "train": 5.0, "input_wait": 3.0, "evaluate": 4.5},
        **{"checks": 4.0, "other": 0.25, "total": 23.25},
    }
    assert sum(v for n, v in found.items() if n != "total") == found["total"]


def test_time_before_the_ledger_is_start_up(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.backdate(4.0)
    clock.now += 1.0
    assert ledger.seconds() == {"start_up": 5.0, "total": 5.0}
    ledger.backdate(-3.0)
    assert ledger.seconds()["total"] == 5.0


def test_a_second_start_changes_nothing(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.start()
    clock.now += 4.0
    ledger.start()
    assert ledger.seconds() == {"other": 4.0, "total": 4.0}


def test_moving_all_of_a_phase_that_was_not_there_is_nothing(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.move(math.inf, "recovery", "start_up")
    assert ledger.seconds() == {"total": 0.0}


def test_progress_is_known_by_phase_and_by_unit(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.start()
    for seconds, steps in ((1.0, 10), (4.0, 20), (3.0, 10)):
        with ledger.timed("train", units=steps):
            clock.now += seconds
    assert ledger.idle() == 0.0
    with ledger.timed("train", units=100):
        assert ledger.usual() == (3, pytest.approx(30.0))  # 0.3 s a step at most so far
        clock.now += 7.0
        assert ledger.idle() == 7.0
        ledger.excuse(5.0)
        assert ledger.idle() == 2.0
    with ledger.timed("evaluate"):
        assert ledger.usual() == (0, 0.0)
        clock.now += 2.0
        ledger.beat()
        assert (ledger.idle(), ledger.usual()) == (0.0, (1, 2.0))


def test_seconds_of_several_processes_are_summed_in_the_usual_order() -> None:
    parts = [{"start_up": 1.0, "train": 5.0, "total": 6.0, "down": 2.0}, {"train": 1.0, "again": 2.0, "total": 3.0}]
    found = summed(parts)
    assert found == {"start_up": 1.0, "train": 6.0, "again": 2.0, "down": 2.0, "total": 9.0}
    assert [n for n in found if n != "total"] == [n for n in PHASES if n in found]


def test_the_sentence_names_the_share_of_new_steps() -> None:
    line = sentence({"start_up": 1.0, "train": 7.0, "input_wait": 1.98, "checks": 0.02, "total": 10.0})
    assert line == "time: 10.0 s, 70% of it new steps: train 70%, input wait 20%, start up 10%"
    assert sentence({}) == sentence({"total": 0.0}) == ""
