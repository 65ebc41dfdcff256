"""A small ranking model on numbers and categories: embeddings, their dot products, perceptrons.

The architecture of Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class PairwiseDots(keras.layers.Layer):
    """Vectors ``[batch, count, width]`` -> dot products of all pairs, ``[batch, count * (count - 1) / 2]``."""

    def call(self, vectors: Any) -> Any:
        """See the class."""
        count = vectors.shape[1]
        dots = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), [-1, count * count])
        below = np.flatnonzero(np.tri(count, k=-1).reshape(-1))
        return tf.gather(dots, below, axis=1)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """See ``keras.layers.Layer``."""
        count = input_shape[1] or 0
        return (input_shape[0], count * (count - 1) // 2)


def ranking(
    *, numbers: int, buckets: Sequence[int], width: int = 16, bottom: Sequence[int] = (64,), top: Sequence[int] = (64,)
) -> keras.Model:
    """Numbers ``[batch, numbers]`` and category ids ``[batch, len(buckets)]`` -> logits ``[batch]``, float32.

    All categories are in one table, so that a step has one look-up and one sparse gradient.

    Args:
      numbers: columns of numbers.
      buckets: ids of each category; ids of category i are below ``buckets[i]``.
      width: of each embedding.
      bottom: units of the hidden layers on the numbers.
      top: units of the hidden layers on the dot products.
    """
    dense = keras.Input((numbers,), name="numbers")
    sparse = keras.Input((len(buckets),), name="ids", dtype="int64")
    starts = np.cumsum([0, *buckets[:-1]]).astype(np.int64)
    # float32 also under mixed precision: a cast of the whole table would make its gradient dense.
    table = keras.layers.Embedding(sum(buckets), width, dtype="float32", name="categories")
    rows = table(sparse + starts)
    low = _layers(dense, [*bottom, width], "bottom")
    vectors = keras.layers.Concatenate(axis=1)([keras.layers.Reshape((1, width))(low), rows])
    high = _layers(keras.layers.Concatenate(axis=1)([low, PairwiseDots()(vectors)]), top, "top")
    logits = keras.layers.Dense(1, dtype="float32", name="logits")(high)
    return keras.Model([dense, sparse], keras.layers.Reshape((), dtype="float32")(logits))


def _layers(x: Any, units: Sequence[int], name: str) -> Any:
    for i, count in enumerate(units):
        x = keras.layers.Dense(count, activation="relu", name=f"{name}_{i}")(x)
    return x
