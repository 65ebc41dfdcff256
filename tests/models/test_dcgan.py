"""DCGAN: sizes of the paper's networks, noise that belongs to the example, and what a run leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from input_pipelines import from_arrays
from models.dcgan import discriminator, generator
from models.dcgan_task import Dcgan, WithNoise, _distances
from models.language_model import parameter_count
from tests.helpers import settings
from tests.input_pipelines.reading import assert_position_decides, read


def test_the_networks_of_64_pixels_are_those_of_the_paper() -> None:
    """Figure 1: 1,024 channels of 4 x 4, then 512, 256 and 128, then the image; 5 x 5 throughout."""
    made = generator(image_size=64, width=128)
    assert made.get_layer("shape").output.shape[1:] == (4, 4, 1024)
    assert [made.get_layer(f"up{i}").output.shape[1:] for i in (1, 2, 3)] == [(8, 8, 512), (16, 16, 256), (32, 32, 128)]
    assert made.output_shape == (None, 64, 64, 3)
    kernels = 100 * 16 * 1024 + 25 * (1024 * 512 + 512 * 256 + 256 * 128 + 128 * 3)
    assert parameter_count(made) == kernels + 2 * (1024 + 512 + 256 + 128) + 3
    judge = discriminator(image_size=64, width=128)
    kernels = 25 * (3 * 128 + 128 * 256 + 256 * 512 + 512 * 1024) + 16 * 1024
    assert parameter_count(judge) == kernels + 128 + 2 * (256 + 512 + 1024) + 1


@pytest.mark.parametrize("size", [8, 32])
def test_smaller_images_take_fewer_layers(size: int) -> None:
    made = generator(image_size=size, channels=1, noise=5, width=4)
    pixels = made(np.zeros([2, 5], np.float32))
    assert pixels.shape == [2, size, size, 1] and np.abs(pixels).max() <= 1.0
    assert discriminator(image_size=size, channels=1, width=4)(pixels).shape == [2, 1]


@pytest.mark.parametrize("size", [4, 28])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"image_size={size} but it must be a power of two from 8 on"):
        generator(image_size=size)


def test_noise_belongs_to_the_example_and_differs_for_the_two_networks() -> None:
    data = from_arrays((np.arange(50), np.zeros(50)), augment=WithNoise(40))
    assert_position_decides(data)
    [(ids, noise)] = read(data, 1, global_batch_size=50)
    assert noise.shape == (50, 2, 40) and sorted(ids) == list(range(50))
    assert -1.0 <= noise.min() < -0.99 and 0.99 < noise.max() < 1.0 and abs(noise.mean()) < 0.05
    assert len(np.unique(noise)) > 3990  # of 4,000 numbers


def test_distances_are_lengths_of_differences() -> None:
    x, y = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32), np.array([[0.0, 0.0], [0.0, 4.0]], np.float32)
    np.testing.assert_allclose(_distances(tf.constant(x), tf.constant(y)), [[0, 4], [5, 3]], atol=1e-3)


def test_a_run_draws_evaluates_and_exports(tmp_path: Any) -> None:
    config = settings(run_dir=tmp_path / "run", train_steps=2, optimizer="adam", eval_batch_size=100)
    task = Dcgan(config, width=4, noise=5, draw_every=2)
    result = task.train()
    assert result["eval/examples"] == 360 and 0.0 < result["eval/energy_distance"] < 32.0
    # Before training, both networks know nothing: the discriminator's loss is about 2 ln 2.
    assert result["discriminator_loss"] == pytest.approx(2 * np.log(2), rel=0.2)
    page = tf.io.decode_png((tmp_path / "run" / "samples" / "step-00000002.png").read_bytes())
    assert page.shape == [64, 64, 1]
    served = tf.saved_model.load(task.export() + "/saved_model").signatures["serving_default"]
    pixels = served(inputs=task._noise(64))["outputs"].numpy()
    np.testing.assert_array_equal(pixels[1, :, :, 0], page.numpy()[:8, 8:16, 0])


@pytest.mark.parametrize("options", [{"noise": 0}, {"width": 0}, {"draw_every": -1}])
def test_settings_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        Dcgan(settings(), **options)
