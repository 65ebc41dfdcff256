"""A replica whose gradients are not like the others' is told before the all-reduce hides it, and noise names nobody."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework.monitor.gradient_outliers import KEPT, SAMPLES, GradientOutliers, history, leap, offset, relative
from tests.helpers import Toy, settings


def noise(draw: np.random.RandomState, replicas: int, variables: int = 5, scale: float = 0.2) -> np.ndarray:
    """Logarithms of norms of one inner loop: all variables of a replica go up and down together, with heavy tails."""
    return scale * (draw.standard_t(8, [replicas, 1]) + 0.3 * draw.standard_t(8, [replicas, variables]))


def samples(replicas: int, count: int = 40, seed: int = 0, **add: float) -> list[np.ndarray]:
    """Relative samples; ``add``: to the logarithm of replica_R."""
    draw = np.random.RandomState(seed)
    found = []
    for _ in range(count):
        logs = noise(draw, replicas, scale=0.05)
        for name, value in add.items():
            logs[int(name.split("_")[1])] += value
        found.append(relative(logs))
    return found


def test_logarithms_are_relative_to_the_middle_of_the_others() -> None:
    logs = np.log(np.array([[1.0, 2.0], [2.0, 2.0], [4.0, 0.5], [8.0, 2.0]]))
    # Replica 3: 8 over the middle of 1, 2, 4; and 2 over that of 2, 2, 0.5.
    assert relative(logs)[3].tolist() == pytest.approx([math.log(4.0), 0.0])
    # Replica 2: 0.5 over 2; of an even number of others the middle lies between two.
    assert relative(logs)[2, 1] == pytest.approx(math.log(0.25))
    with np.errstate(divide="ignore"):
        none = np.log(np.array([[0.0, 1.0], [0.0, 1.0]]))
    assert np.isnan(relative(none)[:, 0]).all() and relative(none)[:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_replica_with_larger_gradients_is_told(replicas: int) -> None:
    found = offset(samples(replicas, replica_1=math.log(1.5)))
    assert found is not None
    assert (found.replica, found.kind) == (1, "offset")
    assert found.factor == pytest.approx(1.5, rel=0.1)
    assert offset(samples(replicas, count=SAMPLES - 1, replica_1=1.0)) is None


def test_of_three_or_more_also_a_smaller_one_is_told_with_its_largest_variables() -> None:
    found = offset([s + np.array([[0, 0, 0, 0, 0]] * 2 + [[-1.0, -1.0, -3.0, -1.0, -2.0]]) for s in samples(3)])
    assert found is not None
    assert found.replica == 2 and found.factor < 0.5
    assert found.columns[:2] == (2, 4)


def test_a_leap_out_of_the_own_history_is_told() -> None:
    *before, last = samples(4)
    assert leap(history(before), last, 10) is None
    last[2] += math.log(1e6) / 10.0  # one of ten steps with a million times the norm
    found = leap(history(before), last, 10)
    assert found is not None and (found.replica, found.kind) == (2, "leap")
    assert leap(history(before), last, 1) is None  # of a single step it is less than ten times
    assert leap(history(before[: SAMPLES - 1]), last, 10) is None


@pytest.mark.parametrize("replicas", [2, 4, 10])
def test_noise_of_healthy_replicas_is_not_told(replicas: int) -> None:
    """10 runs, looked at after every inner loop."""
    trainer = SimpleNamespace(
        config=settings(global_batch_size=replicas),
        strategy=SimpleNamespace(num_replicas_in_sync=replicas),
        step=0,
        local_replicas=replicas,
        cluster=SimpleNamespace(num_workers=1),
        stepper=SimpleNamespace(columns=["loss"]),
    )
    for seed in range(10):
        said: list[str] = []
        draw = np.random.RandomState(seed)
        watch = GradientOutliers(trainer, say=said.append)  # type: ignore[arg-type]
        for _ in range(150):
            logs = np.concatenate([np.zeros([replicas, 1]), 2.0 * noise(draw, replicas)], 1)
            watch.add(SimpleNamespace(steps=8, skipped=0, logs=8 * logs.reshape(-1)))  # type: ignore[arg-type]
        assert said == []
        assert len(watch._all) <= KEPT and watch._each == 4


class Scaled(Toy):
    """Replica 1's gradients are three times what they should be."""

    xs = np.random.RandomState(0).rand(64).astype(np.float32) + 1.0

    def train_step(self, batch: Any) -> Any:
        sums = self.gradients(batch)
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 1:
            sums = dataclasses.replace(sums, gradients=[3.0 * g for g in sums.gradients])
        sums = self.reduce(sums)
        self.apply(sums)
        return sums


def test_a_scaled_gradient_is_told_in_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        num_replicas=2,
        global_batch_size=8,
        train_steps=1 + 8 * SAMPLES,
        steps_per_loop=4,
        straggler_every=0,
        run_dir=str(tmp_path),
        progress="lines",
        log_every=0,
    )
    Scaled(config).train()
    printed = capsys.readouterr().out
    # The first step is alone, then two loops make a sample: the first one has 9 steps, and the 24th ends at 193.
    assert printed.count("step 193: gradients of replica 1 are ") == 1
    (found,) = json.loads((tmp_path / "summary.json").read_text())["checks"]["gradients"]["outliers"]
    assert (found["replica"], found["kind"], found["columns"]) == (1, "offset", ["w"])
    assert found["factor"] == pytest.approx(3.0, rel=0.1)


def test_a_step_that_is_not_finite_does_not_spoil_the_sums() -> None:
    class Broken(Toy):
        xs = np.array([1, 1, 1, 1, np.inf, 1, 1, 1, 2, 2, 2, 2], np.float32)

    trainer = Broken(settings(num_replicas=2, train_steps=3, on_nonfinite="skip", steps_per_loop=3))
    seen: list[Any] = []
    trainer._run._watch.gradients.add = lambda result: seen.append(result.logs)  # type: ignore[method-assign]
    trainer.train()
    # Each replica's sums of gradients are 2, then no number, then 4: logarithms of their squares.
    expected = 2.0 * (math.log(2.0) + math.log(4.0))
    assert np.sum(seen, 0).reshape(2, 2)[:, 1].tolist() == pytest.approx([expected] * 2)


def test_where_nothing_is_compared_the_summary_says_why() -> None:
    for changes, why in [
        ({"gradient_outliers": False}, "off"),
        ({"num_replicas": 1}, "one replica"),
        ({"global_batch_size": 5}, "is no multiple of 2 replicas"),
    ]:
        trainer = Toy(settings(**{"num_replicas": 2, **changes}))  # type: ignore[dict-item]
        assert why in trainer._run._watch.gradients.summary()
        assert trainer._run._loop._logged is False
