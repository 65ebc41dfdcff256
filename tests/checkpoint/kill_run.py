"""Kills a run at random moments while it saves every step, and checks what is there before each restart.

``python -m tests.checkpoint.kill_run FOLDER ROUNDS [SEED]``, from the checkout; it prints one line of JSON.

TensorFlow takes seconds to load, so one process loads it, starts nothing of it, and forks for each life of the run.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from framework import EveryStep, Scheduled
from framework.checkpoint import find
from tests.helpers import Toy, settings

STEPS = 1_000_000


class Falling(Toy):
    """w falls by 1/4 a step (in float32 exactly), whatever was killed: w tells how many updates were made."""

    xs, rate = np.ones(64, np.float32), 0.25
    report: pathlib.Path

    def hooks(self) -> Any:
        def tell(step: int, values: Any) -> None:
            """After the first step of this life: where it stands."""
            if not self.report.exists():
                state = {name: float(v.numpy()) for name, v in self.state().items()}
                value = {"step": step, "w": state["model/w"], "iterations": state["optimizer/iterations"]}
                self.report.with_suffix(".new").write_text(json.dumps(value))
                self.report.with_suffix(".new").rename(self.report)

        return [Scheduled(EveryStep(), tell)]


def live(run_dir: pathlib.Path, report: pathlib.Path) -> None:
    """One life: trains until it is killed."""
    config = settings(
        run_dir=run_dir, train_steps=STEPS, checkpoint_every=1, keep_checkpoints=3, log_every=0, global_batch_size=4
    )
    trainer = Falling(config)
    trainer.report = report
    trainer.train()


def kill_rounds(folder: pathlib.Path, rounds: int, seed: int) -> dict[str, int]:
    """Runs and kills; raises AssertionError at the first restart that is not from the newest whole checkpoint."""
    generator = random.Random(seed)
    run_dir, report = folder / "run", folder / "report.json"
    checkpoints = str(run_dir / find.CHECKPOINTS)
    counts = {"rounds": 0, "left_half_written": 0, "last_step": 0}
    for number in range(rounds):
        found = find.newest(checkpoints)
        assert found.passed_over == {}, f"round {number}: torn under its final name: {found.passed_over}"
        step = found.manifest.step if found.manifest else 0
        assert step >= counts["last_step"], f"round {number}: step {step} after {counts['last_step']}"
        if os.path.isdir(checkpoints):
            counts["left_half_written"] += any(n.startswith(".tmp") for n in os.listdir(checkpoints))
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                live(run_dir, report)
            finally:
                os._exit(1)
        try:
            deadline = time.monotonic() + 60
            while not report.exists():
                assert os.waitpid(child, os.WNOHANG) == (0, 0), f"round {number}: the run ended by itself"
                assert time.monotonic() < deadline, f"round {number}: no step in 60 s"
                time.sleep(0.005)
            time.sleep(generator.uniform(0.0, 0.3))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        value = json.loads(report.read_text())
        assert value["step"] == step + 1, f"round {number}: went on from {value['step'] - 1}, not from {step}"
        assert value["iterations"] == value["step"] and value["w"] == 1.0 - 0.25 * value["step"]
        counts.update(rounds=number + 1, last_step=step)
    counts["last_step"] = find.steps_in(checkpoints)[-1]
    return counts


if __name__ == "__main__":
    place, count, *rest = sys.argv[1:]
    print(json.dumps(kill_rounds(pathlib.Path(place), int(count), int(rest[0]) if rest else 0)))
