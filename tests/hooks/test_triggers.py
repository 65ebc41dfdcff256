"""Triggers: exact lists of firings, with step and clock passed in."""

import math

import pytest

from framework.errors import ConfigError, LockstepError
from framework.hooks import AtSteps, EveryNSteps, EverySeconds, EveryStep, Never, When


def firings(trigger, looks):
    """The steps of ``looks`` (step, or (step, seconds)) at which ``trigger`` fires."""
    pairs = [look if isinstance(look, tuple) else (look, 0.0) for look in looks]
    return [step for step, seconds in pairs if trigger.fires(step, seconds)]


def walk(trigger, start, end):
    """The firings of a loop that stops where the trigger wants it to, and at ``end``."""
    trigger.begin(start, 0.0)
    step, fired = start, []
    while step < end:
        step = int(min(trigger.next_step(step), end))
        if trigger.fires(step, 0.0):
            fired.append(step)
    return fired


def test_b41_every_n_steps_fires_at_each_multiple_and_nowhere_else():
    assert firings(EveryNSteps(3), range(11)) == [3, 6, 9]
    assert firings(EveryNSteps(1), range(4)) == [1, 2, 3]


def test_b41_every_n_steps_says_exactly_where_to_stop():
    trigger = EveryNSteps(10)
    assert [trigger.next_step(step) for step in (0, 9, 10, 11, 19, 37)] == [10, 10, 20, 20, 20, 40]
    assert walk(EveryNSteps(4), 0, 10) == [4, 8]


def test_b41_every_seconds_fires_when_the_time_since_it_last_fired_is_up():
    looks = [(1, 0.0), (2, 29.9), (3, 30.0), (4, 45.0), (5, 75.0), (6, 104.9), (7, 105.0)]
    trigger = EverySeconds(30)
    trigger.begin(0, 0.0)
    # Late at step 5 (due at 60, looked at 75), so the next is due at 105 and not at 90.
    assert firings(trigger, looks) == [3, 5, 7]


def test_b41_every_seconds_counts_from_begin_or_else_from_the_first_look():
    begun, fresh = EverySeconds(10.0), EverySeconds(10.0)
    begun.begin(0, 100.0)
    looks = [(1, 108.0), (2, 111.0), (3, 119.0), (4, 121.5)]
    assert firings(begun, looks) == [2, 4]
    assert firings(fresh, looks) == [3]


def test_b41_every_seconds_never_cuts_the_loop():
    assert EverySeconds(1.0).next_step(5) == math.inf


def test_b41_listed_steps_fire_in_order_whatever_the_order_of_the_list():
    trigger = AtSteps([7, 2, 5, 2])
    assert firings(trigger, range(10)) == [2, 5, 7]
    assert [trigger.next_step(step) for step in (0, 1, 2, 4, 5, 6, 7, 8)] == [2, 2, 5, 5, 7, 7, math.inf, math.inf]
    assert walk(AtSteps([1000, 64, 7, 300]), 0, 2000) == [7, 64, 300, 1000]


def test_b41_never_fires_at_no_step():
    assert firings(Never(), range(5)) == []
    assert Never().next_step(0) == math.inf


def test_triggers_of_a_resumed_run_keep_to_the_steps_of_an_unbroken_one():
    assert walk(EveryNSteps(10), 37, 65) == [40, 50, 60]
    assert walk(EveryNSteps(10), 40, 65) == [50, 60]
    assert walk(AtSteps([10, 40, 50]), 40, 65) == [50]
    assert walk(EveryStep(), 37, 40) == [38, 39, 40]
    assert firings(EveryNSteps(10), [37, 40]) == [40]  # also without begin


@pytest.mark.parametrize("trigger", [EveryNSteps(5), AtSteps([10]), EveryStep(), EverySeconds(1.0)])
def test_no_trigger_fires_twice_for_one_step(trigger):
    trigger.begin(9, 0.0)
    assert [trigger.fires(10, 50.0), trigger.fires(10, 51.0), trigger.fires(10, 99.0)] == [True, False, False]


@pytest.mark.parametrize("trigger", [EveryNSteps(5), AtSteps([10]), EveryStep(), EverySeconds(1.0)])
def test_no_trigger_fires_for_the_step_a_run_begins_at(trigger):
    trigger.begin(10, 0.0)
    assert not trigger.fires(10, 5.0)


def test_after_going_back_and_beginning_again_a_step_fires_again():
    trigger = EveryNSteps(5)
    assert firings(trigger, [5, 10]) == [5, 10]
    trigger.begin(5, 0.0)
    assert firings(trigger, [5, 10]) == [10]


def test_b42_every_step_raises_where_a_step_was_skipped():
    trigger = EveryStep()
    trigger.begin(0)
    assert trigger.fires(1, 0.0) and trigger.fires(2, 0.0)
    with pytest.raises(LockstepError, match="step 4 came after step 2"):
        trigger.fires(4, 0.0)


def test_b42_every_step_raises_where_the_first_step_after_begin_was_skipped():
    trigger = EveryStep()
    trigger.begin(37)
    with pytest.raises(LockstepError, match="step 39 came after step 37"):
        trigger.fires(39, 0.0)


def test_b42_every_step_raises_where_steps_go_back():
    trigger = EveryStep()
    assert firings(trigger, [5, 6]) == [5, 6]  # the first question sets the base
    with pytest.raises(LockstepError, match="step 5 came after step 6"):
        trigger.fires(5, 0.0)


def test_b42_every_step_asks_the_loop_to_stop_at_each_step():
    assert [EveryStep().next_step(step) for step in (0, 37)] == [1, 38]


def test_b17_when_fires_only_where_the_condition_holds():
    trigger = When(EveryNSteps(2), lambda step: step % 3 == 0)
    assert firings(trigger, range(1, 13)) == [6, 12]
    assert trigger.next_step(12) == 14


def test_b17_the_condition_is_asked_only_where_the_trigger_fires():
    asked = []
    trigger = When(AtSteps([2, 4]), lambda step: bool(asked.append(step)))
    assert firings(trigger, [1, 2, 3, 4, 4, 5]) == []
    assert asked == [2, 4]


def test_b17_a_condition_does_not_blind_a_trigger_that_must_see_every_step():
    trigger = When(EveryStep(), lambda step: step >= 3)
    trigger.begin(0)
    assert firings(trigger, [1, 2, 3, 4]) == [3, 4]
    with pytest.raises(LockstepError):
        trigger.fires(6, 0.0)


def test_b17_begin_reaches_the_trigger_inside():
    trigger = When(EveryNSteps(5), lambda step: True)
    trigger.begin(10, 0.0)
    assert firings(trigger, [10, 15]) == [15]


@pytest.mark.parametrize("n", [0, -1, math.nan, 2.5, "3", None, True])
def test_b06_every_n_steps_refuses_what_is_no_count(n):
    with pytest.raises(ConfigError, match=r"^n="):
        EveryNSteps(n)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, "3", None, True])
def test_b06_every_seconds_refuses_what_is_no_time(seconds):
    with pytest.raises(ConfigError, match=r"^seconds="):
        EverySeconds(seconds)


@pytest.mark.parametrize("steps", [[], [0], [5, -1], [math.nan], [1.5]])
def test_b06_at_steps_refuses_what_are_no_steps(steps):
    with pytest.raises(ConfigError, match=r"^steps="):
        AtSteps(steps)
