"""What a run folder holds, read with patience: a file that is missing, torn or not there yet leaves its part out."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run's files; empty where there is none.

    Attributes:
      name: of the run, for people.
      config: ``config.json``.
      summary: ``summary.json``.
      metrics: records of ``metrics.jsonl``, oldest first.
      stragglers: of ``stragglers.jsonl``.
      devices: of ``device_metrics``, by worker.
    """

    name: str
    config: Record
    summary: Record
    metrics: list[Record]
    stragglers: list[Record]
    devices: dict[int, list[Record]]

    def phases(self) -> list[str]:
        """Phases of the metrics, ``train`` first."""
        return sorted({r["phase"] for r in self.metrics}, key=lambda phase: (phase != "train", phase))

    def series(self, phase: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of one figure; records without it, or in which it was not finite, are left out."""
        return [
            (float(r["step"]), float(r[name])) for r in self.metrics if r["phase"] == phase and _number(r.get(name))
        ]

    def names(self) -> list[str]:
        """Figures of the metrics, in the order in which they came up."""
        found: dict[str, None] = {}
        for record in self.metrics:
            found.update({n: None for n, value in record.items() if n not in _NO_FIGURE and _number(value)})
        return list(found)


_NO_FIGURE = ("step", "phase", "time")


def read(run_dir: str, name: str = "") -> RunFiles:
    """Reads a run folder.

    Raises:
      FileNotFoundError: it is no run folder: neither ``config.json`` nor ``metrics.jsonl`` is there.
    """
    if not any(os.path.exists(os.path.join(run_dir, file)) for file in ("config.json", "metrics.jsonl")):
        raise FileNotFoundError(f"{run_dir} is no run folder: it holds neither config.json nor metrics.jsonl")
    folder = os.path.join(run_dir, "device_metrics")
    devices = {}
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        digits = "".join(c for c in file if c.isdigit())
        if file.endswith(".jsonl") and digits:
            devices[int(digits)] = [r for r in _lines(os.path.join(folder, file)) if _number(r.get("time"))]
    metrics = _lines(os.path.join(run_dir, "metrics.jsonl"))
    return RunFiles(
        name=name or os.path.basename(os.path.abspath(run_dir)),
        config=_object(os.path.join(run_dir, "config.json")),
        summary=_object(os.path.join(run_dir, "summary.json")),
        metrics=[r for r in metrics if _number(r.get("step")) and isinstance(r.get("phase"), str)],
        stragglers=[
            r for r in _lines(os.path.join(run_dir, "stragglers.jsonl")) if isinstance(r.get("replicas"), list)
        ],
        devices=devices,
    )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _object(path: str) -> Record:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: str) -> list[Record]:
    found = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    found.append(value)
    except OSError:
        return []
    return found
