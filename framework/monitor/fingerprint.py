"""Fingerprints: 64 bits for the bits of tensors, in integer arithmetic on the device that holds them.

The bits of a tensor are taken as whole numbers, one of at most 32 bits each (an element of 8 bytes gives two), laid out
in rows of ``COLUMNS``. A row's hash is their sum with odd 64-bit weights, one for each column, modulo 2^64; the row's
hashes are mixed by a bijection and added with odd weights again, one for each row (multilinear hashing; the mixing is
that of SplitMix64, Steele et al. 2014). All weights come from a key, so each check may use others.

One number that changes is always found: an odd factor has an inverse. For changes of several numbers that do not look
at the key, the chance that they cancel is at most 2^-32 in a row (where all changes are multiples of 2^31, such as
signs of floats that were swapped) and about 2^-63 otherwise, and about 2^-62 between rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from framework.errors import ConfigError

COLUMNS = 1024
_LARGE = 1 << 20  # numbers: tensors above are worked on one after the other, for the memory of their copies in int64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # all constants as signed 64 bits
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64, 27, 0x94D049BB133111EB - 2**64, 31)
_WHOLE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int32, 16: tf.int32}  # by size in bytes


def has_bits(dtype: tf.DType) -> bool:
    """Whether tensors of ``dtype`` can have a fingerprint: numbers and bool, not strings, resources or variants."""
    return dtype == tf.bool or dtype.is_floating or dtype.is_integer or dtype.is_complex


def bits(tensor: tf.Tensor) -> tf.Tensor:
    """The bits of a numeric or bool tensor of any shape as int64 ``[numbers]``, at most 32 bits in each.

    Raises:
      ConfigError: the dtype is no numeric one.
    """
    if not has_bits(tensor.dtype):
        raise ConfigError(f"a tensor of dtype {tensor.dtype.name} has no fingerprint; compare numbers or bool")
    # On a GPU TensorFlow keeps int32 tensors on the host when they are reshaped: reshape before, or as int64.
    flat = tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.int64)
    whole = _WHOLE[flat.dtype.size]
    numbers = tf.cast(flat if flat.dtype == whole else tf.bitcast(flat, whole), tf.int64)
    return numbers if numbers.shape.rank == 1 else tf.reshape(numbers, [-1])


def from_bits(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Elements ``[count]`` of ``dtype`` from ``[count, numbers of one element]`` as ``bits`` gave them."""
    if dtype == tf.bool:
        return tf.cast(numbers[:, 0], tf.bool)
    whole = tf.cast(numbers, _WHOLE[dtype.size])
    if dtype.size <= 4:
        whole = whole[:, 0]
    return whole if dtype == whole.dtype else tf.bitcast(whole, dtype)


def numbers_per_element(dtype: tf.DType) -> int:
    """How many numbers ``bits`` gives for one element."""
    return 1 if dtype == tf.bool else max(1, dtype.size // 4)


def column_weights(key: Any = 0) -> tf.Tensor:
    """The weights of the columns, int64 ``[COLUMNS]``, for a key: an int64 scalar, a tensor or not."""
    return _odd(COLUMNS, key)


def row_hashes(numbers: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The hash of each row of ``COLUMNS`` numbers, int64 ``[rows]``; the last row may be shorter.

    Args:
      numbers: int64 ``[count]``, the count known while tracing.
      weights: those of the columns.
    """
    count = int(numbers.shape[0])
    if not count:
        return tf.zeros([0], tf.int64)
    full, rest = divmod(count, COLUMNS)
    parts = []
    if full:
        table = tf.reshape(numbers[: full * COLUMNS] if rest else numbers, [full, COLUMNS])
        parts.append(tf.reduce_sum(table * weights, 1))
    if rest:
        last = numbers[full * COLUMNS :] if full else numbers
        parts.append(tf.reduce_sum(last * weights[:rest])[None])
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def fingerprints(groups: Sequence[Sequence[tf.Tensor]], key: Any = 0) -> tf.Tensor:
    """One fingerprint for each group, int64 ``[groups]``: equal where all bits of the group's tensors are equal.

    Args:
      groups: tensors of one dtype in each group, numeric or bool, of any shapes known while tracing; empty ones too.
      key: int64 scalar, the same on all replicas: it chooses the weights.

    Raises:
      ConfigError: a dtype that is not numeric, or a shape that is not known.
    """
    rows: list[tf.Tensor] = []
    weights, vector = column_weights(key), tf.constant([-1])  # one op for all, where there are hundreds of variables
    before: tf.Tensor | None = None
    for group in groups:
        for tensor in group:
            if tensor.shape.num_elements() is None:
                raise ConfigError(f"a tensor of shape {tensor.shape} has no fingerprint; its shape must be known")
        flat = [tensor if tensor.shape.rank == 1 else tf.reshape(tensor, vector) for tensor in group]
        joined = tf.concat(flat, 0) if len(flat) > 1 else flat[0]
        if before is not None and int(joined.shape[0]) > _LARGE:
            with tf.control_dependencies([before]):
                joined = tf.identity(joined)
        hashes = row_hashes(bits(joined), weights)
        before = hashes
        rows.append(hashes)
    if not rows:
        return tf.zeros([0], tf.int64)
    every = tf.concat(rows, 0)
    weighted = _mixed(every) * _odd(int(every.shape[0]), tf.cast(key, tf.int64) + 1)
    parts = tf.split(weighted, [int(row.shape[0]) for row in rows])
    return tf.stack([tf.reduce_sum(part) for part in parts])


def _odd(count: int, key: Any) -> tf.Tensor:
    """Odd weights, int64 ``[count]``."""
    start = _mixed(tf.cast(key, tf.int64) * _GOLDEN)
    return tf.bitwise.bitwise_or(_mixed(tf.range(1, count + 1, dtype=tf.int64) * _GOLDEN + start), 1)


def _mixed(numbers: tf.Tensor) -> tf.Tensor:
    """A bijection of 64 bits, elementwise, in which every bit changes half of the others."""
    first, one, second, two, third = _MIX
    numbers = _folded(numbers, first) * tf.constant(one, tf.int64)
    numbers = _folded(numbers, second) * tf.constant(two, tf.int64)
    return _folded(numbers, third)


def _folded(numbers: tf.Tensor, shift: int) -> tf.Tensor:
    # TensorFlow's shift of signed numbers brings in the sign; without the mask the fold would be no bijection.
    shifted = tf.bitwise.bitwise_and(tf.bitwise.right_shift(numbers, shift), 2 ** (64 - shift) - 1)
    return tf.bitwise.bitwise_xor(numbers, shifted)
