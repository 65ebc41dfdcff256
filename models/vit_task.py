"""Task ``vit``: a vision transformer on digits, or on data in the format of CIFAR or ImageNet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from framework import LossOutput, Signature, Trainer
from models.image_data import ImageSet, image_set
from models.options import option
from models.transformer import check_recompute
from models.vit import VARIANTS, VisionTransformer, VitShape, vit_shape


class Vit(Trainer):
    """Classes from images. The recipe is for digits; larger data take longer, with a smaller rate for larger models."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 2000,
        "global_batch_size": 96,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "weight_decay": 0.05,
        "decay_exclude": "bias,gamma,beta,positions,class_token",
        "schedule": "cosine",
        "warmup_steps": 100,
        "clip_global_norm": 1.0,
        "log_every": 100,
        "eval_every": 500,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data: str = option("digits", "Data set.", choices=("digits", "cifar10", "cifar100", "imagenet"))
        data_dir: str = option("", "Directory of the files; digits need none.")
        image_size: int = option(0, "Side of an image, in pixels, of data=imagenet; 0: 224.")
        variant: str = option("ti", "Sizes: width 192, 384 or 768.", choices=tuple(VARIANTS))
        patch: int = option(0, "Pixels of a patch's side; 0: 2 of digits, 4 of CIFAR, 16 of ImageNet.")
        width: int = option(0, "Width of the residual stream; 0: the variant's.")
        layers: int = option(0, "Blocks; 0: the variant's.")
        heads: int = option(0, "Heads of each attention; 0: the variant's.")
        dropout: float = option(0.0, "Share dropped while training.")
        recompute: bool = option(False, "Compute each block again for its gradients, and keep less in memory.")

        def __post_init__(self) -> None:
            self.shape()

        def images(self) -> ImageSet:
            """The data set."""
            return image_set(self.data, image_size=self.image_size)

        def shape(self) -> VitShape:
            """The model's sizes; ConfigError if they do not go together."""
            images = self.images()
            named = {"width": self.width, "layers": self.layers, "heads": self.heads}
            return vit_shape(
                self.variant,
                image_size=images.size,
                patch=self.patch or images.patch,
                channels=images.channels,
                classes=images.classes,
                dropout=self.dropout,
                recompute=self.recompute,
                **{name: value for name, value in named.items() if value},
            )

    def build_model(self) -> VisionTransformer:
        """Logits ``[batch, classes]`` from normalised images ``[batch, size, size, channels]``."""
        check_recompute(self, self.options.recompute)
        return VisionTransformer(self.options.shape())

    def train_data(self) -> Any:
        """Images and labels, shuffled; shifted and mirrored as suits the data set."""
        return self.options.images().data(self.options.data_dir, "train")

    def eval_data(self) -> Any:
        """Images and labels that are never trained on."""
        return self.options.images().data(self.options.data_dir, "test")

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """Cross-entropy per example, and whether the likeliest class is right; with 100 classes or more the best 5."""
        pixels, labels = batch
        logits = model(self.options.images().normalized(pixels), training=training)
        metrics = {"accuracy": tf.equal(tf.argmax(logits, 1, tf.int32), labels)}
        if logits.shape[-1] >= 100:
            metrics["top5"] = tf.math.in_top_k(labels, logits, 5)
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), metrics=metrics)

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: pixels uint8 ``[batch, size, size, channels]`` -> probabilities ``[batch, classes]``."""
        images = self.options.images()

        def probabilities(model: Any, pixels: tf.Tensor) -> tf.Tensor:
            return tf.nn.softmax(model(images.normalized(pixels), training=False))

        spec = tf.TensorSpec([None, images.size, images.size, images.channels], tf.uint8)
        return {"serving_default": Signature(spec=spec, function=probabilities)}
