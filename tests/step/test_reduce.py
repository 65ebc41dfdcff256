"""The all-reduce, with a value of its own on each replica; never a captured constant, which no SUM multiplies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from framework import LockstepError, LossOutput, Max, Min, StepSums, Sum, gradients, reduce
from framework.step.reduce import Reduction, all_reduce_sum, plan_packs, reduce_stats
from framework.step.values import Stat, as_stats
from tests.helpers import mirrored, per_replica

# --- packs -----------------------------------------------------------------------------------------------------------


def zeros(*sizes: int, dtype: tf.DType = tf.float32) -> list[tf.Tensor]:
    return [tf.zeros([n], dtype) for n in sizes]


def test_packs_are_filled_in_order_up_to_their_size() -> None:
    # 4 bytes an element: 40, 40, 20 fit in 100; the next 40 opens a second pack.
    assert plan_packs(zeros(10, 10, 5, 10), 100) == [[0, 1, 2], [3]]
    assert plan_packs(zeros(10, 10, 5, 10), 99) == [[0, 1], [2, 3]]


def test_a_tensor_larger_than_a_pack_goes_alone() -> None:
    # The 40 bytes before it are in a pack that it does not fit in; what comes after does not fit in its own.
    assert plan_packs(zeros(10, 1000, 10), 100) == [[0], [1], [2]]


def test_packs_of_0_bytes_hold_one_tensor_each() -> None:
    assert plan_packs(zeros(1, 1, 1), 0) == [[0], [1], [2]]


def test_each_dtype_has_its_packs() -> None:
    single, double = zeros(10, 10), zeros(10, 10, dtype=tf.float64)
    mixed = [single[0], double[0], single[1], double[1]]
    assert plan_packs(mixed, 1000) == [[0, 2], [1, 3]]
    assert plan_packs(mixed, 80) == [[0, 2], [1], [3]]  # 160 bytes of float64 do not fit


@pytest.mark.parametrize("pack_bytes", [0, 7, 40, 1000])
def test_every_tensor_is_in_exactly_one_pack(pack_bytes: int) -> None:
    tensors = [tf.zeros([n], d) for n in (0, 1, 3, 100, 2) for d in (tf.float32, tf.float64, tf.int32)]
    packs = plan_packs(tensors, pack_bytes)
    assert sorted(i for pack in packs for i in pack) == list(range(15))
    for pack in packs:
        assert len({tensors[i].dtype for i in pack}) == 1
        assert pack == sorted(pack)
        assert len(pack) == 1 or sum(tensors[i].shape[0] * tensors[i].dtype.size for i in pack) <= pack_bytes


def test_a_shape_that_is_not_known_while_tracing_is_refused() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def trace(x: tf.Tensor) -> tf.Tensor:
        with pytest.raises(LockstepError, match="not known while tracing"):
            plan_packs([x], 100)
        return x

    trace(tf.zeros([3]))


# --- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("pack_bytes", [0, 24, 1 << 20])
def test_each_tensor_is_the_sum_of_all_replicas_in_its_place_shape_and_dtype(replicas: int, pack_bytes: int) -> None:
    def values(i: int) -> list[np.ndarray]:
        return [
            np.float32(10.0**i),
            np.full([2, 3], i + 1, np.float64),
            np.arange(4, dtype=np.float32) * (i + 1),
            np.array([[i]], np.int64),
            np.zeros([0, 2], np.float32),
        ]

    everyone = [values(i) for i in range(replicas)]
    expected = [np.sum([v[k] for v in everyone], axis=0) for k in range(5)]

    def replica(local: list[tf.Tensor]) -> list[tf.Tensor]:
        return all_reduce_sum(local, Reduction(pack_bytes=pack_bytes))

    strategy = mirrored(replicas)
    results = tf.function(lambda v: strategy.run(replica, args=(v,)))(per_replica(strategy, everyone))
    for result, right, mine in zip(results, expected, everyone[0], strict=True):
        for copy in strategy.experimental_local_results(result):
            assert copy.dtype.as_numpy_dtype == mine.dtype
            np.testing.assert_array_equal(copy.numpy(), right)


def test_with_one_replica_the_tensors_come_back_as_they_are() -> None:
    tensors = [tf.constant([1.0]), tf.constant(2)]
    assert all(a is b for a, b in zip(all_reduce_sum(tensors), tensors, strict=True))


@pytest.mark.parametrize("pack_bytes", [0, 1 << 20])
def test_a_nan_of_one_replica_reaches_all_and_stays_in_its_tensor(pack_bytes: int) -> None:
    values = [[np.float32([1, math.nan]), np.float32([1])], [np.float32([1, 1]), np.float32([5])]]
    strategy = mirrored(2)

    def replica(local: list[tf.Tensor]) -> list[tf.Tensor]:
        return all_reduce_sum(local, Reduction(pack_bytes=pack_bytes))

    first, second = tf.function(lambda v: strategy.run(replica, args=(v,)))(per_replica(strategy, values))
    for copy in strategy.experimental_local_results(first):
        np.testing.assert_array_equal(copy.numpy(), [2, math.nan])
    for copy in strategy.experimental_local_results(second):
        np.testing.assert_array_equal(copy.numpy(), [6])


@pytest.mark.parametrize("algorithm", ["hierarchical", "collective"])
def test_two_dtypes_are_reduced_by_every_algorithm(algorithm: str) -> None:
    operations = None if algorithm == "collective" else tf.distribute.HierarchicalCopyAllReduce()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=operations)
    values = [[np.float32([1, 2]), np.float64([1])], [np.float32([10, 20]), np.float64([10])]]

    def replica(local: list[tf.Tensor]) -> list[tf.Tensor]:
        return all_reduce_sum(local)

    single, double = tf.function(lambda v: strategy.run(replica, args=(v,)))(per_replica(strategy, values))
    for copy in strategy.experimental_local_results(single):
        np.testing.assert_array_equal(copy.numpy(), np.float32([11, 22]))
    for copy in strategy.experimental_local_results(double):
        np.testing.assert_array_equal(copy.numpy(), [11.0])


@pytest.mark.parametrize("what", ["tensors", "sums"])
def test_outside_a_replica_it_is_refused(what: str) -> None:
    with mirrored(2).scope(), pytest.raises(LockstepError, match=r"outside a replica.*strategy\.run"):
        if what == "tensors":
            all_reduce_sum([tf.constant(1.0)])
        else:
            reduce(StepSums(gradients=[], weight=tf.constant(1.0), stats={}, variables=[]))


# --- figures ---------------------------------------------------------------------------------------------------------


def reduced_figures(rows: list[list[float]], replicas: int) -> list[dict[str, float]]:
    """Mean, sum, max and min over all replicas' rows, as each replica has them after the reduction."""
    strategy = mirrored(replicas)

    def replica(x: tf.Tensor) -> dict[str, tf.Tensor]:
        output = LossOutput(loss=x, metrics={"sum": Sum(x), "max": Max(x), "min": Min(x)})
        stats = reduce_stats(as_stats(output, "step"))
        assert all(s.reduced for s in stats.values())
        loss = stats.pop("loss")
        return {"mean": loss.value / loss.weight, **{n: s.value for n, s in stats.items()}}

    values = per_replica(strategy, [np.float32(r) for r in rows])
    result = tf.function(lambda v: strategy.run(replica, args=(v,)))(values)
    local = {n: strategy.experimental_local_results(v) for n, v in result.items()}
    return [{n: float(v[i]) for n, v in local.items()} for i in range(replicas)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[3.0, -1.0]], {"mean": 1.0, "sum": 2.0, "max": 3.0, "min": -1.0}),
        ([[1.0], [5.0]], {"mean": 3.0, "sum": 6.0, "max": 5.0, "min": 1.0}),
        # All below zero: the zeros of the other replicas' slots must not win.
        ([[-7.0, -9.0], [-3.0]], {"mean": -19 / 3, "sum": -19.0, "max": -3.0, "min": -9.0}),
        ([[7.0], [9.0, 8.0]], {"mean": 8.0, "sum": 24.0, "max": 9.0, "min": 7.0}),
        # Replicas without an example.
        ([[-4.0, -2.0], []], {"mean": -3.0, "sum": -6.0, "max": -2.0, "min": -4.0}),
        ([[], [4.0], []], {"mean": 4.0, "sum": 4.0, "max": 4.0, "min": 4.0}),
        ([[1.0], [2.0, 3.0], [-5.0], []], {"mean": 0.25, "sum": 1.0, "max": 3.0, "min": -5.0}),
    ],
)
def test_figures_are_those_of_the_whole_batch_on_every_replica(
    rows: list[list[float]], expected: dict[str, float]
) -> None:
    for figures in reduced_figures(rows, len(rows)):
        assert figures == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_nan_of_one_replica_makes_every_figure_nan(where: int) -> None:
    rows = [[1.0], [2.0], [3.0]]
    rows[where] = [math.nan]
    for figures in reduced_figures(rows, 3):
        assert all(math.isnan(v) for v in figures.values()), figures


def test_an_infinite_extreme_stays_infinite() -> None:
    for figures in reduced_figures([[math.inf], [1.0]], 2):
        assert (figures["max"], figures["min"]) == (math.inf, 1.0)
    for figures in reduced_figures([[1.0], [-math.inf]], 2):
        assert (figures["max"], figures["min"]) == (1.0, -math.inf)


@pytest.mark.parametrize("replicas", [1, 2])
def test_figures_that_were_reduced_are_left_alone(replicas: int) -> None:
    strategy = mirrored(replicas)

    def replica(x: tf.Tensor) -> dict[str, tf.Tensor]:
        stats = reduce_stats({"done": Stat("sum", x, reduced=True), "new": Stat("sum", x)})
        assert all(s.reduced for s in stats.values()) and list(stats) == ["done", "new"]
        return {n: s.value for n, s in stats.items()}

    result = tf.function(lambda v: strategy.run(replica, args=(v,)))(
        per_replica(strategy, [np.float32(i + 1) for i in range(replicas)])
    )
    done, new = (strategy.experimental_local_results(result[n]) for n in ("done", "new"))
    assert [float(v) for v in done] == [i + 1 for i in range(replicas)]
    assert [float(v) for v in new] == [sum(range(1, replicas + 1))] * replicas


def test_a_stat_of_whole_numbers_is_summed_too() -> None:
    strategy = mirrored(2)

    def replica(x: tf.Tensor) -> dict[str, tf.Tensor]:
        stats = reduce_stats({"rows": Stat("sum", tf.size(x)), "x": Stat("sum", tf.reduce_sum(x))})
        return {n: s.value for n, s in stats.items()}

    values = per_replica(strategy, [np.float32([1.0, 2.0]), np.float32([3.0])])
    result = tf.function(lambda v: strategy.run(replica, args=(v,)))(values)
    assert {n: float(strategy.experimental_local_results(v)[0]) for n, v in result.items()} == {"rows": 3.0, "x": 6.0}


# --- the sums of a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_gradients_weight_and_figures_are_sums_over_replicas(replicas: int) -> None:
    """Replica i has i + 1 examples x = 1..i+1 of loss w * x, with w = 2 on each replica."""
    strategy = mirrored(replicas)
    with strategy.scope():
        w, unused = tf.Variable(2.0), tf.Variable(7.0)

    def replica(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        local = gradients(lambda: LossOutput(loss=w * x, metrics={"n": Sum(tf.ones_like(x))}), [w, unused])
        total = reduce(local)
        assert total.reduced and not local.reduced
        assert total.gradients[1] is None
        return total.gradients[0], total.weight, total.stats["loss"].value, total.stats["n"].value

    rows = [np.arange(1, i + 2, dtype=np.float32) for i in range(replicas)]
    results = tf.function(lambda v: strategy.run(replica, args=(v,)))(per_replica(strategy, rows))
    x, n = sum(float(r.sum()) for r in rows), sum(len(r) for r in rows)
    for result, right in zip(results, (x, n, 2 * x, n), strict=True):
        assert [float(v) for v in strategy.experimental_local_results(result)] == [right] * replicas


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_reduction_is_refused(replicas: int) -> None:
    strategy = mirrored(replicas)
    with strategy.scope():
        w = tf.Variable(2.0)

    def replica(x: tf.Tensor) -> tf.Tensor:
        once = reduce(gradients(lambda: LossOutput(loss=w * x), [w]))
        with pytest.raises(LockstepError, match="twice"):
            reduce(once)
        return once.weight

    result = tf.function(lambda v: strategy.run(replica, args=(v,)))(
        per_replica(strategy, [np.float32([1.0])] * replicas)
    )
    assert float(strategy.experimental_local_results(result)[0]) == replicas


def test_rows_of_an_embedding_that_both_replicas_look_up_are_added() -> None:
    """Replica 0 looks up rows 0 and 1, replica 1 rows 1 and 4: the gradient of a sum is 1 for each look-up."""
    strategy = mirrored(2)
    with strategy.scope():
        table = tf.Variable(tf.ones([5, 2]))

    def replica(ids: tf.Tensor) -> tf.Tensor:
        looked_up = gradients(lambda: LossOutput(loss=tf.reduce_sum(tf.gather(table, ids), -1)), [table])
        return tf.convert_to_tensor(reduce(looked_up).gradients[0])  # it may be rows alone

    result = tf.function(lambda v: strategy.run(replica, args=(v,)))(per_replica(strategy, [[0, 1], [1, 4]]))
    for copy in strategy.experimental_local_results(result):
        np.testing.assert_array_equal(copy.numpy(), [[1, 1], [2, 2], [0, 0], [0, 0], [1, 1]])
