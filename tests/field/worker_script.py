"""One worker of a gang: trains on shards of unequal size and writes what it saw of each step to OUT/worker-I.json.

python tests/field/worker_script.py OUT
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from framework import EveryStep, LossOutput, RunConfig, Scheduled, Sum, Trainer, optimizers

SHARDS = (6, 4)  # examples of worker 0 and of worker 1
PEAK, WARM_UP = 0.8, 4


class Weight(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0)


class Uneven(Trainer):
    """Loss w * id; worker 0 has the ids 0..5 and worker 1 the ids 6..9, in batches of 2: 3 steps a pass."""

    def build_model(self) -> Any:
        return Weight()

    def build_optimizer(self) -> Any:
        after = optimizers.Step(peak=PEAK, boundaries=(9,), factor=0.5)
        return optimizers.SGD(learning_rate=optimizers.WarmUp(peak=PEAK, steps=WARM_UP, after=after))

    def train_data(self) -> Any:
        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            first = sum(SHARDS[: context.input_pipeline_id])
            ids = np.arange(first, first + SHARDS[context.input_pipeline_id], dtype=np.float32)
            return tf.data.Dataset.from_tensor_slices(ids).batch(2)

        return make

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        # Powers of 2 below 2^10: their sum shows each id, and is exact in float32.
        return LossOutput(loss=0.0 * model.w * batch, metrics={"ids": Sum(2.0**batch)})

    def hooks(self) -> Sequence[Scheduled]:
        return [Scheduled(EveryStep(), lambda step, values: seen.append({"step": step, **values}))]


seen: list[dict[str, float]] = []


def main(out: pathlib.Path) -> None:
    config = RunConfig(
        run_dir=str(out / "run"),
        train_epochs=4,
        global_batch_size=4,
        device="cpu",
        num_replicas=1,
        log_every=1,
        progress="off",
        tensorboard=False,
    )
    trainer = Uneven(config)
    trainer.train()
    values = {"seen": seen, "step": trainer.step, "iterations": int(trainer.optimizer.iterations.numpy())}
    (out / f"worker-{trainer.cluster.index}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
