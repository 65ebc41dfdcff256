"""Augmentation: a function of (seed, epoch, example) and of nothing else."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines import crop_and_flip, from_arrays
from input_pipelines.augment import central_box, random_box
from input_pipelines.order import example_indices, example_keys, subkey, uniforms
from tests.input_pipelines.made_files import stream

IMAGES = np.arange(1, 1 + 10 * 6 * 6 * 3, dtype=np.int32).reshape(10, 6, 6, 3)
LABELS = np.arange(10, dtype=np.int32)


def data(**options: Any) -> Any:
    return from_arrays((IMAGES, LABELS), augment=crop_and_flip(padding=2, **options))


def noisy(example: Any, seed: tf.Tensor) -> Any:
    """An augmentation without ``batched``, with a branch in the graph."""
    image, label = example
    noise = tf.random.stateless_normal(tf.shape(image), subkey(seed, 3))
    image = tf.cast(image, tf.float32) + noise
    return tf.cond(noise[0, 0, 0] > 0, lambda: image, lambda: -image), label


@pytest.mark.parametrize("augment", [crop_and_flip(padding=2), noisy], ids=["batched", "vectorised"])
def test_an_example_is_augmented_alike_in_any_batch_on_any_replica_and_after_a_resume(augment: Any) -> None:
    source = from_arrays((IMAGES, LABELS), augment=augment)
    whole = stream(source, 1, global_batch_size=30, seed=3)
    for batch, replicas, start in ((4, 2, 0), (5, 3, 9), (1, 2, 7)):
        other = stream(source, 4, replicas, global_batch_size=batch, seed=3, start=start)
        for a, b in zip(whole, other):
            np.testing.assert_array_equal(a[start : start + 4 * batch], b)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    first, again, other = (stream(data(), 1, global_batch_size=20, seed=s) for s in (3, 3, 4))
    np.testing.assert_array_equal(first[0], again[0])
    by_label = [
        {int(label): image for image, label in zip(first[0][e : e + 10], first[1][e : e + 10])} for e in (0, 10)
    ]
    assert set(by_label[0]) == set(by_label[1]) == set(range(10))
    same = sum(np.array_equal(by_label[0][i], by_label[1][i]) for i in range(10))
    assert same <= 3  # 50 windows and mirrors each
    assert not np.array_equal(first[0], other[0])


def test_evaluation_is_not_augmented() -> None:
    images, labels = stream(data(), 2, global_batch_size=5, stop=10, training=False)
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, LABELS)


def test_a_crop_is_a_window_of_the_padded_image_or_its_mirror_and_all_are_equally_likely() -> None:
    """Worked out by NumPy: 5 x 5 windows of a 2 x 2 image padded by 2, each mirrored or not."""
    image = np.array([[1, 2], [3, 4]], np.uint8)
    padded = np.pad(image, 2, constant_values=9)
    windows = [padded[y : y + 2, x : x + 2] for y in range(5) for x in range(5)]
    expected = collections.Counter(w.tobytes() for v in windows for w in (v, v[:, ::-1]))
    keys = tf.stack([tf.fill([5000], tf.constant(5, tf.int64)), tf.range(5000, dtype=tf.int64)], 1)
    made = crop_and_flip(padding=2, fill=9).batched(tf.constant(np.repeat(image[None], 5000, 0)), keys).numpy()
    assert made.dtype == np.uint8
    seen = collections.Counter(m.tobytes() for m in made)
    assert set(seen) == set(expected)
    for window, ways in expected.items():
        mean = 5000 * ways / 50
        assert abs(seen[window] - mean) < 6 * np.sqrt(mean)


def test_the_padding_has_the_given_colour_and_the_rest_of_an_example_is_left_alone() -> None:
    augment = crop_and_flip(padding=3, flip=False, fill=(7.0, 8.0, 9.0))
    keys = tf.stack([tf.zeros([50], tf.int64), tf.range(50, dtype=tf.int64)], 1)
    made = augment.batched({"image": tf.zeros([50, 4, 4, 3], tf.uint8), "id": tf.range(50)}, keys)
    assert made["id"].numpy().tolist() == list(range(50))
    colours = set(map(tuple, made["image"].numpy().reshape(-1, 3).tolist()))
    assert colours == {(0, 0, 0), (7, 8, 9)}
    one = augment({"image": tf.zeros([4, 4, 3], tf.uint8), "id": tf.constant(4)}, keys[17])
    np.testing.assert_array_equal(one["image"], made["image"][17])


def test_without_padding_and_mirror_nothing_changes_and_a_bare_image_is_an_example() -> None:
    augment = crop_and_flip(padding=0, flip=False)
    grey = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    images = stream(from_arrays(grey, shuffle=False, augment=augment), 1, global_batch_size=2)
    np.testing.assert_array_equal(images, grey)


def test_shapes_stay_static() -> None:
    [spec, label] = data().batches(BatchPlan(global_batch_size=6, num_replicas=2, local_replicas=2)).element_spec
    assert spec.shape.as_list() == [3, 6, 6, 3] and label.shape.as_list() == [3]


def test_what_cannot_be_augmented_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding=-1"):
        crop_and_flip(padding=-1)
    key = tf.zeros([1, 2], tf.int64)
    with pytest.raises(ConfigError, match=r"images of shape \(1, 5\)"):
        crop_and_flip().batched(tf.zeros([1, 5]), key)
    with pytest.raises(ConfigError, match="the example has pixels but no 'image'"):
        crop_and_flip().batched({"pixels": tf.zeros([1, 5, 5])}, key)


def test_a_key_is_of_seed_epoch_and_example() -> None:
    positions = tf.range(30, dtype=tf.int64)
    index = example_indices(positions, 10, 7, True)
    keys = example_keys(positions, index, 10, 7).numpy()
    assert len(set(map(tuple, keys.tolist()))) == 30
    for epoch in range(3):
        rows = slice(10 * epoch, 10 * epoch + 10)
        assert sorted(keys[rows, 1]) == list(range(10 * epoch, 10 * epoch + 10))
        np.testing.assert_array_equal(keys[rows, 1] - 10 * epoch, index.numpy()[rows])
    largest = example_keys(positions, index, 10, 2**31 - 1).numpy()
    assert np.all(largest >= 0) and not np.any(largest[:, 0] == keys[:, 0])


def test_draws_are_uniform_and_each_row_is_its_own() -> None:
    keys = tf.stack([tf.fill([4000], tf.constant(1 << 32, tf.int64)), tf.range(4000, dtype=tf.int64)], 1)
    draws = uniforms(keys, 2).numpy()
    assert draws.shape == (4000, 2) and draws.min() >= 0.0 and draws.max() < 1.0
    # The mean of 4,000 uniform numbers is within 6 / sqrt(12 x 4000) of 1/2; neighbours and columns do not correlate.
    assert np.all(np.abs(draws.mean(0) - 0.5) < 6 / np.sqrt(12 * 4000))
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 6 / np.sqrt(4000)
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 6 / np.sqrt(4000)
    np.testing.assert_array_equal(uniforms(keys[100:103], 2), draws[100:103])
    assert uniforms(keys[:0], 2).shape == (0, 2)


def test_a_random_part_keeps_to_area_and_shape() -> None:
    shape = tf.constant([300, 400, 3])
    boxes = np.array([random_box(shape, tf.constant([5, i], tf.int64), (0.08, 1.0), (0.75, 4 / 3)) for i in range(200)])
    top, left, height, width = boxes.T
    assert np.all(top >= 0) and np.all(left >= 0) and np.all(top + height <= 300) and np.all(left + width <= 400)
    share, aspect = height * width / 15000.0, width / height
    assert share.min() > 0.078 and share.max() > 0.7
    assert 0.73 < aspect.min() < 0.9 and 1.1 < aspect.max() < 1.36
    thin = random_box(tf.constant([2, 1000, 3]), tf.constant([5, 1], tf.int64), (0.9, 1.0), (0.75, 4 / 3))
    assert thin.numpy().tolist() == [0, 0, 2, 1000]  # nothing fits


@pytest.mark.parametrize(
    ("shape", "box"), [([256, 256], [16, 16, 224, 224]), ([100, 60], [24, 4, 52, 52]), ([1, 9], [0, 4, 1, 1])]
)
def test_the_middle_is_a_square_of_seven_eighths(shape: list[int], box: list[int]) -> None:
    assert central_box(tf.constant([*shape, 3]), 0.875).numpy().tolist() == box
