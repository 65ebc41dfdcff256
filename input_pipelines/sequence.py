"""Anything with a length and examples by number: lists of arrays, data sources of other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.order import example_indices


class SequencePipeline:
    """Examples read one by one in Python; see ``from_sequence``.

    Attributes:
      size: examples in an epoch.
    """

    def __init__(self, source: Any, *, shuffle: bool, parse: Callable[[Any], Any] | None, name: str):
        self._source, self._shuffle, self._parse, self._name = source, shuffle, parse, name
        self.size = len(source)
        if not self.size:
            raise ConfigError(f"{name} has no examples; pass one that has")
        first = source[0]
        self._structure = first
        leaves = [_array(a) for a in tf.nest.flatten(first)]
        self._dtypes = [tf.as_dtype(a.dtype) for a in leaves]
        self._shapes = [a.shape for a in leaves]
        self._row_bytes = sum(len(a[()]) if a.dtype == object and not a.shape else a.nbytes for a in leaves) + 1

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: the examples' structure, each part ``[rows, ...]``."""

        def fetch(positions: tf.Tensor) -> Any:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            parts = tf.numpy_function(self._rows, [index], self._dtypes, stateful=False)
            shaped = [tf.ensure_shape(p, [*index.shape, *s]) for p, s in zip(parts, self._shapes)]
            rows = tf.nest.pack_sequence_as(self._structure, shaped)
            return rows if self._parse is None else self._parse(rows)

        return plan.read(fetch, row_bytes=self._row_bytes)

    def _rows(self, index: np.ndarray) -> list[np.ndarray]:
        """The given examples' parts, stacked."""
        numbers = [int(i) for i in index]
        several = getattr(self._source, "__getitems__", None)  # fewer reads, where a source knows how
        examples = several(numbers) if several and numbers else [self._source[i] for i in numbers]
        flat = [[_array(a) for a in tf.nest.flatten(e)] for e in examples]
        made = []
        for k, (dtype, shape) in enumerate(zip(self._dtypes, self._shapes)):
            kind = object if dtype == tf.string else dtype.as_numpy_dtype
            rows = np.empty([len(numbers), *shape], kind)
            for row, parts in enumerate(flat):
                if len(parts) != len(self._shapes) or parts[k].shape != shape:
                    raise ConfigError(
                        f"example {numbers[row]} of {self._name} has parts of shapes {[p.shape for p in parts]} but "
                        f"example 0 has {self._shapes}; all must be alike"
                    )
                rows[row] = parts[k][()]
            made.append(rows)
        return made


def _array(value: Any) -> np.ndarray:
    """``value`` as an array; text and bytes as objects, since NumPy's own type for them drops NULs at the end."""
    array = np.asarray(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def from_sequence(
    source: Sequence[Any],
    *,
    shuffle: bool = True,
    parse: Callable[[Any], Any] | None = None,
    name: str = "the source",
) -> SequencePipeline:
    """A pipeline over anything with ``len(source)`` and ``source[i]``, in an order that (seed, position) decides.

    Args:
      source: its examples are nests of arrays, numbers, bytes or text, all of the same structure, shapes and dtypes;
        it is read from several threads at once, and by ``source.__getitems__(numbers)`` where that exists.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.
      parse: function of TensorFlow from rows, the nest with each part ``[rows, ...]``, to what a batch is to be; each
        row of that must be a function of one example.
      name: of the source in messages.

    Raises:
      ConfigError: the source is empty. Examples that differ are seen when they are read, as an error of TensorFlow.
    """
    return SequencePipeline(source, shuffle=shuffle, parse=parse, name=name)
