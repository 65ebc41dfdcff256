"""``--deterministic``: two runs in processes of their own leave the same bytes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import column, saved

FLAGS = (
    "--task=digits --deterministic --num_replicas=2 --device=cpu --accumulate_steps=2 --train_steps=20 "
    "--log_every=5 --progress=off --tensorboard=false --mode=train"
)


@pytest.mark.slow
def test_two_runs_of_digits_end_in_equal_checkpoints(tmp_path: pathlib.Path, run_cli: Callable[..., Any]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        finished = run_cli([*FLAGS.split(), f"--run_dir={folder}"], timeout=240)
        assert finished.code == 0, finished.stderr[-2000:]
    first, second = (saved(folder, 20) for folder in folders)
    assert first.keys() == second.keys()
    assert any("seed_generator_state" in name for name in first)  # dropout is on
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name
    losses = [column(folder, "loss") for folder in folders]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert np.isfinite(losses[0]).all() and losses[0][-1] < losses[0][0]
