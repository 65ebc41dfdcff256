"""Fields of a task's ``Options``, with the text that ``--help`` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def option(default: Any, help: str, *, choices: Iterable[str] = ()) -> Any:  # noqa: A002 - the word absl uses
    """A field that becomes a flag of the task.

    Args:
      default: its value where the flag is not given.
      help: one sentence for ``--help``.
      choices: the values that are allowed; none: all of the type.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": tuple(choices)})
