"""One worker of a checkpoint test: ``python tests/field/ckpt_worker.py OUT RUN_DIR [FIELD=VALUE ...]``, with TF_CONFIG.

``own_folder=1`` gives worker 1 another run_dir, as on machines without a shared file system. What a worker saw goes to
OUT/worker-I.json: the step it began at, the step it ended at, its weights at both, or the error.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from framework import EveryStep, LockstepError, LossOutput, RunConfig, Scheduled, Trainer
from input_pipelines import from_arrays


class Normalised(Trainer):
    """A small classifier with batch normalisation and a metric, trained by Adam."""

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((5,)), *layers])

    def train_data(self) -> Any:
        r = np.random.RandomState(3)
        return from_arrays((r.randn(64, 5).astype(np.float32), r.randint(0, 3, 64)))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y = batch
        logits = model(x, training=training)
        right = tf.cast(tf.equal(tf.argmax(logits, 1), tf.cast(y, tf.int64)), tf.float32)
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), metrics={"accuracy": right})

    def hooks(self) -> Any:
        self.began = {"step": self.step, "state": self.numbers()}
        return [Scheduled(EveryStep(), lambda step, values: None)]

    def numbers(self) -> dict[str, Any]:
        """Every variable of a checkpoint, as lists."""
        return {name: np.asarray(v.numpy(), np.float64).ravel().tolist() for name, v in self.state().items()}


def main(out: str, run_dir: str, *pairs: str) -> int:
    changes: dict[str, Any] = {n: json.loads(v) for n, _, v in (pair.partition("=") for pair in pairs)}
    own = changes.pop("own_folder", 0)
    usual = {"global_batch_size": 8, "optimizer": "adam", "learning_rate": 0.01, "num_replicas": 1, "device": "cpu"}
    usual |= {"tensorboard": False, "progress": "lines", "log_every": 1, "run_dir": run_dir}
    trainer = None
    try:
        config = RunConfig(**{**usual, **changes})
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if own and index == 1:
            config = config.replace(run_dir=run_dir + "-of-worker-1")
        trainer = Normalised(config)
        trainer.train()
        value = {"began": trainer.began, "step": trainer.step, "state": trainer.numbers()}
        code = 0
    except LockstepError as error:
        value, code = {"error": str(error)}, error.exit_code
    assert trainer is not None
    (pathlib.Path(out) / f"worker-{trainer.cluster.index}.json").write_text(json.dumps(value))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
