"""Task ``dcgan``: a generator of small images and a discriminator, trained against each other."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from framework import ConfigError, EveryNSteps, LossOutput, Scheduled, Signature, Trainer, optimizers
from input_pipelines.order import subkey, uniforms
from models.dcgan import discriminator, generator
from models.image_data import SMALL_SETS, ImageSet, image_set
from models.options import option

_SAMPLES = 512  # images that generated and real ones are compared by
_GRID = 8  # images of a drawing's side


class WithNoise:
    """An augmentation: (image, label) and its key become (image, noise ``[2, count]`` in -1..1), for two networks.

    Noise is data, and not made in the step: an example comes with the same on any replica.
    """

    def __init__(self, count: int):
        self._count = count

    def batched(self, examples: Any, seeds: tf.Tensor) -> Any:
        """Many examples at once, with seeds int64 ``[rows, 2]``."""
        draws = uniforms(subkey(seeds, 1), 2 * self._count)
        return examples[0], tf.reshape(2.0 * draws - 1.0, [-1, 2, self._count])


class Dcgan(Trainer):
    """Two networks with an optimizer each; the loss is that of Goodfellow et al. 2014, section 3, non-saturating."""

    recipe: ClassVar[dict[str, Any]] = {
        "train_steps": 2000,
        "global_batch_size": 128,
        "optimizer": "adam",
        "learning_rate": 2e-4,
        "beta_1": 0.5,
        "log_every": 100,
        "eval_every": 500,
    }

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Settings of the task."""

        data: str = option("digits", "Data set.", choices=SMALL_SETS)
        data_dir: str = option("", "Directory of the files; digits need none.")
        noise: int = option(100, "Numbers that an image is made of.")
        width: int = option(64, "Channels next to the image; the paper's network has 128.")
        sync_batch_norm: bool = option(True, "Statistics over all replicas.")
        draw_every: int = option(500, "Steps between drawings in RUN_DIR/samples; 0: none.")

        def __post_init__(self) -> None:
            for name in ("noise", "width"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"{name}={getattr(self, name)} but it must be at least 1")
            if self.draw_every < 0:
                raise ConfigError(f"draw_every={self.draw_every} but it must be at least 0; 0 draws nothing")

        def images(self) -> ImageSet:
            """The data set."""
            return image_set(self.data)

    def build_model(self) -> keras.Model:
        """Both networks as one model, so that checkpoints hold both."""
        o, images = self.options, self.options.images()
        sizes = {
            "image_size": images.size,
            "channels": images.channels,
            "width": o.width,
            "sync_batch_norm": o.sync_batch_norm,
        }
        self.generator = generator(noise=o.noise, **sizes)
        self.discriminator = discriminator(**sizes)
        return keras.Sequential([self.generator, self.discriminator], name="dcgan")

    def build_optimizer(self) -> Any:
        """Each network's own optimizer, both as the flags say."""
        return {
            network.name: (optimizers.from_config(self.config, self.total_steps), network.trainable_variables)
            for network in (self.generator, self.discriminator)
        }

    def train_data(self) -> Any:
        """Images, each with noise for either network."""
        return self.options.images().data(self.options.data_dir, "train", WithNoise(self.options.noise))

    def eval_data(self) -> Any:
        """Images that the discriminator never saw, and labels that nobody looks at."""
        return self.options.images().data(self.options.data_dir, "test")

    def train_step(self, batch: Any) -> Any:
        """The discriminator's update, then the generator's against the updated discriminator."""
        d = self.reduce(self.gradients(batch, self.discriminator.trainable_variables, self.discriminator_loss))
        self.apply(d, "discriminator")
        g = self.reduce(self.gradients(batch, self.generator.trainable_variables, self.generator_loss))
        self.apply(g, "generator")
        losses = {"discriminator_loss": d.stats["loss"], "generator_loss": g.stats["loss"]}
        return {**losses, "told_apart": d.stats["told_apart"]}

    def discriminator_loss(self, batch: Any) -> LossOutput:
        """Cross-entropy of one real and one generated image per example, each kind a batch of its own (section 3)."""
        pixels, noise = batch
        real = self.discriminator(_in_range(pixels), training=True)[:, 0]
        generated = self.discriminator(self.generator(noise[:, 0], training=True), training=True)[:, 0]
        told_apart = (tf.cast(real > 0, tf.float32) + tf.cast(generated < 0, tf.float32)) / 2
        return LossOutput(loss=tf.nn.softplus(-real) + tf.nn.softplus(generated), metrics={"told_apart": told_apart})

    def generator_loss(self, batch: Any) -> LossOutput:
        """Cross-entropy of generated images that are to pass for real."""
        generated = self.generator(batch[1][:, 1], training=True)
        return LossOutput(loss=tf.nn.softplus(-self.discriminator(generated, training=True)[:, 0]))

    def eval_step(self, batch: Any) -> Any:
        """Energy distance of generated to real images (Szekely and Rizzo 2013), 0 if they are distributed alike.

        2 E|x - g| - E|x - x'| - E|g - g'|, lengths over the pixels in -1..1; x' are the first test images.
        """
        images = self.options.images()
        real = _flat(_in_range(images.arrays(self.options.data_dir, "test")[0][:_SAMPLES]))
        made = _flat(self.generator(self._noise(_SAMPLES), training=False))
        x = _flat(_in_range(batch[0]))
        among = tf.reduce_mean(_distances(made, made))
        value = 2.0 * tf.reduce_mean(_distances(x, made), 1) - tf.reduce_mean(_distances(x, real), 1) - among
        return {"energy_distance": (value, tf.ones_like(value))}

    def hooks(self) -> list[Scheduled]:
        """A drawing now and then."""
        drawn = self.options.draw_every and self.config.run_dir and self.cluster.is_chief
        return [Scheduled(EveryNSteps(self.options.draw_every), self.draw)] if drawn else []

    def draw(self, step: int, values: Any) -> None:
        """Writes generated images, from the same noise each time, to ``RUN_DIR/samples/step-NNNNNNNN.png``."""
        del values
        folder = pathlib.Path(str(self.config.run_dir)) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        made = self.generator(self._noise(_GRID**2), training=False)
        size, channels = made.shape[1], made.shape[3]
        rows = tf.transpose(tf.reshape(made, [_GRID, _GRID, size, size, channels]), [0, 2, 1, 3, 4])
        page = tf.cast(tf.round(127.5 * (tf.reshape(rows, [_GRID * size, _GRID * size, channels]) + 1.0)), tf.uint8)
        (folder / f"step-{step:08}.png").write_bytes(tf.io.encode_png(page).numpy())

    def signatures(self) -> Mapping[str, Signature]:
        """``serving_default``: noise float32 ``[batch, noise]`` in -1..1 -> pixels uint8."""

        def pixels(model: Any, noise: tf.Tensor) -> tf.Tensor:
            made = model.get_layer("generator")(noise, training=False)
            return tf.cast(tf.round(127.5 * (made + 1.0)), tf.uint8)

        return {"serving_default": Signature(spec=tf.TensorSpec([None, self.options.noise]), function=pixels)}

    def _noise(self, count: int) -> tf.Tensor:
        return tf.random.stateless_uniform([count, self.options.noise], (1, 2), -1.0, 1.0)


def _in_range(pixels: Any) -> tf.Tensor:
    """Float32 in -1..1, as the generator makes them."""
    return tf.cast(pixels, tf.float32) / 127.5 - 1.0


def _flat(images: tf.Tensor) -> tf.Tensor:
    return tf.reshape(images, [-1, images.shape[1] * images.shape[2] * images.shape[3]])


def _distances(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Lengths of all differences, ``[rows of x, rows of y]``."""
    square = tf.reduce_sum(x**2, 1)[:, None] + tf.reduce_sum(y**2, 1) - 2.0 * tf.matmul(x, y, transpose_b=True)
    return tf.sqrt(tf.maximum(square, 0.0))
