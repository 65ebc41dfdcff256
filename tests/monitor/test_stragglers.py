"""A replica that is late only in its backward pass is named, where all replicas' steps take equally long."""

from __future__ import annotations

import gc
import json
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework.cluster.cluster import Cluster
from framework.monitor.stamps import possible
from framework.monitor.stragglers import KEPT, Stragglers
from tests.conftest import ROOT
from tests.helpers import Toy, settings
from tests.monitor.straggler_worker import SlowBackward


def looks(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "stragglers.jsonl").read_text().splitlines()]


def test_extra_work_in_the_backward_of_one_replica_names_it(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        num_replicas=2,
        train_steps=50,
        straggler_every=40,
        steps_per_loop=4,
        progress="lines",
        log_every=0,
        run_dir=str(tmp_path),
        tensorboard=True,
        check_replicas_every=0,
    )
    SlowBackward(config).train()
    first, last = looks(tmp_path)
    assert (first["step"], last["step"]) == (40, 50)
    assert first["samples"] >= 8
    for look in (first, last):
        zero, one = look["replicas"]
        # One waits for the other: what one has to do more the other one waits longer.
        assert one["local_ms"] > zero["local_ms"]
        assert one["reduce_ms"] < zero["reduce_ms"]
        assert look["culprit"]["replicas"] == [1]
        assert look["culprit"]["signal"] == "local"
    printed = capsys.readouterr().out
    assert printed.count("step 40: replica 1 comes ") == 1
    assert "step 50: replica 1" not in printed  # it was named already
    assert "own work           ms a step: min" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())["checks"]["stragglers"]
    assert (summary["times"], summary["last_step"], summary["culprit"]["replicas"]) == (2, 50, [1])
    curves = tags(tmp_path / "tensorboard/replicas")
    assert {"local_ms/replica_0", "local_ms/replica_1", "reduce_ms/max", "input_wait_ms/median"} <= curves


def tags(folder: pathlib.Path) -> set[str]:
    """Names of all curves in a folder of event files."""
    found = set()
    for path in folder.glob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)):
            found |= {v.tag for v in tf.compat.v1.Event.FromString(record.numpy()).summary.value}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("per_worker", [1, 2])
def test_extra_work_in_the_backward_is_named_with_two_workers(
    run_workers: Callable[..., Any], tmp_path: pathlib.Path, per_worker: int
) -> None:
    run_dir = tmp_path / "run"
    finished = run_workers(
        2,
        str(run_dir),
        str(per_worker),
        script="tests/monitor/straggler_worker.py",
        timeout=200,
        env={"PYTHONPATH": str(ROOT)},
    )
    for one in finished:
        assert one.code == 0, one.stderr[-3000:]
    look = looks(run_dir)[-1]
    assert [row["worker"] for row in look["replicas"]] == [r // per_worker for r in range(2 * per_worker)]
    assert look["culprit"]["replicas"] == [1]


def test_several_reductions_in_a_step_count_as_one_without_the_time_in_the_first() -> None:
    class Twice(SlowBackward):
        def train_step(self, batch: Any) -> Any:
            first = self.reduce(self.gradients(batch))
            with tf.control_dependencies(first.gradients):
                sums = self.reduce(self.gradients(tf.identity(batch)))
            self.apply(sums)
            return sums

    trainer = Twice(settings(num_replicas=2, straggler_every=2))
    found: list[np.ndarray] = []
    trainer._run._watch.stragglers.add = lambda result: found.append(result.times)  # type: ignore[method-assign]
    trainer.train()
    end, zero, one = sum(found)
    assert 0.0 < zero < one < end


def test_a_step_without_the_trainers_reduce_is_not_measured(tmp_path: pathlib.Path) -> None:
    class Own(Toy):
        def train_step(self, batch: Any) -> Any:
            from framework.step.reduce import reduce

            sums = reduce(self.gradients(batch))
            self.apply(sums)
            return sums

    Own(settings(num_replicas=2, straggler_every=2, run_dir=str(tmp_path))).train()
    assert not (tmp_path / "stragglers.jsonl").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())["checks"]["stragglers"]
    assert (summary["times"], summary["samples"], summary["replicas"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"straggler_every": 0}, "off"),
        ({"num_replicas": 1}, "one replica: nothing to compare"),
        ({}, ""),
    ],
)
def test_where_nothing_is_compared_no_clock_is_in_the_graph(changes: dict[str, Any], why: str) -> None:
    trainer = Toy(settings(**{"num_replicas": 2, **changes}))
    assert possible(trainer) == why
    assert trainer.stepper.stamped == (not why)
    deterministic = SimpleNamespace(
        config=settings(deterministic=True), strategy=SimpleNamespace(num_replicas_in_sync=2)
    )
    assert "deterministic" in possible(deterministic)  # type: ignore[arg-type]


def test_workers_that_are_watched_collect_garbage_together() -> None:
    trainer = Toy(settings(num_replicas=2))
    alone = Stragglers(trainer, say=print, tell=lambda *_: None)
    with alone.common_gc():
        assert gc.isenabled()
    trainer.cluster = Cluster(workers=("a:1", "b:1"), index=0, source="flags")
    together = Stragglers(trainer, say=print, tell=lambda *_: None)
    with pytest.raises(RuntimeError), together.common_gc():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_only_the_newest_samples_are_kept() -> None:
    trainer = Toy(settings(num_replicas=2))
    told: list[dict[str, Any]] = []
    watch = Stragglers(trainer, say=print, tell=lambda record, curves: told.append(record))
    for i in range(KEPT + 5):
        times = np.array([0.010 + i, 0.004, 0.006 + i])
        result = SimpleNamespace(steps=2, waited=0.002, times=times, seconds=0.012 + i)
        watch.add(result)  # type: ignore[arg-type]
    watch.add(SimpleNamespace(steps=2, waited=0.002, times=np.array([np.nan] * 3)))  # type: ignore[arg-type]
    watch.look()
    assert told[0]["samples"] == KEPT
    assert told[0]["replicas"][0] == {
        "replica": 0,
        "worker": 0,
        "input_wait_ms": 1.0,
        "local_ms": 2.0,
        # (10 + 1000 i - 4) / 2 for i = 5 .. 36: the median is at 20.5.
        "reduce_ms": 10253.0,
    }
    watch.look()
    assert len(told) == 1  # not twice at one step
