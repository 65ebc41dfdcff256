"""The table of faults (``benchmarks.faults``), a fault at a time; the whole of it: -m "slow or not slow"."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import faults
from framework.cluster.addresses import Cluster
from framework.cluster.preflight import differences, facts
from tests.helpers import Toy, settings

LIMIT = 10.0
_FAST = ("code", "loops")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in faults.FAULTS]
)
def test_a_fault_is_found_and_loses_no_more_than_it_must(name: str, tmp_path: pathlib.Path) -> None:
    reason = faults.why_not(name)
    if reason:
        pytest.skip(reason)
    row = faults.run(name, tmp_path, LIMIT, again=name not in _FAST)
    # How long it takes is for the table: here other tests may run at the same time.
    wrong = [one for one in row.wrong(faults.FAULTS[name], LIMIT) if not one.endswith(" s")]
    assert not wrong, (row, (tmp_path / "worker-0.txt").read_text()[-3000:])


def test_the_table_says_what_was_not_tried() -> None:
    row = faults.Row(codes=(4, -9), named="worker 1 (127.0.0.1:77) is lost", seconds=3.21, lost=3, left=0, went_on=True)
    lines = faults.table({"kill": row, "cut_link": "network namespaces need root"}).splitlines()
    assert lines[2] == "| SIGKILL to worker 1 | 4, -9 | worker 1 (HOST:PORT) is lost | 3.2 | 3 | 0 | yes |"
    assert lines[3].startswith("| the cable between two hosts is cut | not tried: network namespaces need root |")


def test_what_is_not_as_it_has_to_be_is_told() -> None:
    row = faults.Row(codes=(0, -9), named="", seconds=99.0, lost=11, left=1, went_on=False)
    assert len(row.wrong(faults.FAULTS["kill"], LIMIT)) == 6


# --- what workers say of themselves before they start ----------------------------------------------------------------

TWO = Cluster(("a:1", "b:1"), 0, "flags")
THREE = Cluster(("a:1", "b:1", "c:1"), 0, "flags")


def test_workers_that_agree_have_no_table() -> None:
    mine = facts(settings(), None, Toy, 1)
    other = facts(settings(progress="lines", run_dir="/elsewhere"), None, Toy, 1)
    assert mine == other and differences({0: mine, 1: other}, TWO) == ""
    known = {"python", "tensorflow", "keras", "numpy", "replicas", "--seed", "code of framework"}
    assert known | {"code of tests.helpers"} <= set(mine)


def test_who_differs_is_named_with_what() -> None:
    mine = facts(settings(), None, Toy, 1)
    other = facts(settings(seed=7), None, Toy, 2)
    table = differences({0: mine, 1: mine, 2: other}, THREE).splitlines()
    assert table[0] == "worker 2 (c:1) does not run what the others run:"
    assert "  replicas: 1 on workers 0, 1; 2 on worker 2" in table
    assert "  --seed: 0 on workers 0, 1; 7 on worker 2" in table
    assert "--mixed_workers" in table[-1]


def test_the_majority_is_right_and_worker_0_where_there_is_none() -> None:
    a, b = {"numpy": "2.1"}, {"numpy": "2.0"}
    assert differences({0: b, 1: a, 2: a}, THREE).startswith("worker 0 (a:1) does not run")
    assert differences({0: b, 1: a}, TWO).startswith("worker 1 (b:1) does not run")
    assert "numpy: 2.0 on worker 0; not said on worker 1" in differences({0: b, 1: {}}, TWO)


def test_an_option_that_is_a_path_may_differ() -> None:
    class Task(Toy):
        pass

    class Options:
        def __init__(self, data: str, width: int):
            self.data, self.width = data, width

    first = facts(settings(), Options("/disk1/data", 3), Task, 1)
    assert first == facts(settings(), Options("/disk2/data", 3), Task, 1)
    assert first != facts(settings(), Options("/disk1/data", 4), Task, 1)
