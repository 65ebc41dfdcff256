"""How long training stands still for a save: ``python -m benchmarks.checkpoint [--mb=10,100,500] [--rounds=5]``.

A state of float32 variables is updated by a compiled step, one after the other. ``direct``: the save is finished before
the next step. ``background``: the call returns at once, and the steps that run until the file is in place are slower
than they were; ``still`` is the call and all that the steps lost together. The stages of a save are measured apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from benchmarks import machine, result
from framework.checkpoint import disk, manifest, store
from framework.checkpoint.store import CheckpointStore

_PIECE = 2_500_000  # values of a variable: 10 MB
_MIXING = 512  # side of the matrices that keep a step busy besides


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="Time training stands still.")
    p.add_argument("--mb", default="10,100,500", help="sizes of the state, in MB, comma separated")
    p.add_argument("--rounds", type=int, default=5, help="saves of each kind; the median counts")
    p.add_argument("--folder", default="", help="where to write; default: a temporary folder")
    p.add_argument("--out", default="", help="result file to write, JSON")
    return p


class State:
    """Variables of ``mb`` MB and a compiled step that updates all of them."""

    def __init__(self, mb: int):
        self.variables = {f"v{i}": tf.Variable(tf.ones([_PIECE])) for i in range(max(1, mb // 10))}
        mix = tf.random.stateless_normal([_MIXING, _MIXING], (1, 2))

        @tf.function
        def step() -> tf.Tensor:
            busy = mix
            for _ in range(4):
                busy = tf.tanh(busy @ mix)
            for variable in self.variables.values():
                variable.assign_add(tf.fill([_PIECE], busy[0, 0] * 1e-6))
            return busy[0, 0]

        self._step = step

    def step(self) -> float:
        """Runs one step; returns its seconds."""
        start = time.perf_counter()
        self._step().numpy()
        return time.perf_counter() - start

    def tensors(self) -> dict[str, Any]:
        """A snapshot."""
        return {name: variable.read_value() for name, variable in self.variables.items()}


@contextlib.contextmanager
def stages(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of checksums and flushes inside the block."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        return call

    with (
        mock.patch.object(manifest, "checksum", timed("checksum", manifest.checksum)),
        mock.patch.object(store, "sync_tree", timed("flush", disk.sync_tree)),
    ):
        yield


def measure(mb: int, rounds: int, folder: str) -> dict[str, float]:
    """Median seconds of one size: a step, and what a save costs in each way and in each stage."""
    state = State(mb)
    for _ in range(5):
        state.step()
    result: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        result.setdefault(name, []).append(value)

    for i in range(rounds):
        base = statistics.median(state.step() for _ in range(20))
        note("step", base)
        for background in (False, True):
            kind = "background" if background else "direct"
            made = CheckpointStore(folder=os.path.join(folder, kind), keep=1, background=background)
            parts: dict[str, float] = {}
            with stages(parts):
                start = time.perf_counter()
                made.save(i + 1, state.tensors())
                still = time.perf_counter() - start
                note(f"{kind}_call", still)
                while made.saving:
                    still += max(0.0, state.step() - base)
                made.wait()
                note(f"{kind}_save", time.perf_counter() - start)
            still += max(0.0, state.step() - base)  # the first update after a snapshot copies the buffers
            note(f"{kind}_still", still)
            if not background:
                for name in ("checksum", "flush"):
                    note(name, parts[name])
        start = time.perf_counter()
        manifest.check(made.path(i + 1))
        note("verify", time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in result.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    cases = []
    for mb in (int(part) for part in args.mb.split(",")):
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder or None)
        try:
            load = machine.load()
            cases.append({"mb": mb, "load": load, **measure(mb, args.rounds, folder)})
        finally:
            shutil.rmtree(folder)
        case = cases[-1]
        names = ("step", "direct_still", "background_still", "background_call", "background_save")
        line = "  ".join(f"{name} {case[name]:.4f} s" for name in (*names, "checksum", "flush", "verify"))
        print(f"{mb} MB: {line}", flush=True)
    if args.out:
        result.write(args.out, {**machine.circumstances(), "rounds": args.rounds, "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
