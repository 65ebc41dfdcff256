"""What tests of the loop share: a model of one weight, whose numbers can be worked out by hand, and ids as a figure."""

from __future__ import annotations

import functools
import gc
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, RunConfig, Sum, Trainer, optimizers
from framework.checkpoint.store import CheckpointStore
from framework.hooks import read_metrics
from input_pipelines import from_arrays


class Weight(tf.Module):
    """One number ``w``."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.w = tf.Variable(value)


class Toy(Trainer):
    """Loss ``w * x`` for each example x: its gradient is the mean of x, whatever w is."""

    xs: ClassVar[Any] = np.arange(1, 13, dtype=np.float32)
    start: ClassVar[float] = 1.0
    rate: ClassVar[float] = 0.0

    def build_model(self) -> Any:
        return Weight(self.start)

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=self.rate)

    def train_data(self) -> Any:
        return from_arrays(self.xs, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch)


class ToyWithEval(Toy):
    """The same, evaluated on ``eval_xs``."""

    eval_xs: ClassVar[Any] = np.ones(4, np.float32)

    def eval_data(self) -> Any:
        return from_arrays(self.eval_xs, shuffle=False)


class Ids(Toy):
    """Examples are their own ids, below 50; the figure ``ids`` holds those of a step: see ``decode_ids``."""

    xs: ClassVar[Any] = np.arange(40, dtype=np.float32)
    shuffle: ClassVar[bool] = True

    def train_data(self) -> Any:
        return from_arrays(self.xs, shuffle=self.shuffle)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch, metrics={"ids": ids_figure(batch), "rows": Sum(tf.ones_like(batch))})


def settings(**changes: Any) -> RunConfig:
    """A quiet run of 4 steps of 4 examples on one CPU replica, with a record for each step."""
    usual = {"train_steps": 4, "global_batch_size": 4, "num_replicas": 1, "device": "cpu", "log_every": 1}
    return RunConfig(**{**usual, "progress": "off", "tensorboard": False, **changes})


def ids_figure(ids: tf.Tensor) -> Sum:
    """Ids below 50 as the sum of their powers of 2: in float64 it is exact, and shows each id that came once."""
    return Sum(tf.pow(tf.constant(2.0, tf.float64), tf.cast(ids, tf.float64)))


def decode_ids(figure: float) -> list[int]:
    """The ids in a sum of powers of 2, rising."""
    return [i for i in range(53) if int(figure) >> i & 1]


def records(run_dir: Any, phase: str = "train") -> list[dict[str, Any]]:
    """The records of one phase in a run's metrics.jsonl."""
    return [r for r in read_metrics(pathlib.Path(run_dir) / "metrics.jsonl") if r["phase"] == phase]


def column(run_dir: Any, name: str, phase: str = "train") -> list[Any]:
    """One figure of all records of a phase."""
    return [record[name] for record in records(run_dir, phase)]


def ids_by_step(run_dir: Any) -> list[list[int]]:
    """Ids of each step of an ``Ids`` run with a record a step; asserts that none came twice in a step."""
    rows = [(decode_ids(r["ids"]), r["rows"]) for r in records(run_dir)]
    for ids, count in rows:
        assert len(ids) == count, f"{count} rows but the distinct ids {ids}"
    return [ids for ids, _ in rows]


def store(run_dir: Any, **options: Any) -> CheckpointStore:
    """The checkpoints of a run."""
    return CheckpointStore(folder=str(pathlib.Path(run_dir) / "checkpoints"), **options)


def tree(folder: Any) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of every file below a folder, by name."""
    found = sorted(p for p in pathlib.Path(folder).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


def saved(run_dir: Any, step: int) -> dict[str, np.ndarray]:
    """All tensors of the checkpoint of ``step``."""
    return store(run_dir).load(step)


def copies(trainer: Trainer) -> list[dict[str, np.ndarray]]:
    """Every variable of a checkpoint on each replica: equal copies if all went well."""
    local = {n: trainer.strategy.experimental_local_results(v) for n, v in trainer.state().items()}
    return [{n: v[i].numpy() for n, v in local.items()} for i in range(trainer.local_replicas)]


def assert_copies_equal(trainer: Trainer) -> None:
    """Every replica has bit for bit the same variables and slots."""
    first, *rest = copies(trainer)
    for other in rest:
        for name, value in first.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


@functools.cache
def mirrored(replicas: int) -> tf.distribute.Strategy:
    """A MirroredStrategy over logical CPUs that reduces without collectives."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def per_replica(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """A value of each replica's own: ``values[i]`` on replica i."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.nest.map_structure(tf.convert_to_tensor, values[context.replica_id_in_sync_group])
    )


@pytest.fixture(scope="session")
def frozen_heap() -> None:
    """Sets aside the million objects of TensorFlow and Keras, so that a collection looks at those of the tests only."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def young_iterators(frozen_heap: None) -> Iterator[None]:
    """Frees a test's data iterators right after it.

    Freeing one may have to wait for tf.data's autotune thread, which sleeps about as long as the iterator is old, up to
    a minute; left to a later collection it would stall whatever test is running then.
    """
    yield
    gc.collect()
