"""CIFAR-10 and CIFAR-100 in their binary version (Krizhevsky 2009)."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from framework import ConfigError
from input_pipelines import files

_SIDE, _PIXELS = 32, 3 * 32 * 32
_CURE = "get the binary version (for C programs) again and unpack it"

# Mean and standard deviation of the training images of CIFAR-10 by channel, in 0..255.
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def load_cifar10(data_dir: str | os.PathLike[str], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 ``[examples, 32, 32, 3]`` and labels int32 ``[examples]`` in 0..9.

    Args:
      data_dir: directory with ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or the one above it.
      split: ``train`` (the five files, one after the other) or ``test``.

    Raises:
      ConfigError: another split; or a file that is missing, empty, cut short or of another format.
    """
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    names = _of_split(split, train, ["test_batch.bin"])
    labels, images = _read(_folder(data_dir, "cifar-10-batches-bin", names[0]), names, [10])
    return images, labels[:, 0]


def load_cifar100(
    data_dir: str | os.PathLike[str], split: str, *, coarse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 ``[examples, 32, 32, 3]`` and labels int32 ``[examples]``.

    Args:
      data_dir: directory with ``train.bin`` and ``test.bin``, or the one above it.
      split: ``train`` or ``test``.
      coarse: the 20 super-classes instead of the 100 classes.

    Raises:
      ConfigError: another split; or a file that is missing, empty, cut short or of another format.
    """
    names = _of_split(split, ["train.bin"], ["test.bin"])
    labels, images = _read(_folder(data_dir, "cifar-100-binary", names[0]), names, [20, 100])
    return images, labels[:, 0 if coarse else 1]


def _of_split(split: str, train: list[str], test: list[str]) -> list[str]:
    if split not in ("train", "test"):
        raise ConfigError(f"split={split!r} but it must be train or test")
    return train if split == "train" else test


def _folder(data_dir: str | os.PathLike[str], usual: str, first: str) -> pathlib.Path:
    """``data_dir``, or the directory of the usual name in it."""
    folder = files.folder_at(data_dir, "data_dir", f"data/{usual}")
    inner = folder / usual
    return inner if inner.is_dir() and not (folder / first).exists() else folder


def _read(folder: pathlib.Path, names: list[str], classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Labels int32 ``[examples, len(classes)]`` and images of several files.

    An example is one byte for each label, then 1,024 bytes of red, of green and of blue, row by row.
    """
    length, parts = len(classes) + _PIXELS, []
    for name in names:
        if (folder / name).with_suffix("").is_file() and not (folder / name).is_file():
            raise ConfigError(f"{folder} has the version for Python but {name} is of the binary one; {_CURE}")
        path = files.find(folder, [name], _CURE)
        content = files.read(path, _CURE)
        count, rest = divmod(len(content), length)
        if rest:
            raise ConfigError(
                f"{path} has {len(content)} bytes, which is {count} examples of {length} bytes and {rest} bytes more: "
                f"it is cut short or of another format; {_CURE}"
            )
        rows = np.frombuffer(content, np.uint8).reshape(count, length)
        for column, number in enumerate(classes):
            if rows[:, column].max() >= number:
                example = int(np.argmax(rows[:, column] >= number))
                raise ConfigError(
                    f"{path} has label {rows[example, column]} at example {example} but labels are below {number}: it "
                    f"is of another format; {_CURE}"
                )
        parts.append(rows)
        # Cut at the border of an example a file looks whole; but those of one set are all of one length.
        if count != len(parts[0]):
            raise ConfigError(
                f"{path} has {count} examples but {names[0]} {len(parts[0])}: one of them is cut short; {_CURE}"
            )
    whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
    images = whole[:, len(classes) :].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return whole[:, : len(classes)].astype(np.int32), np.ascontiguousarray(images)
