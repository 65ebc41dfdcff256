"""IDX files of MNIST and Fashion-MNIST."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from framework import ConfigError
from input_pipelines import idx
from tests.input_pipelines.made_files import cut, write_idx, write_mnist


@pytest.mark.parametrize("packed", [False, True])
def test_images_and_labels_are_those_in_the_files(tmp_path: pathlib.Path, packed: bool) -> None:
    made = write_mnist(tmp_path, packed=packed)
    for split, prefix, count in (("train", "train", 6), ("test", "t10k", 4)):
        images, labels = idx.load(tmp_path, split)
        assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
            (count, 28, 28),
            np.uint8,
            (count,),
            np.int32,
        )
        np.testing.assert_array_equal(images, made[f"{prefix}-images-idx3-ubyte"])
        np.testing.assert_array_equal(labels, made[f"{prefix}-labels-idx1-ubyte"])


def test_the_names_with_a_dot_are_found_and_a_packed_file_without_its_suffix_is_unpacked(
    tmp_path: pathlib.Path,
) -> None:
    images, labels = np.arange(8, dtype=np.uint8).reshape(2, 2, 2), np.array([3, 1], np.uint8)
    write_idx(tmp_path / "train-images.idx3-ubyte", images, packed=True)
    write_idx(tmp_path / "train-labels.idx1-ubyte", labels)
    found = idx.load(str(tmp_path), "train")
    np.testing.assert_array_equal(found[0], images)
    assert found[1].tolist() == [3, 1]


def test_wide_numbers_are_big_endian_in_the_file_and_native_in_the_array(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes([0, 0, 0x0B, 1, 0, 0, 0, 2, 0x01, 0x02, 0xFF, 0xFE]))
    array = idx.read_idx(path)
    assert array.tolist() == [258, -2] and array.dtype == np.int16 and array.dtype.isnative
    values = np.array([[1.5, -2.0]], np.float64)
    np.testing.assert_array_equal(idx.read_idx(write_idx(path, values, code=0x0E)), values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x is empty"),
        (b"\0\0", "no head of an IDX file"),
        (b"P5 28 28 255\n", "no head of an IDX file"),
        (b"\0\0\x07\x01\0\0\0\x01\x05", "no head of an IDX file"),
        (b"\0\0\x08\x00", "no head of an IDX file"),
        (b"\0\0\x08\x03\0\0\0\x01", "cut short within its head, after 8 bytes"),
        (b"\0\0\x08\x01\0\0\0\x03ab", r"has 10 bytes but its head, of shape \[3\], asks for 11: it is cut short"),
        (b"\0\0\x08\x01\0\0\0\x01ab", "followed by something else"),
        (b"\0\0\x08\x01\0\0\0\x00", "holds no numbers"),
        (b"\x1f\x8b\x08\x00garbage", "cannot read|cut short"),
    ],
)
def test_what_is_no_whole_idx_file_is_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        idx.read_idx(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_packed_file_that_is_cut_or_damaged_is_refused(tmp_path: pathlib.Path) -> None:
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    cut(path, len(whole) // 2)
    with pytest.raises(ConfigError, match=r"t10k-images-idx3-ubyte\.gz is cut short: its gzip stream has no end"):
        idx.load(tmp_path, "test")
    path.write_bytes(whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    with pytest.raises(ConfigError, match=r"cannot read .*t10k-images-idx3-ubyte\.gz"):
        idx.load(tmp_path, "test")


def test_files_that_do_not_go_together_are_refused(tmp_path: pathlib.Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(ConfigError, match=r"holds 4 images but .* 5 labels"):
        idx.load(tmp_path, "test")
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros([4, 2], np.uint8))
    with pytest.raises(ConfigError, match="holds uint8 of 2 dimensions but it must hold uint8 of 1"):
        idx.load(tmp_path, "test")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ConfigError, match=r"has none of train-labels-idx1-ubyte, train-labels-idx1-ubyte\.gz"):
        idx.load(tmp_path, "train")


def test_a_directory_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, message in (
        ("", "data_dir is empty"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            idx.load(path, "train")
    with pytest.raises(ConfigError, match="split='valid' but it must be train or test"):
        idx.load(tmp_path, "valid")
