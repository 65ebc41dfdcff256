"""Two workers that save at every step, killed at random moments, again and again: nothing is lost, the bits are equal.

The full form kills 20 times: LOCKSTEP_KILLS=20 python -m pytest -m slow tests/cluster/test_launch_kills.py
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from framework.checkpoint import find
from tests.helpers import saved

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("LOCKSTEP_KILLS", "4"))
STEPS = 40 * (KILLS + 1)


def launched(folder: pathlib.Path) -> subprocess.Popen[str]:
    """The launcher with two workers of digits."""
    folder.mkdir()
    flags = ["--task=digits", f"--run_dir={folder / 'run'}", "--device=cpu", "--mode=train", "--hidden=16"]
    flags += ["--global_batch_size=32", f"--train_steps={STEPS}", "--checkpoint_every=1", "--steps_per_loop=1"]
    flags += ["--deterministic", "--notensorboard", "--collective_timeout=60", "--log_every=0"]
    launcher = [f"--max_restarts={KILLS}", "--backoff=0.1", "--grace=3", f"--log_dir={folder / 'logs'}"]
    command = [sys.executable, "-m", "framework.launch", "--workers=2", *launcher, "--", "train.py", *flags]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err, text=True)


def newest(folder: pathlib.Path) -> int:
    """The newest checkpoint that has its name, which is the last thing it gets; 0: none."""
    return max(find.steps_in(str(folder / "run" / "checkpoints")), default=0)


def _check_goes_on(launcher: subprocess.Popen[str], deadline: float, folder: pathlib.Path) -> None:
    late = time.monotonic() - deadline
    assert launcher.poll() is None and late < 0, (launcher.poll(), late, (folder / "err").read_text()[-3000:])


def restarts(folder: pathlib.Path) -> list[int]:
    """Steps from which the launcher started the workers again."""
    return [int(step) for step in re.findall(r"restart \d+ of \d+ from step (\d+)", (folder / "err").read_text())]


def workers_of(launcher: int) -> list[int]:
    """The processes that train."""
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            words = process.cmdline()
            if "train.py" in words and "framework.launch" not in words:  # the launcher's keeper has its words
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(120 + STEPS // 5 + 60 * (KILLS + 2))
def test_random_kills_of_two_workers_lose_nothing(tmp_path: pathlib.Path) -> None:
    chance = random.Random(KILLS)
    folder = tmp_path / "killed"
    launcher = launched(tmp_path / "whole")
    try:
        assert launcher.wait(timeout=60 + STEPS / 5) == 0, (tmp_path / "whole" / "err").read_text()[-3000:]
        launcher, reached, floors = launched(folder), 0, []
        for kill in range(KILLS):
            # Counted from where the workers began: a save may have been finished behind the kill before.
            began = max([reached, *restarts(folder)[-1:]])
            target, deadline = began + chance.randint(1, 6), time.monotonic() + 60
            while newest(folder) < target:
                _check_goes_on(launcher, deadline, folder)
                time.sleep(0.02)
            time.sleep(chance.random() * 0.2)
            reached = newest(folder)
            floors.append(reached)
            os.kill(chance.choice(workers_of(launcher.pid)), signal.SIGKILL)
            while len(restarts(folder)) <= kill:  # the others are ended first, which takes a moment
                _check_goes_on(launcher, deadline, folder)
                time.sleep(0.05)
        assert launcher.wait(timeout=60 + STEPS / 5) == 0, (folder / "err").read_text()[-3000:]
    finally:
        launcher.kill()
        launcher.wait()
    # Every restart went on from the newest whole checkpoint there was, or from one that was just being finished.
    went_on = restarts(folder)
    assert len(went_on) == KILLS
    assert all(step >= floor for step, floor in zip(went_on, floors, strict=True)), (went_on, floors)
    first, second = (saved(tmp_path / name / "run", STEPS) for name in ("whole", "killed"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)
