"""Two workers with two replicas each against one replica on the whole batch."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from framework import RunConfig
from tests.conftest import ROOT
from tests.field import step_worker
from tests.helpers import copies

Results = list[dict[str, np.ndarray]]


def run(
    run_workers: Callable[..., Any], folder: pathlib.Path, model: str, *pairs: str, code: int = 0
) -> tuple[Results, Any]:
    """What each worker wrote, and how the processes ended; ``run_workers`` fails the test if one is left."""
    finished = run_workers(
        2, model, str(folder), *pairs, script="tests/field/step_worker.py", timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    for one in finished:
        assert one.code == code, one.stderr[-3000:]
    return [dict(np.load(folder / f"worker{i}.npz")) for i in range(2)], finished


def assert_replicas_equal(results: Results, when: str) -> None:
    """All four copies of every variable, bit for bit."""
    names = {key.split("|", 2)[2] for key in results[0] if key.startswith(f"{when}|")}
    assert names
    for name in names:
        values = [results[worker][f"{when}|{i}|{name}"] for worker in range(2) for i in range(2)]
        assert all(np.array_equal(values[0], other) for other in values[1:]), f"{name} at {when}"


@pytest.mark.parametrize("micros", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("model", [pytest.param("dense", marks=pytest.mark.slow), "synchronised"])
def test_two_workers_equal_one_replica(
    model: str, micros: int, tmp_path: pathlib.Path, run_workers: Callable[..., Any]
) -> None:
    results, _ = run(run_workers, tmp_path, model, f"accumulate_steps={micros}")
    # Statistics of a batch normalisation are of a micro-batch, so the one replica has the same.
    trainer = step_worker.MODELS[model](
        RunConfig(
            **step_worker.settings(
                num_replicas=1,
                cluster="none",
                accumulate_steps=micros if model == "synchronised" else 1,
                progress="off",
            )
        )
    )
    trainer.train()
    for result in results:
        np.testing.assert_allclose(result["losses"], trainer.losses, rtol=1e-5)
    assert len(trainer.losses) == step_worker.STEPS
    assert_replicas_equal(results, "end")
    for name, value in copies(trainer)[0].items():
        np.testing.assert_allclose(
            results[1][f"end|1|{name}"], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


@pytest.mark.slow
def test_c101_a_keras_model_and_adam_on_two_workers_train_as_one_replica(
    tmp_path: pathlib.Path, run_workers: Callable[..., Any]
) -> None:
    adam = {"optimizer": "adam", "momentum": None, "learning_rate": 0.01, "train_steps": 5}
    results, _ = run(run_workers, tmp_path, "dense", *(f"{n}={json.dumps(v)}" for n, v in adam.items()))
    trainer = step_worker.Dense(
        RunConfig(**step_worker.settings(num_replicas=1, cluster="none", **{**adam, "progress": "off"}))
    )
    trainer.train()
    assert_replicas_equal(results, "end")
    for name, value in copies(trainer)[0].items():
        np.testing.assert_allclose(results[1][f"end|0|{name}"], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_nan_on_the_second_worker_is_named_by_the_first_and_skipped_by_both(
    tmp_path: pathlib.Path, run_workers: Callable[..., Any]
) -> None:
    # Batches of 10 on 4 replicas: 3, 3, 2, 2 rows; example 39 is the last of batch 4, on the last replica.
    results, finished = run(run_workers, tmp_path, "dense", "nan_at=39", "on_nonfinite=skip", "train_steps=5")
    assert "warning: step 4: replica 3 is not finite" in finished[0].stdout
    assert_replicas_equal(results, "end")
    for result in results:
        assert np.isfinite(result["end|0|model/sequential/dense/kernel"]).all()
        assert result["end|1|optimizer/iterations"] == 4
