"""Field cases SEED: what a seed fixes. C111 is in tests/step/test_randomness.py."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT


def run(run_workers: Callable[..., Any], folder: pathlib.Path, *pairs: str) -> tuple[list[dict[str, np.ndarray]], str]:
    """What each of two workers wrote, and what the first one said."""
    folder.mkdir()
    finished = run_workers(
        2, "dense", str(folder), *pairs, script="tests/field/step_worker.py", timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    for one in finished:
        assert one.code == 0, one.stderr[-3000:]
    return [dict(np.load(folder / f"worker{i}.npz")) for i in range(2)], finished[0].stdout


@pytest.mark.slow
def test_c112_two_workers_repeat_bit_for_bit(tmp_path: pathlib.Path, run_workers: Callable[..., Any]) -> None:
    pairs = ("seed=7", "deterministic=true", "all_reduce=ring", "accumulate_steps=2")
    (first, said), (second, _) = (run(run_workers, tmp_path / name, *pairs) for name in "ab")
    for one, other in zip(first, second, strict=True):
        assert len(one["losses"]) == 20
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.tobytes() == other[name].tobytes(), name
    assert "all-reduce: ring" in said


@pytest.mark.slow
def test_c113_two_workers_without_a_seed_start_and_stay_alike(
    tmp_path: pathlib.Path, run_workers: Callable[..., Any]
) -> None:
    results, _ = run(run_workers, tmp_path / "run", "train_steps=3")
    for step in (0, 3):
        names = [key.split("|", 2)[2] for key in results[0] if key.startswith(f"{step}|0|")]
        assert "model/sequential/dense/kernel" in names
        for name in names:
            values = [results[worker][f"{step}|{i}|{name}"] for worker in range(2) for i in range(2)]
            assert all(np.array_equal(values[0], other) for other in values[1:]), f"{name} at step {step}"
    kernel = "model/sequential/dense/kernel"
    assert not np.array_equal(results[0][f"0|0|{kernel}"], results[0][f"3|0|{kernel}"])
