"""Where each record of TFRecord files begins, so that any of them can be read without those before it.

A record is its length (8 bytes, little-endian), a checksum of the length (4), the data, and a checksum of the data (4).
The scan reads lengths only, and so 12 bytes a record.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import mmap
import os
import pathlib
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from framework import ConfigError

_HEAD, _TAIL = 12, 4
_VERSION = 1
_MORE = "write the file again, or leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordIndex:
    """The records of several files, one file after the other.

    Attributes:
      paths: of the files, ``[files]``.
      counts: records of each file, int64 ``[files]``.
      offsets: byte of its file at which each record begins, int64 ``[records]``.
    """

    paths: tuple[str, ...]
    counts: np.ndarray
    offsets: np.ndarray

    def place(self, record: int) -> tuple[str, int]:
        """The file of a record, and the record's number in it, from 0."""
        ends = np.cumsum(self.counts)
        file = int(np.searchsorted(ends, record, side="right"))
        return self.paths[file], record - int(ends[file] - self.counts[file])


def build(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    index_file: str | os.PathLike[str] | None = None,
    keep_cut: bool = False,
) -> RecordIndex:
    """The index of TFRecord files (not compressed), by scanning them, or from ``index_file``.

    Args:
      paths: files in the order of their records; or one file, or one pattern such as ``data/train-*``, whose files are
        taken in the order of their names.
      index_file: where the index is kept for later runs. It is used if the files have the names, sizes and times of
        change it was made with, and is written again if not. None: it is kept in memory only.
      keep_cut: whether a record that a file's end cuts short is listed too (it fails when it is read) instead of
        refused.

    Raises:
      ConfigError: no file; a file that is missing, empty, compressed, cut short or no TFRecord file; a length whose
        checksum is wrong; or ``index_file`` is something else.
    """
    found = _found(paths)
    if index_file is not None:
        kept = _load(pathlib.Path(index_file), found)
        if kept is not None:
            # The last record is looked at again: another use may have kept a cut one.
            for path, begin in zip(found, _last_offsets(kept), strict=True):
                _check_end(path, begin, keep_cut)
            return kept
    offsets = [scan(path, keep_cut=keep_cut) for path in found]
    counts = np.array([len(o) for o in offsets], np.int64)
    index = RecordIndex(paths=tuple(found), counts=counts, offsets=np.concatenate(offsets))
    if index_file is not None:
        _save(pathlib.Path(index_file), index)
    return index


def scan(path: str, *, keep_cut: bool = False) -> np.ndarray:
    """Byte at which each record of one file begins: int64 ``[records]``; see ``build``."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise ConfigError(f"{path} is empty; {_MORE}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if hasattr(mmap, "MADV_RANDOM"):  # else every page touched brings its neighbours from the disk
                    content.madvise(mmap.MADV_RANDOM)
                return _scan(path, content, size, keep_cut)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}; {_MORE}") from error


def _scan(path: str, content: mmap.mmap, size: int, keep_cut: bool) -> np.ndarray:
    offsets, begin, length_at = [], 0, struct.Struct("<Q").unpack_from
    while begin + _HEAD <= size:
        offsets.append(begin)
        begin += length_at(content, begin)[0] + _HEAD + _TAIL
    heads = np.frombuffer(b"".join(content[o : o + _HEAD] for o in offsets), np.uint8).reshape(-1, _HEAD)
    wrong = masked_crc32c(heads[:, :8]) != np.ascontiguousarray(heads[:, 8:]).view("<u4")[:, 0]
    if wrong.any() or not offsets:
        number = int(np.argmax(wrong)) if offsets else 0
        if content[:2] == b"\x1f\x8b" or (not number and content[:1] == b"\x78"):
            raise ConfigError(f"{path} is compressed but records are read in any order; write it without compression")
        if not number:
            raise ConfigError(f"{path} is no TFRecord file: the length of record 0 does not fit its checksum; {_MORE}")
        raise ConfigError(
            f"record {number} of {path} is damaged: its length does not fit the checksum, so nobody knows where the "
            f"next one begins; {_MORE}"
        )
    if begin < size:  # less than a head is left: the start of one more record
        offsets.append(begin)
    if begin != size:
        _refuse_cut(path, len(offsets) - 1, size, keep_cut)
    return np.array(offsets, np.int64)


def _refuse_cut(path: str, number: int, size: int, keep_cut: bool) -> None:
    if not keep_cut:
        raise ConfigError(
            f"record {number} of {path} is cut short: the file ends within it, after {size} bytes; {_MORE}, or pass "
            "skip_bad_examples"
        )


def _check_end(path: str, begin: int, keep_cut: bool) -> None:
    """Raises ConfigError if the file ends within its last record, which begins at byte ``begin``."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(begin)
        head = file.read(8)
    whole = len(head) == 8 and begin + struct.unpack("<Q", head)[0] + _HEAD + _TAIL == size
    if not whole and not keep_cut:
        raise ConfigError(f"the last record of {path} is cut short; {_MORE}, or pass skip_bad_examples")


def _last_offsets(index: RecordIndex) -> list[int]:
    return [int(index.offsets[end - 1]) for end in np.cumsum(index.counts)]


def _found(paths: Any) -> list[str]:
    """The files that ``paths`` names, each of which exists."""
    if isinstance(paths, (str, os.PathLike)):
        pattern = os.fspath(paths)
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise ConfigError(f"no file fits {pattern!r}; pass the TFRecord files, for example data/train-*")
    else:
        found = [os.fspath(path) for path in paths]
        if not found:
            raise ConfigError("the list of TFRecord files is empty; pass the files, for example data/train-*")
    for path in found:
        if not os.path.isfile(path):
            raise ConfigError(
                f"{path} {'is a directory' if os.path.isdir(path) else 'does not exist'} but it must be a TFRecord "
                f"file; for example {path}/train-*"
            )
    return found


# --- the index on disk -----------------------------------------------------------------------------------------------


def _stamp(paths: Sequence[str]) -> dict[str, Any]:
    """What an index was made of."""
    states = [os.stat(path) for path in paths]
    names = [os.path.basename(path) for path in paths]
    files = [[name, s.st_size, s.st_mtime_ns] for name, s in zip(names, states, strict=True)]
    return {"record_index": _VERSION, "files": files}


def _load(path: pathlib.Path, paths: Sequence[str]) -> RecordIndex | None:
    """The index in a file; None if there is none, or one of files that are others now."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as kept:
            stamp = json.loads(str(kept["stamp"]))
            index = RecordIndex(paths=tuple(paths), counts=kept["counts"], offsets=kept["offsets"])
        if "record_index" not in stamp:
            raise ValueError("it says nothing of records")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"index_file={path} is no index of records ({error}); delete it, or pass another name"
        ) from error
    return index if stamp == _stamp(paths) else None


def _save(path: pathlib.Path, index: RecordIndex) -> None:
    """Writes the index beside its place and moves it there: several workers may do so at once."""
    stamp = json.dumps(_stamp(index.paths))
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, stamp=np.array(stamp), counts=index.counts, offsets=index.offsets)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"cannot write index_file={path}: {error}; pass a place that can be written") from error


# --- checksums -------------------------------------------------------------------------------------------------------


def _table() -> np.ndarray:
    """CRC-32C (Castagnoli) of each byte, reflected polynomial 0x82F63B78."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = (values >> 1) ^ np.where(values & 1, np.uint32(0x82F63B78), np.uint32(0))
    return values


_TABLE = _table()


def masked_crc32c(rows: np.ndarray) -> np.ndarray:
    """The checksum of TFRecord of each row of bytes uint8 ``[rows, bytes]``: uint32 ``[rows]``."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(rows.shape[1]):
        crc = _TABLE[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
