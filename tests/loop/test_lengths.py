"""How long inner loops are: measured by one worker, agreed by several."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from framework.loop.lengths import Lengths
from framework.loop.loop import LoopResult
from tests.loop.test_speed import made


def free(ahead: int) -> float:
    """Nothing ends the loops."""
    return math.inf


def every(n: int, step: list[int]) -> Callable[[int], float]:
    """Loops end at multiples of n."""
    return lambda ahead: n - (step[0] + ahead) % n


def loop(steps: int, *, seconds: float = 1.0, next_steps: int = 0) -> LoopResult:
    return made(steps, 1.0, 1.0, seconds=seconds)._replace(next_steps=next_steps)


@pytest.mark.parametrize(("step_seconds", "lengths"), [(0.001, [1, 1, 8, 200, 200]), (0.1, [1, 1, 1, 1, 1])])
def test_one_worker_measures_its_loops(step_seconds: float, lengths: list[int]) -> None:
    mine, found = Lengths(0, None), []
    for i in range(5):
        count = mine.next(free, compiled=i > 0)
        found.append(count)
        mine.account(loop(count, seconds=count * step_seconds), count, compiled=i > 0)
    assert found == lengths


def test_a_given_length_is_cut_where_something_is_to_be_done() -> None:
    mine, step, found = Lengths(4, None), [0], []
    while step[0] < 20:
        found.append(mine.next(every(10, step), compiled=step[0] > 0))
        mine.account(loop(found[-1]), found[-1], compiled=True)
        step[0] += found[-1]
    assert found == [1, 4, 4, 1, 4, 4, 2]


def test_workers_with_other_lengths_and_other_hooks_make_the_same_loops() -> None:
    told: list[list[int]] = [[], []]
    workers = [Lengths(3, told[0].append), Lengths(7, told[1].append)]
    step, found = [0], []
    rooms = [every(10, step), every(4, step)]
    while step[0] < 40:
        counts = [w.next(room, compiled=step[0] > 0) for w, room in zip(workers, rooms)]
        assert counts[0] == counts[1]
        found.append(counts[0])
        said = min(told[0][-1], told[1][-1])
        for w in workers:
            w.account(loop(counts[0], next_steps=said), counts[0], compiled=step[0] > 0)
        step[0] += counts[0]
        assert all(
            step[0] // n * n > step[0] - counts[0] or step[0] // n == (step[0] - counts[0]) // n for n in (4, 10)
        )
    assert max(found) == 3 and sum(found) == 40


def test_after_a_loop_that_ended_early_nothing_is_agreed() -> None:
    mine = Lengths(5, lambda steps: None)
    mine.account(loop(5, next_steps=4), 5, compiled=True)
    assert mine.next(free, compiled=True) == 4
    mine.account(loop(2, next_steps=4), 4, compiled=True)
    assert mine.next(free, compiled=True) == 1
