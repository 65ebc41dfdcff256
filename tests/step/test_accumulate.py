"""Micro-batches: K of them make the update of one, with one update, one trace and any sizes."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Max, Min, StepSums, Sum, Trainer, all_gather, gradients
from framework.layers import SyncBatchNormalization
from framework.loop import stepper
from framework.step.gradients import accumulate
from input_pipelines import from_arrays
from tests.helpers import Toy, assert_copies_equal, copies, settings

X = np.random.RandomState(0).randn(30, 3).astype(np.float32)
Y = np.random.RandomState(1).randn(30).astype(np.float32)


class Net(Trainer):
    norm: Any = None
    calls = 0

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(4, activation="tanh")] + ([self.norm()] if self.norm else [])
        return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])

    def train_data(self) -> Any:
        return from_arrays((X, Y), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        self.calls += 1  # while tracing only
        x, y = batch
        error = model(x, training=training)[:, 0] - y
        return LossOutput(loss=tf.square(error), metrics={"worst": Max(tf.abs(error)), "rows": Sum(tf.ones_like(y))})


class Normalised(Net):
    norm = SyncBatchNormalization


class FromDataset(Net):
    def train_data(self) -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(self.config.global_batch_size).repeat()


def train(kind: type[Net], replicas: int, micros: int, **changes: Any) -> Net:
    usual = {"optimizer": "adamw", "weight_decay": 0.1, "learning_rate": 0.01, "train_steps": 3}
    trainer = kind(settings(**{**usual, "num_replicas": replicas, "accumulate_steps": micros, **changes}))
    trainer.results = trainer.train()  # type: ignore[attr-defined]
    assert_copies_equal(trainer)
    return trainer


@functools.cache
def whole(kind: type[Net], batch: int) -> Net:
    return train(kind, 1, 1, global_batch_size=batch)


def assert_same(trainer: Net, reference: Net, tolerance: float = 1e-5) -> None:
    """Weights, slots, counters and figures."""
    mine, theirs = copies(trainer)[0], copies(reference)[0]
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=tolerance, atol=tolerance * 1e-2, err_msg=name)
    assert trainer.results == pytest.approx(reference.results, rel=tolerance)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("replicas", "micros", "batch"),
    # 7 rows on 2 replicas: micro-batches of 4 and 3 rows, or 3, 2, 2, or 2, 2, 2, 1: parts differ, some are empty.
    [(1, 2, 7), (1, 3, 7), (2, 2, 7), (2, 3, 7), (2, 4, 7), (2, 4, 5), (3, 2, 4), (2, 2, 12)],
)
def test_micro_batches_make_the_update_of_the_whole_batch(replicas: int, micros: int, batch: int) -> None:
    trainer = train(Net, replicas, micros, global_batch_size=batch)
    assert copies(trainer)[0]["optimizer/iterations"] == 3  # updates, not micro-batches
    assert_same(trainer, whole(Net, batch))


@pytest.mark.parametrize(("replicas", "micros"), [(1, 3), (2, 3), (3, 2)])
def test_micro_batches_of_a_dataset(replicas: int, micros: int) -> None:
    assert_same(train(FromDataset, replicas, micros, global_batch_size=5), whole(Net, 5))


def test_a_short_last_window_is_one_update_on_what_is_left() -> None:
    """30 examples in batches of 8: the fourth has 6, in micro-batches of 2, 2, 1, 1 rows."""
    short = train(Net, 2, 4, global_batch_size=8, train_steps=None, train_epochs=1)
    assert (short.step, short.examples_seen) == (4, 30)
    assert_same(short, train(Net, 1, 1, global_batch_size=8, train_steps=None, train_epochs=1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_unrolled_and_looped_micro_batches_agree(replicas: int, monkeypatch: Any) -> None:
    looped = train(Net, replicas, 3, global_batch_size=7)
    monkeypatch.setattr(stepper, "_communicates", lambda model: True)
    unrolled = train(Net, replicas, 3, global_batch_size=7)
    assert_same(unrolled, looped, 1e-6)
    # Laid out in the graph, and not: what is traced tells them apart.
    assert (looped.calls, unrolled.calls) == (replicas, 3 * replicas)


@pytest.mark.parametrize("micros", [2, 3])
def test_a_forward_pass_that_communicates_is_unrolled_and_exact(micros: int) -> None:
    """Statistics are of a micro-batch over all replicas, so one replica has the same micro-batches."""
    mine = train(Normalised, 2, micros, global_batch_size=7)
    assert mine.calls == 2 * micros
    assert_same(mine, train(Normalised, 1, micros, global_batch_size=7), 1e-4)


@pytest.mark.parametrize("micros", [1, 2, 4])
def test_one_trace_whatever_the_number_of_micro_batches(micros: int) -> None:
    trainer = train(Net, 2, micros, global_batch_size=8, train_steps=8, steps_per_loop=3)
    assert trainer._run._loop.traces == 1
    assert trainer.calls == 2  # once on each replica


class Watching(Toy):
    """Shows the weight that each micro-batch sees, and counts micro-batches."""

    rate = 1.0
    xs = np.float32([1, 2, 1, 2])

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        w = tf.identity(model.w)
        return LossOutput(loss=w * batch, metrics={"low": Min(w), "high": Max(w), "micros": Sum(tf.ones([]))})


def test_b34_a_window_is_summed_and_makes_one_update_divided_once() -> None:
    trainer = Watching(settings(num_replicas=2, accumulate_steps=2, train_steps=1))
    figures = trainer.train()
    assert figures["micros"] == 4
    assert figures["low"] == figures["high"] == 1.0  # the second micro-batch sees the weight of before
    # Gradients (1, 2) twice: 6 / 4.
    assert [c["model/w"] for c in copies(trainer)] == [1.0 - 1.5] * 2


class Contrast(Toy):
    """Each example is weighed against the micro-batch of all replicas: loss w x_i x the sum of its x."""

    xs = np.float32([1, 2, 3, 4])

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model.w * batch * tf.reduce_sum(all_gather(batch)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_that_gathers_works_with_micro_batches(replicas: int) -> None:
    class Says(Contrast):
        loss_communicates = True

    trainer = Says(settings(num_replicas=replicas, accumulate_steps=2, train_steps=1))
    # Micro-batches (1, 2) and (3, 4): sums 3 and 7.
    assert trainer.train()["loss"] == (1 * 3 + 2 * 3 + 3 * 7 + 4 * 7) / 4


def test_a_loss_that_gathers_and_does_not_say_so_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match="set loss_communicates = True in the Trainer class"):
        Contrast(settings(num_replicas=2, accumulate_steps=2, train_steps=1)).train()


def test_more_micro_batches_than_examples_are_refused() -> None:
    with pytest.raises(ConfigError, match="accumulate_steps=5 with global_batch_size=4"):
        settings(accumulate_steps=5, global_batch_size=4)


# --- accumulate() itself ---------------------------------------------------------------------------------------------


def sums_of(batch: Any, count: int, values: Any, unroll: bool, w: tf.Variable, sizes: Any = None) -> StepSums:
    def one(part: Any, k: Any) -> StepSums:
        x = values(part)
        return gradients(
            lambda: LossOutput(loss=w * x, metrics={"max": Max(x), "min": Min(x), "sum": Sum(x), "mean": x}), [w]
        )

    return accumulate(one, batch, count, variables=[w], unroll=unroll, sizes=sizes)


BATCHES = {
    "dense": (tf.constant([5.0, -1.0, 3.0, 2.0, -4.0]), lambda x: x),
    "dict": ({"x": tf.constant([5.0, -1.0, 3.0, 2.0, -4.0])}, lambda batch: batch["x"]),
    "ragged": (
        tf.ragged.constant([[5.0], [1.0, -2.0], [3.0], [], [2.0, -4.0, -2.0]]),
        lambda x: tf.reduce_sum(x, 1),
    ),
    "sparse": (
        tf.sparse.from_dense([[5.0, 0], [1, -2], [3, 0], [2, 0], [0, -4]]),
        lambda x: tf.reduce_sum(tf.sparse.to_dense(x), 1),
    ),
}


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_figure_is_that_of_the_whole(kind: str, count: int, unroll: bool) -> None:
    batch, values = BATCHES[kind]
    w = tf.Variable(2.0)

    @tf.function
    def run() -> tuple[Any, ...]:
        sums = sums_of(batch, count, values, unroll, w)
        return sums.stats, sums.gradients[0], sums.weight

    result, gradient, weight = run()
    x = values(batch).numpy()
    assert {n: float(s.value) for n, s in result.items()} == {
        "loss": 2 * x.sum(),
        "max": x.max(),
        "min": x.min(),
        "sum": x.sum(),
        "mean": x.sum(),
    }
    assert float(result["loss"].weight) == float(result["mean"].weight) == 5
    assert (float(gradient), float(weight)) == (x.sum(), 5.0)


@pytest.mark.parametrize("unroll", [False, True])
def test_given_sizes_are_kept(unroll: bool) -> None:
    seen: list[int] = []
    w = tf.Variable(1.0)

    def one(part: tf.Tensor, k: Any) -> StepSums:
        tf.py_function(lambda p: seen.append(len(p)), [part], [])
        return gradients(lambda: LossOutput(loss=w * part), [w])

    @tf.function
    def run() -> tf.Tensor:
        sizes = tf.constant([0, 3, 1, 0, 1], tf.int64)
        return accumulate(one, tf.range(5.0), 5, variables=[w], unroll=unroll, sizes=sizes).gradients[0]

    assert float(run()) == 10.0
    assert sorted(seen) == [0, 0, 1, 1, 3]


@pytest.mark.parametrize("unroll", [False, True])
def test_a_variable_without_gradient_stays_without(unroll: bool) -> None:
    w, unused = tf.Variable(1.0), tf.Variable([1.0, 2.0])
    found: list[Any] = []

    @tf.function
    def run() -> tf.Tensor:
        sums = accumulate(
            lambda part, k: gradients(lambda: LossOutput(loss=w * part), [w, unused]),
            tf.range(4.0),
            2,
            variables=[w, unused],
            unroll=unroll,
        )
        found.extend(sums.gradients)
        return sums.gradients[0]

    assert float(run()) == 6.0
    assert found[1] is None


@pytest.mark.parametrize("unroll", [False, True])
def test_rows_of_an_embedding_become_one_gradient(unroll: bool) -> None:
    table = tf.Variable(tf.ones([5, 2]))

    @tf.function
    def run(ids: tf.Tensor) -> tf.Tensor:
        def one(part: tf.Tensor, k: Any) -> StepSums:
            return gradients(lambda: LossOutput(loss=tf.reduce_sum(tf.gather(table, part), 1)), [table])

        return tf.convert_to_tensor(accumulate(one, ids, 3, variables=[table], unroll=unroll).gradients[0])

    np.testing.assert_array_equal(run(tf.constant([0, 1, 1, 4]))[:, 0], [1, 2, 0, 0, 1])
