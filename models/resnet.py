"""Residual networks (He et al. 2015): those of section 4.2 for CIFAR, and those of table 1 for ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from framework import ConfigError
from framework.layers import SyncBatchNormalization

# Depth -> blocks of each of the four stages, and whether they are bottlenecks.
_IMAGENET: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
_EXPANSION = 4  # outputs of a bottleneck / its width


def cifar_resnet(
    depth: int = 20,
    *,
    num_classes: int = 10,
    sync_batch_norm: bool = False,
    image_size: int = 32,
    channels: int = 3,
) -> keras.Model:
    """ResNet for small images ``[batch, image_size, image_size, channels]``; logits ``[batch, num_classes]``, float32.

    Three stages of 16, 32 and 64 channels, shortcuts without parameters (option A of section 4.1).

    Args:
      depth: 6n + 2: 20, 32, 44, 56, 110.
      num_classes: units of the last layer; 0: no such layer, and features ``[batch, 64]`` instead of logits.
      sync_batch_norm: statistics over all replicas instead of each replica's own.
      image_size: in pixels.
      channels: of a pixel.

    Raises:
      ConfigError: a depth that is not 6n + 2.
    """
    if depth < 8 or depth % 6 != 2:
        raise ConfigError(f"depth={depth} but it must be 6n + 2 for a whole n; for example depth=20")
    norm = _normalization(sync_batch_norm)
    inputs = keras.Input((image_size, image_size, channels))
    x = _activated(norm("stem_norm")(_conv(16, 3, "stem")(inputs)))
    for stage, width in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            strides = 2 if stage and not block else 1
            name = f"stage{stage + 1}_block{block + 1}"
            y = _activated(norm(f"{name}_norm1")(_conv(width, 3, f"{name}_conv1", strides)(x)))
            y = norm(f"{name}_norm2")(_conv(width, 3, f"{name}_conv2")(y))
            if strides > 1:
                x = keras.ops.pad(x[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [width // 4, width // 4]])
            x = _activated(keras.layers.Add(name=f"{name}_add")([x, y]))
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    if not num_classes:
        return keras.Model(inputs, x, name=f"cifar_resnet{depth}")
    x = keras.layers.Dense(num_classes, kernel_initializer="he_normal", dtype="float32", name="logits")(x)
    return keras.Model(inputs, x, name=f"cifar_resnet{depth}")


def resnet(
    depth: int = 50, *, num_classes: int = 1000, sync_batch_norm: bool = False, image_size: int = 224
) -> keras.Model:
    """ResNet for ImageNet; ``[batch, image_size, image_size, 3]`` -> logits ``[batch, num_classes]``, float32.

    In version 1.5: a bottleneck halves the image in its 3 x 3 convolution and not in the first 1 x 1. The last scale
    (``gamma``) of each block starts at 0, so that every block starts as its shortcut (Goyal et al. 2017, section 5.1).

    Args:
      depth: 18, 34, 50, 101 or 152. Depth 50 with 1,000 classes has 25,557,032 trainable parameters.
      num_classes: units of the last layer.
      sync_batch_norm: statistics over all replicas instead of each replica's own.
      image_size: in pixels.

    Raises:
      ConfigError: another depth.
    """
    if depth not in _IMAGENET:
        raise ConfigError(f"depth={depth} but it must be one of {', '.join(map(str, _IMAGENET))}")
    stages, bottleneck = _IMAGENET[depth]
    norm = _normalization(sync_batch_norm)
    inputs = keras.Input((image_size, image_size, 3))
    x = _activated(norm("stem_norm")(_conv(64, 7, "stem", 2)(inputs)))
    x = keras.layers.ZeroPadding2D(1, name="pool_pad")(x)
    x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            make = _bottleneck if bottleneck else _basic
            x = make(x, 64 * 2**stage, strides, f"stage{stage + 1}_block{block + 1}", norm)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    start = keras.initializers.RandomNormal(stddev=0.01)
    x = keras.layers.Dense(num_classes, kernel_initializer=start, dtype="float32", name="logits")(x)
    model = keras.Model(inputs, x, name=f"resnet{depth}")
    _start_as_shortcuts(model, "_norm3" if bottleneck else "_norm2")
    return model


def kernel_penalty(model: keras.Model, factor: float) -> tf.Tensor:
    """``factor`` / 2 x the sum of squares of all kernels, a scalar: its gradient is ``factor`` x the kernel.

    Scales, offsets and biases are left out (Goyal et al. 2017, section 5.1 leaves out those of the normalisation).
    """
    kernels = [v for v in model.trainable_variables if v.path.endswith("/kernel")]
    return factor * tf.add_n([tf.nn.l2_loss(tf.convert_to_tensor(v)) for v in kernels])


def _basic(x: Any, width: int, strides: int, name: str, norm: Callable[[str], Any]) -> Any:
    """Two 3 x 3 convolutions."""
    y = _activated(norm(f"{name}_norm1")(_conv(width, 3, f"{name}_conv1", strides)(x)))
    y = norm(f"{name}_norm2")(_conv(width, 3, f"{name}_conv2")(y))
    return _joined(x, y, strides, name, norm)


def _bottleneck(x: Any, width: int, strides: int, name: str, norm: Callable[[str], Any]) -> Any:
    """1 x 1, 3 x 3 and 1 x 1 convolutions, the last to four times the width."""
    y = _activated(norm(f"{name}_norm1")(_conv(width, 1, f"{name}_conv1")(x)))
    y = _activated(norm(f"{name}_norm2")(_conv(width, 3, f"{name}_conv2", strides)(y)))
    y = norm(f"{name}_norm3")(_conv(_EXPANSION * width, 1, f"{name}_conv3")(y))
    return _joined(x, y, strides, name, norm)


def _joined(x: Any, y: Any, strides: int, name: str, norm: Callable[[str], Any]) -> Any:
    """The block's result and its shortcut, which is a 1 x 1 convolution where the shape changes."""
    if strides > 1 or x.shape[-1] != y.shape[-1]:
        x = norm(f"{name}_shortcut_norm")(_conv(y.shape[-1], 1, f"{name}_shortcut", strides)(x))
    return _activated(keras.layers.Add(name=f"{name}_add")([x, y]))


def _conv(channels: int, size: int, name: str, strides: int = 1) -> Callable[[Any], Any]:
    """A convolution without bias; with strides the image is padded alike on both sides, which ``same`` does not do."""
    padded = strides > 1 and size > 1
    layer = keras.layers.Conv2D(
        channels,
        size,
        strides,
        padding="valid" if padded else "same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )
    if not padded:
        return layer
    pad = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_pad")
    return lambda x: layer(pad(x))


def _activated(x: Any) -> Any:
    return keras.layers.ReLU()(x)


def _normalization(synchronized: bool) -> Callable[[str], Any]:
    """A function name -> layer."""
    layer = SyncBatchNormalization if synchronized else keras.layers.BatchNormalization
    return lambda name: layer(momentum=0.9, epsilon=1e-5, name=name)


def _start_as_shortcuts(model: keras.Model, last: str) -> None:
    """Sets the scale of the last normalisation of each block to 0."""
    for layer in model.layers:
        if layer.name.endswith(last):
            layer.gamma.assign(keras.ops.zeros_like(layer.gamma))
