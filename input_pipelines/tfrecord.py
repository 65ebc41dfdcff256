"""TFRecord files as a pipeline with random access: order and position are exact, whatever the number of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from input_pipelines import record_index
from input_pipelines.augment import Augment
from input_pipelines.examples import ExamplePipeline, Order
from input_pipelines.order import shard_indices


def tfrecords(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    parse: Callable[[tf.Tensor], Any],
    *,
    shuffle: bool = True,
    by_shard: bool = False,
    augment: Augment | None = None,
    skip_bad_examples: int = 0,
    index_file: str | os.PathLike[str] | None = None,
) -> ExamplePipeline:
    """A pipeline over the records of TFRecord files whose order is a function of (seed, position).

    The files are scanned once for where each record begins, without reading the data.

    Args:
      files: a pattern, a file, or a list of files, not compressed; example 0 is the first record of the first file.
      parse: record (string scalar) -> a nest of tensors of fixed shape, in the graph, for example with
        ``tf.io.parse_single_example``.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.
      by_shard: shuffled epochs go through one file after the other, the files and the records of each in a seeded
        order: for data larger than memory on a disk that is slow at random places. False: all records are mixed.
      augment: function (example, seed int64 ``[2]``) -> example, in training only; see ``from_arrays``.
      skip_bad_examples: so many records that are damaged or cannot be parsed are replaced by the next readable one,
        with a warning that names file and record; one more ends the run.
      index_file: where the scan's result is kept for later runs; it is made again when a file has changed.

    Raises:
      ConfigError: a file is missing, empty, compressed, cut short or no TFRecord file; the first record cannot be
        parsed; or an example's shape is not fixed.
    """
    index = record_index.build(files, index_file=index_file, keep_cut=skip_bad_examples > 0)
    read = reader(index)

    def load(number: tf.Tensor, key: tf.Tensor, training: bool) -> Any:
        example = parse(read(number))
        return augment(example, key) if augment is not None and training else example

    return ExamplePipeline(
        size=len(index.offsets),
        load=load,
        order=by_shard_order(index) if by_shard else None,
        shuffle=shuffle,
        skip_bad_examples=skip_bad_examples,
        describe=lambda number: describe(index, number),
    )


def reader(index: record_index.RecordIndex) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function of the graph: record number (int64 scalar) -> its data (string scalar), with the checksum verified."""
    with tf.device("CPU:0"):  # tensors and not constants: they would be copied into every graph
        paths = tf.constant(index.paths)
        counts, offsets = tf.constant(index.counts), tf.constant(index.offsets)
        ends = tf.cumsum(counts)

    def read(number: tf.Tensor) -> tf.Tensor:
        path = tf.gather(paths, tf.searchsorted(ends, number[None], side="right")[0])
        # Unbuffered: a buffer would be filled with the records behind this one.
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=path[None],
            compression_type="",
            buffer_size=tf.constant(0, tf.int64),
            byte_offsets=tf.gather(offsets, number)[None],
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        return records.take(1).get_single_element()

    return read


def by_shard_order(index: record_index.RecordIndex) -> Order:
    """Shuffled epochs that go through one file after the other."""
    with tf.device("CPU:0"):
        counts = tf.constant(index.counts)
    return lambda positions, seed: shard_indices(positions, counts, len(index.offsets), seed)


def describe(index: record_index.RecordIndex, number: int) -> str:
    """Where a record is, for messages."""
    path, record = index.place(number)
    return f"record {record} of {path}"
