"""What a resume changes: the settings of the run that is there against those it is to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.errors import ConfigError

# What makes a run the run it is: the random stream and the meaning of the state. Of an optimizer the slots' names may
# agree and their meaning not (adam and adamw); with another seed some examples of the epoch come twice and some never.
# How fast, how long, on what and with which batch may change, and is said.
_IDENTITY = ("seed", "optimizer")
# Of the command, or of no account for the training.
_PASSED_OVER = (
    "run_dir",
    "resume",
    "resume_anyway",
    "worker_index",
    "worker_port",
    "workers",
    "progress",
    "num_replicas",
)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compares two ``config.json``.

    Args:
      old: of the run as it was; may be empty, or of another version.
      new: of the run as it is to go on.

    Returns:
      What changes, and what of it makes another run; each as ``name old -> new``.
    """
    changed: list[str] = []
    identity: list[str] = []

    def note(name: str, before: Any, after: Any, *, another: bool = False) -> None:
        if before != after:
            changed.append(f"{name} {_shown(before)} -> {_shown(after)}")
            if another:
                identity.append(changed[-1])

    if not old:
        return [], []
    # A class may be renamed, or be a subclass; the name of a task on the command line is what it is.
    before, after = old.get("task_name"), new.get("task_name")
    note("task", before or old.get("task"), after or new.get("task"), another=bool(before and after))
    for name, value in new.get("options", {}).items():
        if name in old.get("options", {}):  # one that the task has got since has its default
            note(name, old["options"][name], value, another=True)
    note("replicas", _at(old, "strategy", "num_replicas"), _at(new, "strategy", "num_replicas"))
    note("workers", len(old.get("workers") or [0]), len(new.get("workers") or [0]))
    for name, value in new["config"].items():
        if name in old["config"] and name not in _PASSED_OVER:
            note(name, old["config"][name], value, another=name in _IDENTITY)
    for name, version in new.get("versions", {}).items():
        note(name, _at(old, "versions", name), version)
    return changed, identity


def describe(old: Mapping[str, Any], new: Mapping[str, Any], run_dir: str, *, anyway: bool) -> str:
    """``changed: ...`` for the line of a resume, or an empty text.

    Raises:
      ConfigError: what changes makes another run, and ``anyway`` is not set.
    """
    changed, identity = compare(old, new)
    if identity and not anyway:
        raise ConfigError(
            f"run_dir={run_dir} has a run that was started with other settings: {', '.join(identity)}; it would not be "
            "that run any more. Pass what it was started with, another --run_dir, or --resume_anyway"
        )
    return f"changed: {', '.join(changed)}" if changed else ""


def _at(value: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        value = value.get(key, {}) if isinstance(value, Mapping) else {}
    return None if value == {} else value


def _shown(value: Any) -> str:
    return repr(value) if value == "" else str(value)
