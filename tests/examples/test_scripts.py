"""Every example runs as a script, with the flags of ``train.py``."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import column

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "figure", "low", "high", "extra"),
    [
        # What an untrained network gives, more or less: four steps change little.
        ("gan.py", "energy_distance", 1.0, 5.0, []),
        pytest.param("contrastive.py", "neighbour_accuracy", 0.5, 1.0, ["--pairs=1"], marks=pytest.mark.slow),
        pytest.param("gradient_penalty.py", "slope", 0.1, 2.0, ["--strength=0.5"], marks=pytest.mark.slow),
        pytest.param("distillation.py", "teacher_accuracy", 0.3, 1.0, ["--teacher_steps=20"], marks=pytest.mark.slow),
    ],
)
def test_runs_for_a_few_steps(
    tmp_path: pathlib.Path, script: str, figure: str, low: float, high: float, extra: list[str]
) -> None:
    run_dir = tmp_path / "run"
    done = run(script, "--train_steps=4", "--num_replicas=2", "--device=cpu", f"--run_dir={run_dir}", *extra)
    assert done.returncode == 0, done.stderr
    (value,) = column(run_dir, figure, phase="eval")
    assert low < value < high
    assert f"eval/{figure} {value:.4g}" in done.stdout  # what it ends with
    assert column(run_dir, "step") == column(run_dir, "step", phase="eval") == [4]


def test_refuses_an_unknown_flag_like_train_does() -> None:
    done = run("gan.py", "--train_stepz=4")
    assert done.returncode == 2
    assert "did you mean --train_steps?" in done.stderr
