"""The check before a run of several workers: do all run the same versions, code and settings, on the same data?

What workers say of themselves is a flat dict of short texts, ``facts``; it crosses with the roll call, before any of
TensorFlow's servers starts. A difference is shown as a table of who differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from framework.cluster.addresses import Cluster, short

Facts = Mapping[str, str]

# Settings of one process, or of where things lie on its machine.
_OWN = frozenset(
    ["worker_index", "worker_port", "workers", "cluster", "run_dir", "export_dir", "init_from", "progress"]
)
# Variables that change what TensorFlow computes.
_VARIABLES = (
    *("TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS", "TF_DETERMINISTIC_OPS", "TF_CUDNN_DETERMINISTIC"),
    *("NVIDIA_TF32_OVERRIDE", "TF_USE_LEGACY_KERAS", "TF_ENABLE_AUTO_MIXED_PRECISION"),
)
_PACKAGES = ("tensorflow", "keras", "numpy", "lockstep-tf")
_ROWS = 12  # differences shown


def facts(config: Any, options: Any, kind: type, replicas: int) -> dict[str, str]:
    """What this worker says of itself.

    Args:
      config: its ``RunConfig``.
      options: the task's options, or None.
      kind: the trainer's class; its code, and that of its packages, is part of what must agree.
      replicas: of this worker.
    """
    found = {
        "python": platform.python_version(),
        "replicas": str(replicas),
        "task": f"{kind.__module__}.{kind.__qualname__}",
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found.update({f"${name}": os.environ.get(name, "") for name in _VARIABLES})
    found.update({f"--{name}": _text(value) for name, value in config.to_dict().items() if name not in _OWN})
    named = vars(options) if options is not None else {}
    # A path may differ from machine to machine.
    found.update({f"--{name}": _text(value) for name, value in named.items() if os.sep not in str(value)})
    found.update({f"code of {name}": digest for name, digest in _code(kind).items()})
    return found


def differences(all_facts: Mapping[int, Facts], cluster: Cluster) -> str:
    """A table of what differs and who has what; empty: all agree.

    The majority is taken for right, and worker 0 where there is none; the others are named.
    """
    rows, wrong = [], set()
    names = list(dict.fromkeys(name for one in all_facts.values() for name in one))
    for name in names:
        values = {worker: one.get(name, "not said") for worker, one in sorted(all_facts.items())}
        if len(set(values.values())) == 1:
            continue
        counts = Counter(values.values())
        top = max(counts.values())
        usual = next(value for value in values.values() if counts[value] == top)  # the first: worker 0's in a draw
        by_value: dict[str, list[int]] = {}
        for worker, value in values.items():
            by_value.setdefault(value, []).append(worker)
            if value != usual:
                wrong.add(worker)
        shown = "; ".join(f"{value or 'not set'} on {_workers(who)}" for value, who in by_value.items())
        rows.append(f"  {name}: {shown}")
    if not rows:
        return ""
    more = [f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else []
    who = ", ".join(cluster.name(worker) for worker in sorted(wrong)[:8])
    return "\n".join(
        [
            f"{who} {'does' if len(wrong) == 1 else 'do'} not run what the others run:",
            *rows[:_ROWS],
            *more,
            "give all workers the same code, versions and flags; or pass --mixed_workers to all of them",
        ]
    )


def _workers(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
    return f"worker{'s' * (len(indices) > 1)} {shown}"


def _text(value: Any) -> str:
    return short(value) if isinstance(value, str) else json.dumps(value)


def _code(kind: type) -> dict[str, str]:
    """A digest of the source of each package that the trainer's class is made of; of the module where there is none."""
    found = {}
    for name in dict.fromkeys(base.__module__ for base in kind.__mro__ if base is not object):
        top = name.partition(".")[0]
        init = getattr(sys.modules.get(top), "__file__", None) or ""
        own = getattr(sys.modules.get(name), "__file__", None) or ""
        if os.path.basename(init) == "__init__.py":
            found[top] = _digest(_sources(os.path.dirname(init)), os.path.dirname(init))
        elif own.endswith(".py"):
            found[name] = _digest([own], os.path.dirname(own))
    return found


def _sources(folder: str) -> list[str]:
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        found += [os.path.join(where, name) for name in sorted(files) if name.endswith(".py")]
    return found


def _digest(files: Iterable[str], root: str) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.path.relpath(path, root).encode() + b"\0")
        with open(path, "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()[:12]
