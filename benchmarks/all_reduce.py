"""The all-reduce alone: ``python -m benchmarks.all_reduce [--rounds=5] [--replicas=2 --replicas=4] [--out=FILE]``.

Gradients as a ResNet has them (convolutions with two vectors after each) are added over logical CPU devices in a
compiled loop: by the framework with each algorithm it offers, and as TensorFlow does it by default. Each variant has a
process of its own, because two strategies in one process can share keys of their collectives. A round runs every
variant once; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, result
from benchmarks.process import ROOT

SIZES_MB = (0.4, 10.0, 100.0)
BLOCKS = 33  # a convolution and two vectors each: 99 tensors
VARIANTS = ("tensorflow", "auto", "one_device", "hierarchical", "collective")


def shapes(megabytes: float) -> list[tuple[int, ...]]:
    """Shapes of float32 gradients of about so many megabytes: ``BLOCKS`` times a 3 x 3 convolution and two vectors."""
    width = max(1, round((megabytes * 1e6 / 4 / BLOCKS / 9) ** 0.5))
    return [s for _ in range(BLOCKS) for s in ((3, 3, width, width), (width,), (width,))]


def child(variant: str, replicas: int, seconds: float) -> dict[str, float]:
    """Milliseconds of one reduction for each size, in this process."""
    import tensorflow as tf

    from framework import Reduction, RunConfig, StepSums, reduce
    from framework.cluster import cluster, strategy

    how: Reduction | None = None
    if variant == "tensorflow":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
        strategies = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    else:
        config = RunConfig(device="cpu", num_replicas=replicas, all_reduce=variant, train_steps=1)
        alone = cluster.resolve(config)
        choice = strategy.choose(config, alone, 0, False)
        strategy.configure_devices(choice, config)
        strategies = strategy.build(choice, config, alone)
        how = Reduction(
            pack_bytes=int(config.all_reduce_pack_mb * 1e6), options=strategy.communication_options(choice, config)
        )

    def one(size: float) -> float:
        wanted = shapes(size)

        def replica(x: tf.Tensor) -> tf.Tensor:
            gradients = [tf.fill(s, x) for s in wanted]
            if how is None:
                summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            else:
                sums = StepSums(gradients=gradients, weight=tf.ones([]), stats={}, variables=[None] * len(gradients))
                summed = reduce(sums, how).gradients
            return tf.reduce_sum(tf.stack([tf.reshape(g, [-1])[-1] for g in summed]))

        @tf.function(autograph=False)
        def run(steps: tf.Tensor) -> tf.Tensor:
            def body(i: tf.Tensor, total: tf.Tensor) -> Any:
                # Each replica's gradients come from its own value: what is captured would not be added.
                mine = strategies.run(replica, args=(tf.cast(i, tf.float32) + total * 0.0,))
                return i + 1, total + strategies.experimental_local_results(mine)[0]

            return tf.while_loop(lambda i, _: i < steps, body, (0, 0.0), parallel_iterations=1)[1]

        run(tf.constant(2)).numpy()
        steps, elapsed = 1, 0.0
        while elapsed < seconds:
            steps *= 2
            start = time.perf_counter()
            run(tf.constant(steps)).numpy()
            elapsed = time.perf_counter() - start
        return elapsed / steps * 1e3

    return {str(size): one(size) for size in SIZES_MB}


def measure(replicas: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each number of replicas, size and variant."""
    rows = []
    for count in replicas:
        runs: list[dict[str, dict[str, float]]] = []
        for number in range(rounds):
            order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
            runs.append({variant: _in_process(variant, count, seconds) for variant in order})
            print(f"{count} replicas: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for size in map(str, SIZES_MB):
            best = min((v for v in VARIANTS[2:]), key=lambda v: statistics.median(r[v][size] for r in runs))
            for variant in VARIANTS:
                rows.append(
                    {
                        "replicas": count,
                        "megabytes": float(size),
                        "variant": variant,
                        "ms": statistics.median(r[variant][size] for r in runs),
                        "over_tensorflow": statistics.median(r[variant][size] / r["tensorflow"][size] for r in runs),
                        "over_best": statistics.median(r[variant][size] / r[best][size] for r in runs),
                    }
                )
    return rows


def _in_process(variant: str, replicas: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--child", variant, "--replicas", str(replicas)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command += ["--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{variant} on {replicas} replicas ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all_reduce", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of fresh processes")
    parser.add_argument("--replicas", type=int, action="append", help="logical CPU devices; may be repeated")
    parser.add_argument("--seconds", type=float, default=0.5, help="measured time of each size")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help="result file to write, JSON")
    args = parser.parse_args(argv)
    replicas = args.replicas or [2, 4]
    if args.child:
        print(json.dumps(child(args.child, replicas[0], args.seconds)))
        return 0
    rows = measure(replicas, args.rounds, args.seconds)
    print(f"{'replicas':>8} {'MB':>6} {'variant':<14} {'ms':>9} {'/TensorFlow':>12} {'/best':>7}")
    for r in rows:
        print(
            f"{r['replicas']:>8} {r['megabytes']:>6} {r['variant']:<14} {r['ms']:>9.2f} {r['over_tensorflow']:>12.2f} "
            f"{r['over_best']:>7.2f}"
        )
    if args.out:
        result.write(args.out, {**machine.circumstances(), "rounds": args.rounds, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
