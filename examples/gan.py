"""A GAN on digits: two networks, two optimizers, two updates in one step (Goodfellow et al. 2014, non-saturating loss).

Drawn now and then are six generated digits; measured is the energy distance of generated images to real ones.

    python examples/gan.py --num_replicas=2 --train_steps=3000
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import framework
from framework import LossOutput, Scheduled, Trainer, flags, optimizers
from input_pipelines import digits, from_arrays
from train import train

NOISE = 16  # numbers that an image is generated from


class Gan(Trainer):
    """A generator of 8 x 8 digits from noise, and a discriminator that gives the logit of "is real"."""

    recipe = {
        "train_steps": 3000,
        "global_batch_size": 96,
        "optimizer": "adam",
        "learning_rate": 5e-4,
        "beta_1": 0.5,
        "log_every": 500,
        "eval_every": 1000,
    }

    def build_model(self) -> keras.Model:
        """Both networks as one model, so that checkpoints hold both."""
        dense, act = keras.layers.Dense, keras.layers.LeakyReLU
        hidden = [dense(128), act(), dense(128), act()]
        image = [dense(64, activation="sigmoid"), keras.layers.Reshape((8, 8))]
        self.generator = keras.Sequential([keras.Input((NOISE,)), *hidden, *image], name="generator")
        judge = [keras.layers.Flatten(), dense(128), act(), dense(1)]
        self.discriminator = keras.Sequential([keras.Input((8, 8)), *judge], name="discriminator")
        return keras.Sequential([self.generator, self.discriminator])

    def build_optimizer(self) -> Any:
        """Each network's own optimizer, both as the flags say."""
        return {
            network.name: (optimizers.from_config(self.config, self.total_steps), network.trainable_variables)
            for network in (self.generator, self.discriminator)
        }

    def train_data(self) -> Any:
        """Images only; a GAN needs no labels."""
        return from_arrays(digits.load("train")[0])

    def eval_data(self) -> Any:
        """360 images that the discriminator never saw."""
        return from_arrays(digits.load("test")[0])

    def noise(self, images: tf.Tensor, use: str) -> tf.Tensor:
        """Noise ``[batch, NOISE]``, another at every step, on every replica and for every use."""
        return tf.random.stateless_normal([tf.shape(images)[0], NOISE], framework.step_seed(use))

    def discriminator_loss(self, images: tf.Tensor) -> LossOutput:
        """Cross-entropy of one real and one generated image per example."""
        real = self.discriminator(images)[:, 0]
        generated = self.discriminator(self.generator(self.noise(images, "discriminator")))[:, 0]
        told_apart = (tf.cast(real > 0, tf.float32) + tf.cast(generated < 0, tf.float32)) / 2
        return LossOutput(loss=tf.nn.softplus(-real) + tf.nn.softplus(generated), metrics={"told_apart": told_apart})

    def generator_loss(self, images: tf.Tensor) -> LossOutput:
        """Cross-entropy of generated images that are to pass for real."""
        generated = self.generator(self.noise(images, "generator"))
        return LossOutput(loss=tf.nn.softplus(-self.discriminator(generated)[:, 0]))

    def train_step(self, batch: Any) -> Any:
        """The discriminator's update, then the generator's against the updated discriminator."""
        d = self.reduce(self.gradients(batch, self.discriminator.trainable_variables, self.discriminator_loss))
        self.apply(d, "discriminator")
        g = self.reduce(self.gradients(batch, self.generator.trainable_variables, self.generator_loss))
        self.apply(g, "generator")
        losses = {"discriminator_loss": d.stats["loss"], "generator_loss": g.stats["loss"]}
        return {**losses, "told_apart": d.stats["told_apart"]}

    def eval_step(self, batch: Any) -> Any:
        """Energy distance (Szekely and Rizzo 2013); 0 if generated and real images are distributed alike."""
        real = tf.reshape(digits.load("test")[0], [-1, 64])
        generated = self.generator(tf.random.stateless_normal([len(real), NOISE], (1, 2)))
        x, generated = tf.reshape(batch, [-1, 64]), tf.reshape(generated, [-1, 64])
        value = 2 * distances(x, generated) - distances(x, real) - tf.reduce_mean(distances(generated, generated))
        return {"energy_distance": (value, tf.ones_like(value))}

    def hooks(self) -> Any:
        """Six generated digits next to each other, now and then."""
        return [Scheduled(framework.EveryNSteps(1000), self.draw)]

    def draw(self, step: int, values: Any) -> None:
        """Prints them, the darker the larger a pixel's value."""
        images = self.generator(tf.random.stateless_normal([6, NOISE], (3, 4))).numpy()
        for row in range(8):
            print("  ".join("".join(" .:+#@"[int(v * 5.99)] * 2 for v in image[row]) for image in images))


def distances(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean distance of each row of x to the rows of y, ``[rows of x]``."""
    return tf.reduce_mean(tf.norm(x[:, None] - y[None], axis=2), 1)


if __name__ == "__main__":
    sys.exit(flags.run(train, [sys.argv[0], "--task=gan", *sys.argv[1:]], tasks={"gan": Gan}))
