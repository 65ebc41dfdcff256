"""Vision transformers: their size, numbers against NumPy, and what the task makes of its settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from models.language_model import parameter_count
from models.vit import VisionTransformer, vit_shape
from models.vit_task import Vit
from tests.helpers import settings
from tests.models.encoders import blocks, norm, randomized, weights


@pytest.mark.parametrize(("variant", "parameters"), [("ti", 5_717_416), ("s", 22_050_664), ("b", 86_567_656)])
def test_variants_have_the_published_number_of_parameters(variant: str, parameters: int) -> None:
    assert vit_shape(variant, image_size=224, patch=16, classes=1000).parameters == parameters


def small(**changes: Any) -> VisionTransformer:
    sizes = {"width": 8, "layers": 2, "heads": 2, "channels": 2, "image_size": 6, "patch": 3, "classes": 5}
    return VisionTransformer(vit_shape("ti", **{**sizes, **changes}))


def test_a_model_has_the_parameters_that_its_shape_says() -> None:
    made = small()
    assert parameter_count(made) == made.shape.parameters
    # By hand: patches of 18 numbers and a bias, the token, 5 positions, a norm, a head; a block as of a small GPT.
    assert made.shape.parameters == 144 + 8 + 8 + 40 + 16 + 45 + 2 * 872


def test_logits_are_those_of_numpy() -> None:
    made = randomized(small())
    images = np.random.default_rng(0).normal(size=[3, 6, 6, 2]).astype(np.float32)
    w = weights(made)
    expected = []
    for image in images.astype(np.float64):
        patches = [image[i : i + 3, j : j + 3].ravel() for i in (0, 3) for j in (0, 3)]
        x = np.stack([w["class_token"], *(p @ w["patch_kernel"] + w["patch_bias"] for p in patches)]) + w["positions"]
        y = norm(blocks(made, x), w, "norm", 1e-6)[0]
        expected.append(y @ w["head_kernel"] + w["head_bias"])
    found = made(images)
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert made(images[:0]).shape == [0, 5]


def test_a_new_model_finds_all_classes_equally_likely() -> None:
    assert np.all(small()(np.ones([2, 6, 6, 2], np.float32)).numpy() == 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 3}, "patch=3 with images of 8 pixels"),
        ({"width": 10, "heads": 3}, "width=10 with heads=3"),
        ({"image_size": 64}, "image_size=64 with data=digits, whose images have 8 pixels"),
        ({"data": "mnist"}, "data='mnist' but it must be one of digits, cifar10, cifar100, imagenet"),
        ({"variant": "h"}, "variant='h' but it must be one of ti, s, b"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Vit(settings(), **options)


def test_settings_replace_those_of_the_variant_and_of_the_data() -> None:
    shape = Vit.Options(data="imagenet", variant="s", image_size=64, patch=8, layers=2).shape()
    assert (shape.width, shape.layers, shape.heads, shape.patches, shape.classes) == (384, 2, 6, 64, 1000)
    assert Vit.Options().shape().patches == 16


def test_a_directory_for_data_of_the_package_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="with data=digits, which come with the package; leave it out"):
        Vit(settings(), data_dir=str(tmp_path)).train_data()
