"""Finds checkpoints: those of a folder, the newest whole one, the one that a path means. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection

from framework.checkpoint import manifest as manifests
from framework.checkpoint.manifest import MANIFEST, Damaged, Manifest
from framework.errors import ConfigError

CHECKPOINTS = "checkpoints"  # the folder of them in a run's folder
_NAME = re.compile(r"step-(\d{8,})")


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, or none, and why each newer one was passed over: step -> reason, falling."""

    manifest: Manifest | None
    passed_over: dict[int, str]


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(folder: str) -> list[int]:
    """Steps of which ``folder`` has a checkpoint, whole or not, rising; empty if it is no folder."""
    try:
        matches = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    # step-00000009 and step-000000009 would be one step; only the name that is written counts.
    return sorted(int(m[1]) for m in matches if m and name_of(int(m[1])) == m[0])


def check(folder: str, step: int, *, content: bool) -> Manifest:
    """Checks the checkpoint of ``step`` in ``folder``; see ``framework.checkpoint.manifest.check``.

    Raises:
      Damaged: it is not whole, or is that of another step.
    """
    found = manifests.check(os.path.join(folder, name_of(step)), content=content)
    if found.step != step:
        raise Damaged(f"it is named {name_of(step)} but {MANIFEST} says step {found.step}")
    return found


def newest(folder: str, skip: Collection[int] = ()) -> Found:
    """Looks from the newest checkpoint in ``folder`` backwards for a whole one; every byte of it is checked.

    Args:
      folder: where the ``step-NNNNNNNN`` are.
      skip: steps that are not looked at.
    """
    passed_over: dict[int, str] = {}
    for step in reversed(steps_in(folder)):
        if step in skip:
            continue
        try:
            return Found(check(folder, step, content=True), passed_over)
        except Damaged as error:
            passed_over[step] = str(error)
    return Found(None, passed_over)


def folder_of(path: str) -> str:
    """The folder of checkpoints that ``path`` means: a run's folder, or that folder itself.

    Raises:
      ConfigError: there is no such folder, or it has no checkpoint.
    """
    if not os.path.isdir(path):
        raise ConfigError(f"{path} is not a folder; pass a run folder, its checkpoints, or one of these")
    for folder in (os.path.join(path, CHECKPOINTS), path):
        if steps_in(folder):
            return folder
    raise ConfigError(f"{path} has no checkpoint; pass a run folder, its checkpoints, or one of these")


def one_of(path: str) -> tuple[str, Manifest, dict[int, str]]:
    """The one checkpoint that ``path`` means: itself, or the newest whole one of a folder; checked byte by byte.

    Returns:
      Its folder, its manifest, and why newer ones were passed over: step -> reason.

    Raises:
      ConfigError: there is none, or none is whole; the message says why each was passed over.
    """
    itself = _NAME.fullmatch(os.path.basename(os.path.abspath(path)))
    if itself or os.path.exists(os.path.join(path, MANIFEST)):
        try:
            return path, manifests.check(path), {}
        except Damaged as error:
            raise ConfigError(f"the checkpoint {path} is not whole: {error}; pass another") from error
    folder = folder_of(path)
    found = newest(folder)
    if found.manifest is None:
        raise ConfigError(f"no checkpoint in {folder} is whole: {reasons(found)}")
    return os.path.join(folder, name_of(found.manifest.step)), found.manifest, found.passed_over


def reasons(found: Found) -> str:
    """Each checkpoint that was passed over with the reason, in one line."""
    return "; ".join(f"{name_of(step)}: {reason}" for step, reason in found.passed_over.items())
