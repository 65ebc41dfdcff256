"""A run that is killed at any moment while it saves every step goes on from its newest whole checkpoint.

The long form, 100 kills: ``pytest tests/checkpoint/test_kill.py -m slow``.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from framework.checkpoint import find
from tests.conftest import ROOT


@pytest.mark.parametrize("rounds", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_every_restart_goes_on_from_the_newest_whole_checkpoint(tmp_path: pathlib.Path, rounds: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.kill_run", str(tmp_path), str(rounds), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 10 * rounds)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["rounds"] == rounds and counts["last_step"] > rounds
    print(f"{counts}")
    assert find.newest(str(tmp_path / "run" / "checkpoints")).passed_over == {}
