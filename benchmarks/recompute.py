"""What computing blocks again saves and costs: ``python -m benchmarks.recompute [--layers=12] [--rounds=5]``.

A language model takes training steps in a process of its own, with ``recompute`` and without, in turn. ``activations``
is the highest memory of the process during its steps, less what it had when the model was built; the losses of the two
must be equal. Memory is the process's, so the figure holds what TensorFlow's allocator keeps besides.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import machine, result
from benchmarks.process import ROOT

_STEPS = 4  # that are timed, after one that compiles


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description="Memory and time of recomputation.")
    p.add_argument("--width", type=int, default=256, help="of the residual stream")
    p.add_argument("--layers", type=int, default=12, help="blocks")
    p.add_argument("--length", type=int, default=256, help="tokens in a window")
    p.add_argument("--batch", type=int, default=16, help="windows in a step")
    p.add_argument("--rounds", type=int, default=5, help="processes of each kind; the median counts")
    p.add_argument("--out", default="", help="result file to write, JSON")
    p.add_argument("--child", default="", choices=["", "kept", "again"], help=argparse.SUPPRESS)
    return p


def child(args: argparse.Namespace) -> dict[str, float]:
    """Takes the steps, and measures this process."""
    import keras
    import psutil
    import tensorflow as tf

    from models.language_model import LanguageModel, LanguageShape

    keras.utils.set_random_seed(0)
    model = LanguageModel(
        LanguageShape(
            vocabulary=257,
            length=args.length,
            width=args.width,
            layers=args.layers,
            heads=max(1, args.width // 64),
            recompute=args.child == "again",
        )
    )
    variables = [v.value for v in model.trainable_variables]
    ids = tf.random.stateless_uniform([args.batch, args.length + 1], (1, 2), 0, 257, tf.int32)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(ids[:, :-1], training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1:], logits))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * tf.convert_to_tensor(gradient))
        return loss

    before = psutil.Process().memory_info().rss / 1e6
    loss = float(step())
    start = time.perf_counter()
    for _ in range(_STEPS):
        loss = float(step())
    seconds = (time.perf_counter() - start) / _STEPS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # KiB on Linux
    return {"activations_mb": peak * 1.024 - before, "step_s": seconds, "loss": loss}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, by kind.

    Raises:
      RuntimeError: a process failed, or the losses differ.
    """
    sizes = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "length", "batch")]
    runs: dict[str, list[dict[str, float]]] = {"kept": [], "again": []}
    for number in range(args.rounds):
        for kind in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            command = [sys.executable, "-m", "benchmarks.recompute", f"--child={kind}", *sizes]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}\n{done.stderr[-2000:]}")
            runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    losses = {kind: found[0]["loss"] for kind, found in runs.items()}
    if losses["kept"] != losses["again"]:
        raise RuntimeError(f"the losses differ, so the gradients do: {losses}")
    names = ("activations_mb", "step_s", "loss")
    return {kind: {n: statistics.median(r[n] for r in found) for n in names} for kind, found in runs.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    if args.child:
        print(json.dumps(child(args)), flush=True)
        return 0
    load = machine.load()
    found = measure(args)
    for kind, figures in found.items():
        print(f"{kind}: {figures['activations_mb']:.0f} MB above the model, {figures['step_s'] * 1e3:.0f} ms a step")
    sizes = {name: getattr(args, name) for name in ("width", "layers", "length", "batch", "rounds")}
    if args.out:
        result.write(args.out, {**machine.circumstances(), **sizes, "load": load, "cases": [found]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
