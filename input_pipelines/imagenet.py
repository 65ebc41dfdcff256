"""ImageNet in its usual layout of TFRecord files: ``train-00000-of-01024`` and ``validation-00000-of-00128``."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from framework import ConfigError
from input_pipelines import files, images, record_index, tfrecord
from input_pipelines.examples import ExamplePipeline

CLASSES = 1000
_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


def imagenet(
    data_dir: str | os.PathLike[str],
    split: str,
    *,
    image_size: int = 224,
    by_shard: bool = False,
    skip_bad_examples: int = 0,
    index_file: str | os.PathLike[str] | None = None,
) -> ExamplePipeline:
    """ImageNet (ILSVRC 2012): images uint8 ``[rows, image_size, image_size, 3]`` and labels int32 ``[rows]`` in 0..999.

    Training takes a random part of each image and mirrors half of them, evaluation the middle; see ``images.decode``.

    Args:
      data_dir: directory of the files; each record is a ``tf.train.Example`` with ``image/encoded`` and
        ``image/class/label`` (1..1000).
      split: ``train`` or ``validation``.
      image_size: in pixels.
      by_shard: as of ``tfrecords``.
      skip_bad_examples: as of ``tfrecords``; also for an image that cannot be decoded, or a label out of range.
      index_file: as of ``tfrecords``.

    Raises:
      ConfigError: another split, no file of it, an ``image_size`` below 1, or what ``tfrecords`` refuses.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f"split={split!r} but it must be train or validation")
    if image_size < 1:
        raise ConfigError(f"image_size={image_size} but it must be at least 1; for example image_size=224")
    folder = files.folder_at(data_dir, "data_dir", "data/imagenet")
    found = sorted(p for p in folder.glob(f"{split}-*") if p.is_file())
    if not found:
        raise ConfigError(
            f"{folder} has no file {split}-*; pass the directory of the TFRecord files, such as {split}-00000-of-01024"
        )
    index = record_index.build(found, index_file=index_file, keep_cut=skip_bad_examples > 0)
    read = tfrecord.reader(index)

    def load(number: tf.Tensor, key: tf.Tensor, training: bool) -> Any:
        example = tf.io.parse_single_example(read(number), _FEATURES)
        label = example["image/class/label"]
        inside = tf.debugging.Assert((label >= 1) & (label <= CLASSES), ["image/class/label is not in 1..1000:", label])
        with tf.control_dependencies([inside] if inside is not None else []):
            image = images.decode(example["image/encoded"], key, size=image_size, training=training)
        return image, tf.cast(label - 1, tf.int32)

    return ExamplePipeline(
        size=len(index.offsets),
        load=load,
        order=tfrecord.by_shard_order(index) if by_shard else None,
        skip_bad_examples=skip_bad_examples,
        describe=lambda number: tfrecord.describe(index, number),
    )
