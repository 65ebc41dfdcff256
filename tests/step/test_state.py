"""Non-trainable state: the copies that a step leaves on the replicas become one, by the rule that was named."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Trainer, optimizers
from framework.step.state import ReplicaState
from input_pipelines import from_arrays
from tests.helpers import Weight, assert_copies_equal, copies, mirrored, per_replica, settings

MOMENTUM, EPSILON = 0.5, 1e-3
X = (np.random.RandomState(0).randn(30, 3) * [1, 2, 3] + [0, 1, 5]).astype(np.float32)


class Normalised(Trainer):
    """Batch normalisation right on the input, so that NumPy knows what it saw."""

    synchronized = False

    def build_model(self) -> Any:
        norm = keras.layers.BatchNormalization(momentum=MOMENTUM, synchronized=self.synchronized, name="norm")
        return keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])

    def train_data(self) -> Any:
        return from_arrays(X, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.square(model(batch, training=training))[:, 0])


class Synchronised(Normalised):
    synchronized = True


def statistics(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    state = copies(trainer)[0]
    return state["model/sequential/norm/moving_mean"], state["model/sequential/norm/moving_variance"]


def test_moving_statistics_are_the_mean_over_replicas_weighted_by_rows() -> None:
    """Batches of 5 rows on 2 replicas: 3 and 2. Each replica moves its own; then (3 a + 2 b) / 5."""
    trainer = Normalised(settings(num_replicas=2, global_batch_size=5, optimizer="sgd"))
    mean, variance = np.zeros(3), np.ones(3)
    for step in range(3):
        trainer.train(1)
        assert_copies_equal(trainer)
        batch = X[5 * step : 5 * step + 5].astype(np.float64)
        parts = (batch[:3], batch[3:])
        mean = sum(len(p) * (MOMENTUM * mean + (1 - MOMENTUM) * p.mean(0)) for p in parts) / 5
        variance = sum(len(p) * (MOMENTUM * variance + (1 - MOMENTUM) * p.var(0)) for p in parts) / 5
        got = statistics(trainer)
        np.testing.assert_allclose(got[0], mean, rtol=1e-5)
        np.testing.assert_allclose(got[1], variance, rtol=1e-4)


def test_a_replica_without_a_row_does_not_count() -> None:
    trainer = Normalised(settings(num_replicas=2, global_batch_size=1, train_steps=1, optimizer="sgd"))
    trainer.train()
    assert_copies_equal(trainer)
    np.testing.assert_allclose(statistics(trainer)[0], (1 - MOMENTUM) * X[0], rtol=1e-6)
    np.testing.assert_allclose(statistics(trainer)[1], [MOMENTUM] * 3, rtol=1e-6)


def test_micro_batches_move_the_statistics_one_after_the_other() -> None:
    """Batches of 8 rows, 2 micro-batches of 2 rows on each of 2 replicas."""
    config = settings(num_replicas=2, global_batch_size=8, accumulate_steps=2, train_steps=1, optimizer="sgd")
    trainer = Normalised(config)
    trainer.train()
    assert_copies_equal(trainer)
    ends = []
    for parts in ((X[0:2], X[6:8]), (X[2:4], X[4:6])):  # larger parts go round: replica r has place (r + k) mod 2
        mean = np.zeros(3)
        for part in parts:
            mean = MOMENTUM * mean + (1 - MOMENTUM) * part.mean(0)
        ends.append(mean)
    np.testing.assert_allclose(statistics(trainer)[0], np.mean(ends, 0), rtol=1e-5)


def test_an_empty_micro_batch_leaves_moving_statistics_finite() -> None:
    """3 rows in 2 micro-batches on 2 replicas: 2 and 1, so one replica has a micro-batch without a row."""
    config = settings(num_replicas=2, global_batch_size=3, accumulate_steps=2, train_steps=1, optimizer="sgd")
    trainer = Normalised(config)
    trainer.train()
    for value in copies(trainer)[0].values():
        assert np.isfinite(value).all()


def test_keras_own_synchronized_normalisation_sees_all_rows() -> None:
    trainer = Synchronised(settings(num_replicas=2, global_batch_size=6, train_steps=1, optimizer="sgd"))
    trainer.train()
    assert_copies_equal(trainer)
    mean, variance = statistics(trainer)
    np.testing.assert_allclose(mean, (1 - MOMENTUM) * X[:6].mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, MOMENTUM + (1 - MOMENTUM) * X[:6].var(0), rtol=1e-4)


# --- what must not move ----------------------------------------------------------------------------------------------


class Frozen(Trainer):
    """A frozen layer before one that learns."""

    def build_model(self) -> Any:
        frozen = keras.layers.Dense(3, trainable=False, name="frozen")
        return keras.Sequential([keras.Input((3,)), frozen, keras.layers.Dense(1)])

    def train_data(self) -> Any:
        return from_arrays(X, shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.square(model(batch))[:, 0])


def test_frozen_weights_stay_bit_for_bit() -> None:
    trainer = Frozen(settings(num_replicas=2, global_batch_size=7, train_steps=6, optimizer="sgd"))
    before = copies(trainer)[0]
    trainer.train()
    after = copies(trainer)
    for one in after:
        np.testing.assert_array_equal(one["model/sequential/frozen/kernel"], before["model/sequential/frozen/kernel"])


def test_frozen_weights_are_not_sent() -> None:
    """A frozen backbone would double what crosses the replicas; 9 + 3 floats here."""
    trainer = Frozen(settings(num_replicas=2, train_steps=1, optimizer="sgd"))
    trainer.train()
    floats = sum(pack["bytes"] for pack in trainer.stepper.packs) // 4
    # 3 + 1 gradients; loss, its weight, the weight, rows; slots [2, 3] of loss and norms.
    assert floats <= 4 + 4 + 6


# --- rules -----------------------------------------------------------------------------------------------------------


class Counters(keras.layers.Layer):
    """Counts its calls, its rows, and keeps the largest value seen and a moving mean."""

    kind = "int64"

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        self.rows = self.add_weight(shape=(), dtype=self.kind, initializer="zeros", trainable=False, name="rows")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")
        self.moving = self.add_weight(shape=(), initializer="zeros", trainable=False, name="moving")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign(self.calls + 1)
            self.rows.assign(self.rows + tf.cast(tf.shape(x)[0], self.kind))
            self.largest.assign(tf.maximum(self.largest.value, tf.reduce_max(x)))
            self.moving.assign(0.5 * self.moving + 0.5 * tf.reduce_mean(x))
        return x


class Counting(Trainer):
    def build_model(self) -> Any:
        return keras.Sequential([keras.Input((1,)), Counters(name="c"), keras.layers.Dense(1)])

    def replica_state(self) -> dict[str, str]:
        return {"rows": "sum", "largest": "max"}

    def train_data(self) -> Any:
        return from_arrays(np.float32([[1], [5], [2], [8], [4], [3], [7], [6]]), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model(batch, training=training)[:, 0])


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_rule_gives_its_own_result(replicas: int) -> None:
    trainer = Counting(settings(num_replicas=replicas, optimizer="sgd"))
    wanted = [(1, 4, 8.0, 0.5 * 4), (2, 8, 8.0, 0.5 * 2 + 0.5 * 5)]  # means of the batches: 4 and 5
    for calls, rows, largest, moving in wanted:
        trainer.train(1)
        assert_copies_equal(trainer)
        state = copies(trainer)[0]
        assert [state[f"model/sequential/c/{n}"] for n in ("calls", "rows", "largest", "moving")] == [
            calls,
            rows,
            largest,
            moving,
        ]


@pytest.mark.parametrize("rule", ["sum", "max"])
def test_a_counter_of_32_bits_works_like_one_of_64(rule: str) -> None:
    class Narrow(Counters):
        kind = "int32"

    class CountingNarrow(Counting):
        def build_model(self) -> Any:
            return keras.Sequential([keras.Input((1,)), Narrow(name="c"), keras.layers.Dense(1)])

        def replica_state(self) -> dict[str, str]:
            return {"rows": rule}

    trainer = CountingNarrow(settings(num_replicas=2, optimizer="sgd", train_steps=1))
    trainer.train()
    assert [c["model/sequential/c/rows"] for c in copies(trainer)] == [{"sum": 4, "max": 2}[rule]] * 2


class Doubled(Trainer):
    """Two optimizers; both gradients are taken before the first update."""

    def build_model(self) -> Any:
        model = Weight(1.0)
        model.v = tf.Variable(1.0)
        model.seen = tf.Variable(0.0, trainable=False)
        return model

    def build_optimizer(self) -> Any:
        return {n: (optimizers.SGD(learning_rate=0.1), [getattr(self.model, n)]) for n in ("w", "v")}

    def replica_state(self) -> dict[str, str]:
        return {"seen": "sum"}

    def train_data(self) -> Any:
        return from_arrays(np.float32([1, 2, 4, 8]), shuffle=False)

    def train_step(self, batch: Any) -> Any:
        sums = []
        for name in ("w", "v"):
            variable = getattr(self.model, name)

            def compute(batch: Any, variable: Any = variable) -> LossOutput:
                self.model.seen.assign_add(tf.reduce_sum(batch))
                return LossOutput(loss=variable * batch)

            sums.append(self.reduce(self.gradients(batch, [variable], compute)))
        self.apply(sums[0], "w")
        self.apply(sums[1], "v")
        return sums[0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_gradients_before_two_updates_keep_the_state_common(replicas: int) -> None:
    trainer = Doubled(settings(num_replicas=replicas, train_steps=1))
    trainer.train()
    # Both passes see all four examples.
    assert [c["model/seen"] for c in copies(trainer)] == [30.0] * replicas


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        ({"moving": "average"}, ["replica_state['moving']='average'", "mean, sum, max, first"]),
        ({"moved": "mean"}, ["replica_state['moved'] fits no non-trainable variable", "norm/moving_mean"]),
    ],
)
def test_a_rule_that_cannot_be_is_refused_before_training(rules: dict[str, str], parts: list[str]) -> None:
    class Ruled(Normalised):
        def replica_state(self) -> dict[str, str]:
            return rules

    with pytest.raises(ConfigError) as error:
        Ruled(settings(num_replicas=2)).build()
    for part in parts:
        assert part in str(error.value)


def test_a_rule_for_a_model_without_such_state_says_so() -> None:
    with pytest.raises(ConfigError, match="there are none"):
        ReplicaState({}, {"x": "sum"})


def test_the_first_rule_found_counts_and_the_others_go_by_dtype() -> None:
    names = {n: tf.Variable(0.0) for n in ("a/x", "b/x", "c")} | {"n": tf.Variable(0)}
    state = ReplicaState(names, {"a/": "max", "x": "sum"})
    stats = state.sums(state.read(), tf.constant(2.0))
    assert {n: s.kind for n, s in stats.items()} == {"a/x": "max", "b/x": "sum", "c": "mean"}  # n: first, not sent


@pytest.mark.parametrize("action", ["commit", "undo"])
def test_commit_and_undo_on_each_replica(action: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        mean, total = tf.Variable(10.0, trainable=False), tf.Variable(5, dtype=tf.int64, trainable=False)
        state = ReplicaState({"mean": mean, "total": total}, {"total": "sum"})

    def replica(value: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        from framework.step.reduce import reduce_stats

        before = state.read()
        mean.assign(value)
        total.assign_add(tf.cast(rows, tf.int64))
        reduced = reduce_stats(state.sums(before, rows))
        if action == "commit":
            state.commit(before, reduced)
        else:
            state.undo(before)
        return mean.read_value(), total.read_value()

    values, rows = (
        per_replica(strategy, [np.float32(1.0), np.float32(4.0)]),
        per_replica(strategy, [np.float32(1), np.float32(2)]),
    )
    results = tf.function(lambda v, r: strategy.run(replica, args=(v, r)))(values, rows)
    got = [[v.numpy() for v in strategy.experimental_local_results(r)] for r in results]
    assert got == ([[3.0, 3.0], [8, 8]] if action == "commit" else [[10.0, 10.0], [5, 5]])
