"""``config.json`` and ``summary.json`` of a run folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def write_text(path: str, text: str) -> None:
    """Writes ``text`` so that a reader sees the old file or the new one whole, also after a power cut."""
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` so that a reader sees the old file or the new one whole. NaN and infinity become null."""
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """``value`` as indented JSON with a final newline. NaN and infinity become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def settings(trainer: Trainer, run_id: str) -> dict[str, Any]:
    """What ``config.json`` holds: the resolved config with versions, cluster and strategy, and the run's id."""
    choice = trainer.choice
    return {
        "run_id": run_id,
        "task_name": trainer.task_name,
        "task": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "config": trainer.config.to_dict(),
        "options": vars(trainer.options) if trainer.options is not None else {},
        "strategy": {"kind": choice.kind, "device": choice.device, "all_reduce": choice.all_reduce}
        | {"num_replicas": trainer.strategy.num_replicas_in_sync, "reason": choice.reason},
        "all_reduce_packs": trainer.stepper.packs,
        "workers": list(trainer.cluster.workers),
        "cluster_source": trainer.cluster.source,
        "versions": versions(),
        "command": sys.argv,
    }


def write_config(trainer: Trainer, run_id: str) -> None:
    """Writes ``config.json``."""
    assert trainer.config.run_dir is not None
    write_json(os.path.join(trainer.config.run_dir, "config.json"), settings(trainer, run_id))


def write_summary(
    trainer: Trainer,
    status: str,
    reason: str,
    metrics: Mapping[str, float],
    seconds: Mapping[str, float],
    counts: Mapping[str, Any],
    checks: Mapping[str, Any],
) -> None:
    """Writes how the run ended; ``seconds`` are of this process, by class; ``checks``: what was checked, and when."""
    assert trainer.config.run_dir is not None
    value = {
        "status": status,
        "reason": reason,
        "step": trainer.step,
        "examples": trainer.examples_seen,
        "metrics": dict(metrics),
        **counts,
        "seconds": dict(seconds),
        "checks": dict(checks),
    }
    write_json(os.path.join(trainer.config.run_dir, "summary.json"), value)
