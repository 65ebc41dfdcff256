"""IDX files, the format of MNIST and of Fashion-MNIST, gzipped or not."""

from __future__ import annotations

import math
import os
import pathlib
import struct

import numpy as np

from framework import ConfigError
from input_pipelines import files

# The third byte of a file: type of its numbers, which are big-endian.
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIX = {"train": "train", "test": "t10k"}
_CURE = "get the file again, for example from a mirror of MNIST or Fashion-MNIST"


def load(data_dir: str | os.PathLike[str], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 ``[examples, rows, columns]`` and labels int32 ``[examples]`` of MNIST or Fashion-MNIST.

    Args:
      data_dir: directory with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
        ``t10k-labels-idx1-ubyte``, each with or without ``.gz``; a dot before ``idx`` is understood too.
      split: ``train`` or ``test``.

    Raises:
      ConfigError: another split; a file that is missing, empty, cut short or of another format; or as many images as
        not labels.
    """
    if split not in _PREFIX:
        raise ConfigError(f"split={split!r} but it must be train or test")
    folder = files.folder_at(data_dir, "data_dir", "data/mnist")
    images_path = _find(folder, _PREFIX[split], "images", 3)
    labels_path = _find(folder, _PREFIX[split], "labels", 1)
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, array, axes in ((images_path, images, 3), (labels_path, labels, 1)):
        if array.ndim != axes or array.dtype != np.uint8:
            raise ConfigError(
                f"{path} holds {array.dtype} of {array.ndim} dimensions but it must hold uint8 of {axes}; {_CURE}"
            )
    if len(images) != len(labels):
        raise ConfigError(
            f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} labels; they must be of one set"
        )
    return images, labels.astype(np.int32)


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an IDX file, in the machine's byte order.

    The format: two zero bytes, a byte for the type, one for the number of dimensions, each dimension as a big-endian
    32-bit number, and the numbers.

    Raises:
      ConfigError: the file cannot be read, or is empty, no IDX file, or shorter or longer than its head says.
    """
    path = pathlib.Path(path)
    content = files.read(path, _CURE)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or not content[3]:
        raise ConfigError(f"{path} starts with {content[:4].hex()}, which is no head of an IDX file; {_CURE}")
    kind, axes = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * axes
    if len(content) < start:
        raise ConfigError(f"{path} is cut short within its head, after {len(content)} bytes; {_CURE}")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    wanted = start + math.prod(shape) * kind.itemsize
    if len(content) != wanted:
        raise ConfigError(
            f"{path} has {len(content)} bytes but its head, of shape {list(shape)}, asks for {wanted}: it is "
            f"{'cut short' if len(content) < wanted else 'followed by something else'}; {_CURE}"
        )
    if not math.prod(shape):
        raise ConfigError(f"{path} holds no numbers: its shape is {list(shape)}; {_CURE}")
    numbers = np.frombuffer(content, kind, offset=start).reshape(shape)
    return numbers.astype(kind.newbyteorder("="))


def _find(folder: pathlib.Path, prefix: str, what: str, axes: int) -> pathlib.Path:
    stems = [f"{prefix}-{what}{dot}idx{axes}-ubyte" for dot in "-."]
    names = [f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz")]
    return files.find(folder, names, "pass the directory with the files of MNIST or Fashion-MNIST")
