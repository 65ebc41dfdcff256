"""Gradients of embeddings: rows of one index are added before anything looks at them, and both ways give one result."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import LossOutput, Reduction, Trainer, gradients, optimizers, reduce
from framework.step.reduce import local_norms, merge_rows
from input_pipelines import from_arrays
from tests.helpers import assert_copies_equal, copies, mirrored, per_replica, settings

ROWS, WIDTH, BATCH = 60, 3, 8
# Few distinct ids: most rows are hit by both replicas, and more than once by each.
IDS = np.random.RandomState(0).randint(0, 6, (24, 2)) * 7


def slices(indices: Any, values: Any, rows: int = 6) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([rows, np.shape(values)[-1]]))


def test_rows_of_one_index_are_added_and_indices_rise() -> None:
    merged = merge_rows(slices([4, 1, 4, 0, 1, 4], [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]))
    np.testing.assert_array_equal(merged.indices, [0, 1, 4])
    np.testing.assert_array_equal(merged.values, [[4.0], [7.0], [10.0]])


def test_indices_of_any_shape_are_merged() -> None:
    merged = merge_rows(slices([[2, 0], [2, 2]], [[[1.0], [2.0]], [[3.0], [4.0]]]))
    np.testing.assert_array_equal(merged.indices, [0, 2])
    np.testing.assert_array_equal(merged.values, [[2.0], [8.0]])


def test_no_row_stays_no_row() -> None:
    merged = merge_rows(slices(np.zeros([0], np.int64), np.zeros([0, 2], np.float32)))
    assert (merged.indices.shape, merged.values.shape) == ((0,), (0, 2))


def test_norms_are_of_merged_rows() -> None:
    """Rows 3 and 4 of one index are 7 together: 49, not 9 + 16."""
    strategy = mirrored(2)
    with strategy.scope():
        table = tf.Variable(tf.zeros([5, 1]))

    def replica(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        sums = gradients(lambda: LossOutput(loss=tf.gather(table, [2, 2])[:, 0] * x), [table])
        assert isinstance(sums.gradients[0], tf.IndexedSlices)
        alone = local_norms(sums, [merge_rows(sums.gradients[0])])
        return reduce(sums).norms, alone

    rows = per_replica(strategy, [np.float32([3, 4]), np.float32([-1, 2])])
    norms, alone = tf.function(lambda x: strategy.run(replica, args=(x,)))(rows)
    for one in strategy.experimental_local_results(norms):
        np.testing.assert_allclose(one, [[0, 49], [0, 1]])
    assert [float(v[1]) for v in strategy.experimental_local_results(alone)] == [49.0, 1.0]


@pytest.mark.parametrize(
    "how",
    [
        "dense",
        "sparse",
        "auto",
    ],
)
def test_replicas_with_different_rows_and_one_without_any(how: str) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        table = tf.Variable(tf.ones([5, 2]))

    def replica(ids: tf.Tensor) -> tf.Tensor:
        sums = gradients(lambda: LossOutput(loss=tf.reduce_sum(tf.gather(table, ids), -1)), [table])
        return tf.convert_to_tensor(reduce(sums, Reduction(sparse=how)).gradients[0])

    ids = per_replica(strategy, [np.int32([0, 1, 1]), np.zeros([0], np.int32), np.int32([1, 4])])
    result = tf.function(lambda x: strategy.run(replica, args=(x,)))(ids)
    for one in strategy.experimental_local_results(result):
        np.testing.assert_array_equal(one[:, 0], [1, 3, 0, 0, 1])


class Lookup(Trainer):
    rows = ROWS
    tied = False

    def build_model(self) -> Any:
        model = tf.Module()
        model.table = tf.Variable(np.random.RandomState(1).randn(self.rows, WIDTH).astype(np.float32))
        model.out = tf.Variable(np.random.RandomState(2).randn(WIDTH, 1).astype(np.float32))
        return model

    def train_data(self) -> Any:
        return from_arrays(IDS, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        hidden = tf.reduce_sum(tf.gather(model.table, batch), 1)
        if self.tied:
            logits = tf.matmul(hidden, model.table, transpose_b=True)
            return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 0], logits))
        return LossOutput(loss=tf.square(tf.matmul(hidden, model.out)[:, 0] - 1.0))


class Tied(Lookup):
    tied = True


class Small(Lookup):
    rows = 43  # two replicas with 4 examples of 2 ids: 16 look-ups


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "learning_rate": 0.01},
    "clip_global_norm": {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "clip_global_norm": 0.5},
    "clip_norm": {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "clip_norm": 0.3},
}


@functools.cache
def train(kind: type[Lookup], how: str, setting: str, replicas: int = 2) -> Lookup:
    trainer = kind(
        settings(
            num_replicas=replicas, global_batch_size=BATCH, train_steps=3, sparse_gradients=how, **SETTINGS[setting]
        )
    )
    trainer.results = trainer.train()  # type: ignore[attr-defined]
    assert_copies_equal(trainer)
    return trainer


def table_is_packed(trainer: Lookup) -> bool:
    return any(pack["bytes"] >= trainer.rows * WIDTH * 4 for pack in trainer.stepper.packs)


@pytest.mark.parametrize("setting", SETTINGS)
def test_sparse_is_dense(setting: str) -> None:
    sparse, dense = (train(Lookup, how, setting) for how in ("sparse", "dense"))
    assert (table_is_packed(sparse), table_is_packed(dense)) == (False, True)
    mine, theirs = copies(sparse)[0], copies(dense)[0]
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
    assert sparse.results == pytest.approx(dense.results, rel=1e-6)  # type: ignore[attr-defined]


def test_sparse_on_one_replica_is_the_same() -> None:
    mine, theirs = (copies(train(Lookup, "sparse", "clip_global_norm", n))[0] for n in (1, 2))
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_table_that_also_makes_the_logits() -> None:
    """Its gradient is the sum of few rows and of all rows."""
    mine, theirs = (copies(train(Tied, how, "sgd"))[0] for how in ("sparse", "dense"))
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(("rows", "packed"), [(17, False), (16, True), (60, False)])
def test_auto_goes_by_rows_looked_up_and_rows_of_the_table(rows: int, packed: bool) -> None:
    """8 look-ups on each of two replicas: sparse if the table has more than 16 rows."""
    strategy = mirrored(2)
    with strategy.scope():
        table = tf.Variable(tf.zeros([rows, 2]))
    plans: list[Any] = []

    def replica(x: tf.Tensor) -> tf.Tensor:
        ids = tf.constant([0, 1, 2, 3, 4, 5, 6, 6])
        sums = gradients(lambda: LossOutput(loss=tf.reduce_sum(tf.gather(table, ids), 1) * x), [table])
        result = reduce(sums, Reduction(report=plans.append)).gradients[0]
        assert isinstance(result, tf.IndexedSlices) is not packed
        return tf.convert_to_tensor(result)

    result = tf.function(lambda x: strategy.run(replica, args=(x,)))(
        per_replica(strategy, [np.float32(1), np.float32(2)])
    )
    np.testing.assert_array_equal(strategy.experimental_local_results(result)[0][:8, 0], [3, 3, 3, 3, 3, 3, 6, 0])
    assert any(pack["bytes"] >= rows * 8 for pack in plans[0]) is packed


class KerasLookup(Lookup):
    """A Keras layer: what auto does for it."""

    rows = 400

    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(self.rows, WIDTH)])

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=0.1)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.reduce_sum(tf.square(model(batch)), [1, 2]))


def test_auto_takes_a_large_keras_embedding_sparse_and_a_small_one_dense() -> None:
    class SmallKeras(KerasLookup):
        rows = 43

    assert not table_is_packed(train(KerasLookup, "auto", "sgd"))
    # 16 look-ups of 43 rows are still fewer; as tables get smaller than the look-ups they go dense.
    small = train(SmallKeras, "dense", "sgd")
    assert table_is_packed(small)
