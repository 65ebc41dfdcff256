"""Arrays as a pipeline: every example once an epoch, in an order that position and seed alone decide."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError, Pipeline
from input_pipelines import digits, from_arrays


def batches(data: Any, steps: int, replicas: int = 1, **plan: Any) -> list[list[int]]:
    """The examples of each global batch, parts of the replicas joined."""
    made = BatchPlan(num_replicas=replicas, local_replicas=replicas, **plan)
    rows = [list(map(int, r)) for r in data.batches(made).take(steps * replicas).as_numpy_iterator()]
    return [joined(rows[i : i + replicas]) for i in range(0, len(rows), replicas)]


def joined(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [3, 4, 10, 25])
def test_every_epoch_holds_each_example_once_though_batches_span_its_end(batch: int, replicas: int) -> None:
    data = from_arrays(np.arange(10))
    stream = joined(batches(data, 60 // batch + 1, replicas, global_batch_size=batch, seed=4))
    for epoch in range(6):
        assert sorted(stream[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert stream[:10] != stream[10:20]


@pytest.mark.parametrize("start", [0, 1, 7, 10, 23, 1003])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_start_at_any_example_gives_the_rest_of_the_same_stream(start: int, replicas: int) -> None:
    data = from_arrays(np.arange(10))
    stream = joined(batches(data, start + 12, global_batch_size=1, seed=4))
    rest = joined(batches(data, 3, replicas, global_batch_size=4, seed=4, start=start))
    assert rest == stream[start : start + 12]


def test_a_start_far_into_the_stream_costs_no_more_than_one_at_its_head() -> None:
    """A skip of 10^12 examples, had they to be gone through, would take weeks at a million a second."""
    data = from_arrays(np.arange(1000))
    begun = time.perf_counter()
    batches(data, 2, global_batch_size=8)
    middle = time.perf_counter()
    batches(data, 2, global_batch_size=8, start=10**12)
    assert time.perf_counter() - middle < 10 * (middle - begun) + 5.0


@pytest.mark.parametrize(("batch", "replicas"), [(1, 1), (3, 1), (4, 2), (10, 3), (64, 4), (7, 3)])
def test_evaluation_gives_every_example_once_in_order(batch: int, replicas: int) -> None:
    data = from_arrays(np.arange(21))
    plan = {"global_batch_size": batch, "stop": 21, "training": False, "seed": 9}
    steps = BatchPlan(**plan).num_batches
    assert steps == -(-21 // batch)
    seen = batches(data, steps, replicas, **plan)
    assert joined(seen) == list(range(21))
    assert [len(b) for b in seen[:-1]] == [batch] * (steps - 1)


def test_training_without_shuffling_is_in_order_over_and_over() -> None:
    data = from_arrays(np.arange(5), shuffle=False)
    assert batches(data, 3, global_batch_size=4) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_the_seed_decides_the_order() -> None:
    data = from_arrays(np.arange(30))
    orders = [batches(data, 1, global_batch_size=30, seed=s) for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_nests_of_arrays_keep_their_structure_dtypes_and_rows_together() -> None:
    arrays = {
        "x": np.arange(12, dtype=np.float64).reshape(6, 2),
        "pair": (np.arange(6, dtype=np.int16), tf.range(6)),
        "name": np.array([f"n{i}" for i in range(6)]),
    }
    data = from_arrays(arrays)
    assert isinstance(data, Pipeline) and data.size == 6
    [batch] = data.batches(BatchPlan(global_batch_size=4, seed=1)).take(1)
    index = batch["pair"][1].numpy()
    assert len(set(index)) == 4
    np.testing.assert_array_equal(batch["x"].numpy(), arrays["x"][index])
    np.testing.assert_array_equal(batch["pair"][0].numpy(), index)
    assert [s.decode() for s in batch["name"].numpy()] == [f"n{i}" for i in index]
    assert (batch["x"].dtype, batch["pair"][0].dtype, batch["pair"][1].dtype) == (tf.float64, tf.int16, tf.int32)


@pytest.mark.parametrize("arrays", [(), {}, (np.ones(3), np.ones(4)), (np.ones(3), np.float32(1.0)), [1, 2, 3]])
def test_arrays_that_do_not_go_together_are_refused(arrays: Any) -> None:
    with pytest.raises(ConfigError, match=r"from_arrays got"):
        from_arrays(arrays)


def test_shapes_are_static_where_the_batch_can_be_divided_evenly() -> None:
    data = from_arrays((np.zeros([10, 3], np.float32), np.zeros(10)))
    even = data.batches(BatchPlan(global_batch_size=6, num_replicas=2, local_replicas=2))
    odd = data.batches(BatchPlan(global_batch_size=5, num_replicas=2, local_replicas=2))
    assert [s.shape.as_list() for s in even.element_spec] == [[3, 3], [3]]
    assert [s.shape.as_list() for s in odd.element_spec] == [[None, 3], [None]]


def test_the_digits_are_there_in_full_and_no_test_image_is_a_training_image() -> None:
    train, test = digits.load("train"), digits.load("test")
    for (images, labels), count in ((train, 1437), (test, 360)):
        assert images.shape == (count, 8, 8) and images.dtype == np.float32
        assert labels.shape == (count,) and labels.dtype == np.int32
        assert images.min() == 0.0 and images.max() == 1.0
        assert sorted(set(labels.tolist())) == list(range(10))
    assert not {i.tobytes() for i in train[0]} & {i.tobytes() for i in test[0]}
