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
    last = tf.constant(size - 1, tf.int64)
    shuffled = tf.raw_ops.RandomIndexShuffle(index=index, seed=_keys(epoch, seed), max_index=last, rounds=8)
    return tf.ensure_shape(shuffled[1:], positions.shape)


def _keys(epoch: tf.Tensor, seed: int) -> tf.Tensor:
    """uint32 ``[rows, 3]``: three words that depend on all bits of seed and epoch.

    The op itself hardly mixes its key: with the epoch as it is in one word there are 256 orders, then they come again.
    """
    first = _mix(epoch * _word(0x9E3779B9) + _mix(_word(seed) + _word(_ORDER)))
    return tf.stack([first, _mix(first + _word(1)), _mix(first + _word(2))], 1)


def _mix(value: tf.Tensor) -> tf.Tensor:
    """A bijection of 32 bits in which each input bit changes each output bit (MurmurHash3, Appleby 2011)."""
    half = _word(16)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        value = tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, half)) * _word(factor)
    return tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, half))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)
