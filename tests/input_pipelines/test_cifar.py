"""CIFAR-10 and CIFAR-100 in their binary version."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from framework import ConfigError
from input_pipelines import cifar
from tests.input_pipelines.made_files import cifar_rows, cut, write_cifar10


def test_red_green_and_blue_planes_become_channels(tmp_path: pathlib.Path) -> None:
    """One example by hand: red counts along the rows, green is 7, blue is the row's number."""
    write_cifar10(tmp_path, test=1)
    red = np.tile(np.arange(32, dtype=np.uint8), 32)
    blue = np.repeat(np.arange(32, dtype=np.uint8), 32)
    (tmp_path / "test_batch.bin").write_bytes(bytes([9]) + red.tobytes() + bytes([7] * 1024) + blue.tobytes())
    images, labels = cifar.load_cifar10(tmp_path, "test")
    assert images.shape == (1, 32, 32, 3) and images.dtype == np.uint8 and images.flags.c_contiguous
    assert labels.tolist() == [9] and labels.dtype == np.int32
    assert images[0, 5, 11].tolist() == [11, 7, 5]


def test_the_training_files_follow_each_other_and_the_usual_directory_is_found(tmp_path: pathlib.Path) -> None:
    rows = write_cifar10(tmp_path / "cifar-10-batches-bin", each=3)
    for folder in (tmp_path, tmp_path / "cifar-10-batches-bin"):
        images, labels = cifar.load_cifar10(folder, "train")
        assert labels.tolist() == rows[:, 0].tolist()
        np.testing.assert_array_equal(images.transpose(0, 3, 1, 2).reshape(15, -1), rows[:, 1:])


def test_cifar_100_has_two_labels(tmp_path: pathlib.Path) -> None:
    labels = np.array([[19, 99], [0, 5], [3, 42]])
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(cifar_rows(3, labels).tobytes())
    for split in ("train", "test"):
        assert cifar.load_cifar100(tmp_path, split)[1].tolist() == [99, 5, 42]
        images, coarse = cifar.load_cifar100(tmp_path, split, coarse=True)
        assert coarse.tolist() == [19, 0, 3] and images.shape == (3, 32, 32, 3)


def test_files_that_are_missing_empty_cut_or_foreign_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    whole = path.read_bytes()
    for content, message in (
        (b"", "data_batch_3.bin is empty"),
        (whole[:-1], "has 24583 bytes, which is 7 examples of 3073 bytes and 3072 bytes more"),
        (whole[:-3073], "data_batch_3.bin has 7 examples but data_batch_1.bin 8: one of them is cut short"),
        (b"\x0a" + whole[1:], "data_batch_3.bin has label 10 at example 0 but labels are below 10"),
        (b"PK\x03\x04", "which is 0 examples"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            cifar.load_cifar10(tmp_path, "train")
    path.unlink()
    with pytest.raises(ConfigError, match=r"has none of data_batch_3\.bin"):
        cifar.load_cifar10(tmp_path, "train")
    (tmp_path / "data_batch_3").write_bytes(b"pickled")
    with pytest.raises(ConfigError, match=r"has the version for Python but data_batch_3\.bin is of the binary one"):
        cifar.load_cifar10(tmp_path, "train")


def test_cifar_10_is_no_cifar_100(tmp_path: pathlib.Path) -> None:
    write_cifar10(tmp_path, test=4)
    (tmp_path / "test_batch.bin").rename(tmp_path / "test.bin")
    with pytest.raises(ConfigError, match="of another format"):
        cifar.load_cifar100(tmp_path, "test")
    cut(tmp_path / "test.bin", 0)
    with pytest.raises(ConfigError, match=r"test\.bin is empty"):
        cifar.load_cifar100(tmp_path, "test")


def test_a_directory_or_split_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"data_dir is empty .* data_dir=data/cifar-10-batches-bin"):
        cifar.load_cifar10("", "train")
    with pytest.raises(ConfigError, match="does not exist"):
        cifar.load_cifar100(tmp_path / "no", "train")
    with pytest.raises(ConfigError, match="split='dev'"):
        cifar.load_cifar100(tmp_path, "dev")
