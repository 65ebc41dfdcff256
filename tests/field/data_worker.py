"""One worker of a gang that trains on a user's tf.data.Dataset; writes what each replica saw to OUT/worker-I.json.

python tests/field/data_worker.py OUT, where OUT holds the TFRecord files
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from framework import EveryStep, LossOutput, Max, RunConfig, Scheduled, Sum, Trainer, optimizers
from input_pipelines import from_arrays

COUNT, BATCH, EPOCHS = 46, 8, 2


THOUSAND = np.random.RandomState(0).randn(1000).astype(np.float32)


def scored(model: Any, batch: tf.Tensor) -> LossOutput:
    """A loss, an accuracy and a maximum that depend on each example."""
    metrics = {"accuracy": tf.cast(batch > 0, tf.float32), "most": Max(batch), "rows": Sum(tf.ones_like(batch))}
    return LossOutput(loss=tf.square(batch - model.w), metrics=metrics)


class Weight(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0)


class FromFiles(Trainer):
    """Examples of TFRecord files, shuffled without a seed, as dicts of two features and a label."""

    files: ClassVar[Sequence[str]] = ()

    def build_model(self) -> Any:
        return Weight()

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=0.0)

    def _read(self) -> tf.data.Dataset:
        def parse(record: tf.Tensor) -> Any:
            x = tf.io.parse_single_example(record, {"id": tf.io.FixedLenFeature([], tf.int64)})["id"]
            return {"x": tf.cast(x, tf.float32), "name": tf.strings.as_string(x)}, tf.cast(x, tf.int32)

        return tf.data.TFRecordDataset(list(self.files)).map(parse)

    def train_data(self) -> Any:
        return self._read().shuffle(100).batch(BATCH)

    def eval_data(self) -> Any:
        return {"file": self._read().batch(BATCH), "thousand": from_arrays(THOUSAND)}

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        if isinstance(batch, tf.Tensor):
            return scored(model, batch)
        features, label = batch
        assert set(features) == {"x", "name"} and features["name"].dtype == tf.string and label.dtype == tf.int32
        context = tf.distribute.get_replica_context()
        figure = tf.pow(tf.constant(2.0, tf.float64), tf.cast(label, tf.float64))
        mine = {
            f"ids{r}": Sum(tf.where(tf.equal(context.replica_id_in_sync_group, r), figure, tf.zeros_like(figure)))
            for r in range(2)
        }
        names = Sum(tf.strings.length(features["name"]))
        right = tf.cast(label > 0, tf.float32)  # one example is predicted wrongly: the first
        metrics = {**mine, "names": names, "rows": Sum(tf.ones_like(features["x"])), "accuracy": right}
        return LossOutput(loss=model.w * features["x"], metrics=metrics)

    def hooks(self) -> Sequence[Scheduled]:
        return [Scheduled(EveryStep(), lambda step, values: seen.append({"step": step, **values}))]


seen: list[dict[str, float]] = []


def main(out: pathlib.Path) -> None:
    FromFiles.files = sorted(map(str, out.glob("*.tfrecord")))
    config = RunConfig(train_epochs=EPOCHS, global_batch_size=BATCH, device="cpu", num_replicas=1, seed=1)
    trainer = FromFiles(config)
    result = trainer.train(evaluate=False)
    evaluated = trainer.evaluate()
    values = {"seen": seen, "step": trainer.step, "result": result, "evaluated": evaluated}
    (out / f"worker-{trainer.cluster.index}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
