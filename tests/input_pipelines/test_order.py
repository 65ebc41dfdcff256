"""The order of the stream: permutations by epoch, a function of (seed, position), alike for small and large data."""

from __future__ import annotations

import collections
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from input_pipelines.order import example_indices


def order(start: int, count: int, size: int, seed: int = 0, *, shuffle: bool = True) -> list[int]:
    """The examples at ``count`` positions from ``start`` on."""
    return example_indices(tf.range(start, start + count, dtype=tf.int64), size, seed, shuffle).numpy().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1437])
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_every_epoch_is_a_permutation(size: int, seed: int) -> None:
    for epoch in (0, 1, 2, 1000):
        assert sorted(order(epoch * size, size, size, seed)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(order(epoch * 50, 50, 50, seed)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert tuple(range(50)) not in orders
    # Seed and epoch are not added up: (seed 0, epoch 1) is not (seed 1, epoch 0).
    assert order(50, 50, 50, seed=0) != order(0, 50, 50, seed=1)


def test_a_position_has_its_example_however_it_is_asked_for() -> None:
    whole = order(0, 40, 10, seed=3)
    assert [order(i, 1, 10, seed=3)[0] for i in range(40)] == whole
    assert order(7, 6, 10, seed=3) == whole[7:13]  # across the border of two epochs


def test_without_shuffling_the_examples_come_in_turn() -> None:
    assert order(7, 6, 10, shuffle=False) == [7, 8, 9, 0, 1, 2]


def test_no_positions_are_no_examples() -> None:
    for shuffle in (True, False):
        empty = example_indices(tf.zeros([0], tf.int64), 10, 0, shuffle)
        assert empty.shape == [0] and empty.dtype == tf.int64


@pytest.mark.parametrize("rows", [4, None])
def test_the_static_shape_is_kept(rows: int | None) -> None:
    @tf.function(input_signature=[tf.TensorSpec([rows], tf.int64)])
    def trace(positions: tf.Tensor) -> tf.Tensor:
        result = example_indices(positions, 10, 0, True)
        assert result.shape.as_list() == [rows]
        return result

    trace(tf.range(4, dtype=tf.int64))


def test_a_stream_of_many_epochs_is_read_far_ahead_at_no_cost() -> None:
    far = 10**15
    assert sorted(order(far * 8, 8, 8)) == list(range(8))
    big = 2**40  # one epoch of 10^12 examples
    some = order(5, 1000, big)
    assert len(set(some)) == 1000 and min(some) >= 0 and max(some) < big


def chi_square(counts: list[int], cells: int) -> float:
    """Pearson's statistic of equal cells, those of count 0 included."""
    expected = sum(counts) / cells
    return sum((c - expected) ** 2 / expected for c in counts) + (cells - len(counts)) * expected


def bound(cells: int) -> float:
    """Six standard deviations above the mean of chi-square with ``cells - 1`` degrees of freedom."""
    return (cells - 1) + 6 * math.sqrt(2 * (cells - 1))


def many_epochs(size: int, count: int) -> np.ndarray:
    """``count`` epochs ``[count, size]``: 250 of each of as many seeds as it takes."""
    seeds = range(-(-count // 250))
    return np.concatenate([np.array(order(0, 250 * size, size, seed)).reshape(250, size) for seed in seeds])[:count]


@pytest.mark.parametrize(("size", "each"), [(2, 500), (3, 200), (4, 50)])
def test_all_permutations_of_few_examples_are_about_equally_frequent(size: int, each: int) -> None:
    """``each`` epochs for each of the size! permutations, far above the 5 a cell that the statistic needs."""
    cells = math.factorial(size)
    counts = collections.Counter(map(tuple, many_epochs(size, each * cells).tolist()))
    assert set(counts) <= set(itertools.permutations(range(size)))
    assert chi_square(list(counts.values()), cells) < bound(cells)


@pytest.mark.parametrize("size", [6, 10, 17, 40])
def test_each_example_is_about_as_often_at_each_place(size: int) -> None:
    """Each of the size^2 pairs (place, example) 250 / size times; the sums of rows and columns are given."""
    rows = many_epochs(size, 250)
    counts = np.stack([np.bincount(rows[:, place], minlength=size) for place in range(size)])
    statistic = chi_square(counts.ravel().tolist(), size * size)
    assert statistic < bound((size - 1) ** 2 + 1)


@pytest.mark.parametrize("size", [10, 40])
def test_neighbours_in_the_data_are_no_neighbours_in_the_stream(size: int) -> None:
    """In a random permutation i + 1 comes right after i once in ``size`` cases, of which an epoch has size - 1."""
    rows = many_epochs(size, 500)
    pairs = int(np.sum(rows[:, 1:] == rows[:, :-1] + 1))
    expected = 500 * (size - 1) / size
    assert abs(pairs - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("apart", [256, 1024])
def test_an_order_does_not_come_again_after_some_hundred_epochs(apart: int) -> None:
    assert order(0, 100, 1437) != order(apart * 1437, 100, 1437)


@pytest.mark.parametrize("apart", [256, 65536])
def test_seeds_that_are_far_apart_have_orders_of_their_own(apart: int) -> None:
    assert order(0, 100, 1437, seed=42) != order(0, 100, 1437, seed=42 + apart)


def test_orders_of_seeds_next_to_each_other_have_nothing_in_common() -> None:
    """Places at which two permutations of 1000 agree: Poisson of mean 1, so at most 9 (1 in 10^7)."""
    orders = [np.array(order(0, 1000, 1000, seed=s)) for s in range(20)]
    for a, b in itertools.pairwise(orders):
        assert int(np.sum(a == b)) <= 9
