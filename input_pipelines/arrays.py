"""Arrays in memory: the simplest pipeline with an exact order and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.order import example_indices


class ArrayPipeline:
    """A pipeline over arrays in memory; see ``from_arrays``."""

    def __init__(self, arrays: Any, *, shuffle: bool):
        leaves = tf.nest.flatten(arrays)
        if not leaves:
            raise ConfigError("from_arrays got no array; for example from_arrays((images, labels))")
        converted = [a if isinstance(a, tf.Tensor) else np.asarray(a) for a in leaves]
        lengths = [a.shape[0] if len(a.shape) else None for a in converted]
        if None in lengths or len(set(lengths)) != 1:
            raise ConfigError(
                f"from_arrays got arrays of lengths {lengths} but all need the same first dimension, the examples"
            )
        self.size: int = int(lengths[0] or 0)
        self._shuffle = shuffle
        with tf.device("CPU:0"):
            self._arrays = tf.nest.pack_sequence_as(arrays, [tf.convert_to_tensor(a) for a in converted])

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: batches of rows gathered in the plan's order."""

        def fetch(positions: tf.Tensor) -> Any:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            return tf.nest.map_structure(lambda array: tf.gather(array, index), self._arrays)

        # Order is kept: the elements go to the replicas in turn.
        return plan.positions().map(fetch, num_parallel_calls=2, deterministic=True).prefetch(4)


def from_arrays(arrays: Any, *, shuffle: bool = True) -> ArrayPipeline:
    """A pipeline over arrays in memory whose order is a function of (seed, position).

    Args:
      arrays: a tuple or dict (or nest of them) of arrays ``[examples, ...]``, all of the same length.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.

    Raises:
      ConfigError: no array, or lengths that differ.
    """
    return ArrayPipeline(arrays, shuffle=shuffle)
