"""One worker of ``benchmarks.faults``: trains a small model, and does what it is told to do wrong.

    python -m benchmarks.fault_worker OUT FAULT [LIMIT]

At the moment of the fault it writes the time to ``OUT/fault``.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from framework import AtSteps, LockstepError, LossOutput, RunConfig, Scheduled, Trainer
from framework.checkpoint import find
from input_pipelines import from_arrays

STEPS, AT, EVERY, BATCH = 60, 13, 10, 8
# Workers that do it, or say when it is to be done; else worker 1.
GUILTY = {"exception_all": (0, 1), "full_disk": (0,), "kill_save": (0,), "cut_link": (0,), "slow_link": (0,)}


class Linear(tf.Module):
    """A matrix large enough that a save takes a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(tf.random.stateless_normal([256, 256], [1, 2], stddev=0.05))


class Faulty(Trainer):
    """Regression of a row on itself; worker 1, or both, fail behind step 13."""

    out = pathlib.Path()
    fault = "none"
    poison = 0.0

    def build_model(self) -> Any:
        return Linear()

    def train_data(self) -> Any:
        rows = np.random.RandomState(0).randn(160, 256).astype(np.float32)
        if self.fault != "no_data":
            return from_arrays(rows)

        def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
            mine = rows[context.input_pipeline_id :: 2]
            data = tf.data.Dataset.from_tensor_slices(mine).repeat(6 if context.input_pipeline_id == 0 else 3)
            return data.batch(BATCH // 2, drop_remainder=True)

        return share

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        loss = tf.reduce_mean(tf.square(batch @ model.w - batch), 1)
        if self.fault == "nan":
            loss += tf.numpy_function(lambda: np.float32(self.poison), [], tf.float32)
        return LossOutput(loss=loss)

    def hooks(self) -> Sequence[Scheduled]:
        own = [Scheduled(AtSteps([5, 23]), lambda step, values: None)] if self.cluster.is_chief else []
        return [Scheduled(AtSteps([AT]), lambda step, values: self._fail()), *(own if self.fault == "loops" else [])]

    def _fail(self) -> None:
        if self.fault in ("none", "code", "no_data", "loops") or self.cluster.index not in GUILTY.get(self.fault, (1,)):
            return
        (self.out / "fault").write_text(f"{time.time()} {self.step}")
        if self.fault in ("kill", "stop", "term"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[self.fault])
        elif self.fault in ("exception", "exception_all"):
            raise ValueError("an injected fault")
        elif self.fault == "leave":
            raise SystemExit(0)
        elif self.fault == "nan":
            self.poison = float("nan")
        elif self.fault == "full_disk":
            self._fill_disk()
        elif self.fault == "kill_save":
            threading.Thread(target=self._kill_in_save, daemon=True).start()
        elif self.fault in ("cut_link", "slow_link"):  # by whoever started the workers
            while not (self.out / "go").exists():
                time.sleep(0.01)

    def _fill_disk(self) -> None:
        """Leaves 64 KiB."""
        free = shutil.disk_usage(self.out).free - 65536
        with (self.out / "filler").open("wb") as file:
            file.write(b"\0" * max(free, 0))

    def _kill_in_save(self) -> None:
        """SIGKILL as soon as a checkpoint is there that has not got its name yet."""
        folder = self.out / "run" / find.CHECKPOINTS
        while True:
            if any(name.startswith(".") for name in os.listdir(folder)):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.0005)


def _index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def main(out: pathlib.Path, fault: str, limit: float) -> int:
    """Trains; returns the exit code."""
    Faulty.out, Faulty.fault = out, fault
    config = RunConfig(
        run_dir=str(out / "run"),
        train_steps=-1 if fault == "no_data" else STEPS,
        global_batch_size=BATCH,
        device="cpu",
        num_replicas=1,
        log_every=0 if fault == "loops" else 1,
        # Of other lengths than the other worker's, and with a hook that only one of them has.
        steps_per_loop=(3, 7)[_index()] if fault == "loops" else 1,
        mixed_workers=fault == "loops",
        checkpoint_every=EVERY,
        keep_checkpoints=10,
        hang_limit=limit,
        tensorboard=False,
    )
    try:
        Faulty(config).train()
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
