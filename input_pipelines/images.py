"""Decoding of JPEG and PNG images to a fixed size: a random part for training, the middle for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from input_pipelines.augment import central_box, random_box
from input_pipelines.order import subkey

# Of the training images of ImageNet by channel, in 0..255 (Krizhevsky et al. 2012 subtract the mean; the figures are
# those in general use since).
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

# Share of the shorter side that the middle square has in evaluation: 224 of 256 (Krizhevsky et al. 2012).
_CENTRE = 0.875


def decode(encoded: tf.Tensor, seed: tf.Tensor, *, size: int, training: bool) -> tf.Tensor:
    """An image of ``size`` x ``size`` pixels, uint8 ``[size, size, 3]``, from the bytes of a JPEG or PNG file.

    Training: a random part of 8 to 100 % of the area and of 3/4 to 4/3 width to height (Szegedy et al. 2015, section
    6), mirrored with probability 1/2. Evaluation: the square in the middle, 7/8 of the shorter side. Of a JPEG only
    that part is decoded.

    Args:
      encoded: string scalar.
      seed: int64 ``[2]``.
      size: in pixels.
      training: which part.

    Raises:
      tf.errors.InvalidArgumentError: when it runs, for bytes that are no whole image.
    """

    def box(shape: tf.Tensor) -> tf.Tensor:
        return random_box(shape, seed, (0.08, 1.0), (3 / 4, 4 / 3)) if training else central_box(shape, _CENTRE)

    def of_jpeg() -> tf.Tensor:
        part = box(tf.image.extract_jpeg_shape(encoded))
        return tf.image.decode_and_crop_jpeg(encoded, part, channels=3)

    def of_other() -> tf.Tensor:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        top, left, height, width = tf.unstack(box(tf.shape(image)))
        return image[top : top + height, left : left + width]

    image = tf.cond(tf.io.is_jpeg(encoded), of_jpeg, of_other)
    image = tf.image.resize(tf.ensure_shape(image, [None, None, 3]), [size, size])
    image = tf.cast(tf.round(image), tf.uint8)
    if not training:
        return image
    # Mirrored as bytes, and only if it has to be: of floats, and always, it took as long as decoding.
    mirrored = tf.random.stateless_uniform([], subkey(seed, 1)) < 0.5
    return tf.cond(mirrored, lambda: tf.reverse(image, [1]), lambda: tf.identity(image))


def normalize(images: tf.Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> tf.Tensor:
    """(image - mean) / std by channel, float32, from ``[..., channels]`` in 0..255; cheapest on the device."""
    return (tf.cast(images, tf.float32) - tf.constant(mean, tf.float32)) / tf.constant(std, tf.float32)
