"""Data sets of TensorFlow Datasets, if the package is installed: examples by number, in a seeded order."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from framework import ConfigError
from input_pipelines.sequence import SequencePipeline, from_sequence


def from_tfds(
    name: str,
    *,
    split: str,
    keys: Sequence[str] = (),
    data_dir: str | PathLike[str] | None = None,
    download: bool = False,
    shuffle: bool = True,
) -> SequencePipeline:
    """A pipeline over a data set that TensorFlow Datasets has prepared for random access.

    Args:
      name: for example ``mnist``; with a version after a colon, for example ``mnist:3.0.1``.
      split: for example ``train`` or ``train[:90%]``.
      keys: the batch is a tuple of these features; none: the dict of all of them.
      data_dir: where data sets are; None: the package's own folder.
      download: let the package download and prepare the data set if it is not there.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.

    Raises:
      ConfigError: the package is not installed, it cannot open the data set, or a key is no feature.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ConfigError(
            f"from_tfds needs the package tensorflow_datasets, which is not installed ({error}); "
            "pip install tensorflow-datasets array_record"
        ) from error
    folder = None if data_dir is None else str(data_dir)
    try:
        source: Any = tensorflow_datasets.data_source(name, split=split, data_dir=folder, download=download)
        found = len(source)
    except Exception as error:  # what it raises depends on what is missing
        more = "" if download else "; if it is not prepared in data_dir yet, pass download=True"
        raise ConfigError(f"TensorFlow Datasets cannot open {name}, split {split}: {error}{more}") from error
    if keys and found:
        missing = [k for k in keys if k not in source[0]]
        if missing:
            raise ConfigError(f"{name} has no feature {', '.join(missing)}; it has {', '.join(sorted(source[0]))}")
        source = _Chosen(source, tuple(keys))
    return from_sequence(source, shuffle=shuffle, name=f"{name}, split {split}")


class _Chosen:
    """Some features of a source's examples, as tuples."""

    def __init__(self, source: Any, keys: tuple[str, ...]):
        self._source, self._keys = source, keys

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return self.__getitems__([i])[0]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Any, ...]]:
        several = getattr(self._source, "__getitems__", None)
        examples = several(numbers) if several else [self._source[i] for i in numbers]
        return [tuple(example[key] for key in self._keys) for example in examples]
