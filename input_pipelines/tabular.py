"""Tables with sparse categories: lines of a label, whole numbers and categories, between tabs, as Criteo's are."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from framework import BatchPlan, ConfigError
from input_pipelines.files import PathsLike, find_files
from input_pipelines.lines import Lines
from input_pipelines.order import example_indices


class TablePipeline:
    """Rows of a table; see ``from_tsv``.

    Attributes:
      size: lines in an epoch.
    """

    def __init__(self, lines: Lines, *, numbers: int, buckets: Sequence[int], shuffle: bool, skip_bad_examples: int):
        self.size = len(lines)
        self._lines, self._numbers, self._shuffle, self._limit = lines, numbers, shuffle, skip_bad_examples
        self._buckets = np.array(buckets, np.uint32)
        self._bad: set[int] = set()
        self._lock = threading.Lock()  # the input reads in several threads
        self._check_ends()

    @property
    def bad_examples(self) -> list[int]:
        """Numbers of the bad lines seen so far, counted through all files from 0 on."""
        with self._lock:
            return sorted(self._bad)

    def batches(self, plan: BatchPlan) -> tf.data.Dataset:
        """See ``framework.Pipeline``: a dict as ``from_tsv`` says."""

        def fetch(positions: tf.Tensor) -> dict[str, tf.Tensor]:
            index = example_indices(positions, self.size, plan.seed, self._shuffle and plan.training)
            types = (tf.float32, tf.float32, tf.int64, tf.float32)
            label, dense, sparse, weight = tf.numpy_function(self.rows, [index], types, stateful=False)
            return {
                "label": tf.ensure_shape(label, index.shape),
                "dense": tf.ensure_shape(dense, [*index.shape, self._numbers]),
                "sparse": tf.ensure_shape(sparse, [*index.shape, len(self._buckets)]),
                "weight": tf.ensure_shape(weight, index.shape),
            }

        return plan.read(fetch, row_bytes=8 + 4 * self._numbers + 8 * len(self._buckets))

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Label, dense and sparse features, and weight of the given lines, as NumPy arrays; see ``from_tsv``."""
        label = np.zeros(len(index), np.float32)
        numbers = np.zeros([len(index), self._numbers], np.float64)
        codes = np.zeros([len(index), len(self._buckets)], np.uint32)
        there = np.zeros(codes.shape, bool)
        weight = np.zeros(len(index), np.float32)
        for row, i in enumerate(index):
            fields = self._lines[i].split(b"\t")
            why = self._parse(fields, row, label, numbers)
            if why:
                self._count(int(i), why)
                continue
            weight[row] = 1.0
            categories = fields[1 + self._numbers :]
            codes[row] = [zlib.crc32(c) for c in categories]
            there[row] = [bool(c) for c in categories]
        dense = np.log1p(np.maximum(numbers, 0.0)).astype(np.float32) * weight[:, None]
        sparse = np.where(there, 1 + _mixed(codes) % (self._buckets - 1), 0).astype(np.int64)
        return label * weight, dense, sparse, weight

    def _parse(self, fields: list[bytes], row: int, label: np.ndarray, numbers: np.ndarray) -> str:
        """Fills the row's label and numbers; returns what is wrong with the line, or nothing."""
        expected = 1 + self._numbers + len(self._buckets)
        if len(fields) != expected:
            return f"{len(fields)} fields between tabs but there must be {expected}"
        if fields[0] not in (b"0", b"1"):
            return f"label {_shown(fields[0])} but it must be 0 or 1"
        label[row] = float(fields[0] == b"1")
        for column, field in enumerate(fields[1 : 1 + self._numbers]):
            if field:
                try:
                    numbers[row, column] = int(field)
                except (ValueError, OverflowError):
                    return f"number {column + 1} is {_shown(field)} but it must be a whole number or empty"
        return ""

    def _count(self, i: int, why: str) -> None:
        """Notes a bad line, or raises ConfigError if that is one too many."""
        with self._lock:
            self._bad.add(i)
            count = len(self._bad)
        if count > self._limit:
            seen = f"; it is bad line {count} and skip_bad_examples={self._limit}" if self._limit else ""
            raise ConfigError(
                f"{self._lines.where(i)}: {why}{seen}; repair the line, or pass skip_bad_examples={count} or more"
            )

    def _check_ends(self) -> None:
        """Refuses a foreign file by its first line, and one that was cut off by its last."""
        expected, first = 1 + self._numbers + len(self._buckets), 0
        for cut_off, last in zip(self._lines.cut_off, self._lines.last_lines()):
            found = self._lines[first].count(b"\t") + 1
            if found != expected and not (cut_off and first == last):
                raise ConfigError(
                    f"{self._lines.where(first)}: {found} fields between tabs but there must be {expected}: a label, "
                    f"{self._numbers} numbers, {len(self._buckets)} categories; it is another table, pass its counts"
                )
            found = self._lines[last].count(b"\t") + 1
            if cut_off and found != expected and not self._limit:
                raise ConfigError(
                    f"{self._lines.where(last)}: {found} fields between tabs but there must be {expected}, and the "
                    "file ends without a line end: it was cut off; copy it again"
                )
            first = last + 1


def _mixed(codes: np.ndarray) -> np.ndarray:
    """A bijection of uint32 in which each bit changes all others (MurmurHash3's finaliser, Appleby 2011).

    CRC-32 is linear: without it categories that differ in a few bits would fill buckets in stripes.
    """
    with np.errstate(over="ignore"):
        for factor in (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)):
            codes = (codes ^ (codes >> np.uint32(16))) * factor
    return codes ^ (codes >> np.uint32(16))


def _shown(field: bytes) -> str:
    return repr(field[:40].decode("utf-8", "replace"))


def from_tsv(
    source: PathsLike,
    *,
    pattern: str = "*.tsv",
    numbers: int = 13,
    buckets: int | Sequence[int] = 10_000,
    categories: int = 26,
    shuffle: bool = True,
    in_memory: bool = False,
    skip_bad_examples: int = 0,
) -> TablePipeline:
    """A pipeline over lines of ``label TAB number ... TAB category ...``, Criteo's format with its 13 and 26 columns.

    A batch is a dict: ``label`` float32 ``[rows]``, 0 or 1; ``dense`` float32 ``[rows, numbers]``, log(1 + max(x, 0))
    and 0 where missing; ``sparse`` int64 ``[rows, categories]``, 0 where missing, else 1 + hash modulo (buckets - 1),
    a hash that is the same on every machine; ``weight`` float32 ``[rows]``, 1, and 0 for a bad line.

    A bad line keeps its position: it is delivered as zeros of weight 0, so it counts in no loss, and no other example
    moves. So a resume is exact whether or not it has seen the line before.

    Args:
      source: a folder, a file, or several of them.
      pattern: of the names of files in folders.
      numbers: columns of whole numbers.
      buckets: ids of each category, at least 2, for all columns or one a column.
      categories: columns of categories.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.
      in_memory: read the files into memory; needed for gzip.
      skip_bad_examples: so many different bad lines are borne by each worker; one more is an error that names it.

    Raises:
      ConfigError: a file is missing, empty, cut off, of another table, or gzip without ``in_memory``. A bad line
        found later is an error of TensorFlow with file, line and reason in its text.
    """
    counts = [buckets] * categories if isinstance(buckets, int) else list(buckets)
    if len(counts) != categories:
        raise ConfigError(f"buckets has {len(counts)} counts but categories={categories}; pass one for each column")
    if any(not 2 <= b < 2**31 for b in counts):
        raise ConfigError(f"buckets={buckets} but each must be from 2, a missing one and another, to 2**31 - 1")
    if skip_bad_examples < 0 or numbers < 0:
        raise ConfigError(f"skip_bad_examples={skip_bad_examples}, numbers={numbers}: neither may be below 0")
    lines = Lines(find_files(source, pattern), in_memory=in_memory)
    return TablePipeline(lines, numbers=numbers, buckets=counts, shuffle=shuffle, skip_bad_examples=skip_bad_examples)
