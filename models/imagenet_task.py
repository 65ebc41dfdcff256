"""Task ``imagenet``: a residual network on ImageNet (ILSVRC 2012), with the recipe of Goyal et al. 2017."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import LossOutput, Signature, Trainer
from input_pipelines import imagenet, images
from models.options import option
from models.resnet import kernel_penalty, resnet


class ImageNet(Trainer):
    """A thousand classes from photographs; the rate is for 256 images a step: scale it in proportion to them."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_epochs": 90,
        "global_batch_size": 256,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "schedule": "cosine",
        "warmup_steps": 25_000,
        "log_every": 100,
        "eval_every": 5000,
        "checkpoint_every": 5000,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data_dir: str = option("", "Directory of the TFRecord files.")
        depth: int = option(50, "Depth of the network: 18, 34, 50, 101 or 152.")
        image_size: int = option(224, "Side of an image, in pixels.")
        l2: float = option(1e-4, "Weight decay of kernels, in the loss.")
        label_smoothing: float = option(0.1, "Share of the target that all classes have in common.")
        sync_batch_norm: bool = option(False, "Statistics over all replicas.")
        by_shard: bool = option(False, "Read one file after the other.")
        skip_bad_examples: int = option(0, "Images that may be replaced because they cannot be read.")
        index_file: str = option("", "Prefix of the files in which the places of the records are kept.")

    def build_model(self) -> keras.Model:
        """Logits ``[batch, 1000]`` from normalised images ``[batch, image_size, image_size, 3]``."""
        o = self.options
        return resnet(o.depth, sync_batch_norm=o.sync_batch_norm, image_size=o.image_size)

    def train_data(self) -> Any:
        """Random parts of the training images, half of them mirrored."""
        return self._data("train")

    def eval_data(self) -> Any:
        """The middle of the validation images."""
        return self._data("validation")

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy per example, and whether the class is the likeliest, or among the five likeliest."""
        pixels, labels = batch
        logits = model(images.normalize(pixels), training=training)
        smooth = self.options.label_smoothing if training else 0.0
        classes = logits.shape[-1]
        target = tf.one_hot(labels, classes, 1.0 - smooth + smooth / classes, smooth / classes)
        correct = tf.equal(tf.argmax(logits, 1, tf.int32), labels)
        return LossOutput(
            loss=tf.nn.softmax_cross_entropy_with_logits(target, logits),
            metrics={"accuracy": correct, "top5": tf.math.in_top_k(labels, logits, 5)},
            penalty=kernel_penalty(model, self.options.l2) if training else 0.0,
        )

    def signatures(self) -> Mapping[str, Signature]:
        """Probabilities ``[batch, 1000]`` from pixels (``serving_default``) or from JPEG or PNG files (``encoded``)."""
        size = self.options.image_size

        def of_pixels(model: Any, pixels: tf.Tensor) -> tf.Tensor:
            return tf.nn.softmax(model(images.normalize(pixels), training=False))

        def of_files(model: Any, inputs: Any) -> tf.Tensor:
            def middle(encoded: tf.Tensor) -> tf.Tensor:
                return images.decode(encoded, tf.zeros([2], tf.int64), size=size, training=False)

            return of_pixels(model, tf.map_fn(middle, inputs["encoded"], fn_output_signature=tf.uint8))

        return {
            "serving_default": Signature(spec=tf.TensorSpec([None, size, size, 3], tf.uint8), function=of_pixels),
            "encoded": Signature(spec={"encoded": tf.TensorSpec([None], tf.string)}, function=of_files),
        }

    def _data(self, split: str) -> Any:
        o = self.options
        return imagenet(
            o.data_dir,
            split,
            image_size=o.image_size,
            by_shard=o.by_shard,
            skip_bad_examples=o.skip_bad_examples,
            index_file=f"{o.index_file}-{split}.npz" if o.index_file else None,
        )
