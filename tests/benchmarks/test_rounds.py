"""Rounds: who runs when, and who is thrown out."""

import pytest

from benchmarks.cases import Case
from benchmarks.rounds import run_rounds


def quiet(line):
    del line


def test_contenders_take_turns_and_the_order_is_reversed_from_round_to_round(case, fakes, fake):
    opener = fakes(trainer=fake(), bare=fake())
    run_rounds(case, 2, opener, quiet)
    assert opener.log == [
        # round 1: start and warm up one after the other, then two windows each in turn
        *["open trainer", "start trainer", "window trainer", "open bare", "start bare", "window bare"],
        *["window trainer", "window bare", "window bare", "window trainer"],
        *["close trainer", "close bare"],
        # round 2: the other way round, in fresh processes
        *["open bare", "start bare", "window bare", "open trainer", "start trainer", "window trainer"],
        *["window bare", "window trainer", "window trainer", "window bare"],
        *["close bare", "close trainer"],
    ]


def test_the_warm_up_is_apart_from_the_windows_that_count(case, fakes, fake):
    result = run_rounds(case, 1, fakes(trainer=fake(warm_up_ms=70.0), bare=fake()), quiet)
    run = result.runs[0]["trainer"]
    # Steps 2 to 10 warm up; 11 to 20 and 21 to 30 count.
    assert [(w.step, w.steps) for w in run.warm_up] == [(10, 9)]
    assert [(w.step, w.steps) for w in run.windows] == [(20, 10), (30, 10)]
    assert run.warm_up[0].seconds == pytest.approx(0.63)
    assert [w.seconds for w in run.windows] == [0.01, 0.01]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_contender_that_breaks_is_thrown_out_with_its_message_and_the_others_go_on(case, fakes, fake, fails_at):
    said = []
    opener = fakes(trainer=fake(fails_at=fails_at), bare=fake())
    result = run_rounds(case, 2, opener, said.append)
    assert result.rejected == {"trainer": "contender trainer broke"}
    assert [sorted(runs) for runs in result.runs] == [["bare"], ["bare"]]
    assert [len(runs["bare"].windows) for runs in result.runs] == [2, 2]
    assert said == ["small: trainer is thrown out: contender trainer broke"]
    assert opener.log.count("open trainer") == opener.log.count("close trainer") == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"parameters": 11}, "11 parameters where the reference has 10"),
        ({"losses": (2.1, 1.0)}, "the loss of the first step is 2.1 where the reference has 2"),
        ({"losses": (2.0, 1.0, 1.1)}, "the mean loss of window 2 is 1.1 where the reference has 1"),
        ({"losses": (2.0, float("nan"))}, "the mean loss of window 1 is nan"),
    ],
)
def test_a_contender_that_does_other_work_is_thrown_out(case, fakes, fake, other, message):
    result = run_rounds(case, 1, fakes(trainer=fake(**other), bare=fake()), quiet)
    assert list(result.rejected) == ["trainer"]
    assert result.rejected["trainer"].startswith(message)
    assert list(result.runs[0]) == ["bare"]


def test_a_round_before_the_one_that_showed_the_difference_does_not_count_either(case, fakes, fake):
    slow_start = fake()
    opener = fakes(trainer=slow_start, bare=fake())

    def opened(case, name):
        if opener.log.count("open trainer") == 2:  # from the third round on
            slow_start.parameters = 11
        return opener(case, name)

    result = run_rounds(case, 3, opened, quiet)
    assert [list(runs) for runs in result.runs] == [["bare"], ["bare"], ["bare"]]


def test_rounding_does_not_throw_anybody_out(case, fakes, fake):
    # 1e-6 of the first loss, 1 % of later ones, and 3e-4 where the model knows its data by heart.
    close = fake(losses=(2.000002, 1.01, 0.0003))
    result = run_rounds(case, 1, fakes(trainer=close, bare=fake(losses=(2.0, 1.0, 0.0001))), quiet)
    assert result.rejected == {}


@pytest.mark.parametrize("wrong", [{"warm_up": 0}, {"windows": 0}, {"window_steps": 1}, {"reference": "torch"}])
def test_a_case_that_cannot_be_measured_is_refused(case, wrong):
    values = {**vars(case), **wrong}
    with pytest.raises(ValueError, match="case small"):
        Case(**values)
