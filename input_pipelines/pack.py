"""Packs text files into a token file: ``python -m input_pipelines.pack SOURCE ... OUT.bin --pattern=*.txt``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from os import PathLike

import numpy as np

from framework.errors import ConfigError, LockstepError
from input_pipelines.files import find_files, split_files
from input_pipelines.text import read_document
from input_pipelines.tokens import BYTES_VOCABULARY, DTYPES, END_OF_DOCUMENT, TokenFile, side_path

_CHUNK = 2**22  # ids that are converted at a time


def write_tokens(
    documents: Iterable[np.ndarray],
    path: str | PathLike[str],
    *,
    vocabulary_size: int,
    end_of_document: int | None = None,
) -> TokenFile:
    """Writes documents one after the other into a token file, and its JSON file beside it.

    Both are written under other names and get their own when they are whole, the JSON file last; without it the token
    file is not read.

    Args:
      documents: arrays of ids ``[ids]``; empty ones are left out.
      path: of the token file, ending in ``.bin``.
      vocabulary_size: ids are below it; up to 65,536 they take two bytes each, else four.
      end_of_document: id written after each document; None: nothing is.

    Raises:
      ConfigError: the file exists, an id is not in the vocabulary, or no document has any id.
    """
    path = pathlib.Path(path)
    side = side_path(path)
    _refuse(path, side)
    dtype = "uint16" if vocabulary_size <= 2**16 else "uint32"
    end = np.array([] if end_of_document is None else [end_of_document], DTYPES[dtype])
    new = [file.with_name(f"{file.name}.{os.getpid()}.tmp") for file in (path, side)]
    count = 0
    try:
        with new[0].open("wb") as out:
            for document in documents:
                if not len(document):
                    continue
                if int(document.max()) >= vocabulary_size or int(document.min()) < 0:
                    raise ConfigError(
                        f"a document has ids from {document.min()} to {document.max()} but they must be from 0 to "
                        f"{vocabulary_size - 1}; pass its vocabulary_size"
                    )
                for low in range(0, len(document), _CHUNK):
                    document[low : low + _CHUNK].astype(DTYPES[dtype]).tofile(out)
                end.tofile(out)
                count += len(document) + len(end)
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise ConfigError("all documents are empty, so there is nothing to write; pass files with text")
        made = TokenFile(
            path=path, dtype=dtype, vocabulary_size=vocabulary_size, count=count, end_of_document=end_of_document
        )
        new[1].write_text(made.side_file(), encoding="utf-8")
        _refuse(path, side)  # it may have taken hours
        new[0].rename(path)
        new[1].rename(side)
    finally:
        for file in new:
            file.unlink(missing_ok=True)
    return made


def _refuse(*paths: pathlib.Path) -> None:
    if paths[0].suffix != ".bin":
        raise ConfigError(f"{paths[0]} does not end in .bin; for example {paths[0].with_suffix('.bin')}")
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists and is not overwritten; delete it or pass another name")
    if not paths[0].parent.is_dir():
        raise ConfigError(f"{paths[0].parent} is no folder; make it first")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 the disk refused, 2 nothing was written."""
    parser = argparse.ArgumentParser(prog="python -m input_pipelines.pack", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", nargs="+", help="text files, or folders of them; each file is a document")
    parser.add_argument("out", help="the token file to write, ending in .bin")
    parser.add_argument("--pattern", default="*.txt", help="of the names of files in folders (default: %(default)s)")
    parser.add_argument("--vocabulary", default="bytes", choices=["bytes"], help="ids: 256 bytes and an end")
    parser.add_argument(
        "--split", default="all", choices=["all", "train", "eval"], help="eval: every 20th file; train: the others"
    )
    options = parser.parse_args(argv)
    try:
        files = split_files(find_files(options.source, options.pattern), options.split)
        made = write_tokens(
            map(read_document, files), options.out, vocabulary_size=BYTES_VOCABULARY, end_of_document=END_OF_DOCUMENT
        )
    except (LockstepError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{made.path}: {made.count:,} ids of {len(files):,} files, {made.dtype}, vocabulary {made.vocabulary_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
