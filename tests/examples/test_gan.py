"""The GAN example: two optimizers in one step, each with its own variables, and noise that no two replicas share."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from examples.gan import NOISE, Gan
from framework import Max, Min, optimizers
from input_pipelines import digits, from_arrays
from tests.examples.runs import assert_close, assert_moved, assert_same, initial, trained, weights
from tests.helpers import column, settings

IMAGES = digits.load("train")[0][:48]
STEPS, RATE = 6, 0.1


class FromImage(Gan):
    """Images in the order of the data; "noise" is pixels of the image, so that it does not depend on the replica."""

    def train_data(self) -> Any:
        return from_arrays(IMAGES, shuffle=False)

    def noise(self, images: tf.Tensor, use: str) -> tf.Tensor:
        first = 16 if use == "discriminator" else 32
        return 4.0 * tf.reshape(images, [-1, 64])[:, first : first + NOISE] - 1.0


def plain_training(model: Any, size: int) -> list[tuple[float, float]]:
    """The same training on the whole batch at once, without the framework: (discriminator loss, generator loss)."""
    generator, discriminator = model.layers
    losses = []
    for step in range(STEPS):
        images = tf.constant(IMAGES[np.arange(step * size, (step + 1) * size) % len(IMAGES)])
        pixels = 4.0 * tf.reshape(images, [-1, 64]) - 1.0
        pair = []
        for network in (discriminator, generator):
            with tf.GradientTape() as tape:
                if network is discriminator:
                    logits = discriminator(generator(pixels[:, 16:32]))[:, 0]
                    loss = tf.reduce_mean(tf.math.log(1.0 + tf.exp(-discriminator(images)[:, 0])))
                    loss += tf.reduce_mean(tf.math.log(1.0 + tf.exp(logits)))
                else:
                    logits = discriminator(generator(pixels[:, 32:48]))[:, 0]
                    loss = tf.reduce_mean(tf.math.log(1.0 + tf.exp(-logits)))
            for v, g in zip(network.trainable_variables, tape.gradient(loss, network.trainable_variables)):
                v.assign(v - RATE * g)
            pair.append(float(loss))
        losses.append((pair[0], pair[1]))
    return losses


@pytest.mark.parametrize(("replicas", "size"), [(1, 12), (2, 12), (3, 10)])
def test_replicas_give_the_losses_and_the_weights_of_the_whole_batch(
    tmp_path: pathlib.Path, replicas: int, size: int
) -> None:
    # The generator's loss is that against the discriminator as updated in the same step, so the order counts too.
    model = initial(FromImage)
    start = weights(model)
    expected = np.array(plain_training(model, size))
    trainer, records = trained(
        FromImage, tmp_path, replicas, train_steps=STEPS, learning_rate=RATE, global_batch_size=size
    )
    for i, name in enumerate(("discriminator_loss", "generator_loss")):
        np.testing.assert_allclose([r[name] for r in records], expected[:, i], rtol=1e-5)
    assert_moved(start, weights(trainer.model))
    assert_close(weights(trainer.model), weights(model))


@pytest.mark.parametrize(("moving", "resting"), [("generator", "discriminator"), ("discriminator", "generator")])
def test_each_optimizer_changes_only_its_own_variables(tmp_path: pathlib.Path, moving: str, resting: str) -> None:
    class Half(Gan):
        def build_optimizer(self) -> Any:
            networks = {network.name: network for network in (self.generator, self.discriminator)}
            return {
                name: (optimizers.SGD(learning_rate=0.1 if name == moving else 0.0), network.trainable_variables)
                for name, network in networks.items()
            }

    before = weights(initial(Half))
    trainer, _ = trained(Half, tmp_path, 2, train_steps=3)
    after = weights(trainer.model)
    paths = {n.name: [v.path for v in n.variables] for n in (trainer.generator, trainer.discriminator)}
    assert_moved({path: before[path] for path in paths[moving]}, after)
    assert_same({path: before[path] for path in paths[resting]}, after)


def test_both_optimizers_count_and_keep_slots_of_their_own_network_only(tmp_path: pathlib.Path) -> None:
    trainer, _ = trained(Gan, tmp_path, 2, optimizer="adam", momentum=None, train_steps=4)
    assert set(trainer.optimizers) == {"generator", "discriminator"}
    for name, network in (("generator", trainer.generator), ("discriminator", trainer.discriminator)):
        slots = {slot.partition("/")[2] for slot in trainer.optimizers[name].state()} - {""}
        assert slots == {v.path for v in network.variables}
        assert int(trainer.optimizers[name].iterations.numpy()) == 4


def test_noise_differs_between_replicas_steps_and_uses(tmp_path: pathlib.Path) -> None:
    class Seen(Gan):
        def train_step(self, batch: Any) -> Any:
            figures: dict[str, Any] = {}
            for use in ("generator", "discriminator"):
                first = self.noise(batch, use)[0, 0]  # of the replica's only example
                figures |= {f"{use}_most": Max(first[None]), f"{use}_least": Min(first[None])}
            return {**super().train_step(batch), **figures}

    trainer, _ = trained(Seen, tmp_path, 2, train_steps=3, global_batch_size=2)
    names = [f"{use}_{end}" for use in ("generator", "discriminator") for end in ("most", "least")]
    drawn = [value for name in names for value in column(trainer.config.run_dir, name)]
    assert len(set(drawn)) == 2 * 2 * 3


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_gives_the_energy_distance(replicas: int) -> None:
    # 360 = 3 x 100 + 60: the last batch is short.
    trainer = Gan(settings(num_replicas=replicas, global_batch_size=100))
    found = trainer.evaluate()
    real = digits.load("test")[0].reshape(-1, 64).astype(np.float64)
    generated = trainer.generator(tf.random.stateless_normal([360, NOISE], (1, 2))).numpy().reshape(-1, 64)

    def mean_distance(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean([np.linalg.norm(y - row, axis=1).mean() for row in x]))

    expected = 2 * mean_distance(real, generated) - mean_distance(real, real) - mean_distance(generated, generated)
    assert found["energy_distance"] == pytest.approx(expected, rel=1e-4)
