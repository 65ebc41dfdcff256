"""Learning rates against lists written by hand."""

from __future__ import annotations

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework.config import RunConfig
from framework.errors import ConfigError
from framework.optimizers import SGD, Constant, Cosine, Polynomial, Step, WarmUp
from framework.optimizers.schedules import from_config


def rates(schedule, count, start=0):
    """Rates of updates start .. start + count - 1, computed in a graph from an int64 tensor."""
    compiled = tf.function(schedule, input_signature=[tf.TensorSpec([], tf.int64)])
    values = [compiled(tf.constant(i, tf.int64)) for i in range(start, start + count)]
    assert all(value.dtype == tf.float32 and value.shape == () for value in values)
    return np.array([value.numpy() for value in values])


ROOT_HALF = 0.70710678118654752  # cos(pi / 4)

BY_HAND = {
    "constant": (Constant(rate=0.1), [0.1] * 4),
    # (1 + cos(pi i / 4)) / 2 for i = 0 .. 4, then held.
    "cosine": (Cosine(peak=1.0, stop=4), [1.0, (1 + ROOT_HALF) / 2, 0.5, (1 - ROOT_HALF) / 2, 0.0, 0.0]),
    # 2 (0.1 + 0.9 (1 + cos) / 2), decaying over updates 2 .. 4: halfway at 3.
    "cosine_with_end": (Cosine(peak=2.0, start=2, stop=4, end=0.1), [2.0, 2.0, 2.0, 1.1, 0.2, 0.2]),
    "line": (Polynomial(peak=1.0, stop=4), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    # 4 (0.25 + 0.75 (1 - i / 2)^2): 4, 4 (0.25 + 0.1875), 1.
    "square_with_end": (Polynomial(peak=4.0, stop=2, power=2.0, end=0.25), [4.0, 1.75, 1.0, 1.0]),
    "power_0": (Polynomial(peak=4.0, stop=2, power=0.0), [4.0, 4.0, 4.0]),
    "step": (Step(peak=1.0, boundaries=(2, 3), factor=0.5), [1.0, 1.0, 0.5, 0.25, 0.25]),
    "warm_up": (WarmUp(peak=1.0, steps=4, after=Constant(rate=1.0)), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    "warm_up_then_step": (
        WarmUp(peak=1.0, steps=2, after=Step(peak=1.0, boundaries=(3,), factor=0.5)),
        [0.5, 1.0, 1.0, 0.5],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_rates_equal_the_list_written_by_hand(case):
    schedule, expected = BY_HAND[case]
    np.testing.assert_allclose(rates(schedule, len(expected)), expected, rtol=1e-7, atol=1e-17)


def test_warm_up_of_5_then_cosine_to_20_as_configured():
    config = RunConfig(learning_rate=0.5, schedule="cosine", warmup_steps=5)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5] + [0.25 * (1 + np.cos(np.pi * (i - 5) / 15)) for i in range(5, 20)]
    got = rates(from_config(config, 20), 20)
    np.testing.assert_allclose(got, expected, rtol=1e-7)
    assert got[4] == got[5] == np.float32(0.5)
    assert got[19] > 0.0  # no update is spent at a rate of 0


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "step", "schedule_boundaries": "1,3", "schedule_factor": 0.5}, [1.0, 0.5, 0.5, 0.25]),
        ({"schedule": "polynomial", "warmup_steps": 1, "schedule_end": 0.25}, [1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "polynomial", "schedule_power": 2.0}, [1.0, 0.5625, 0.25, 0.0625, 0.0]),
        ({"schedule": "cosine", "schedule_end": 0.5}, [1.0, 0.5 + (1 + ROOT_HALF) / 4, 0.75]),
    ],
)
def test_configured_schedules(settings, expected):
    schedule = from_config(RunConfig(learning_rate=1.0, **settings), 4)
    np.testing.assert_allclose(rates(schedule, len(expected)), expected, rtol=1e-7, atol=1e-17)


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_decay_never_rises_and_holds_its_end_at_very_large_counts(kind):
    total = 3_000_000_000  # beyond int32, and beyond the whole numbers of float32
    schedule = from_config(RunConfig(learning_rate=0.3, schedule=kind, warmup_steps=1000, schedule_end=0.1), total)
    compiled = tf.function(schedule, input_signature=[tf.TensorSpec([], tf.int64)])
    at = sorted({999, 1000, *range(2**24, 2**24 + 40), *np.linspace(1000, total, 300).astype(int), total, total + 1})
    values = [float(compiled(tf.constant(int(i), tf.int64))) for i in at] + [
        float(compiled(tf.constant(2**50, tf.int64)))
    ]
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert values[0] == np.float32(0.3)
    assert values[-1] == values[-2] == np.float32(0.3 * 0.1)
    # Two neighbours far into the run differ by less than float32 tells, but the rate does move over 1/300 of the run.
    assert values[60] > values[80] > values[100]


def test_the_same_update_has_the_same_bits_wherever_the_run_began():
    schedule = from_config(RunConfig(learning_rate=0.1, schedule="cosine", warmup_steps=5), 20)
    unbroken = rates(schedule, 20)
    again = from_config(RunConfig(learning_rate=0.1, schedule="cosine", warmup_steps=5), 20)
    np.testing.assert_array_equal(rates(again, 12, start=8), unbroken[8:])
    eager = np.array([schedule(tf.constant(i, tf.int64)).numpy() for i in range(20)])
    np.testing.assert_array_equal(eager, unbroken)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_rate_is_one_per_update_on_every_replica(mirrored, replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = SGD(learning_rate=from_config(RunConfig(learning_rate=1.0, warmup_steps=4), 12))
        optimizer.build([w], ["w"])

    @tf.function
    def step():
        def replica_step():
            rate = optimizer.learning_rate()
            optimizer.update([tf.constant(0.0)])
            return rate

        return strategy.experimental_local_results(strategy.run(replica_step))

    got = [[float(value) for value in step()] for _ in range(5)]
    assert got == [[rate] * replicas for rate in (0.25, 0.5, 0.75, 1.0, 1.0)]


def test_a_keras_schedule_serves_as_it_is():
    w = tf.Variable(0.0)
    optimizer = SGD(learning_rate=keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5]))
    optimizer.build([w], ["w"])
    for _ in range(3):
        optimizer.update([tf.constant(1.0)])
    assert w.numpy() == -2.5  # updates 0 and 1 at 1.0: Keras's boundary belongs to the left
    assert optimizer.learning_rate().dtype == tf.float32


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_a_decay_needs_to_know_the_end_of_the_run(kind):
    config = RunConfig(schedule=kind, train_steps=-1)
    with pytest.raises(ConfigError, match=rf"schedule={kind} .* \(train_steps=-1\).* pass --train_steps=N"):
        from_config(config, None)


def test_constant_and_step_do_not_need_the_end_of_the_run():
    assert from_config(RunConfig(learning_rate=0.1), None) == Constant(rate=0.1)
    config = RunConfig(learning_rate=0.1, schedule="step", schedule_boundaries="5")
    assert from_config(config, None) == Step(peak=0.1, boundaries=(5,), factor=0.1)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_a_warm_up_as_long_as_the_run_is_refused(kind):
    with pytest.raises(ConfigError, match=r"warmup_steps=10 with 10 updates in all.* --warmup_steps below 10"):
        from_config(RunConfig(schedule=kind, warmup_steps=10), 10)
    from_config(RunConfig(schedule=kind, warmup_steps=9), 10)


def test_a_drop_within_the_warm_up_is_refused():
    config = RunConfig(schedule="step", schedule_boundaries="5,20", warmup_steps=6)
    with pytest.raises(ConfigError, match="schedule_boundaries=5,20 with warmup_steps=6"):
        from_config(config, 100)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Constant(rate=-1.0), "learning_rate=-1.0"),
        (lambda: Cosine(peak=float("inf"), stop=4), "learning_rate=inf"),
        (lambda: Cosine(peak=1.0, start=4, stop=4), "start=4 with stop=4"),
        (lambda: Polynomial(peak=1.0, stop=4, end=1.5), "schedule_end=1.5"),
        (lambda: Polynomial(peak=1.0, stop=4, power=-1.0), "schedule_power=-1.0"),
        (lambda: Step(peak=1.0, boundaries=(3, 2)), "boundaries=(3, 2)"),
        (lambda: Step(peak=1.0, boundaries=()), "boundaries=()"),
        (lambda: WarmUp(peak=1.0, steps=0, after=Constant(rate=1.0)), "warmup_steps=0"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()
