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
            tensors = [tf.convert_to_tensor(a) for a in converted]
        self._arrays = tf.nest.pack_sequence_as(arrays, tensors)
        self._row_bytes = sum((t.shape[1:].num_elements() or 1) * max(1, t.dtype.size) for t in tensors)

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: batches of rows gathered in the plan's order."""

        def fetch(positions: tf.Tensor) -> Any:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            return tf.nest.map_structure(lambda array: tf.gather(array, index), self._arrays)

        return plan.read(fetch, row_bytes=self._row_bytes)


def from_arrays(arrays: Any, *, shuffle: bool = True) -> ArrayPipeline:
    """A pipeline over arrays in memory whose order is a function of (seed, position).

    Args:
      arrays: a tuple or dict (or nest of them) of arrays ``[examples, ...]``, all of the same length.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.

    Raises:
      ConfigError: no array, or lengths that differ.
    """
    return ArrayPipeline(arrays, shuffle=shuffle)
