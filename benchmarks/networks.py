"""The networks of the measurements, on Keras layers as most users would write them; ``keras`` may be ``tf_keras``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BYTES, LENGTH, WIDTH, HEADS, BLOCKS = 256, 128, 128, 4, 4


def _mlp(keras: Any, features: int, hidden: Sequence[int]) -> Any:
    """Dense layers with ReLU, 10 classes."""
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(10)])


def _resnet20(keras: Any, features: int, hidden: Sequence[int]) -> Any:
    """ResNet-20 for 32 x 32 images (He et al. 2016, section 4.2), 10 classes."""
    del features, hidden

    def convolved(x: Any, filters: int, stride: int) -> Any:
        x = keras.layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        return keras.layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(convolved(inputs, 16, 1))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and not block else 1
            y = keras.layers.ReLU()(convolved(x, filters, stride))
            y = convolved(y, filters, 1)
            if stride == 2:
                x = keras.layers.Conv2D(filters, 1, 2, use_bias=False)(x)
            x = keras.layers.ReLU()(x + y)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def _transformer(keras: Any, features: int, hidden: Sequence[int]) -> Any:
    """A decoder of 4 pre-norm blocks over bytes: ``[batch, 128]`` -> logits ``[batch, 128, 256]``."""
    del features, hidden
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(BYTES, WIDTH)(inputs)
    for _ in range(BLOCKS):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(y))
    return keras.Model(inputs, keras.layers.Dense(BYTES)(keras.layers.LayerNormalization()(x)))


BUILDERS: dict[str, Callable[[Any, int, Sequence[int]], Any]] = {
    "mlp": _mlp,
    "resnet20": _resnet20,
    "transformer": _transformer,
}
