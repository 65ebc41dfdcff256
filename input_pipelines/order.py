"""The order of a stream of examples: which example stands at which position, without a shuffle buffer."""

from __future__ import annotations

import tensorflow as tf

# Domain separation: order and other uses of one seed never share random numbers.
_ORDER = 0x6F726465


def example_indices(positions: tf.Tensor, size: int, seed: int, shuffle: bool) -> tf.Tensor:
    """The example at each position of the stream, in O(1) each.

    Epoch e is positions ``[e * size, (e + 1) * size)``; shuffled, it is a permutation of the examples keyed by
    (seed, e), computed by ``RandomIndexShuffle`` (a small block cipher walked until it falls into the range).

    Args:
      positions: int64 ``[rows]``, counted from the beginning of the run.
      size: examples in an epoch.
      seed: of the run.
      shuffle: False: the examples in their order.

    Returns:
      int64 ``[rows]``, each in ``[0, size)``.
    """
    index = positions % size
    if not shuffle or size == 1:
        return index
    epoch = tf.cast(positions // size, tf.uint32)
    # The op refuses an empty vector, which a replica without an example has: a row is put in front and taken off again.
    index, epoch = tf.concat([[0], index], 0), tf.concat([[0], epoch], 0)
    constants = [tf.fill(tf.shape(epoch), tf.constant(c, tf.uint32)) for c in (seed, _ORDER)]
    last = tf.constant(size - 1, tf.int64)
    shuffled = tf.raw_ops.RandomIndexShuffle(
        index=index, seed=tf.stack([*constants, epoch], 1), max_index=last, rounds=8
    )
    return tf.ensure_shape(shuffled[1:], positions.shape)
