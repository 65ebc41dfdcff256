"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def mlp(input_shape: Sequence[int], hidden: Sequence[int], num_classes: int, dropout: float = 0.0) -> keras.Model:
    """Dense layers with ReLU; ``[batch, *input_shape]`` -> logits ``[batch, num_classes]``, float32.

    Args:
      input_shape: of one example; flattened.
      hidden: units of each hidden layer.
      num_classes: units of the last layer.
      dropout: share of hidden units dropped while training; 0: no dropout layer.
    """
    layers: list[keras.layers.Layer] = [keras.Input(tuple(input_shape)), keras.layers.Flatten()]
    for units in hidden:
        layers.append(keras.layers.Dense(units, activation="relu"))
        if dropout:
            layers.append(keras.layers.Dropout(dropout))
    return keras.Sequential([*layers, keras.layers.Dense(num_classes, dtype="float32")])
