"""The order of a stream of examples: which example stands at which position, without a shuffle buffer; and its key."""

from __future__ import annotations

import tensorflow as tf

# Domain separation: order and other uses of one seed never share random numbers.
_ORDER, _SHARDS, _KEYS = 0x6F726465, 0x73686172, 0x6B657973


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
    last = tf.constant(size - 1, tf.int64)
    return _shuffled(index, tf.cast(positions // size, tf.uint32), last, seed)


def shard_indices(positions: tf.Tensor, sizes: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """The same where each epoch goes through whole shards: these in a seeded order, and so the examples of each.

    Args:
      positions: int64 ``[rows]``, counted from the beginning of the run.
      sizes: int64 ``[shards]``: examples of each shard, at least 1; they follow each other in the data.
      size: examples in an epoch, the sum of ``sizes``.
      seed: of the run.

    Returns:
      int64 ``[rows]``, each in ``[0, size)``.
    """
    shards = tf.size(sizes, tf.int64)
    epochs, row_epoch = tf.unique(positions // size, tf.int64)
    # One line for each epoch in the batch: its shards in order, and where each of them ends. Line after line is one
    # rising sequence, in which a row finds its shard.
    turns = tf.reshape(epochs[:, None] * shards + tf.range(shards, dtype=tf.int64), [-1])
    count = sizes.shape[0]
    order = tf.reshape(example_indices(turns, count, seed ^ _SHARDS, True), [-1, count])
    ends = tf.cumsum(tf.gather(sizes, order), axis=1) + tf.range(tf.size(epochs, tf.int64))[:, None] * size
    place = positions % size + row_epoch * size
    turn = tf.searchsorted(tf.reshape(ends, [-1]), place, side="right", out_type=tf.int64)
    shard = tf.gather(tf.reshape(order, [-1]), turn)
    rows = tf.gather(sizes, shard)
    local = place - (tf.gather(tf.reshape(ends, [-1]), turn) - rows)
    epoch = tf.cast(positions // size, tf.uint32)
    word = _mix(epoch * _word(0x9E3779B9) + _mix(tf.cast(shard, tf.uint32) + _word(_SHARDS)))
    # The op needs two places to shuffle.
    shuffled = _shuffled(local, word, tf.maximum(rows - 1, 1), seed)
    return tf.gather(tf.cumsum(sizes, exclusive=True), shard) + tf.where(rows > 1, shuffled, tf.zeros_like(shuffled))


def example_keys(positions: tf.Tensor, indices: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """A seed for ``tf.random.stateless_*`` for each example: a function of (seed, epoch, example) and nothing else.

    So an example is augmented alike in whatever batch and on whatever replica it comes.

    Args:
      positions: int64 ``[rows]``, counted from the beginning of the run.
      indices: int64 ``[rows]``, the examples there, as ``example_indices`` gives them.
      size: examples in an epoch.
      seed: of the run.

    Returns:
      int64 ``[rows, 2]``.
    """
    run = tf.fill(tf.shape(positions), tf.constant((seed << 32) + _KEYS, tf.int64))
    return tf.stack([run, positions - positions % size + indices], 1)


def subkey(key: tf.Tensor, draw: int) -> tf.Tensor:
    """Another seed for each further draw (1, 2, ...) of one example: int64 ``[..., 2]`` from the same."""
    return key + tf.constant([draw, 0], tf.int64)


def uniforms(keys: tf.Tensor, count: int) -> tf.Tensor:
    """Random numbers in [0, 1) for many examples at once: float32 ``[rows, count]`` from keys int64 ``[rows, 2]``.

    ``tf.random.stateless_uniform`` takes one seed a call, and 128 calls in a loop of the graph took 2 ms on a CPU. This
    hashes the keys' four words and the column.
    """
    state = tf.fill(tf.shape(keys)[:1], _word(0))
    for column, shift in ((0, 0), (0, 32), (1, 0), (1, 32)):
        part = tf.bitwise.right_shift(keys[:, column], tf.constant(shift, tf.int64))
        word = tf.cast(tf.bitwise.bitwise_and(part, tf.constant(0xFFFFFFFF, tf.int64)), tf.uint32)
        state = _mix(state * _word(0x9E3779B9) + word)
    columns = tf.cast(tf.range(1, count + 1), tf.uint32) * _word(0x9E3779B9)
    bits = _mix(_mix(state[:, None] + columns))
    return tf.cast(tf.bitwise.right_shift(bits, _word(8)), tf.float32) * 2.0**-24


def _shuffled(index: tf.Tensor, word: tf.Tensor, last: tf.Tensor, seed: int) -> tf.Tensor:
    """Where ``index`` goes in the permutation of ``[0, last]`` that (word, seed) names: int64 ``[rows]``."""
    # The op refuses an empty vector, which a replica without an example has: a row is put in front and taken off again.
    rows, index, word = index.shape, tf.concat([[0], index], 0), tf.concat([[0], word], 0)
    last = last if last.shape.rank == 0 else tf.concat([[1], last], 0)
    shuffled = tf.raw_ops.RandomIndexShuffle(index=index, seed=_keys(word, seed), max_index=last, rounds=8)
    return tf.ensure_shape(shuffled[1:], rows)


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
