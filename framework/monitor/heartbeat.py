"""Heartbeats: small files in the run folder by which workers, and later restarts, know where each process is.

    RUN_DIR/heartbeats/worker-0000.json    where one worker is, written anew about every second
    RUN_DIR/attempts.jsonl                 one line for each earlier process of the chief: its last heartbeat

They are written without waiting for the disk: after a power cut the last seconds may be missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

FOLDER = "heartbeats"
ATTEMPTS = "attempts.jsonl"
RUNNING = "running"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where one worker is.

    Attributes:
      worker: its index.
      pid, host: the process.
      began: seconds since 1970 at which it began; together with ``pid`` and ``host`` it names a process for good.
      time: seconds since 1970 of this heartbeat.
      count: rises with each heartbeat, so that a reader needs no common clock to see that it goes on.
      phase: of ``framework.monitor.ledger``, or ``debugger``.
      step: steps done.
      idle: seconds since the last progress.
      status: ``running``, or how it ended.
      seconds: its time by phase so far.
    """

    worker: int
    pid: int
    host: str
    began: float
    time: float
    count: int
    phase: str
    step: int
    idle: float
    status: str = RUNNING
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def process(self) -> tuple[str, int, float]:
        """What tells this process from all others."""
        return self.host, self.pid, self.began

    def describe(self) -> str:
        """Where it is, in words."""
        if self.status != RUNNING:
            return f"ended at step {self.step}: {self.status}"
        return f"in {self.phase.replace('_', ' ')} at step {self.step}, no progress for {self.idle:.0f} s"


def path(run_dir: str, worker: int) -> str:
    """The file of one worker."""
    return os.path.join(run_dir, FOLDER, f"worker-{worker:04d}.json")


def write(run_dir: str, beat: Heartbeat) -> None:
    """Replaces the worker's file; raises OSError."""
    target = path(run_dir, beat.worker)
    temporary = f"{target}.tmp"
    text = json.dumps(dataclasses.asdict(beat))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except OSError:  # a full disk: the old file has its room already, and the others want to know how this one ended
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        with open(target, "r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def read(run_dir: str, worker: int) -> Heartbeat | None:
    """The worker's last heartbeat; None: there is none, or it cannot be read."""
    try:
        with open(path(run_dir, worker), encoding="utf-8") as file:
            return _parsed(json.load(file))
    except (OSError, ValueError):
        return None


def _parsed(value: Any) -> Heartbeat | None:
    """A heartbeat from its JSON; None: it is none."""
    if not isinstance(value, dict):
        return None
    kinds = {"pid": int, "worker": int, "count": int, "step": int, "host": str, "phase": str, "status": str}
    known: dict[str, Any] = {field.name: value.get(field.name) for field in dataclasses.fields(Heartbeat)}
    for name, kind in kinds.items():
        if type(known[name]) is not kind:
            return None
    for name in ("began", "time", "idle"):
        if not isinstance(known[name], (int, float)):
            return None
    seconds = known["seconds"]
    if not isinstance(seconds, dict) or not all(isinstance(v, (int, float)) for v in seconds.values()):
        return None
    return Heartbeat(**known)


def close_attempt(run_dir: str, mine: tuple[str, int, float]) -> list[Heartbeat]:
    """Moves the last heartbeat of an earlier chief to ``attempts.jsonl``; returns all earlier ones, oldest first.

    Args:
      run_dir: the run folder.
      mine: this process (``Heartbeat.process``), which is no earlier one.
    """
    earlier = attempts(run_dir)
    last = read(run_dir, 0)
    if last is None or last.process == mine or last.process in [a.process for a in earlier]:
        return earlier
    with contextlib.suppress(OSError), open(os.path.join(run_dir, ATTEMPTS), "a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(last)) + "\n")
    return [*earlier, last]


def attempts(run_dir: str) -> list[Heartbeat]:
    """The last heartbeats of earlier processes of the chief, oldest first; lines that cannot be read are left out."""
    found = []
    try:
        with open(os.path.join(run_dir, ATTEMPTS), encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    beat = _parsed(json.loads(line))
                    found += [beat] if beat is not None else []
    except OSError:
        return []
    return found
