"""Arrays in memory: the simplest pipeline with an exact order and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.augment import Augment, augmented
from input_pipelines.order import example_indices, example_keys


class ArrayPipeline:
    """A pipeline over arrays in memory; see ``from_arrays``."""

    def __init__(self, arrays: Any, *, shuffle: bool, augment: Augment | None):
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
        self._shuffle, self._augment = shuffle, augment
        with tf.device("CPU:0"):
            tensors = [tf.convert_to_tensor(a) for a in converted]
        self._arrays = tf.nest.pack_sequence_as(arrays, tensors)
        self._row_bytes = sum((t.shape[1:].num_elements() or 1) * max(1, t.dtype.size) for t in tensors)

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: batches of rows gathered in the plan's order."""

        def fetch(positions: tf.Tensor) -> Any:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            rows = tf.nest.map_structure(lambda array: tf.gather(array, index), self._arrays)
            if self._augment is None or not plan.training:
                return rows
            return augmented(self._augment, rows, example_keys(positions, index, self.size, plan.seed))

        return plan.read(fetch, row_bytes=self._row_bytes)


def from_arrays(arrays: Any, *, shuffle: bool = True, augment: Augment | None = None) -> ArrayPipeline:
    """A pipeline over arrays in memory whose order is a function of (seed, position).

    Args:
      arrays: a tuple or dict (or nest of them) of arrays ``[examples, ...]``, all of the same length.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.
      augment: function (example, seed) -> example, for training only: one row of ``arrays``, and a seed int64 ``[2]``
        for ``tf.random.stateless_*`` that is a function of (seed of the run, epoch, example); for example
        ``crop_and_flip()``. It is vectorised with ``tf.vectorized_map`` unless it has a method ``batched`` (rows, seeds
        ``[rows, 2]``) -> rows; it is traced without AutoGraph, so ``tf.where`` or ``tf.cond`` and not ``if``.

    Raises:
      ConfigError: no array, or lengths that differ.
    """
    return ArrayPipeline(arrays, shuffle=shuffle, augment=augment)
