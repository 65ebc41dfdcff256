"""A penalty on the gradient at the input, which makes a classifier harder to mislead (Drucker and LeCun 1992).

The loss of an example holds a gradient itself, so training differentiates twice. Printed is the accuracy on images that
were each moved by 0.1 a pixel towards a larger loss (Goodfellow et al. 2015); compare with --strength=0.

    python examples/gradient_penalty.py --num_replicas=2 --train_steps=1000
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from framework import LossOutput, Trainer, flags
from input_pipelines import digits, from_arrays
from models.mlp import mlp
from train import train


class GradientPenalty(Trainer):
    """Ten digits from 64 pixels, with a loss that is flat around each training image."""

    recipe = {
        "train_steps": 1000,
        "global_batch_size": 96,
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "log_every": 200,
        "eval_every": 500,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        hidden: int = 128  # units of the hidden layer
        strength: float = 1.0  # of the penalty; 0: plain cross-entropy
        attack: float = 0.1  # by how much each pixel is moved in the evaluation

    def build_model(self) -> keras.Model:
        """Logits ``[batch, 10]`` from images ``[batch, 8, 8]``."""
        return mlp((8, 8), [self.options.hidden], 10)

    def train_data(self) -> Any:
        """1,437 images and labels, shuffled."""
        return from_arrays(digits.load("train"))

    def eval_data(self) -> Any:
        """360 images and labels that are never trained on."""
        return from_arrays(digits.load("test"))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy + strength x squared norm of its gradient at the image, per example."""
        images, labels = batch
        with tf.GradientTape() as tape:
            tape.watch(images)
            logits = model(images, training=training)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        # The gradient of the sum: each example's loss depends on its own image only, so this is per example.
        slope = tape.gradient(loss, images)
        square = tf.reduce_sum(tf.square(slope), [1, 2])
        metrics = {"accuracy": tf.equal(tf.argmax(logits, 1, tf.int32), labels), "slope": tf.sqrt(square)}
        if not training:
            moved = model(images + self.options.attack * tf.sign(slope), training=False)
            metrics["attacked_accuracy"] = tf.equal(tf.argmax(moved, 1, tf.int32), labels)
        return LossOutput(loss=loss + self.options.strength * square, metrics=metrics)


if __name__ == "__main__":
    task = {"gradient_penalty": GradientPenalty}
    sys.exit(flags.run(train, [sys.argv[0], "--task=gradient_penalty", *sys.argv[1:]], tasks=task))
