"""``plain_loop.py`` is what the framework does: its losses are the trainer's, to the last bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Both in one fresh process, which has the devices that the plain loop asks for.
BOTH = """
import json, sys
from examples import plain_loop

replicas = int(sys.argv[1])
sys.argv = ["plain_loop.py", f"--replicas={replicas}", "--steps=50", "--batch=96", "--learning_rate=0.1", "--seed=0"]
plain = plain_loop.main()

from framework import EveryStep, RunConfig, Scheduled
from models.digits_task import Digits

losses = []

class Recorded(Digits):
    def hooks(self):
        return [Scheduled(EveryStep(), lambda step, values: losses.append(values["loss"]))]

Recorded(
    RunConfig(
        train_steps=50, global_batch_size=96, optimizer="sgd", learning_rate=0.1, momentum=0.9, seed=0,
        num_replicas=replicas, device="cpu", progress="off",
    ),
    dropout=0.0,
).train(evaluate=False)
print(json.dumps([plain, losses]))
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_equal_the_trainers_to_the_last_bit(replicas: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(replicas)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    plain, losses = json.loads(done.stdout.splitlines()[-1])
    assert len(plain) == len(losses) == 50
    assert plain == losses
    assert plain[0] == pytest.approx(2.303, abs=0.2)  # of ten classes alike: log(10)
    assert plain[-1] < 0.3


def test_refuses_a_batch_that_does_not_divide() -> None:
    command = [sys.executable, str(ROOT / "examples" / "plain_loop.py"), "--replicas=5", "--batch=96"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--batch=96 must be divisible by --replicas=5" in done.stderr
