"""ArrayRecord files, if the package ``array_record`` is installed: records by number, in a seeded order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework import ConfigError
from input_pipelines.files import PathsLike, find_files
from input_pipelines.sequence import SequencePipeline, from_sequence


def from_array_record(
    source: PathsLike,
    parse: Callable[[Any], Any] | None = None,
    *,
    pattern: str = "*.array_record*",
    shuffle: bool = True,
) -> SequencePipeline:
    """A pipeline over the records of ArrayRecord files, counted through the files in the order of their paths.

    Args:
      source: a folder, a file, or several of them.
      parse: function of TensorFlow from records, string ``[rows]``, to a batch; for example
        ``lambda records: tf.io.parse_example(records, features)``. None: the batch is the records.
      pattern: of the names of files in folders.
      shuffle: whether each training epoch is a new seeded permutation; evaluation always reads in order.

    Raises:
      ConfigError: the package is not installed; a file is missing, empty, cut off or not an ArrayRecord file.
    """
    try:
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    except ImportError as error:
        raise ConfigError(
            f"from_array_record needs the package array_record, which is not installed ({error}); "
            "pip install array_record"
        ) from error
    files = find_files(source, pattern)
    for file in files:
        if file.stat().st_size == 0:
            raise ConfigError(f"{file} is empty; pass ArrayRecord files")
        try:
            len(ArrayRecordDataSource([str(file)]))
        except Exception as error:  # what it raises depends on its version
            raise ConfigError(f"{file} is not a whole ArrayRecord file: {error}; copy or write it again") from error
    name = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    return from_sequence(ArrayRecordDataSource([str(f) for f in files]), shuffle=shuffle, parse=parse, name=name)
