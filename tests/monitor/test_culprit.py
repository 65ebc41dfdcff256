"""Who holds the others up is named from times that say so, and nobody is from noise."""

from __future__ import annotations

import numpy as np
import pytest

from framework.monitor.culprit import LOCAL, REDUCE, SAMPLES, WAIT, judge, medians, split


def samples(
    replicas: int, *, count: int = 16, wait: float = 1.0, local: float = 20.0, reduce: float = 2.0, noise: float = 0.05
) -> np.ndarray:
    """Healthy replicas: who arrives early waits for the last one; ``noise`` is relative to the own work."""
    draw = np.random.RandomState(7)
    own = local * (1.0 + noise * draw.randn(replicas, count))
    return with_reduce(np.full((replicas, count), wait), own, reduce)


def with_reduce(wait: np.ndarray, local: np.ndarray, reduce: float) -> np.ndarray:
    arrival = wait + local
    return np.stack([wait, local, arrival.max(0) - arrival + reduce], 2)


def late(found: np.ndarray, replicas: list[int], column: int, by: float) -> np.ndarray:
    """The same with some replicas' work or input slower by ``by`` ms."""
    found = found.copy()
    found[replicas, :, column] += by
    return with_reduce(found[:, :, WAIT], found[:, :, LOCAL], 2.0)


@pytest.mark.parametrize(("replicas", "who"), [(2, 1), (2, 0), (3, 2), (8, 5)])
def test_a_replica_with_more_work_is_named_with_its_times(replicas: int, who: int) -> None:
    found = judge(late(samples(replicas, noise=0.01), [who], LOCAL, 10.0), [0] * replicas)
    assert found is not None
    assert (found.replicas, found.worker, found.signal) == ((who,), None, "local")
    # 20 ms of work are 30 on one: it is 10 of the 33 ms of a step late, and the others wait 10 ms longer.
    assert found.late == pytest.approx(10.0, abs=0.5)
    assert found.share == pytest.approx(10.0 / 33.0, rel=0.05)
    assert found.own == pytest.approx(30.0, rel=0.02)
    assert found.others == pytest.approx(20.0, rel=0.02)
    assert found.waited == pytest.approx(10.0, abs=0.5)
    said = found.describe(f"replica {who}")
    assert said.startswith(f"replica {who} comes ")
    assert "forward and backward pass " in said


def test_a_worker_whose_input_is_slow_is_named_as_a_whole() -> None:
    found = judge(late(samples(4, noise=0.01), [2, 3], WAIT, 15.0), [0, 0, 1, 1])
    assert found is not None
    assert (found.replicas, found.worker, found.signal) == ((2, 3), 1, "input")
    assert found.own == pytest.approx(16.0)
    assert found.others == pytest.approx(1.0)
    assert "waits for input 16 ms, the others 1;" in found.describe("worker 1")


def test_two_late_replicas_of_eight_are_both_named_and_half_of_them_are_not() -> None:
    found = judge(late(samples(8, noise=0.01), [1, 6], LOCAL, 10.0), [0] * 8)
    assert found is not None
    assert found.replicas == (1, 6)
    assert judge(late(samples(8, noise=0.01), [0, 1, 2, 3], LOCAL, 10.0), [0] * 8) is None


@pytest.mark.parametrize("replicas", [2, 4, 10])
def test_no_noise_of_healthy_replicas_names_anybody(replicas: int) -> None:
    """200 looks with heavy tails: a step takes twice as long now and then, on any replica."""
    draw = np.random.RandomState(3)
    for _ in range(200):
        own = 20.0 * np.exp(0.3 * draw.randn(replicas, 32)) * np.where(draw.rand(replicas, 32) < 0.1, 2.0, 1.0)
        assert judge(with_reduce(np.full_like(own, 1.0), own, 2.0), [0] * replicas) is None


# Medians recorded from 10 replicas on two busy cores, all healthy: they begin one after the other.
RECORDED_LOCAL = [0.01, 0.02, 0.05, 0.10, 0.20, 0.44, 0.61, 1.10, 1.59, 2.16]
RECORDED_REDUCE = [5.47, 5.40, 5.38, 5.29, 5.08, 4.71, 4.27, 3.90, 3.43, 2.78]


@pytest.mark.parametrize("wait", [0.0, 14.78])
def test_replicas_that_take_turns_on_few_cores_are_no_culprits(wait: float) -> None:
    draw = np.random.RandomState(1)
    scale = 1.0 + 0.3 * draw.rand(1, 24, 1)
    middle = np.stack([[wait] * 10, RECORDED_LOCAL, RECORDED_REDUCE], 1)[:, None]
    assert judge(middle * scale, [0] * 10) is None


def test_lateness_that_nobody_waited_for_is_no_evidence() -> None:
    """A clock that is read late, and not a replica that is late: the others do not wait."""
    found = samples(2, noise=0.01)
    found[1, :, LOCAL] += 10.0
    assert judge(found, [0, 0]) is None


def test_lateness_below_the_share_that_matters_names_nobody() -> None:
    assert judge(late(samples(2, noise=0.001), [1], LOCAL, 2.0), [0, 0]) is None  # 2 of 25 ms
    assert judge(late(samples(2, noise=0.001), [1], LOCAL, 5.0), [0, 0]) is not None  # 5 of 28 ms


def test_too_few_samples_name_nobody() -> None:
    found = late(samples(2, count=SAMPLES, noise=0.01), [1], LOCAL, 20.0)
    assert judge(found, [0, 0]) is not None
    found[1, 0] = np.nan
    assert judge(found, [0, 0]) is None
    assert judge(found[:1], [0]) is None


def test_missing_samples_are_left_out_of_medians() -> None:
    found = np.full((1, 4, 3), np.nan)
    found[0, :3] = [[1, 2, 3], [3, 4, 5], [2, 30, 4]]
    assert medians(found).tolist() == [[2, 4, 4]]
    assert REDUCE == 2


def test_a_step_is_split_without_a_rest_that_is_unknown() -> None:
    # The second comes 4 ms later, and spends only the 2 ms of the all-reduce itself in it.
    table = np.array([[1.0, 10.0, 6.0], [1.0, 14.0, 2.0]])
    found = split(table, 18.5)
    assert found == {"input": 1.0, "own_work": 12.0, "waiting": 2.0, "all_reduce": 2.0, "rest": 1.5}
    assert sum(found.values()) == 18.5
