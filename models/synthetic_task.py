"""Task ``synthetic``: a perceptron on random data, for measuring without reading anything."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import LossOutput, Trainer
from input_pipelines import synthetic
from models.mlp import mlp
from models.options import option


class Synthetic(Trainer):
    """Random inputs and labels; the loss has nothing to learn but the classes' frequency."""

    recipe: ClassVar[dict[str, Any]] = {"train_steps": 200, "global_batch_size": 256, "learning_rate": 1e-3}

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        features: int = option(784, "Numbers in one example.")
        hidden: int = option(512, "Units of each of the two hidden layers.")
        examples: int = option(4096, "Examples in an epoch.")

    def build_model(self) -> keras.Model:
        """Logits ``[batch, 10]`` from ``[batch, features]``."""
        return mlp((self.options.features,), [self.options.hidden] * 2, 10)

    def train_data(self) -> Any:
        """Normal inputs and uniform labels."""
        spec = (tf.TensorSpec([self.options.features], tf.float32), tf.TensorSpec([], tf.int32))
        return synthetic(spec, size=self.options.examples)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy per example."""
        inputs, labels = batch
        logits = model(inputs, training=training)
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
