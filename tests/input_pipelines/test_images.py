"""Decoded images: the right part, size and colours; ImageNet's records and directories; what cannot be read."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import BatchPlan, ConfigError, Pipeline
from input_pipelines import image_folder, imagenet, images
from tests.input_pipelines.made_files import cut, damage, image_example, jpeg, picture, stream, write_imagenet

KEY = tf.constant([5, 1], tf.int64)


def key(i: int) -> tf.Tensor:
    return tf.constant([5, i], tf.int64)


# --- one image -------------------------------------------------------------------------------------------------------


def test_evaluation_takes_the_middle_and_keeps_the_colours() -> None:
    """48 x 64 pixels: a square of 42 in the middle; of its own size it is not even resized."""
    whole = picture(3, 48, 64)
    made = images.decode(jpeg(3, height=48, width=64), KEY, size=42, training=False)
    assert made.dtype == tf.uint8 and made.shape == (42, 42, 3)
    middle = whole[3:45, 11:53].astype(int)
    assert np.abs(made.numpy() - middle).max() <= 6
    half = images.decode(jpeg(3, height=48, width=64), KEY, size=21, training=False).numpy()
    assert np.abs(half - middle.reshape(21, 2, 21, 2, 3).mean((1, 3))).max() <= 6


def test_a_png_is_decoded_to_the_same_pixels_and_grey_becomes_colour() -> None:
    png = tf.io.encode_png(picture(3, 48, 64))
    made = images.decode(png, KEY, size=42, training=False).numpy()
    np.testing.assert_array_equal(made, picture(3, 48, 64)[3:45, 11:53])
    grey = images.decode(tf.io.encode_jpeg(picture(3)[..., :1]), KEY, size=8, training=False).numpy()
    assert grey.shape == (8, 8, 3) and np.array_equal(grey[..., 0], grey[..., 2])


def test_training_takes_random_parts_and_mirrors_half_of_them() -> None:
    """Red grows to the right and green downwards, so a part tells where it is and whether it is mirrored."""
    y, x = np.mgrid[0:64, 0:64]
    ramp = np.stack([x * 3, y * 3, 0 * x], -1).astype(np.uint8)
    encoded = tf.io.encode_jpeg(ramp, quality=100, chroma_downsampling=False)
    made = [images.decode(encoded, key(i), size=16, training=True).numpy().astype(int) for i in range(100)]
    mirrored = sum(m[8, 0, 0] > m[8, -1, 0] for m in made)
    assert 25 <= mirrored <= 75  # 50 and 5 standard deviations
    spans = [abs(m[8, 0, 0] - m[8, -1, 0]) / 180 for m in made]
    assert min(spans) < 0.45 and max(spans) > 0.85
    assert len({m.tobytes() for m in made}) > 95
    again = images.decode(encoded, key(7), size=16, training=True).numpy()
    np.testing.assert_array_equal(again, made[7])


@pytest.mark.parametrize("training", [False, True])
def test_bytes_that_are_no_image_are_an_error(training: bool) -> None:
    for encoded in (b"", b"GIF of sorts", jpeg(1)[:100], b"\xff\xd8\xff" + b"x" * 50):
        with pytest.raises(tf.errors.InvalidArgumentError):
            images.decode(tf.constant(encoded), KEY, size=8, training=training)


def test_normalised_pixels_have_the_mean_subtracted_and_the_unit_divided() -> None:
    made = images.normalize(tf.constant([[[0, 100, 255]]], tf.uint8), (10.0, 20.0, 55.0), (2.0, 4.0, 5.0))
    assert made.dtype == tf.float32 and made.numpy().tolist() == [[[-5.0, 20.0, 40.0]]]


# --- ImageNet --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twelve images in two training files, four in one file for validation; label of image i is 80 i + 1."""
    train = [image_example(jpeg(i, height=30 + i, width=40), 80 * i + 1) for i in range(12)]
    write_imagenet(tmp_path, train)
    write_imagenet(tmp_path, [image_example(jpeg(i), 1000 - i) for i in range(4)], shards=1, split="validation")
    return tmp_path


def test_labels_start_at_0_and_evaluation_is_in_the_order_of_the_files(small: pathlib.Path) -> None:
    data = imagenet(small, "validation", image_size=16)
    assert isinstance(data, Pipeline) and data.size == 4
    made, labels = stream(data, 3, 2, global_batch_size=2, stop=4, training=False)
    assert labels.tolist() == [999, 998, 997, 996] and labels.dtype == np.int32
    assert made.shape == (4, 16, 16, 3) and made.dtype == np.uint8
    for i in range(4):
        np.testing.assert_array_equal(made[i], images.decode(jpeg(i), KEY, size=16, training=False))
    train = stream(imagenet(small, "train", image_size=8), 1, global_batch_size=12, stop=12, training=False)[1]
    assert train.tolist() == [80 * i for i in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)]


@pytest.mark.parametrize("by_shard", [False, True])
def test_training_is_equal_on_any_replicas_and_after_a_resume(small: pathlib.Path, by_shard: bool) -> None:
    data = imagenet(small, "train", image_size=16, by_shard=by_shard, index_file=small / "index.npz")
    whole = stream(data, 1, global_batch_size=24, seed=9)
    for batch, replicas, start in ((5, 3, 0), (6, 2, 7)):
        other = stream(data, 2, replicas, global_batch_size=batch, seed=9, start=start)
        np.testing.assert_array_equal(other[1], whole[1][start : start + 2 * batch])
        np.testing.assert_array_equal(other[0], whole[0][start : start + 2 * batch])
    assert sorted(whole[1][:12]) == sorted(whole[1][12:]) == [80 * i for i in range(12)]
    first = {int(label): image for image, label in zip(whole[0][:12], whole[1])}
    assert not any(np.array_equal(first[int(label)], image) for image, label in zip(whole[0][12:], whole[1][12:]))


def test_shapes_are_static(small: pathlib.Path) -> None:
    plan = BatchPlan(global_batch_size=6, num_replicas=2, local_replicas=2)
    spec = imagenet(small, "train", image_size=16).batches(plan).element_spec
    assert [s.shape.as_list() for s in spec] == [[3, 16, 16, 3], [3]]


def test_a_directory_without_the_files_of_the_split_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"has no file train-\*"):
        imagenet(tmp_path, "train")
    with pytest.raises(ConfigError, match="does not exist"):
        imagenet(tmp_path / "no", "train")
    with pytest.raises(ConfigError, match="split='test'"):
        imagenet(tmp_path, "test")
    with pytest.raises(ConfigError, match="image_size=0"):
        imagenet(tmp_path, "train", image_size=0)
    (tmp_path / "train-0").write_bytes(b"")
    with pytest.raises(ConfigError, match="train-0 is empty"):
        imagenet(tmp_path, "train")


def test_a_foreign_first_record_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    for record, message in (
        (b"no example at all", "record 0 of .*train-00000-of-00001 cannot be read: .*parse"),
        (tf.train.Example().SerializeToString(), "record 0 of .*image/.* is required"),
        (image_example(jpeg(1), 0), "record 0 of .*not in 1..1000"),
        (image_example(jpeg(1), 1001), "record 0 of .*not in 1..1000"),
        (image_example(b"no image", 5), "record 0 of .* cannot be read"),
    ):
        write_imagenet(tmp_path, [record], shards=1)
        with pytest.raises(ConfigError, match=message):
            imagenet(tmp_path, "train", image_size=8)


def test_an_image_that_cannot_be_decoded_is_replaced_and_counted(tmp_path: pathlib.Path) -> None:
    bad = {2: image_example(jpeg(2)[:200], 3), 3: image_example(jpeg(3), 2000)}
    write_imagenet(tmp_path, [bad.get(i, image_example(jpeg(i), i + 1)) for i in range(6)], shards=1)
    path = tmp_path / "train-00000-of-00001"
    damage(path, -6)  # and record 5
    data = imagenet(tmp_path, "train", image_size=8, skip_bad_examples=3)
    _, labels = stream(data, 2, 2, global_batch_size=3, stop=6, training=False)
    assert labels.tolist() == [0, 1, 4, 4, 4, 0]
    assert sorted(data.bad_examples) == [2, 3, 5]
    strict = imagenet(tmp_path, "train", image_size=8)
    with pytest.raises(tf.errors.OpError, match=rf"record 2 of {path} cannot be read"):
        stream(strict, 2, global_batch_size=3, stop=6, training=False)


# --- a directory of images -------------------------------------------------------------------------------------------


@pytest.fixture
def pets(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two cats and three dogs, as JPEG and PNG, among things that are no images."""
    for name, content in {
        "dog/b.JPG": jpeg(2),
        "dog/a.png": tf.io.encode_png(picture(1)).numpy(),
        "dog/c.jpeg": jpeg(3),
        "cat/1.jpg": jpeg(4),
        "cat/2.jpg": jpeg(5),
        "cat/notes.txt": b"x",
        ".hidden/x.jpg": b"x",
        "readme.jpg": b"x",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_classes_are_sub_directories_in_the_order_of_their_names(pets: pathlib.Path) -> None:
    data = image_folder(pets, image_size=16)
    assert isinstance(data, Pipeline) and (data.size, data.class_names) == (5, ["cat", "dog"])
    made, labels = stream(data, 1, global_batch_size=5, stop=5, training=False)
    assert labels.tolist() == [0, 0, 1, 1, 1] and labels.dtype == np.int32
    expected = [jpeg(4), jpeg(5), tf.io.encode_png(picture(1)), jpeg(2), jpeg(3)]
    for image, encoded in zip(made, expected, strict=True):
        np.testing.assert_array_equal(image, images.decode(encoded, KEY, size=16, training=False))


def test_training_on_a_directory_is_shuffled_and_augmented_by_example(pets: pathlib.Path) -> None:
    data = image_folder(pets, image_size=16)
    whole = stream(data, 1, global_batch_size=15, seed=1)
    rest = stream(data, 2, 3, global_batch_size=4, seed=1, start=6)
    for a, b in zip(whole, rest):
        np.testing.assert_array_equal(a[6:14], b)
    assert len({image.tobytes() for image in whole[0]}) == 15


def test_a_file_that_is_no_image_is_named_or_replaced(pets: pathlib.Path) -> None:
    cut(pets / "dog" / "b.JPG", 60)
    (pets / "cat" / "2.jpg").write_bytes(b"")
    plan: dict[str, Any] = {"global_batch_size": 5, "stop": 5, "training": False}
    with pytest.raises(tf.errors.OpError, match=r"cat/2\.jpg cannot be read"):
        stream(image_folder(pets, image_size=8), 1, **plan)
    data = image_folder(pets, image_size=8, skip_bad_examples=2)
    made, labels = stream(data, 1, **plan)
    assert labels.tolist() == [0, 1, 1, 1, 1]
    np.testing.assert_array_equal(made[3], made[4])
    np.testing.assert_array_equal(made[1], made[2])
    (pets / "dog" / "a.png").unlink()  # after the pipeline was made
    with pytest.raises(tf.errors.OpError, match=r"dog/a\.png cannot be read: .*No such file"):
        stream(data, 1, **plan)


def test_directories_that_hold_no_classes_or_no_images_are_refused(pets: pathlib.Path) -> None:
    for path, message in (
        ("", "data_dir is empty"),
        (pets / "no", "does not exist"),
        (pets / "readme.jpg", "is a file"),
        (pets / "dog", "has no sub-directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            image_folder(path)
    with pytest.raises(ConfigError, match="image_size=-1"):
        image_folder(pets, image_size=-1)
    (pets / "bird").mkdir()
    with pytest.raises(ConfigError, match=r"bird has no file that ends with \.jpg"):
        image_folder(pets)
    (pets / "bird" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"bird/x\.jpg cannot be read"):
        image_folder(pets)
