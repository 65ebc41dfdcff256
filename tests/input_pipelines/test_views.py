"""Two views of an image: parts, mirrors and colours, each a function of the example's key."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from input_pipelines import TwoViews, from_arrays
from input_pipelines.views import _hue_turned
from tests.input_pipelines.reading import assert_position_decides, read


def views(images: Any, **options: Any) -> list[np.ndarray]:
    """Both views of each image, and the labels behind them."""
    keys = np.stack([np.zeros(len(images), np.int64), np.arange(len(images))], 1)
    made = TwoViews(**options).batched((tf.constant(images), tf.range(len(images))), tf.constant(keys))
    return [np.asarray(v) for v in made]


def test_a_view_of_all_of_an_image_without_change_is_the_image_or_its_mirror() -> None:
    images = np.random.default_rng(0).integers(0, 256, [40, 6, 6, 3]).astype(np.uint8)
    whole = images.astype(int)
    first, second, labels = views(images, area=(1.0, 1.0), color=0.0, gray=0.0)
    assert first.dtype == np.uint8 and labels.tolist() == list(range(40))
    kinds = []
    for image, one in zip(whole, first.astype(int)):
        # The aspect changes the part: of an area of 1 with another aspect than 1 a side is cut off.
        kinds.append(np.abs(one - image[:, ::-1]).mean() < np.abs(one - image).mean())
    assert 8 < sum(kinds) < 32
    assert np.any(first != second)
    plain = views(images, area=(1.0, 1.0), color=0.0, gray=0.0, flip=False)[0].astype(int)
    assert np.abs(plain - whole).mean() < 0.8 * np.abs(plain - whole[:, :, ::-1]).mean()


def test_a_view_shows_a_part_of_the_asked_area() -> None:
    """On a picture whose pixels say where they are, the corners tell the box."""
    y, x = np.mgrid[0:64, 0:64] * 4
    images = np.repeat(np.stack([y, x], -1)[None].astype(np.uint8), 500, 0)
    first, *_ = views(images, area=(0.2, 0.5), color=0.0, flip=False)
    box = (first[:, -1, -1].astype(float) - first[:, 0, 0]) / (63 * 4)
    area, aspect = box[:, 0] * box[:, 1], box[:, 1] / box[:, 0]
    assert 0.18 < area.min() < 0.23 and 0.47 < area.max() < 0.52 and abs(area.mean() - 0.35) < 0.02
    assert 0.72 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.37


def test_colours_change_in_8_of_10_views_and_some_views_are_gray() -> None:
    colour = np.broadcast_to(np.array([150, 90, 60], np.uint8), [1000, 4, 4, 3])
    first, second, _ = views(colour, area=(1.0, 1.0), color=0.5, gray=0.2)
    for view in (first, second):
        pixel = view[:, 0, 0].astype(int)
        gray = np.ptp(pixel, axis=1) <= 1
        same = np.all(np.abs(pixel - [150, 90, 60]) <= 1, axis=1)
        assert abs(gray.mean() - 0.2) < 0.05 and abs(same.mean() - 0.16) < 0.05  # 0.2 unchanged x 0.8 not gray
    assert np.mean(first != second) > 0.5
    one_channel, *_ = views(colour[..., :1], color=0.5)
    assert one_channel.shape == (1000, 4, 4, 1)
    assert np.std(one_channel[:, 0, 0].astype(int)) > 20


def test_a_hue_that_is_turned_by_a_third_makes_green_of_red() -> None:
    red = tf.constant([[[[180.0, 90.0, 90.0]]]])
    turned = _hue_turned(red, tf.constant([-2 * np.pi / 3])).numpy().ravel() / 255
    hue = colorsys.rgb_to_hsv(*np.clip(turned, 0, 1))[0]
    assert abs(hue - 1 / 3) < 0.08 or abs(hue - 2 / 3) < 0.08
    np.testing.assert_allclose(turned @ [0.299, 0.587, 0.114], np.array([180, 90, 90]) / 255 @ [0.299, 0.587, 0.114],
                               rtol=1e-3)  # fmt: skip


def test_seed_and_position_decide_the_views() -> None:
    images = np.random.default_rng(0).integers(0, 256, [12, 6, 6, 3]).astype(np.uint8)
    data = from_arrays((images, np.arange(12)), augment=TwoViews())
    assert_position_decides(data)
    [batch] = read(data, 1, 3, global_batch_size=2)  # a replica without an example
    assert [part.shape for part in batch] == [(2, 6, 6, 3), (2, 6, 6, 3), (2,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"area": (0.0, 1.0)}, "area="), ({"area": (0.5, 0.2)}, "the smaller first"), ({"color": 2.0}, "color=2")],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoViews(**options)
