"""One process of ``benchmarks.scale_model``: the all-reduce alone, then a perceptron's steps; OUT/figures.json."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from framework import LossOutput, RunConfig, Scheduled, Trainer
from framework.hooks import EveryNSteps
from input_pipelines import from_arrays

SIZES = (4e3, 4e4, 4e5, 4e6)  # bytes
BATCH, STEPS, EVERY = 128, 300, 20  # examples of a replica; the first record is left out


class Perceptron(Trainer):
    """784-512-512-10 on random rows."""

    def build_model(self) -> Any:
        inputs = keras.Input((784,))
        x = keras.layers.Dense(512, activation="relu")(inputs)
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Dense(512, activation="relu")(x)))

    def train_data(self) -> Any:
        r = np.random.RandomState(0)
        return from_arrays((r.randn(4096, 784).astype(np.float32), r.randint(0, 10, 4096)))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0])))

    def hooks(self) -> Any:
        self.steps: list[float] = []

        def keep(step: int, values: Any) -> None:
            if step > EVERY:
                self.steps.append(values["step_ms"] * 1e-3)

        return [Scheduled(EveryNSteps(EVERY), keep)]


def all_reduce(trainer: Trainer) -> dict[str, float]:
    """Median seconds of one all-reduce by size in bytes."""
    strategy, found = trainer.strategy, {}
    for size in SIZES:

        def replica(x: tf.Tensor, size: float = size) -> tf.Tensor:
            value = tf.fill([int(size) // 4], x)
            return tf.distribute.get_replica_context().all_reduce("SUM", value)[0]

        @tf.function(autograph=False)
        def run(x: tf.Tensor, replica: Any = replica) -> tf.Tensor:
            return strategy.experimental_local_results(strategy.run(replica, args=(x,)))[0]

        seconds = []
        for _ in range(40):
            start = time.perf_counter()
            run(tf.constant(1.0)).numpy()
            seconds.append(time.perf_counter() - start)
        found[str(size)] = statistics.median(seconds[10:])
    return found


def main(out: pathlib.Path) -> None:
    """Measures; the chief writes."""
    workers = len(json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {}).get("worker", [0]))
    config = RunConfig(
        train_steps=STEPS,
        device="cpu",
        num_replicas=1,
        global_batch_size=BATCH * workers,
        optimizer="sgd",
        progress="off",
        check_replicas_every=0,
    )
    trainer = Perceptron(config)
    times = all_reduce(trainer)
    trainer.train()
    if trainer.cluster.is_chief:
        size = sum(int(np.prod(v.shape)) * 4 for v in trainer.trainable_variables)
        value = {"step_s": statistics.median(trainer.steps), "all_reduce_s": times, "gradient_bytes": size}
        (out / "figures.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
