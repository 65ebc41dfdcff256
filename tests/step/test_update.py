"""The update, on 1 to 4 replicas with gradients of their own: divide once, test, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LockstepError, LossOutput, StepSums, apply, gradients, optimizers, reduce
from framework.step.values import Stat
from tests.helpers import mirrored, per_replica


class Made(NamedTuple):
    """What an update left on each replica, and what it reported."""

    weights: list[np.ndarray]
    state: list[dict[str, np.ndarray]]
    finite: list[bool]
    norm: list[float]


def update(
    rows: Sequence[Any],
    *,
    make: Callable[[], Any] = lambda: optimizers.SGD(learning_rate=1.0),
    loss: Callable[[tf.Variable, tf.Tensor], LossOutput] = lambda w, x: LossOutput(loss=tf.linalg.matvec(x, w)),
    start: Any = (0.0, 0.0),
    steps: int = 1,
    **options: float,
) -> Made:
    """``steps`` whole steps on as many replicas as there are ``rows``: gradients, reduce, apply.

    The default loss of an example x ``[2]`` is w . x, so its gradient is x itself.
    """
    strategy = mirrored(len(rows))
    with strategy.scope():
        w = tf.Variable(np.float32(start))
        optimizer = optimizers.as_optimizer(make())
        optimizer.build([w], ["w"])

    def replica(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        made = apply(reduce(gradients(lambda: loss(w, x), [w])), optimizer, **options)
        return made.finite, made.grad_norm

    run = tf.function(lambda v: strategy.run(replica, args=(v,)))
    values = per_replica(strategy, [np.asarray(r, np.float32) for r in rows])
    for _ in range(steps):
        finite, norm = run(values)
    of_each = range(len(rows))
    state = {n: strategy.experimental_local_results(v) for n, v in optimizer.state().items()}
    return Made(
        [v.numpy() for v in strategy.experimental_local_results(w)],
        [{n: v[i].numpy() for n, v in state.items()} for i in of_each],
        [bool(f) for f in strategy.experimental_local_results(finite)],
        [float(n) for n in strategy.experimental_local_results(norm)],
    )


def assert_weights(made: Made, expected: Any, rel: float = 1e-6) -> None:
    """All copies are equal bit for bit, and as expected."""
    for copy in made.weights:
        np.testing.assert_array_equal(copy, made.weights[0])
        np.testing.assert_allclose(copy, expected, rtol=rel)


# --- divide once -----------------------------------------------------------------------------------------------------

KINDS = [lambda: optimizers.SGD(learning_rate=1.0), lambda: keras.optimizers.SGD(1.0)]


@pytest.mark.parametrize("make", KINDS, ids=["own", "keras"])
@pytest.mark.parametrize(
    "rows",
    [
        [[[1, 0], [2, 0], [3, 0], [4, 8]]],
        [[[1, 0], [2, 0]], [[3, 0], [4, 8]]],
        [[[1, 0]], [[2, 0], [3, 0], [4, 8]]],
        [[[1, 0], [2, 0]], np.zeros([0, 2]), [[3, 0], [4, 8]]],
        [[[1, 0]], [[2, 0]], [[3, 0]], [[4, 8]]],
    ],
    ids=["1", "2", "2-uneven", "3-one-empty", "4"],
)
def test_the_gradient_is_the_mean_over_the_global_batch_however_it_is_split(rows: Any, make: Any) -> None:
    made = update(rows, make=make)
    assert_weights(made, [-2.5, -2.0])
    assert all(made.finite)
    assert made.norm == pytest.approx([math.hypot(2.5, 2.0)] * len(rows), rel=1e-6)


def test_gradients_1_and_2_as_sums_move_both_copies_by_their_mean() -> None:
    # B31's -3 divided by the weight of 2: reduced twice it would be -3, not reduced -1 and -2.
    assert_weights(update([[[1, 0]], [[2, 0]]]), [-1.5, 0.0])


def test_weights_of_examples_divide_not_their_number() -> None:
    # (1*3 + 5*1 + 9*0) / (3 + 1 + 0) = 2; a mean of replica means would be (1*3 + 5*1)/4 and 9 apart.
    def loss(w: tf.Variable, x: tf.Tensor) -> LossOutput:
        return LossOutput(loss=w[0] * x[:, 0], weight=x[:, 1])

    assert_weights(update([[[1, 3], [5, 1]], [[9, 0]]], loss=loss), [-2.0, 0.0])
    assert_weights(update([[[1, 3]], [[5, 1], [9, 0]]], loss=loss), [-2.0, 0.0])


def test_a_total_weight_of_zero_changes_nothing() -> None:
    def loss(w: tf.Variable, x: tf.Tensor) -> LossOutput:
        return LossOutput(loss=w[0] * x[:, 0], weight=0.0, penalty=100.0 * w[1])

    made = update([[[1, 0]], [[5, 0]]], loss=loss, start=(2.0, 3.0))
    assert_weights(made, [2.0, 3.0], rel=0.0)
    assert made.finite == [True, True] and made.norm == [0.0, 0.0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_c006_the_penalty_is_added_once_for_any_number_of_replicas(replicas: int) -> None:
    """Zero data loss, weight 3, penalty 0.1 w^2: the gradient is 0.6, so w becomes 2.4 and not 3 - 0.6 N."""

    def loss(w: tf.Variable, x: tf.Tensor) -> LossOutput:
        return LossOutput(loss=0.0 * w[0] * x[:, 0], penalty=0.1 * w[0] ** 2)

    made = update([[[1, 0]] * (i + 1) for i in range(replicas)], loss=loss, start=(3.0, 0.0))
    assert_weights(made, [2.4, 0.0])


def test_the_penalty_is_added_once_though_a_replica_has_no_example() -> None:
    def loss(w: tf.Variable, x: tf.Tensor) -> LossOutput:
        return LossOutput(loss=0.0 * w[0] * x[:, 0], penalty=0.1 * w[0] ** 2)

    assert_weights(update([[[1, 0]], np.zeros([0, 2])], loss=loss, start=(3.0, 0.0)), [2.4, 0.0])


# --- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", KINDS, ids=["own", "keras"])
def test_b32_the_global_norm_is_clipped_after_the_reduction(make: Any) -> None:
    """Mean gradient [5, 5] of norm 7.07: clipped to norm 1. Clipped locally first, it would be of norm 0.707."""
    made = update([[[10, 0]], [[0, 10]]], make=make, clip_global_norm=1.0)
    assert_weights(made, [-math.sqrt(0.5)] * 2)
    assert float(np.linalg.norm(made.weights[0])) == pytest.approx(1.0, rel=1e-6)
    assert made.norm == pytest.approx([math.hypot(5, 5)] * 2, rel=1e-6)  # before clipping


def test_clipping_acts_on_the_sum_where_local_gradients_cancel() -> None:
    # Mean of +12 and -8 is 2: below 3, so nothing is clipped. Local clipping would give (3 - 3) / 2 = 0.
    assert_weights(update([[[12, 0]], [[-8, 0]]], clip_global_norm=3.0), [-2.0, 0.0])
    # Mean (4, 3) of norm 5 clipped to 2.5: (2, 1.5).
    assert_weights(update([[[8, 0]], [[0, 6]]], clip_global_norm=2.5), [-2.0, -1.5])


def test_a_norm_at_or_below_the_limit_is_left_as_it_is_bit_for_bit() -> None:
    free = update([[[0.3, 0.1]], [[0.7, 0.9]]]).weights[0]
    clipped = update([[[0.3, 0.1]], [[0.7, 0.9]]], clip_global_norm=100.0).weights[0]
    np.testing.assert_array_equal(free, clipped)


def test_the_norm_is_over_all_variables_together() -> None:
    """Gradients 3 and 4 of two variables, clip 1: 0.6 and 0.8."""
    with mirrored(1).scope():
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = optimizers.SGD(learning_rate=1.0)
        optimizer.build([a, b], ["a", "b"])

    def replica() -> None:
        apply(reduce(gradients(lambda: LossOutput(loss=[3 * a + 4 * b]), [a, b])), optimizer, clip_global_norm=1.0)

    tf.function(lambda: mirrored(1).run(replica))()
    assert (a.numpy(), b.numpy()) == pytest.approx((-0.6, -0.8), rel=1e-6)


def test_clip_value_cuts_each_element_of_the_mean_gradient() -> None:
    assert_weights(update([[[10, -1]], [[-2, -9]]], clip_value=3.0), [-3.0, 3.0])  # mean (4, -5)
    assert_weights(update([[[10, 1]], [[-10, 2]]], clip_value=3.0), [0.0, -1.5])  # mean (0, 1.5)


def test_both_clips_at_once_are_refused() -> None:
    sums = StepSums(gradients=[tf.ones([])], weight=tf.constant(1.0), stats={}, variables=[None], reduced=True)
    with pytest.raises(ConfigError, match=r"clip_global_norm=1\.0 with clip_value=2\.0"):
        apply(sums, optimizers.SGD(learning_rate=1.0), clip_global_norm=1.0, clip_value=2.0)


# --- non-finite ------------------------------------------------------------------------------------------------------

STATEFUL = {
    "momentum": lambda: optimizers.SGD(learning_rate=1.0, momentum=0.9),
    "adamw": lambda: optimizers.AdamW(learning_rate=0.1, weight_decay=0.5),
    "keras": lambda: keras.optimizers.Adam(0.1, weight_decay=0.5),
}


@pytest.mark.parametrize(
    ("make", "bad", "where"),
    [("momentum", math.nan, 0), ("adamw", math.nan, 1), ("adamw", math.inf, 1), ("keras", -math.inf, 0)],
)
def test_a_bad_value_on_one_replica_moves_nothing_anywhere(make: str, bad: float, where: int) -> None:
    rows = [[[1.0, 2.0]], [[3.0, 4.0]]]
    rows[where][0][1] = bad
    made = update(rows, make=STATEFUL[make], start=(1.0, 2.0), steps=2)
    assert made.finite == [False, False]
    assert_weights(made, [1.0, 2.0], rel=0.0)
    for state in made.state:  # neither the slots nor the counter, nor decay
        assert all(not np.any(v) for n, v in state.items() if n != "learning_rate"), state


def test_a_bad_gradient_under_a_finite_loss_is_seen() -> None:
    """sqrt has the loss 0 and the gradient infinity at 0."""
    made = update([[[0, 1]], [[4, 1]]], loss=lambda w, x: LossOutput(loss=tf.sqrt(w[0] * x[:, 0])), start=(1.0, 0.0))
    assert made.finite == [False, False]
    assert_weights(made, [1.0, 0.0], rel=0.0)


def test_a_bad_loss_with_finite_gradients_is_seen() -> None:
    def loss(w: tf.Variable, x: tf.Tensor) -> LossOutput:
        return LossOutput(loss=w[0] * x[:, 0] + tf.stop_gradient(x[:, 1]))

    made = update([[[1, math.nan]], [[1, 1]]], loss=loss)
    assert made.finite == [False, False]
    assert_weights(made, [0.0, 0.0], rel=0.0)


@pytest.mark.parametrize("scale", [1e18, 1e-25])
def test_a_gradient_whose_square_fits_or_vanishes_is_a_gradient(scale: float) -> None:
    made = update([[[scale, 0]], [[scale, 0]]])
    assert made.finite == [True, True]
    assert_weights(made, [-scale, 0.0])


def test_a_norm_beyond_float32_counts_as_not_finite() -> None:
    """The norm is a sum of squares in float32: its limit is 1.8e19, and nothing moves beyond."""
    made = update([[[1e20, 0]], [[1e20, 0]]])
    assert made.finite == [False, False]
    assert_weights(made, [0.0, 0.0], rel=0.0)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_sums_that_were_not_reduced_are_refused() -> None:
    sums = StepSums(gradients=[tf.ones([])], weight=tf.constant(1.0), stats={}, variables=[None])
    with pytest.raises(LockstepError, match=r"not reduced; call reduce\(sums\) first"):
        apply(sums, optimizers.SGD(learning_rate=1.0))


def test_a_loss_that_depends_on_no_variable_is_refused() -> None:
    sums = StepSums(
        gradients=[None, None],
        weight=tf.constant(1.0),
        stats={"loss": Stat("mean", tf.ones([]))},
        variables=[None, None],
        reduced=True,
    )
    with pytest.raises(LockstepError, match="depends on none of the variables"):
        apply(sums, optimizers.SGD(learning_rate=1.0))


def test_a_variable_without_gradient_is_left_alone_with_its_slot() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        used, unused = tf.Variable(1.0), tf.Variable(5.0)
        optimizer = optimizers.AdamW(learning_rate=0.1, weight_decay=0.5)
        optimizer.build([used, unused], ["used", "unused"])

    def replica(x: tf.Tensor) -> None:
        apply(reduce(gradients(lambda: LossOutput(loss=used * x), [used, unused])), optimizer)

    run = tf.function(lambda v: strategy.run(replica, args=(v,)))
    run(per_replica(strategy, [np.float32([1.0]), np.float32([2.0])]))
    for copy in strategy.experimental_local_results(unused):
        assert copy.numpy() == 5.0
    assert optimizer.state()["m/unused"].numpy() == 0.0
    assert optimizer.state()["m/used"].numpy() == pytest.approx(0.15, rel=1e-6)  # (1 - 0.9) * (1 + 2) / 2


def test_the_rate_is_that_of_the_update_that_was_made() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = optimizers.SGD(learning_rate=lambda i: tf.cast(i + 1, tf.float32))
        optimizer.build([w], ["w"])

    def replica(x: tf.Tensor) -> tf.Tensor:
        return apply(reduce(gradients(lambda: LossOutput(loss=w * x), [w])), optimizer).learning_rate

    run = tf.function(lambda v: strategy.run(replica, args=(v,)))
    values = per_replica(strategy, [np.float32([1.0]), np.float32([3.0])])
    rates = [[float(r) for r in strategy.experimental_local_results(run(values))] for _ in range(3)]
    assert rates == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert w.numpy() == -(1 + 2 + 3) * 2.0
