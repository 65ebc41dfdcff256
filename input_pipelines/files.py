"""What sources share about files: finding them, reading them, and saying what is wrong with them."""

from __future__ import annotations

import gzip
import os
import pathlib
import zlib
from collections.abc import Sequence

from framework import ConfigError

_GZIP = b"\x1f\x8b"


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
