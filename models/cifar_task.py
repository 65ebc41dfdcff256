"""Task ``cifar10``: a residual network on CIFAR-10, with the recipe of He et al. 2015, section 4.2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import LossOutput, Signature, Trainer
from input_pipelines import cifar, crop_and_flip, from_arrays, images
from models.options import option
from models.resnet import cifar_resnet, kernel_penalty


class Cifar10(Trainer):
    """Ten classes from 32 x 32 pixels; the paper reports a test error of 8.75 % for depth 20, 6.97 % for 56."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 64_000,
        "global_batch_size": 128,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "schedule": "step",
        "schedule_boundaries": "32000,48000",
        "log_every": 100,
        "eval_every": 2000,
        "checkpoint_every": 2000,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data_dir: str = option("", "Directory of CIFAR-10, binary version.")
        depth: int = option(20, "Depth of the network, 6n + 2: 20, 32, 44, 56, 110.")
        l2: float = option(1e-4, "Weight decay of kernels, in the loss.")
        sync_batch_norm: bool = option(False, "Statistics over all replicas.")

    def build_model(self) -> keras.Model:
        """Logits ``[batch, 10]`` from normalised images ``[batch, 32, 32, 3]``."""
        return cifar_resnet(self.options.depth, sync_batch_norm=self.options.sync_batch_norm)

    def train_data(self) -> Any:
        """50,000 images and labels, shuffled; shifted by up to 4 pixels and half of them mirrored."""
        augment = crop_and_flip(padding=4, fill=cifar.MEAN)
        return from_arrays(cifar.load_cifar10(self.options.data_dir, "train"), augment=augment)

    def eval_data(self) -> Any:
        """10,000 images and labels that are never trained on."""
        return from_arrays(cifar.load_cifar10(self.options.data_dir, "test"))

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy per example, and whether the likeliest class is right."""
        pixels, labels = batch
        logits = model(images.normalize(pixels, cifar.MEAN, cifar.STD), training=training)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        correct = tf.equal(tf.argmax(logits, 1, tf.int32), labels)
        penalty = kernel_penalty(model, self.options.l2) if training else 0.0
        return LossOutput(loss=loss, metrics={"accuracy": correct}, penalty=penalty)

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: pixels uint8 ``[batch, 32, 32, 3]`` -> probabilities ``[batch, 10]``."""

        def probabilities(model: Any, pixels: tf.Tensor) -> tf.Tensor:
            return tf.nn.softmax(model(images.normalize(pixels, cifar.MEAN, cifar.STD), training=False))

        return {"serving_default": Signature(spec=tf.TensorSpec([None, 32, 32, 3], tf.uint8), function=probabilities)}
