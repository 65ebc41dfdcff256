"""``metrics.jsonl``: one JSON object a line, with no gap and no repeat after a kill and a resume.

A record has ``step``, ``phase`` (``train``, ``eval`` or ``eval/NAME``), ``time`` (Unix seconds) and then the values in
the order they came. A value that is not finite is written as ``null``: JSON has no NaN, and a text in its place would
turn a column of numbers into a mixed one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, LockstepError
from framework.hooks.hook import Hook, Values

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_log = logging.getLogger(__name__)
_OWN_KEYS = ("step", "phase", "time")


class MetricsLog(Hook):
    """Appends training and evaluation figures to ``path``, each record in one write.

    There is one record for a phase and step, and the first one stands: an evaluation repeated at the same step, after
    a resume or by a second ``evaluate()``, is not written again (one log line says so). The file is opened for each
    record, so that another process (an evaluator) may append to it too and none holds a file that was replaced.

    Args:
      path: the file; its folder is made when needed, the file with the first record.
      clock: gives Unix seconds.

    Raises:
      ConfigError: when a record is written whose values hold ``step``, ``phase`` or ``time``.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time):
        self._path = Path(path)
        self._clock = clock
        self._there: set[tuple[str, int]] | None = None  # (phase, step) in the file; None: not looked at yet
        self._own: set[tuple[str, int]] = set()  # the part of it that this object wrote

    def begin(self, trainer: Trainer) -> None:
        """Moves what a killed run left after ``trainer.step``, torn lines too, to ``*.discarded.jsonl``.

        A run at step 0 is a new one and takes over nothing, not even an evaluation at step 0, unless this object
        wrote it.
        """
        self._tidy(trainer.step)

    def __call__(self, step: int, values: Values) -> None:
        self._append(step, "train", values)

    def evaluated(self, step: int, name: str, values: Values) -> None:
        self._append(step, f"eval/{name}" if name else "eval", values)

    def _append(self, step: int, phase: str, values: Values) -> None:
        clash = [key for key in _OWN_KEYS if key in values]
        if clash:
            raise ConfigError(
                f"metric {clash[0]!r} in phase {phase!r} but every record has its own {', '.join(_OWN_KEYS)}; "
                "give the metric another name"
            )
        if self._there is None:
            self._tidy(None)
        assert self._there is not None
        key = (phase, int(step))
        if key in self._there:
            _log.warning("%s has a record of phase %s at step %d already: it stands", self._path, *key)
            return
        record: dict[str, Any] = {"step": int(step), "phase": phase, "time": self._clock()}
        record.update((name, _plain(value)) for name, value in values.items())
        line = json.dumps(record, allow_nan=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # closing makes the one write; a full disk raises here
            file.write(line.encode())
        self._there.add(key)
        self._own.add(key)

    def _tidy(self, start: int | None) -> None:
        """Leaves whole records only and, given ``start``, only those that a run at this step goes on from."""
        self._there = set()
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        kept, later, unreadable = [], [], []
        for line in text.split(b"\n"):
            record = _parse(line)
            if record is None:
                unreadable += [line] if line else []
                continue
            key = (str(record.get("phase")), record["step"])
            if start is None or (key[1] <= start and (start > 0 or key in self._own)):
                kept.append(line)
                self._there.add(key)
            else:
                later.append(line)
        if later or unreadable or (text and not text.endswith(b"\n")):
            self._rewrite(kept, later + unreadable)
        if later or unreadable:
            _log.warning(
                "%s: moved %d records of an earlier run and %d unreadable lines to %s",
                self._path,
                len(later),
                len(unreadable),
                self._discarded.name,
            )

    @property
    def _discarded(self) -> Path:
        return self._path.with_name(f"{self._path.stem}.discarded{self._path.suffix}")

    def _rewrite(self, kept: list[bytes], discarded: list[bytes]) -> None:
        # In this order: a kill in between leaves lines in both files, which the next start moves again, and none lost.
        if discarded:
            _write_durably(self._discarded, "ab", discarded)
        new = self._path.with_name(self._path.name + ".tmp")
        _write_durably(new, "wb", kept)
        os.replace(new, self._path)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, oldest first; a last line that a killed run left torn is passed over.

    Raises:
      LockstepError: a line before the last is no record; the message names file and line number.
      FileNotFoundError: there is no such file.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line and number < len(lines):
            raise LockstepError(f"{path}, line {number}: {line[:60]!r} but each line must be a JSON object with a step")
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in ``line``, or None where there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _plain(value: Any) -> int | float | None:
    """A value (also of NumPy or TensorFlow) as what JSON can hold; None where it is not finite."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _write_durably(path: Path, mode: str, lines: list[bytes]) -> None:
    with path.open(mode) as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
