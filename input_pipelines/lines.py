"""Lines of text files by number: an index of where each begins, made once."""

from __future__ import annotations

import bisect
import gzip
import itertools
import mmap
import pathlib
import zlib
from typing import Any

import numpy as np

from framework import ConfigError

_CHUNK = 2**24  # bytes that are searched for line ends at a time


class Lines:
    """The lines of several files, counted through; a file whose last line has no line end has that line too.

    The index takes 8 bytes a line, in memory, and one pass over the files.

    Attributes:
      cut_off: whether the last line of each file has no line end.

    Args:
      files: plain, or gzip if ``in_memory``.
      in_memory: read the files into memory; else they are mapped.

    Raises:
      ConfigError: a file is empty, damaged, or gzip and not to be read into memory.
    """

    def __init__(self, files: list[pathlib.Path], *, in_memory: bool = False):
        self.files = files
        self._data = [_open(f, in_memory) for f in files]
        indexed = [_starts(d) for d in self._data]
        self._starts = [starts for starts, _ in indexed]
        self.cut_off = [cut for _, cut in indexed]
        self._totals = list(itertools.accumulate(len(s) - 1 for s in self._starts))

    def __len__(self) -> int:
        return self._totals[-1]

    def __getitem__(self, i: int) -> bytes:
        """Line i without its line end."""
        file, line = self._place(i)
        low, high = self._starts[file][line : line + 2]
        return self._data[file][low:high].rstrip(b"\r\n")

    def where(self, i: int) -> str:
        """File and number, from 1 on, of line i."""
        file, line = self._place(i)
        return f"{self.files[file]}, line {line + 1}"

    def last_lines(self) -> list[int]:
        """The number of each file's last line."""
        return [total - 1 for total in self._totals]

    def _place(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"line {i} of {len(self)}")
        file = bisect.bisect_right(self._totals, i)
        return file, i - (self._totals[file - 1] if file else 0)


def _open(path: pathlib.Path, in_memory: bool) -> Any:
    """Something whose slices are bytes."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            if packed and not in_memory:
                raise ConfigError(
                    f"{path} is gzip, in which no line can be found without reading all before it; unpack it with "
                    f"gunzip, or pass in_memory=True"
                )
            if path.stat().st_size == 0:
                raise ConfigError(f"{path} is empty; pass a file with one example a line")
            file.seek(0)
            if not in_memory:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            data = gzip.decompress(file.read()) if packed else file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    if not data:
        raise ConfigError(f"{path} is empty; pass a file with one example a line")
    return data


def _starts(data: Any) -> tuple[np.ndarray, bool]:
    """Where each line begins and, last, where the data ends; and whether the last line has no line end."""
    size, found = len(data), [np.zeros(1, np.int64)]
    for low in range(0, size, _CHUNK):
        chunk = np.frombuffer(data[low : low + _CHUNK], np.uint8)
        found.append(np.flatnonzero(chunk == ord("\n")) + (low + 1))
    starts = np.concatenate(found)
    cut_off = int(starts[-1]) != size
    return (np.append(starts, size) if cut_off else starts), cut_off
