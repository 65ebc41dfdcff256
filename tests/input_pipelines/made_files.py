"""Writes small data sets in their real formats, byte by byte as their authors describe them."""

from __future__ import annotations

import gzip
import itertools
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan


def write_idx(path: pathlib.Path, array: np.ndarray, *, packed: bool = False, code: int = 0x08) -> pathlib.Path:
    """An IDX file of numbers of one byte, or of big-endian ones with their ``code``."""
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def write_mnist(folder: pathlib.Path, *, train: int = 6, test: int = 4, packed: bool = False) -> dict[str, np.ndarray]:
    """The four files of MNIST with random pixels; what is in them, by file."""
    random, made = np.random.default_rng(0), {}
    for prefix, count in (("train", train), ("t10k", test)):
        for name, shape in (
            (f"{prefix}-images-idx3-ubyte", (count, 28, 28)),
            (f"{prefix}-labels-idx1-ubyte", (count,)),
        ):
            made[name] = random.integers(0, 10 if len(shape) == 1 else 256, shape).astype(np.uint8)
            write_idx(folder / (name + ".gz" * packed), made[name], packed=packed)
    return made


def cifar_rows(count: int, labels: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Rows of a binary CIFAR file, uint8 ``[count, labels + 3072]``: a colour for each class under noise.

    The classes can be told apart by their mean colours, so that a model has something to learn.
    """
    random = np.random.default_rng(seed)
    colours = np.random.default_rng(99).integers(40, 216, [100, 3])
    noise = random.normal(0.0, 25.0, [count, 3, 32, 32])
    pixels = np.clip(colours[labels[:, -1]][:, :, None, None] + noise, 0, 255).astype(np.uint8)
    return np.concatenate([labels.astype(np.uint8), pixels.reshape(count, -1)], 1)


def write_cifar10(folder: pathlib.Path, *, each: int = 8, test: int = 8) -> np.ndarray:
    """The six files of CIFAR-10; the rows of the training files."""
    folder.mkdir(parents=True, exist_ok=True)
    random, parts = np.random.default_rng(1), []
    for i in range(1, 7):
        count = each if i < 6 else test
        rows = cifar_rows(count, random.integers(0, 10, [count, 1]), seed=i)
        (folder / (f"data_batch_{i}.bin" if i < 6 else "test_batch.bin")).write_bytes(rows.tobytes())
        parts.append(rows)
    return np.concatenate(parts[:-1])


def write_records(folder: pathlib.Path, counts: Sequence[int], *, stem: str = "train") -> list[str]:
    """TFRecord files of the given numbers of records, numbered through: record i is i in decimal, i + 1 times."""
    paths, numbers = [], itertools.count()
    for shard, count in enumerate(counts):
        path = str(folder / f"{stem}-{shard:05}-of-{len(counts):05}")
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(count):
                number = next(numbers)
                writer.write(b",".join([str(number).encode()] * (number + 1)))
        paths.append(path)
    return paths


def parse_number(record: tf.Tensor) -> tf.Tensor:
    """The number of a record of ``write_records``; its copies must agree."""
    numbers = tf.strings.to_number(tf.strings.split(record, ","), tf.int64)
    same = tf.reduce_all(numbers == tf.size(numbers, tf.int64) - 1)
    with tf.control_dependencies([tf.debugging.Assert(same, [record])]):
        return tf.cast(numbers[0], tf.int32)


def picture(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    """A smooth picture, uint8 ``[height, width, 3]``: JPEG keeps it within a few grey levels."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / 10.0
    waves = [np.sin(x * random.uniform(0.2, 0.6) + y * random.uniform(0.2, 0.6) + random.uniform(0, 6)) for _ in "rgb"]
    return np.asarray(128 + 100 * np.stack(waves, -1)).astype(np.uint8)


def jpeg(seed: int, **shape: int) -> bytes:
    """A JPEG file of ``picture``."""
    return tf.io.encode_jpeg(picture(seed, **shape), quality=100, chroma_downsampling=False).numpy()


def image_example(encoded: bytes, label: int) -> bytes:
    """A record of ImageNet."""
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x.JPEG"])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_imagenet(folder: pathlib.Path, records: Sequence[bytes], *, shards: int = 2, split: str = "train") -> None:
    """ImageNet's files from ready records, dealt out in turn."""
    for shard in range(shards):
        with tf.io.TFRecordWriter(str(folder / f"{split}-{shard:05}-of-{shards:05}")) as writer:
            for record in records[shard::shards]:
                writer.write(record)


def damage(path: str | pathlib.Path, at: int, value: int = 0x55) -> None:
    """Flips bits of the byte at ``at`` (from the end if negative)."""
    content = bytearray(pathlib.Path(path).read_bytes())
    content[at] ^= value
    pathlib.Path(path).write_bytes(bytes(content))


def cut(path: str | pathlib.Path, keep: int) -> None:
    """Keeps the first ``keep`` bytes, or all but the last ``-keep``."""
    path = pathlib.Path(path)
    path.write_bytes(path.read_bytes()[:keep])


def global_batches(data: Any, steps: int, replicas: int = 1, **plan: Any) -> list[Any]:
    """The global batches of a pipeline as nests of arrays, parts of the replicas joined."""
    made = BatchPlan(num_replicas=replicas, local_replicas=replicas, **plan)
    parts = list(data.batches(made).take(steps * replicas).as_numpy_iterator())
    steps_of = [parts[i : i + replicas] for i in range(0, len(parts), replicas)]
    return [tf.nest.map_structure(lambda *p: np.concatenate(p), *one) for one in steps_of]


def stream(data: Any, steps: int, replicas: int = 1, **plan: Any) -> Any:
    """The same as one nest: all examples in their order."""
    return tf.nest.map_structure(lambda *p: np.concatenate(p), *global_batches(data, steps, replicas, **plan))
