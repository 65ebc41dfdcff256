"""Workers tell each other short texts; two replicas of one process stand for two workers, each with its own text."""

from __future__ import annotations

import json

import pytest

from framework.cluster import agree
from framework.cluster.agree import exchange
from framework.cluster.cluster import Cluster
from tests.helpers import mirrored

TWO = ("a:1", "b:1")


def test_one_worker_hears_itself_and_asks_nobody() -> None:
    assert exchange(None, Cluster(), "any text") == ["any text"]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_text_is_in_the_place_of_its_worker_once(index: int, replicas: int) -> None:
    """Only one replica of a worker speaks: two that did would add up to other letters."""
    text = json.dumps({"why": "fünf — \n 5", "step": 3}, ensure_ascii=False)
    said = exchange(mirrored(replicas), Cluster(TWO, index), text)
    assert said == ["" if i != index else text for i in range(2)]


def test_a_text_that_is_too_long_is_cut_between_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "LENGTH", 5)
    strategy = mirrored(2)
    agree._sum.cache_clear()
    assert exchange(strategy, Cluster(TWO, 0), "üüüü")[0] == "üü"


def test_it_works_inside_the_scope_too() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        assert exchange(strategy, Cluster(TWO, 1), "x") == ["", "x"]
