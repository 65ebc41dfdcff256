"""Token files: token ids in one memory-mapped file, with a JSON file beside it, read in windows."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from os import PathLike
from typing import Any

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.masking import MaskTokens
from input_pipelines.order import example_indices, example_keys

FORMAT = "lockstep-tokens"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

# Bytes as tokens, and after them the id that ends a document.
BYTES_VOCABULARY = 257
END_OF_DOCUMENT = 256

# A file up to this size is held in memory: reading it there takes no Python in the input's threads.
_RESIDENT_BYTES = 64 * 2**20
_MAKE = "make one with python -m input_pipelines.pack"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """What the JSON file beside a token file says; see ``open_tokens``.

    Attributes:
      path: of the token file, raw little-endian ids without a header.
      dtype: ``uint16`` or ``uint32``.
      vocabulary_size: ids are below it.
      count: ids in the file.
      end_of_document: the id that ends each document; None: the file has no marks.
    """

    path: pathlib.Path
    dtype: str
    vocabulary_size: int
    count: int
    end_of_document: int | None = None

    def ids(self) -> np.ndarray:
        """The ids as a read-only array ``[count]`` that the system reads from the file where it is looked at."""
        return np.memmap(self.path, DTYPES[self.dtype], mode="r", shape=(self.count,))

    def side_file(self) -> str:
        """The text of the JSON file."""
        values = dataclasses.asdict(self)
        del values["path"]
        return json.dumps({"format": FORMAT, "version": 1, **values}, indent=2) + "\n"


def side_path(path: str | PathLike[str]) -> pathlib.Path:
    """Where the JSON file of a token file is: the same name ending in ``.json``."""
    return pathlib.Path(path).with_suffix(".json")


def open_tokens(path: str | PathLike[str]) -> TokenFile:
    """The description of a token file, after checking that it and the file agree.

    Raises:
      ConfigError: one of the two files is missing, empty, cut off, or not of this format.
    """
    path = pathlib.Path(path)
    side = side_path(path)
    if path == side:
        raise ConfigError(f"{path} is the side file's name; pass the token file, {path.with_suffix('.bin')}")
    for file in (path, side):
        if not file.is_file():
            raise ConfigError(f"{file} is missing: a token file is {path.name} with {side.name} beside it; {_MAKE}")
    try:
        values = json.loads(side.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{side} cannot be read as JSON: {error}; copy it again, or {_MAKE}") from error
    found = _checked(values, path, side)
    size, item = path.stat().st_size, DTYPES[found.dtype].itemsize
    if size != found.count * item:
        raise ConfigError(
            f"{path} has {size} bytes but {side.name} says {found.count} ids of {found.dtype}, {found.count * item} "
            "bytes: it is cut off or belongs to another file; copy both again"
        )
    return found


def _checked(values: Any, path: pathlib.Path, side: pathlib.Path) -> TokenFile:
    """The fields of a side file, or ConfigError."""
    if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != 1:
        raise ConfigError(
            f'{side} does not say "format": "{FORMAT}", "version": 1; it belongs to something else; {_MAKE}'
        )

    def whole(name: str, low: int, high: int) -> int:
        value = values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(
                f"{side} says {name}={value!r} but it must be a whole number from {low} to {high}; {_MAKE}"
            )
        return value

    dtype = values.get("dtype")
    if dtype not in DTYPES:
        raise ConfigError(f"{side} says dtype={dtype!r} but it must be one of {', '.join(DTYPES)}; {_MAKE}")
    # int32 in the graph, so ids stay below 2**31.
    vocabulary = whole("vocabulary_size", 1, min(2 ** (8 * DTYPES[dtype].itemsize), 2**31 - 1))
    end = values.get("end_of_document")
    return TokenFile(
        path=path,
        dtype=dtype,
        vocabulary_size=vocabulary,
        count=whole("count", 0, 2**62),
        end_of_document=None if end is None else whole("end_of_document", 0, vocabulary - 1),
    )


class TokenPipeline:
    """Windows of a token file; see ``from_tokens``.

    Attributes:
      file: what the file says of itself.
      size: windows in an epoch.
    """

    def __init__(
        self, file: TokenFile, *, length: int, shuffle: bool, resident: bool, corrupt: MaskTokens | None = None
    ):
        self.file, self._length, self._shuffle, self._corrupt = file, length, shuffle, corrupt
        self.size = (file.count - 1) // length
        self._ids = file.ids()
        self._tensor = None
        if resident:
            self._check(self._ids, 0)
            with tf.device("CPU:0"):
                self._tensor = tf.constant(self._ids)

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: inputs and targets, int32 ``[rows, length]`` each."""

        def fetch(positions: tf.Tensor) -> Any:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            if self._tensor is not None:
                places = index[:, None] * self._length + tf.range(self._length + 1, dtype=tf.int64)
                windows = tf.cast(tf.gather(self._tensor, places), tf.int32)
            else:
                windows = tf.numpy_function(self._read, [index], tf.int32, stateful=False)
            windows = tf.ensure_shape(windows, [*index.shape, self._length + 1])
            rows = windows[:, :-1], windows[:, 1:]
            if self._corrupt is None:
                return rows
            return self._corrupt(rows, example_keys(positions, index, self.size, plan.seed))

        return plan.read(fetch, row_bytes=8 * self._length)

    def _read(self, index: np.ndarray) -> np.ndarray:
        """Windows int32 ``[rows, length + 1]`` from the file."""
        windows = np.empty([len(index), self._length + 1], np.int32)
        for row, i in enumerate(index):
            start = int(i) * self._length
            ids = self._ids[start : start + self._length + 1]
            self._check(ids, start)
            windows[row] = ids
        return windows

    def _check(self, ids: np.ndarray, start: int) -> None:
        # A GPU's embedding gives zeros for an id that it does not have, without a word.
        if int(ids.max()) >= self.file.vocabulary_size:
            at = int(np.argmax(ids >= self.file.vocabulary_size))
            raise ConfigError(
                f"{self.file.path} holds id {ids[at]} at place {start + at} but ids must be below the vocabulary size "
                f"{self.file.vocabulary_size} of {side_path(self.file.path).name}; {_MAKE}"
            )


def from_tokens(
    path: str | PathLike[str],
    *,
    length: int,
    shuffle: bool = True,
    resident: bool | None = None,
    corrupt: MaskTokens | None = None,
) -> TokenPipeline:
    """A pipeline over the windows of a token file: batches of (inputs, targets), int32 ``[rows, length]`` each.

    Window i is ids ``[i * length, (i + 1) * length]``: its targets are its inputs one place on, and every id but the
    first is a target once an epoch. What is left at the end and too short for a window is not used. Which window
    stands at a position is a function of (seed, position), so a start anywhere costs nothing.

    Args:
      path: of the token file (``.bin``), with its JSON file beside it.
      length: ids in a window's inputs.
      shuffle: whether each training epoch is a new seeded permutation of the windows; evaluation reads in order.
      resident: hold the file in memory; None: if it has at most 64 MiB. Else it is mapped, and read as it is needed.
      corrupt: hides ids of each window, in training and in evaluation, and gives another batch; see ``MaskTokens``.

    Raises:
      ConfigError: see ``open_tokens``; or the file is shorter than one window, or holds an id that is not in the
        vocabulary (of a mapped file that is seen when it is read, as an error of TensorFlow with the same text).
    """
    if length < 1:
        raise ConfigError(f"length={length} but a window has at least 1 id; for example length=128")
    file = open_tokens(path)
    if file.count < length + 1:
        raise ConfigError(
            f"{file.path} holds {file.count} ids but one window of length={length} takes {length + 1}; "
            "pass a shorter length or a longer file"
        )
    if resident is None:
        resident = file.path.stat().st_size <= _RESIDENT_BYTES
    return TokenPipeline(file, length=length, shuffle=shuffle, resident=resident, corrupt=corrupt)
