"""Task ``simclr``: features of small images, learnt without labels from pairs of views."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import ConfigError, LossOutput, Signature, Trainer
from input_pipelines.views import TwoViews
from models.image_data import SMALL_SETS, ImageSet, image_set
from models.options import option
from models.simclr import nt_xent, simclr


class SimClr(Trainer):
    """A contrastive loss over the global batch, and one layer that learns the labels from the features as they are."""

    loss_communicates: ClassVar[bool] = True

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 1000,
        "global_batch_size": 128,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "weight_decay": 1e-4,
        "decay_exclude": "bias,gamma,beta",
        "schedule": "cosine",
        "warmup_steps": 100,
        "log_every": 100,
        "eval_every": 500,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data: str = option("digits", "Data set.", choices=SMALL_SETS)
        data_dir: str = option("", "Directory of the files; digits need none.")
        depth: int = option(20, "Depth of the residual network, 6n + 2.")
        width: int = option(64, "Numbers of an embedding.")
        temperature: float = option(0.5, "Similarities are divided by it.")
        least_area: float = option(
            0.0, "Share of an image that a view shows at least; 0: 0.5 of digits, 0.08 of CIFAR."
        )
        color: float = option(0.5, "Strength of the change of colours, 0 to 1.")
        sync_batch_norm: bool = option(True, "Statistics over all replicas.")

        def __post_init__(self) -> None:
            if self.temperature <= 0.0:
                raise ConfigError(f"temperature={self.temperature} but it must be above 0; for example 0.5")
            self.views()

        def images(self) -> ImageSet:
            """The data set."""
            return image_set(self.data)

        def views(self) -> TwoViews:
            """What makes two views of an image; ConfigError for settings out of range."""
            images = self.images()
            least = self.least_area or (0.5 if self.data == "digits" else 0.08)
            return TwoViews(area=(least, 1.0), flip=images.flip, color=self.color)

    def build_model(self) -> keras.Model:
        """Embedding and logits from normalised images ``[batch, size, size, channels]``."""
        if self.config.accumulate_steps > 1:
            raise ConfigError(
                f"accumulate_steps={self.config.accumulate_steps} but this loss compares all examples of a batch, "
                "and a micro-batch holds only some; leave it out"
            )
        o, images = self.options, self.options.images()
        return simclr(
            o.depth,
            image_size=images.size,
            channels=images.channels,
            classes=images.classes,
            width=o.width,
            sync_batch_norm=o.sync_batch_norm,
        )

    def train_data(self) -> Any:
        """Two views of each training image, and its label. Views are made with the data: alike on any replica."""
        return self.options.images().data(self.options.data_dir, "train", self.options.views())

    def eval_data(self) -> Any:
        """Images as they are, and labels, that are never trained on."""
        return self.options.images().data(self.options.data_dir, "test")

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        """The contrastive loss of each example, and the cross-entropy of its class by the features as they are."""
        first, second, labels = batch
        views = self.options.images().normalized(tf.concat([first, second], 0))
        embedded, logits = model(views, training=training)
        a, b = tf.split(embedded, 2)
        contrastive, found = nt_xent(a, b, self.options.temperature)
        told = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.tile(labels, [2]), logits)
        metrics = {"contrastive_loss": contrastive, "found": found}
        return LossOutput(loss=contrastive + tf.add_n(tf.split(told, 2)) / 2.0, metrics=metrics)

    def eval_step(self, batch: Any) -> Any:
        """How often the class is right that one layer tells from the features of an unseen image."""
        pixels, labels = batch
        _, logits = self.model(self.options.images().normalized(pixels), training=False)
        right = tf.cast(tf.equal(tf.argmax(logits, 1, tf.int32), labels), tf.float32)
        told = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return {"accuracy": (right, tf.ones_like(right)), "probe_loss": (told, tf.ones_like(told))}

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: pixels uint8 ``[batch, size, size, channels]`` -> features, before the embedding."""
        images = self.options.images()

        def features(model: Any, pixels: tf.Tensor) -> tf.Tensor:
            encoder = keras.Model(model.input, model.get_layer("pool").output)
            return encoder(images.normalized(pixels), training=False)

        spec = tf.TensorSpec([None, images.size, images.size, images.channels], tf.uint8)
        return {"serving_default": Signature(spec=spec, function=features)}
