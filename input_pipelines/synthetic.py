"""Synthetic data of given shapes: examples are a function of (seed, position), made in the graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from framework import BatchPlan, ConfigError


class SyntheticPipeline:
    """Random examples; see ``synthetic``."""

    def __init__(self, spec: Any, *, size: int | None, num_classes: int):
        self._spec, self.size, self._num_classes = spec, size, num_classes
        for part in tf.nest.flatten(spec):
            if not isinstance(part, tf.TensorSpec) or not part.shape.is_fully_defined():
                raise ConfigError(f"synthetic got {part!r} but every part must be a tf.TensorSpec with a full shape")
            if not (part.dtype.is_floating or part.dtype.is_integer):
                raise ConfigError(f"synthetic got dtype {part.dtype.name} but it makes floating and integer data only")

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``."""

        def example(position: tf.Tensor) -> Any:
            parts = []
            for i, part in enumerate(tf.nest.flatten(self._spec)):
                key = tf.stack([position, tf.constant(plan.seed * 1009 + i, tf.int64)])
                if part.dtype.is_floating:
                    parts.append(tf.random.stateless_normal(part.shape, key, dtype=part.dtype))
                else:
                    high = tf.constant(self._num_classes, part.dtype)
                    parts.append(tf.random.stateless_uniform(part.shape, key, maxval=high, dtype=part.dtype))
            return tf.nest.pack_sequence_as(self._spec, parts)

        def fetch(positions: tf.Tensor) -> Any:
            index = positions if self.size is None else positions % self.size
            # vectorized_map refuses no rows, which a replica without an example has: one is put in front and taken off.
            made = tf.vectorized_map(example, tf.concat([[0], index], 0))
            return tf.nest.map_structure(lambda part: tf.ensure_shape(part[1:], [*index.shape, *part.shape[1:]]), made)

        row_bytes = sum(s.shape.num_elements() * s.dtype.size for s in tf.nest.flatten(self._spec))
        return plan.read(fetch, row_bytes=row_bytes)


def synthetic(spec: Any, *, size: int | None = None, num_classes: int = 10) -> SyntheticPipeline:
    """Random data: normal for floating types, uniform below ``num_classes`` for integers.

    Args:
      spec: a nest of ``tf.TensorSpec`` of one example, without the batch dimension.
      size: examples in an epoch; None: endless.
      num_classes: integers are in ``[0, num_classes)``.

    Raises:
      ConfigError: a shape that is not known, or a dtype that cannot be made.
    """
    return SyntheticPipeline(spec, size=size, num_classes=num_classes)
