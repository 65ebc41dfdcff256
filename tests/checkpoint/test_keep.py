"""What is kept: each rule alone by hand, and all of them together for any steps and figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.checkpoint.keep import Keep


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (Keep(last=2), [1, 2, 3, 4]),
        (Keep(last=10), []),
        (Keep(last=1, every=2), [1, 3, 5]),
        (Keep(last=1, best=("loss", "min")), [1, 3, 4, 5]),
        (Keep(last=1, every=4, best=("loss", "max")), [2, 3, 5]),
    ],
)
def test_each_rule_keeps_its_own(rule: Keep, gone: list[int]) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: math.nan}
    figures = {step: {"loss": loss} for step, loss in losses.items()}
    assert rule.superfluous([1, 2, 3, 4, 5, 6], figures) == gone


@given(
    steps=st.sets(st.integers(0, 50), min_size=1),
    last=st.integers(1, 5),
    every=st.integers(0, 7),
    direction=st.sampled_from(["min", "max"]),
    values=st.lists(st.floats(), min_size=51, max_size=51),
)
def test_no_rule_takes_what_another_keeps(
    steps: set[int], last: int, every: int, direction: str, values: list[float]
) -> None:
    rule = Keep(last=last, every=every, best=("loss", direction))
    figures = {step: {"loss": values[step]} for step in steps}
    left = steps - set(rule.superfluous(steps, figures))
    assert set(sorted(steps)[-last:]) <= left
    assert not every or {s for s in steps if s % every == 0} <= left
    finite = {s: values[s] for s in steps if math.isfinite(values[s])}
    best = rule.best_step(figures)
    if not finite:
        assert best is None
    else:
        right = (min if direction == "min" else max)(finite.values())
        assert best == min(s for s, v in finite.items() if v == right) and best in left
    assert len(left) <= last + 1 + (len(steps) if every else 0)


@given(
    new=st.floats(), old=st.lists(st.floats(), max_size=5), direction=st.sampled_from(["min", "max"]), data=st.data()
)
def test_better_means_it_would_be_the_best_if_it_came_last(
    new: float, old: list[float], direction: str, data: Any
) -> None:
    rule = Keep(best=("loss", direction))
    there = {step: {"loss": value} for step, value in enumerate(old)}
    assert rule.is_better({"loss": new}, there) == (rule.best_step({**there, 99: {"loss": new}}) == 99)


def test_without_a_best_nothing_is_better() -> None:
    assert not Keep().is_better({"loss": 1.0}, {}) and Keep().best_step({1: {"loss": 1.0}}) is None
