"""Windows of text for the language tasks: of a folder of texts, of token files, or of Python's standard library."""

from __future__ import annotations

import pathlib
from typing import Any

from framework import ConfigError
from input_pipelines import MaskTokens, from_text, from_tokens, standard_library
from input_pipelines.files import find_files
from input_pipelines.tokens import BYTES_VOCABULARY, END_OF_DOCUMENT, open_tokens, side_path


def packed(data_dir: str) -> bool:
    """Whether the folder holds token files."""
    return bool(data_dir) and (pathlib.Path(data_dir) / "train.bin").exists()


def vocabulary(data_dir: str) -> int:
    """Ids are below it: as ``train.bin`` says, or 257, bytes and the end of a document."""
    return open_tokens(pathlib.Path(data_dir) / "train.bin").vocabulary_size if packed(data_dir) else BYTES_VOCABULARY


def document_end(data_dir: str, *, needed: bool) -> int | None:
    """The id that ends each document.

    Args:
      data_dir: see ``windows``.
      needed: whether documents are to be told apart; else None says that token files have no such id.

    Raises:
      ConfigError: it is needed and there is none.
    """
    if not packed(data_dir):
        return END_OF_DOCUMENT
    file = open_tokens(pathlib.Path(data_dir) / "train.bin")
    if needed and file.end_of_document is None:
        raise ConfigError(
            f"separate_documents but {side_path(file.path)} has no end_of_document, so documents cannot be told apart; "
            "leave it out, or pack the file with such an id"
        )
    return file.end_of_document


def windows(data_dir: str, split: str, *, length: int, pattern: str, corrupt: MaskTokens | None = None) -> Any:
    """A pipeline over windows of ``length`` ids; None if there is nothing to evaluate.

    Args:
      data_dir: folder with ``train.bin`` and maybe ``eval.bin``, or with text; empty: the standard library.
      split: ``train``, which is shuffled, or ``eval``.
      length: ids in a window.
      pattern: of the names of text files.
      corrupt: see ``from_text``.

    Raises:
      ConfigError: no data, or not of the format.
    """
    shuffle = split == "train"
    if packed(data_dir):
        file = pathlib.Path(data_dir) / f"{split}.bin"
        if split == "eval" and not file.exists():
            return None
        return from_tokens(file, length=length, shuffle=shuffle, corrupt=corrupt)
    if not data_dir:
        return from_text(standard_library(split), length=length, shuffle=shuffle, corrupt=corrupt)
    files = find_files(data_dir, pattern)
    if len(files) == 1:  # it cannot be split by file
        return from_text(files, length=length, corrupt=corrupt) if split == "train" else None
    return from_text(files, length=length, split=split, shuffle=shuffle, corrupt=corrupt)
