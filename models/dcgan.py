"""Deep convolutional generative adversarial networks (Radford et al. 2015, "DCGAN", section 3 and figure 1)."""

from __future__ import annotations

import math
from typing import Any

import keras

from framework import ConfigError
from framework.layers import SyncBatchNormalization


def generator(
    *, image_size: int, channels: int = 3, noise: int = 100, width: int = 128, sync_batch_norm: bool = True
) -> keras.Model:
    """Noise ``[batch, noise]`` -> images ``[batch, image_size, image_size, channels]`` in -1..1, float32.

    From a small image of many channels each transposed convolution of 5 x 5 doubles the sides and halves the channels.

    Args:
      image_size: in pixels, a power of two from 8 on. The paper's network is that of 64 and a width of 128.
      channels: of a pixel.
      noise: numbers an image is made of.
      width: channels before the last layer.
      sync_batch_norm: statistics over all replicas instead of each replica's own.

    Raises:
      ConfigError: another size.
    """
    count = _doublings(image_size)
    side, most = image_size // 2**count, width * 2 ** (count - 1)
    inputs = keras.Input((noise,))
    x = keras.layers.Dense(side * side * most, use_bias=False, kernel_initializer=_start(), name="project")(inputs)
    x = keras.layers.Reshape((side, side, most), name="shape")(x)
    x = keras.layers.ReLU()(_norm(sync_batch_norm, "project_norm")(x))
    for i in range(1, count):
        layer = keras.layers.Conv2DTranspose(
            most // 2**i, 5, 2, padding="same", use_bias=False, kernel_initializer=_start(), name=f"up{i}"
        )
        x = keras.layers.ReLU()(_norm(sync_batch_norm, f"up{i}_norm")(layer(x)))
    last = keras.layers.Conv2DTranspose(
        channels, 5, 2, padding="same", kernel_initializer=_start(), dtype="float32", name="image"
    )
    return keras.Model(
        inputs, keras.layers.Activation("tanh", dtype="float32", name="range")(last(x)), name="generator"
    )


def discriminator(*, image_size: int, channels: int = 3, width: int = 128, sync_batch_norm: bool = True) -> keras.Model:
    """Images ``[batch, image_size, image_size, channels]`` in -1..1 -> logits ``[batch, 1]`` of "is real", float32.

    Convolutions of 5 x 5 halve the sides and double the channels; no normalisation stands behind the first.

    Args:
      image_size: as of ``generator``.
      channels: of a pixel.
      width: channels behind the first layer.
      sync_batch_norm: as of ``generator``.

    Raises:
      ConfigError: another size.
    """
    inputs = x = keras.Input((image_size, image_size, channels))
    for i in range(_doublings(image_size)):
        x = keras.layers.Conv2D(
            width * 2**i, 5, 2, padding="same", use_bias=not i, kernel_initializer=_start(), name=f"down{i + 1}"
        )(x)
        x = _norm(sync_batch_norm, f"down{i + 1}_norm")(x) if i else x
        x = keras.layers.LeakyReLU(0.2)(x)
    x = keras.layers.Flatten(name="flat")(x)
    logits = keras.layers.Dense(1, kernel_initializer=_start(), dtype="float32", name="real")(x)
    return keras.Model(inputs, logits, name="discriminator")


def _doublings(image_size: int) -> int:
    """Layers that double the sides: from 4 x 4, and from 2 x 2 for 8 x 8."""
    if image_size < 8 or image_size & (image_size - 1):
        raise ConfigError(f"image_size={image_size} but it must be a power of two from 8 on; for example 64")
    return max(2, int(math.log2(image_size)) - 2)


def _norm(synchronized: bool, name: str) -> Any:
    layer = SyncBatchNormalization if synchronized else keras.layers.BatchNormalization
    return layer(momentum=0.9, epsilon=1e-5, name=name)


def _start() -> Any:
    return keras.initializers.RandomNormal(stddev=0.02)
