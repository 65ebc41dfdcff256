"""Two views of each image, for learning without labels (Chen et al. 2020, "SimCLR", section 3 and appendix A)."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from framework import ConfigError
from input_pipelines.order import subkey, uniforms

_GRAY = (0.299, 0.587, 0.114)  # luminance of red, green and blue (ITU-R BT.601)


class TwoViews:
    """An augmentation for ``from_arrays``: an image becomes two random views of it, each from a key of its own.

    A view is a random part of the image at the image's size, maybe mirrored, with its colours changed: brightness, then
    contrast, saturation and hue (the paper draws their order), then maybe gray. Of images of one channel only
    brightness and contrast change. The example is a tuple that begins with the image, uint8
    ``[height, width, channels]``; it becomes (first view, second view, the rest).

    Args:
      area: share of the image's area that a view shows, from and to.
      flip: whether half of the views are mirrored.
      color: strength of the change of colours in 8 of 10 views; 0: none.
      gray: share of the views without colours.

    Raises:
      ConfigError: a setting out of range.
    """

    def __init__(
        self, *, area: tuple[float, float] = (0.08, 1.0), flip: bool = True, color: float = 0.5, gray: float = 0.2
    ):
        if not 0.0 < area[0] <= area[1] <= 1.0:
            raise ConfigError(f"area={area} but it must be two shares above 0 and at most 1, the smaller first")
        if not 0.0 <= color <= 1.0 or not 0.0 <= gray <= 1.0:
            raise ConfigError(f"color={color} and gray={gray} but both must be from 0 to 1")
        self._area, self._flip, self._color, self._gray = area, flip, color, gray

    def __call__(self, example: Any, seed: tf.Tensor) -> Any:
        """One example, with its seed int64 ``[2]``."""
        rows = self.batched(tf.nest.map_structure(lambda t: t[None], example), seed[None])
        return tf.nest.map_structure(lambda t: t[0], rows)

    def batched(self, examples: Any, seeds: tf.Tensor) -> Any:
        """Many examples at once, with seeds int64 ``[rows, 2]``: what each gets alone."""
        pixels, *rest = examples
        return (self._view(pixels, seeds), self._view(pixels, subkey(seeds, 1)), *rest)

    def _view(self, pixels: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        draws = uniforms(seeds, 11)
        x = self._part(tf.cast(pixels, tf.float32), draws[:, :5])
        if self._color:
            changed = self._colored(x, draws[:, 5:9])
            x = tf.where(draws[:, 9][:, None, None, None] < 0.8, changed, x)
        if self._gray and x.shape[-1] == 3:
            x = tf.where(draws[:, 10][:, None, None, None] < self._gray, tf.broadcast_to(_gray(x), tf.shape(x)), x)
        return tf.ensure_shape(tf.cast(tf.round(tf.clip_by_value(x, 0.0, 255.0)), tf.uint8), pixels.shape)

    def _part(self, x: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """A part of some area and of 3/4 to 4/3 width to height, anywhere (Szegedy et al. 2015, section 6)."""
        low, high = self._area
        area = low + (high - low) * draws[:, 0]
        aspect = tf.exp(math.log(4 / 3) * (2.0 * draws[:, 1] - 1.0))
        height, width = tf.minimum(tf.sqrt(area / aspect), 1.0), tf.minimum(tf.sqrt(area * aspect), 1.0)
        top, left = draws[:, 2] * (1.0 - height), draws[:, 3] * (1.0 - width)
        right = left + width
        if self._flip:
            mirrored = draws[:, 4] < 0.5  # a box from right to left
            left, right = tf.where(mirrored, right, left), tf.where(mirrored, left, right)
        boxes = tf.stack([top, left, top + height, right], 1)
        return tf.image.crop_and_resize(x, boxes, tf.range(tf.shape(x)[0]), x.shape[1:3])

    def _colored(self, x: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Brightness, contrast and saturation times 1 - 0.8 c to 1 + 0.8 c, and hue turned by up to 0.2 c of a turn."""
        factors = 1.0 + 0.8 * self._color * (2.0 * draws[:, :3] - 1.0)
        brightness, contrast, saturation = (factors[:, i, None, None, None] for i in range(3))
        x = tf.clip_by_value(x * brightness, 0.0, 255.0)
        mean = tf.reduce_mean(_gray(x) if x.shape[-1] == 3 else x, [1, 2, 3], keepdims=True)
        x = tf.clip_by_value(mean + contrast * (x - mean), 0.0, 255.0)
        if x.shape[-1] != 3:
            return x
        gray = _gray(x)
        x = tf.clip_by_value(gray + saturation * (x - gray), 0.0, 255.0)
        return _hue_turned(x, 0.2 * self._color * 2.0 * math.pi * (2.0 * draws[:, 3] - 1.0))


def _gray(x: tf.Tensor) -> tf.Tensor:
    """Luminance, ``[rows, height, width, 1]``."""
    return tf.reduce_sum(x * tf.constant(_GRAY), -1, keepdims=True)


def _hue_turned(x: tf.Tensor, angle: tf.Tensor) -> tf.Tensor:
    """Colours turned by ``angle`` ``[rows]`` about the axis of grays: luminance stays (in the YIQ space)."""
    to_yiq = tf.constant([_GRAY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)], tf.float32)
    cos, sin = tf.cos(angle), tf.sin(angle)
    one, zero = tf.ones_like(cos), tf.zeros_like(cos)
    turn = tf.reshape(tf.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1), [-1, 3, 3])
    matrix = tf.linalg.inv(to_yiq) @ turn @ to_yiq
    return tf.einsum("nhwc,ndc->nhwd", x, matrix)
