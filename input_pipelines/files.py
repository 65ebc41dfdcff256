"""What sources share about files: found in a fixed order, split by file, read, and what is wrong with them."""

from __future__ import annotations

import gzip
import os
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TypeAlias

from framework import ConfigError

PathsLike: TypeAlias = "str | PathLike[str] | Sequence[str | PathLike[str]]"

_GZIP = b"\x1f\x8b"

# Every so many-th file is for evaluation.
_SHARE = 20


def find_files(source: PathsLike, pattern: str = "*") -> list[pathlib.Path]:
    """The files of a folder and the folders in it whose name fits ``pattern``, sorted by path; files as they are given.

    Args:
      source: a folder, a file, or several of them; each once, whatever names it twice.
      pattern: as in a shell, on the name of files in folders.

    Raises:
      ConfigError: a path is missing, or there is no file at all.
    """
    paths = [source] if isinstance(source, (str, PathLike)) else list(source)
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob(pattern) if p.is_file())
            if not inside:
                raise ConfigError(f"{path} has no file that fits {pattern!r}; pass another folder or pattern")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise ConfigError(f"{path} does not exist; pass a file or folder that does")
    if not found:
        raise ConfigError("no file was given; pass a file or folder")
    return list(found)


def split_files(files: Iterable[pathlib.Path], split: str) -> list[pathlib.Path]:
    """The files of one split: every 20th in their order is for evaluation, of fewer than 20 the last.

    Args:
      files: at least two, unless ``split`` is ``all``.
      split: ``all``, ``train`` or ``eval``.

    Raises:
      ConfigError: another split, or one file that cannot be split.
    """
    files = list(files)
    if split not in ("all", "train", "eval"):
        raise ConfigError(f"split={split!r} but it must be all, train or eval")
    if split == "all":
        return files
    if len(files) < 2:
        raise ConfigError(f"{files[0]} alone cannot be split by file; pass two files or more, or split=all")
    held = set(files[_SHARE - 1 :: _SHARE] or files[-1:])
    return [f for f in files if (f in held) == (split == "eval")]


def folder_at(path: str | os.PathLike[str], what: str, example: str) -> pathlib.Path:
    """The directory ``path``.

    Args:
      path: as the user gave it.
      what: the option it came from, for the message.
      example: a value the option could have.

    Raises:
      ConfigError: it is empty, missing, or no directory.
    """
    if not os.fspath(path):
        raise ConfigError(f"{what} is empty but it must name a directory; for example {what}={example}")
    folder = pathlib.Path(path)
    if not folder.exists():
        raise ConfigError(f"{what}={folder} does not exist; it must be a directory, for example {what}={example}")
    if not folder.is_dir():
        raise ConfigError(f"{what}={folder} is a file but it must be a directory; for example {what}={example}")
    return folder


def find(folder: pathlib.Path, names: Sequence[str], cure: str) -> pathlib.Path:
    """The first of ``names`` that is a file in ``folder``.

    Raises:
      ConfigError: none is; the message ends with ``cure``.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} has none of {', '.join(names)}; {cure}")


def read(path: pathlib.Path, cure: str) -> bytes:
    """The content of a file, unpacked if it is gzipped (whatever it is called).

    Raises:
      ConfigError: it cannot be read, is empty, or its gzip stream is cut or damaged; the message ends with ``cure``.
    """
    try:
        content = path.read_bytes()
        if content[:2] == _GZIP:
            content = gzip.decompress(content)
    except EOFError as error:
        raise ConfigError(f"{path} is cut short: its gzip stream has no end; {cure}") from error
    except (OSError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}; {cure}") from error
    if not content:
        raise ConfigError(f"{path} is empty; {cure}")
    return content
