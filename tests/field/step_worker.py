"""One worker of a test: trains a small model and writes what it saw to a file of its own.

``python tests/field/step_worker.py MODEL FOLDER [FIELD=VALUE ...]``, with TF_CONFIG set; fields are those of RunConfig.
``nan_at=N`` spoils example N; ``slow_chief=SECONDS`` makes the chief take that long to write a checkpoint.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from framework import CheckFailed, EveryNSteps, LossOutput, RunConfig, Scheduled, Trainer
from framework.checkpoint.store import CheckpointStore
from framework.layers import SyncBatchNormalization
from input_pipelines import from_arrays

STEPS, BATCH, SIZE = 20, 10, 61  # on four replicas parts of 2 and 3 rows; epochs do not fit batches


class Dense(Trainer):
    """A small classifier that keeps its losses, and its weights at steps 0 and 3."""

    nan_at = -1
    norm: Any = None

    def build_model(self) -> Any:
        norm = [self.norm()] if self.norm else []
        hidden = keras.layers.Dense(8, activation="tanh")
        return keras.Sequential([keras.Input((6,)), hidden, *norm, keras.layers.Dense(3)])

    def train_data(self) -> Any:
        r = np.random.RandomState(3)
        x, y = r.randn(SIZE, 6).astype(np.float32), r.randint(0, 3, SIZE)
        if self.nan_at >= 0:
            x[self.nan_at] = np.nan
        return from_arrays((x, y), shuffle=self.nan_at < 0)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y = batch
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=training)))

    def hooks(self) -> Any:
        self.losses: list[float] = []
        self.seen = {0: self.replicas()}

        def keep(step: int, values: Any) -> None:
            self.losses.append(values["loss"])
            if step == 3:
                self.seen[3] = self.replicas()

        return [Scheduled(EveryNSteps(1), keep)]

    def replicas(self) -> dict[str, list[Any]]:
        """Every variable of a checkpoint, on each of this worker's replicas."""
        return {
            n: [v.numpy() for v in self.strategy.experimental_local_results(variable)]
            for n, variable in self.state().items()
        }


class Synchronised(Dense):
    """With statistics over all replicas of all workers."""

    norm = SyncBatchNormalization


MODELS = {"dense": Dense, "synchronised": Synchronised}


def settings(**changes: Any) -> dict[str, Any]:
    """The run of the workers and of the replica that they are compared with."""
    usual = {
        "train_steps": STEPS,
        "global_batch_size": BATCH,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
    }
    return {**usual, "device": "cpu", "progress": "lines", "tensorboard": False, "log_every": 1, **changes}


def main(model: str, folder: str, *pairs: str) -> int:
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    nan_at, slow = changes.pop("nan_at", -1), changes.pop("slow_chief", 0.0)
    trainer = MODELS[model](RunConfig(**settings(num_replicas=2, **changes)))
    trainer.nan_at = nan_at
    if slow:
        write = CheckpointStore._write

        def slow_write(self: CheckpointStore, *args: Any) -> None:
            time.sleep(slow)
            write(self, *args)

        CheckpointStore._write = slow_write  # type: ignore[method-assign]
    status = 0
    try:
        trainer.train()
    except CheckFailed as error:
        print(f"refused: {error}", flush=True)
        status = error.exit_code
    result: dict[str, Any] = {"losses": np.array(trainer.losses), "step": np.array(trainer.step)}
    for step, replicas in {**trainer.seen, "end": trainer.replicas()}.items():
        for name, values in replicas.items():
            for i, value in enumerate(values):
                result[f"{step}|{i}|{name}"] = value
    np.savez(pathlib.Path(folder) / f"worker{trainer.cluster.index}.npz", **result)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
