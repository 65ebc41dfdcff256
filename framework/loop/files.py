"""``config.json`` and ``summary.json`` of a run folder."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


def versions() -> dict[str, str]:
    """Versions of everything a result depends on."""
    import keras
    import numpy
    import tensorflow as tf

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }


def check_folder(path: str) -> None:
    """Refuses a run folder that cannot be one, before anything starts; makes nothing.

    Raises:
      ConfigError: it, or a folder it would be in, is a file; or it may not be written.
    """
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"run_dir={path} but {there} is not a folder; pass another --run_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir={path} but {there} may not be written (Permission denied); pass another --run_dir")


def write_text(path: str, text: str) -> None:
    """Writes ``text`` so that a reader sees the old file or the new one whole."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` so that a reader sees the old file or the new one whole. NaN and infinity become null."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_config(trainer: Trainer) -> None:
    """Writes the resolved config with versions, cluster and strategy."""
    assert trainer.config.run_dir is not None
    choice = trainer.choice
    value = {
        "task": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "config": trainer.config.to_dict(),
        "options": vars(trainer.options) if trainer.options is not None else {},
        "strategy": {"kind": choice.kind, "device": choice.device, "all_reduce": choice.all_reduce}
        | {"num_replicas": trainer.strategy.num_replicas_in_sync, "reason": choice.reason},
        "all_reduce_packs": trainer.stepper.packs,
        "workers": list(trainer.cluster.workers),
        "versions": versions(),
        "command": sys.argv,
    }
    write_json(os.path.join(trainer.config.run_dir, "config.json"), value)


def write_summary(
    trainer: Trainer,
    status: str,
    reason: str,
    metrics: Mapping[str, float],
    seconds: Mapping[str, float],
    counts: Mapping[str, int],
) -> None:
    """Writes how the run ended; ``seconds`` are of this process, by class."""
    assert trainer.config.run_dir is not None
    value = {
        "status": status,
        "reason": reason,
        "step": trainer.step,
        "examples": trainer.examples_seen,
        "metrics": dict(metrics),
        **counts,
        "seconds": dict(seconds),
        "checks": {"finite": "every step"},
    }
    write_json(os.path.join(trainer.config.run_dir, "summary.json"), value)
