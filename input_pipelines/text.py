"""Text as bytes: the documents of a folder in memory, in windows with weights; by default Python's own source files."""

from __future__ import annotations

import itertools
import pathlib
import sysconfig

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.files import PathsLike, find_files, split_files
from input_pipelines.masking import MaskTokens
from input_pipelines.order import example_indices, example_keys
from input_pipelines.tokens import BYTES_VOCABULARY, END_OF_DOCUMENT

_LARGEST = 2**30  # bytes that are read into memory


def read_document(path: pathlib.Path) -> np.ndarray:
    """The bytes of a text file as uint8 ``[bytes]``.

    Raises:
      ConfigError: it cannot be read, or has a NUL byte, which no text in UTF-8 or another byte-wise encoding has.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; pass readable text files") from error
    if len(data) and not data.min():
        raise ConfigError(
            f"{path} is not text: byte {data.argmin()} is NUL; narrow the pattern to text files, or convert it to UTF-8"
        )
    return data


def standard_library(split: str = "all") -> list[pathlib.Path]:
    """The source files of the Python standard library on this machine, its top-level modules, sorted by name.

    They are text that every machine has, of about 4.7 MB; which text depends on Python's version.

    Args:
      split: ``all``, ``train`` or ``eval``: every 20th file is for evaluation.

    Raises:
      ConfigError: this Python has its library in another form.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    # Written when Python was built, other on each machine.
    files = [p for p in sorted(folder.glob("*.py")) if not p.name.startswith("_sysconfigdata")]
    if len(files) < 20:
        raise ConfigError(f"{folder} has {len(files)} source files of the standard library; pass a folder with text")
    return split_files(files, split)


class TextPipeline:
    """Windows of documents; see ``from_text``.

    Attributes:
      size: windows in an epoch.
      vocabulary_size: 257: the bytes, and 256 that ends a document.
    """

    vocabulary_size = BYTES_VOCABULARY

    def __init__(
        self,
        documents: list[np.ndarray],
        *,
        length: int,
        shuffle: bool,
        cross_documents: bool,
        corrupt: MaskTokens | None = None,
    ):
        ends = np.cumsum([len(d) + 1 for d in documents])
        ids = np.full(ends[-1], END_OF_DOCUMENT, np.uint16)
        for document, end in zip(documents, ends):
            ids[end - 1 - len(document) : end - 1] = document
        borders = [0, ends[-1]] if cross_documents else [0, *ends]
        # The last id of a piece has nothing after it, so it starts no window.
        starts = [np.arange(low, high - 1, length) for low, high in itertools.pairwise(borders)]
        stops = [np.full(len(s), high) for s, high in zip(starts, borders[1:])]
        self._length, self._shuffle, self._corrupt = length, shuffle, corrupt
        with tf.device("CPU:0"):
            self._ids = tf.constant(ids)
            self._starts = tf.constant(np.concatenate(starts), tf.int64)
            self._stops = tf.constant(np.concatenate(stops), tf.int64)
        self.size = int(self._starts.shape[0])

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: a dict as ``from_text`` says."""

        def fetch(positions: tf.Tensor) -> dict[str, tf.Tensor]:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            places = tf.gather(self._starts, index)[:, None] + tf.range(self._length + 1, dtype=tf.int64)
            inside = places < tf.gather(self._stops, index)[:, None]
            ids = tf.cast(tf.gather(self._ids, tf.minimum(places, len(self._ids) - 1)), tf.int32)
            ids = tf.where(inside, ids, END_OF_DOCUMENT)
            inputs = ids[:, :-1]
            ended = inputs == END_OF_DOCUMENT
            number = 1 + tf.cumsum(tf.cast(ended, tf.int32), 1, exclusive=True)
            rows = {
                "inputs": inputs,
                "targets": ids[:, 1:],
                "weights": tf.cast(inside[:, 1:] & ~ended, tf.float32),
                "segments": tf.where(inside[:, :-1], number, 0),
            }
            if self._corrupt is None:
                return rows
            return self._corrupt(rows, example_keys(positions, index, self.size, plan.seed))

        return plan.read(fetch, row_bytes=16 * self._length)


def from_text(
    source: PathsLike,
    *,
    length: int,
    pattern: str = "*.txt",
    split: str = "all",
    shuffle: bool = True,
    cross_documents: bool = True,
    corrupt: MaskTokens | None = None,
) -> TextPipeline:
    """A pipeline over text files, each a document: its bytes as ids 0 to 255, then 256, its end.

    A batch is a dict, each of shape ``[rows, length]``: ``inputs`` int32; ``targets`` int32, the inputs one place on;
    ``weights`` float32, 0 where nothing is to be learnt: at a document's end, after which any document may begin, and
    in padding; ``segments`` int32: 1 for the window's first document, 2 for the next, ..., 0 for padding.

    Args:
      source: a folder, a file, or several of them.
      length: ids in a window's inputs.
      pattern: of the names of files in folders.
      split: ``all``, or ``train`` or ``eval``: every 20th file is for evaluation, of fewer the last.
      shuffle: whether each training epoch is a new seeded permutation of the windows; evaluation reads in order.
      cross_documents: cut the documents, joined in the order of their paths, into windows, of which only the last one
        is padded; False: cut each document for itself, so that the last window of each is padded.
      corrupt: hides ids of each window, in training and in evaluation, and gives another batch; see ``MaskTokens``.

    Raises:
      ConfigError: a file is missing or not text, or all are empty, or they are too large for memory together.
    """
    if length < 1:
        raise ConfigError(f"length={length} but a window has at least 1 byte; for example length=128")
    files = split_files(find_files(source, pattern), split)
    total = sum(f.stat().st_size for f in files)
    if total > _LARGEST:
        raise ConfigError(
            f"{files[0]} and {len(files) - 1} other files have {total} bytes but at most {_LARGEST} are read into "
            "memory; pack them with python -m input_pipelines.pack and read them with from_tokens"
        )
    documents = [d for d in map(read_document, files) if len(d)]
    if not documents:
        raise ConfigError(f"{files[0]} is empty, as are the {len(files) - 1} other files; pass files with text")
    return TextPipeline(documents, length=length, shuffle=shuffle, cross_documents=cross_documents, corrupt=corrupt)
