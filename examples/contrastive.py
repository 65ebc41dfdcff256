"""A contrastive loss over the examples of all replicas (Chen et al. 2020, SimCLR; van den Oord et al. 2018, InfoNCE).

Two noisy views of one image are to be closer to each other than to any view in the global batch. Labels are used only
to look at the result: how often the nearest training image, by embedding, has the label of a test image.

    python examples/contrastive.py --num_replicas=2 --train_steps=1000
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from framework import ConfigError, LossOutput, Trainer, all_gather, flags
from input_pipelines import digits, from_arrays
from train import train


class Contrastive(Trainer):
    """An embedding of digits that is learnt without labels."""

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

        width: int = 8  # numbers of an embedding
        temperature: float = 0.2  # of the softmax over similarities
        pairs: int = 8  # pairs of views made of each image

    def build_model(self) -> keras.Model:
        """Embedding ``[batch, width]`` of images ``[batch, 8, 8]``."""
        dense = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(self.options.width)]
        return keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), *dense])

    def train_data(self) -> Any:
        """Pairs of views. They are data, and not made in the step, so that they do not depend on the replica."""
        images = np.repeat(digits.load("train")[0], self.options.pairs, axis=0)
        return from_arrays((noisy_view(images, seed=1), noisy_view(images, seed=2)))

    def eval_data(self) -> Any:
        """360 images and labels that are never trained on."""
        return from_arrays(digits.load("test"))

    def embed(self, images: Any) -> tf.Tensor:
        """Embeddings of length 1."""
        return tf.math.l2_normalize(self.model(images), axis=1)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """For each view of this replica: which of all replicas' other views is its partner?"""
        if self.config.accumulate_steps > 1:
            raise ConfigError(
                f"accumulate_steps={self.config.accumulate_steps} but this loss compares all examples of a batch; a "
                "micro-batch holds only some, so leave it out"
            )
        first, second = self.embed(batch[0]), self.embed(batch[1])
        # Gradients flow back through the gathering to the replica that an embedding comes from.
        all_first, all_second = all_gather(first), all_gather(second)
        partner = tf.reduce_sum(first * second, 1)
        to_second = tf.matmul(first, all_second, transpose_b=True)  # [this replica's examples, all examples]
        to_first = tf.matmul(second, all_first, transpose_b=True)
        heat = self.options.temperature
        loss = tf.reduce_logsumexp(to_second / heat, 1) + tf.reduce_logsumexp(to_first / heat, 1) - 2 * partner / heat
        return LossOutput(loss=loss / 2, metrics={"found": partner >= tf.reduce_max(to_second, 1)})

    def eval_step(self, batch: Any) -> Any:
        """Has the nearest training image, by embedding, the same label?"""
        images, labels = batch
        known_images, known_labels = digits.load("train")
        nearest = tf.argmax(tf.matmul(self.embed(images), self.embed(known_images), transpose_b=True), 1)
        right = tf.cast(tf.equal(tf.gather(known_labels, nearest), labels), tf.float32)
        return {"neighbour_accuracy": (right, tf.ones_like(right))}


def noisy_view(images: np.ndarray, *, seed: int) -> np.ndarray:
    """Each image moved by up to one pixel, made lighter or darker, and with noise on it."""
    random = np.random.default_rng(seed)
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)])
    shifted = np.stack([padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)])
    moved = shifted[random.integers(0, 9, len(images)), np.arange(len(images))]
    light = random.uniform(0.6, 1.4, [len(images), 1, 1])
    return (moved * light + random.normal(0.0, 0.2, images.shape)).astype(np.float32)


if __name__ == "__main__":
    sys.exit(flags.run(train, [sys.argv[0], "--task=contrastive", *sys.argv[1:]], tasks={"contrastive": Contrastive}))
