"""Random augmentation of images: a pure function of an example and its seed.

The seed is made of (seed of the run, epoch, example) (``order.example_keys``), so an example is augmented alike in any
batch, on any replica and after any resume, and differently in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from framework import ConfigError
from input_pipelines.order import uniforms

# (example, seed int64 [2]) -> example; a ``batched`` attribute does the same for many rows at once.
Augment: TypeAlias = Callable[[Any, Any], Any]


def augmented(augment: Augment, rows: Any, keys: tf.Tensor) -> Any:
    """``augment`` for each row of a nest ``[rows, ...]``, with its key of int64 ``[rows, 2]``; also for no rows."""
    batched = getattr(augment, "batched", None)
    if batched is not None:
        return batched(rows, keys)
    # vectorized_map refuses no rows, which a replica without an example has: one is put in front and taken off.
    front = tf.nest.map_structure(lambda t: tf.concat([tf.zeros([1, *t.shape[1:]], t.dtype), t], 0), (rows, keys))
    made = tf.vectorized_map(lambda pair: augment(*pair), front, warn=False)
    count = keys.shape[0]
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t[1:], [count, *t.shape[1:]]), made)


def crop_and_flip(*, padding: int = 4, flip: bool = True, fill: float | Sequence[float] = 0.0) -> CropAndFlip:
    """Shifts an image by up to ``padding`` pixels each way, and mirrors half of them (He et al. 2015, section 4.2).

    The image keeps its size: it is a random window of the image with ``padding`` pixels added on each side.

    Args:
      padding: in pixels.
      flip: whether to mirror left and right with probability 1/2.
      fill: value of the added pixels, one or one for each channel; the mean colour is usual.

    Returns:
      An augmentation for ``from_arrays``. The image, ``[height, width]`` or ``[height, width, channels]`` of any dtype,
      is the whole example, or the first entry of a tuple, or the entry ``image`` of a dict; the rest is left alone.

    Raises:
      ConfigError: a negative padding.
    """
    return CropAndFlip(padding=padding, flip=flip, fill=fill)


class CropAndFlip:
    """See ``crop_and_flip``."""

    def __init__(self, *, padding: int, flip: bool, fill: float | Sequence[float]):
        if padding < 0:
            raise ConfigError(f"padding={padding} but it must be at least 0; for example padding=4")
        self._padding, self._flip, self._fill = padding, flip, fill

    def __call__(self, example: Any, seed: tf.Tensor) -> Any:
        """One example, with its seed int64 ``[2]``."""
        rows = self.batched(tf.nest.map_structure(lambda t: t[None], example), seed[None])
        return tf.nest.map_structure(lambda t: t[0], rows)

    def batched(self, examples: Any, seeds: tf.Tensor) -> Any:
        """Many examples at once, with seeds int64 ``[rows, 2]``: what each gets alone."""
        return _with_image(examples, lambda images: self._images(images, seeds))

    def _images(self, images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        if images.shape.rank not in (3, 4):
            raise ConfigError(
                f"crop_and_flip got images of shape {images.shape} but they must be [rows, height, width] or "
                "[rows, height, width, channels]"
            )
        height, width = images.shape[1:3]
        draws = uniforms(seeds, 3)
        corner = tf.cast(draws[:, :2] * (2 * self._padding + 1), tf.int32)
        rows, columns = corner[:, :1] + tf.range(height), corner[:, 1:] + tf.range(width)
        if self._flip:
            columns = tf.where(draws[:, 2:] < 0.5, tf.reverse(columns, [1]), columns)
        picked = tf.gather(self._padded(images), rows, axis=1, batch_dims=1)
        return tf.ensure_shape(tf.gather(picked, columns, axis=2, batch_dims=1), images.shape)

    def _padded(self, images: tf.Tensor) -> tf.Tensor:
        """``images`` with ``padding`` pixels of the colour added on each side."""
        fill = tf.cast(tf.constant(self._fill, tf.float32), images.dtype)
        for axis in (1, 2):  # tf.pad knows one number only, and no colour
            shape = tf.tensor_scatter_nd_update(tf.shape(images), [[axis]], [self._padding])
            side = tf.broadcast_to(fill, shape)
            images = tf.concat([side, images, side], axis)
        return images


def random_box(shape: tf.Tensor, seed: tf.Tensor, area: tuple[float, float], aspect: tuple[float, float]) -> tf.Tensor:
    """A random part of an image (Szegedy et al. 2015, section 6): int32 ``[4]``: top, left, height, width.

    Args:
      shape: int32 ``[3]``: height, width, channels.
      seed: int64 ``[2]``.
      area: share of the image's area, from and to.
      aspect: width / height, from and to. Where nothing fits in 100 tries, the whole image is taken.
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4]),
        seed,
        min_object_covered=0.0,
        area_range=area,
        aspect_ratio_range=aspect,
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], 0)


def central_box(shape: tf.Tensor, share: float) -> tf.Tensor:
    """The square in the middle whose side is ``share`` of the image's shorter one: int32 ``[4]`` as ``random_box``."""
    side = tf.cast(tf.round(tf.cast(tf.minimum(shape[0], shape[1]), tf.float32) * share), tf.int32)
    side = tf.maximum(side, 1)
    return tf.stack([(shape[0] - side) // 2, (shape[1] - side) // 2, side, side])


def _with_image(example: Any, change: Callable[[Any], Any]) -> Any:
    """``example`` with its image changed."""
    if isinstance(example, dict):
        if "image" not in example:
            raise ConfigError(f"the example has {', '.join(example)} but no 'image' to augment; name it so")
        return {**example, "image": change(example["image"])}
    if isinstance(example, (tuple, list)):
        entries = [change(example[0]), *example[1:]]
        return type(example)(*entries) if hasattr(example, "_fields") else type(example)(entries)
    return change(example)
