"""Replicas that differ, by the faults seen in the field: C042, C113, B37."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from framework import CheckFailed
from tests.conftest import ROOT
from tests.helpers import Toy, settings


def test_c042_c113_two_workers(run_workers: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A variable set on worker 0 alone; weights drawn without a seed; assertions of a plain ``strategy.run``."""
    finished = run_workers(
        2, str(tmp_path), script="tests/field/replica_worker.py", timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    for one in finished:
        assert one.code == 3, one.stderr[-3000:]
    seen = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(2)]
    said = (
        "step 3: replicas differ in 1 of 4 variables: model/coefficient (float32 []): replica 0 (worker 0): 1.0, "
        "replica 1 (worker 0): 1.0, replica 2 (worker 1): 0.0, replica 3 (worker 1): 0.0"
    )
    for worker in seen:
        assert worker["error"].startswith(said)
        assert "it last passed at step 0" in worker["error"]
        assert worker["step"] == 3
        # C113: identical at steps 0 and 3, on all four replicas.
        for step in (0, 3):
            first = seen[0][f"weights at {step}"][0]
            assert all(copy == first for copy in worker[f"weights at {step}"])
        assert len(set(seen[0]["weights at 0"][0])) == 8
        assert (worker["equal, alike"], worker["close, alike"]) == ("", "")
        each = "replica 0: 2500, replica 1: 2500, replica 2: 2500, replica 3: 2501"
        assert f"numbers (float32 [3000]) at [2500] (odd one out: replica 3) is {each}" in worker["equal"]
        assert f"at [2500] by more than 0.5 + 0 * |replica 0| is {each}" in worker["close"]
    assert seen[0]["error"] == seen[1]["error"]
    written = json.loads((tmp_path / "run/replica_check/step-00000003.json").read_text())
    assert written["differing"] == ["model/coefficient"]
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["checks"]["replicas"]["last_step"]) == ("failed", 0)


@pytest.mark.parametrize("replicas", [2, 3])
def test_b37_an_altered_copy_is_named_with_its_replica(replicas: int) -> None:
    trainer = Toy(settings(num_replicas=replicas, global_batch_size=6, train_steps=4))
    trainer.train()
    trainer.strategy.experimental_local_results(trainer.model.w)[1].assign(1.5)
    with pytest.raises(CheckFailed, match=r"model/w \(float32 \[\]\): replica 0: 1\.0, replica 1: 1\.5") as error:
        trainer.train(steps=1)
    assert ("in the minority: replica 1 " in str(error.value)) == (replicas == 3)
