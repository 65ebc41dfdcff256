"""One worker of a gang, one of which gets a signal at a given moment: python tests/field/stop_worker.py OUT MOMENT.

MOMENT: ``step`` (between two inner loops), ``evaluation``, ``compile`` (while the step is traced): SIGTERM; ``kill`` or
``freeze``: SIGKILL or SIGSTOP between two inner loops; or ``none``.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

from framework import AtSteps, LossOutput, PeerLost, Preempted, RunConfig, Scheduled, Trainer, optimizers
from input_pipelines import from_arrays

STEPS = 60


class Weight(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0)


class Stopped(Trainer):
    """Loss w x; worker 1 sends itself SIGTERM."""

    moment = "none"

    def build_model(self) -> Any:
        return Weight()

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=0.01, momentum=0.9)

    def train_data(self) -> Any:
        return from_arrays(np.arange(1, 41, dtype=np.float32) / 40)

    def eval_data(self) -> Any:
        return from_arrays(np.ones(8, np.float32))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        self._stop("compile" if training else "evaluation")  # while it is traced
        return LossOutput(loss=model.w * batch)

    def hooks(self) -> Sequence[Scheduled]:
        return [Scheduled(AtSteps([13]), lambda step, values: [self._stop(m) for m in ("step", "kill", "freeze")])]

    def _stop(self, moment: str) -> None:
        if moment == self.moment and self.cluster.index == 1:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}.get(moment, signal.SIGTERM))


def main(out: pathlib.Path, moment: str) -> int:
    Stopped.moment = moment
    config = RunConfig(
        run_dir=str(out / "run"),
        train_steps=STEPS,
        global_batch_size=4,
        device="cpu",
        num_replicas=1,
        log_every=1,
        eval_every=20,
        steps_per_loop=4,
        checkpoint_every=10,
        collective_timeout=15 if moment == "freeze" else 0,
        tensorboard=False,
    )
    try:
        Stopped(config).train()
    except (Preempted, PeerLost) as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
