"""What tests of sources share: reading global batches, and the proof that position alone decides what comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, Pipeline


def read(data: Any, steps: int, replicas: int = 1, **plan: Any) -> list[Any]:
    """The first global batches, parts of the replicas joined, as nests of arrays."""
    made = BatchPlan(num_replicas=replicas, local_replicas=replicas, **plan)
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread sleeps, and freeing the iterator would wait for it
    parts = list(data.batches(made).take(steps * replicas).with_options(options).as_numpy_iterator())
    return [join(parts[i : i + replicas]) for i in range(0, len(parts), replicas)]


def join(parts: list[Any]) -> Any:
    """Nests of arrays, one behind the other."""
    return tf.nest.map_structure(lambda *p: np.concatenate(p), *parts)


def assert_position_decides(data: Any) -> None:
    """A start anywhere, with any batch and number of replicas, gives the rest of one stream of shuffled epochs."""
    assert isinstance(data, Pipeline)
    size = int(data.size or 0)
    assert size > 3
    [whole] = read(data, 1, global_batch_size=3 * size, seed=4)
    for start, batch, replicas in ((3, 4, 1), (size - 1, 4, 2), (size + 1, 5, 3)):
        rest = join(read(data, 2, replicas, global_batch_size=batch, seed=4, start=start))
        tf.nest.map_structure(
            lambda r, w, low=start, high=start + 2 * batch: np.testing.assert_array_equal(r, w[low:high]), rest, whole
        )
    [far] = read(data, 1, global_batch_size=2, seed=4, start=10**12 * size)  # years, were they gone through
    assert len(tf.nest.flatten(far)[0]) == 2


def assert_reads_once_in_order(data: Any, expected: Any, leaf: Any) -> None:
    """Evaluation on 1 and 3 replicas gives every example once, in order, a short last batch included."""
    for replicas in (1, 3):
        batches = read(data, 99, replicas, global_batch_size=4, stop=data.size, training=False)
        assert len(batches) == -(-data.size // 4)
        np.testing.assert_array_equal(leaf(join(batches)), expected)
