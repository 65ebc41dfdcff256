"""Input alone: ``python -m benchmarks.input [--rounds=7] [--case=NAME ...] [--check] [--out=FILE]``.

Examples a second of the index stream against what most users write, ``Dataset.shuffle(all).batch``, over the same
arrays and with the same read-ahead; the seconds to the first batch at example 0 and at example 10 million; and the
share of a training step spent waiting, with the bottleneck named. Rounds interleave, ratios are taken in a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import machine, result

# name -> (examples, shape of one, dtype, batch)
CASES: dict[str, tuple[int, tuple[int, ...], str, int]] = {
    "digits": (1437, (64,), "float32", 96),
    "vectors": (20_000, (784,), "float32", 256),
    "images": (20_000, (32, 32, 3), "uint8", 128),
}
FAR = 10_000_000
BOUNDS = {"ratio": 1.0, "start": 1.2}


def arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and labels of a case."""
    count, shape, dtype, _ = CASES[name]
    random = np.random.default_rng(0)
    inputs = random.integers(0, 255, (count, *shape)).astype(dtype)
    return inputs, random.integers(0, 10, count).astype(np.int32)


def stream(name: str) -> Any:
    """The framework's pipeline."""
    from framework import BatchPlan
    from input_pipelines import from_arrays

    return from_arrays(arrays(name)).batches(BatchPlan(global_batch_size=CASES[name][3]))


def shuffled(name: str) -> Any:
    """The same with a shuffle buffer of all examples, as tutorials have it."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(arrays(name)).shuffle(CASES[name][0], seed=0).repeat()
    return data.batch(CASES[name][3], drop_remainder=True).prefetch(4)


def rate(dataset: Any, batch: int, seconds: float) -> float:
    """Examples a second, after the first batches; they are read in a compiled loop and not used."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def read(iterator: Any, count: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor) -> tf.Tensor:
            inputs, _ = next(iterator)
            with tf.control_dependencies([inputs]):
                return i + 1

        return tf.while_loop(lambda i: i < count, body, (tf.constant(0),), parallel_iterations=1)

    iterator, done = iter(dataset), 0
    read(iterator, tf.constant(64))
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        read(iterator, tf.constant(64))
        done += 64
    return done * batch / (time.perf_counter() - began)


def first_batch(pipeline: Any, batch: int, start: int) -> float:
    """Seconds from asking a pipeline for its batches from example ``start`` on to having the first."""
    from framework import BatchPlan

    began = time.perf_counter()
    next(iter(pipeline.batches(BatchPlan(global_batch_size=batch, start=start))))
    return time.perf_counter() - began


def waiting(name: str) -> tuple[float, str]:
    """Share of a training step of a small perceptron spent waiting for this input, and which of the two is slower."""
    import keras
    import tensorflow as tf

    from framework import AtSteps, LossOutput, RunConfig, Scheduled, Trainer
    from input_pipelines import from_arrays

    found: list[float] = []

    class Small(Trainer):
        """A perceptron of 64 hidden units."""

        def build_model(self) -> Any:
            shape = CASES[name][1]
            inputs = keras.Input(shape)
            x = keras.layers.Rescaling(1 / 255)(keras.layers.Flatten()(inputs))
            return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Dense(64, activation="relu")(x)))

        def train_data(self) -> Any:
            return from_arrays(arrays(name))

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            logits = model(batch[0], training=training)
            return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))

        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(AtSteps([400]), lambda step, values: found.append(values["input_wait"]))]

    Small(RunConfig(train_steps=400, global_batch_size=CASES[name][3], device="cpu", progress="off")).train()
    return found[0], "input" if found[0] > 0.5 else "step"


def measure(names: Sequence[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row a case."""
    from input_pipelines import from_arrays

    rows = []
    for name in names:
        batch = CASES[name][3]
        contenders: list[tuple[str, Callable[[str], Any]]] = [("stream", stream), ("shuffle", shuffled)]
        rates: dict[str, list[float]] = {"stream": [], "shuffle": []}
        starts: list[tuple[float, float]] = []
        pipeline = from_arrays(arrays(name))
        first_batch(pipeline, batch, 0)  # the first of a process pays for what is loaded lazily
        for number in range(rounds):
            for kind, make in contenders if number % 2 == 0 else contenders[::-1]:
                rates[kind].append(rate(make(name), batch, seconds))
            for _ in range(3):
                starts.append((first_batch(pipeline, batch, 0), first_batch(pipeline, batch, FAR)))
        share, bottleneck = waiting(name)
        rows.append(
            {
                "case": name,
                "stream": statistics.median(rates["stream"]),
                "shuffle": statistics.median(rates["shuffle"]),
                "ratio": statistics.median(a / b for a, b in zip(rates["stream"], rates["shuffle"], strict=True)),
                "first_batch_s": statistics.median(near for near, _ in starts),
                "first_batch_far_s": statistics.median(far for _, far in starts),
                "start": statistics.median(far / near for near, far in starts),
                "input_wait": share,
                "bottleneck": bottleneck,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.input", description="Input pipelines alone.")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--case", action="append", default=[], choices=sorted(CASES), help="only this; may be repeated")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    parser.add_argument("--out", default="", help="result file to write, JSON")
    args = parser.parse_args(argv)
    rows = measure(args.case or list(CASES), args.rounds, args.seconds)
    print(f"{'case':<9} {'stream/s':>10} {'shuffle/s':>10} {'ratio':>6} {'first s':>8} {'at 10M':>7}", end=" ")
    print(f"{'/':>5} {'wait':>5}  slower")
    for r in rows:
        print(
            f"{r['case']:<9} {r['stream']:>10.0f} {r['shuffle']:>10.0f} {r['ratio']:>6.2f} {r['first_batch_s']:>8.3f} "
            f"{r['first_batch_far_s']:>7.3f} {r['start']:>5.2f} {r['input_wait']:>5.2f}  {r['bottleneck']}"
        )
    if args.out:
        result.write(args.out, {**machine.circumstances(), "rounds": args.rounds, "bounds": BOUNDS, "rows": rows})
    broken = [r["case"] for r in rows if r["ratio"] < BOUNDS["ratio"] or r["start"] > BOUNDS["start"]]
    if broken:
        print(f"bounds broken by {', '.join(broken)}: {BOUNDS}", file=sys.stderr)
    return 1 if broken and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
