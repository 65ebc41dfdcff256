"""Step time and efficiency of N workers with M devices each, from what was measured, and a check of the model itself.

    python -m benchmarks.scale_model [--out=FILE]                                   measures here, predicts 4 processes
    python -m benchmarks.scale_model --step_ms=180 --gradient_mb=102 --link_gbps=100 --inner_gbps=2400 --devices=8

A step is the local work and then the all-reduce, because the update waits for all gradients:

    t(N, M) = compute + 2 (M-1) a' + 2 (M-1)/M S/b'  +  2 (N-1) a + 2 (N-1)/N S/b

with S bytes of gradients, b and a the bandwidth and the latency of the link between workers, b' and a' those between
the devices of one worker: a ring inside each worker, then a ring over the workers (hierarchical). In one ring over all
devices that crosses the slow link the sum is 2 (NM-1) a + 2 (NM-1)/(NM) S/b. The cost of a ring: Patarasuk and Yuan,
Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009, with the latency term of Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005. Efficiency is compute / t:
weak scaling, where each device keeps its batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import machine, result
from benchmarks.process import ROOT
from framework.launcher.ports import HeldPorts

WORKERS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection: bytes a second in one direction, and seconds of one message."""

    bandwidth: float
    latency: float = 0.0

    def ring(self, members: int, size: float) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes."""
        if members == 1:
            return 0.0
        return 2 * (members - 1) * self.latency + 2 * (members - 1) / members * size / self.bandwidth


def predict(compute: float, size: float, workers: int, devices: int, link: Link, inner: Link | None = None) -> float:
    """Seconds of a step.

    Args:
      compute: seconds of the local work of a step on one device.
      size: bytes of gradients that each device sends.
      workers, devices: workers, and devices of each.
      link: between workers.
      inner: between the devices of a worker; None: one ring over all devices, through ``link``.
    """
    if inner is None:
        return compute + link.ring(workers * devices, size)
    return compute + inner.ring(devices, size) + link.ring(workers, size)


def fit(times: Mapping[float, float], members: int) -> Link:
    """The link that fits seconds of a ring all-reduce by size in bytes, by least squares of relative errors."""
    # t = x + y S, with weights 1 / t^2.
    rows = [(1.0 / t, s / t) for s, t in times.items()]
    a11, a12, a22 = (
        sum(f(u, v) for u, v in rows) for f in (lambda u, v: u * u, lambda u, v: u * v, lambda u, v: v * v)
    )
    b1, b2 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = a11 * a22 - a12 * a12
    x, y = (b1 * a22 - b2 * a12) / determinant, (b2 * a11 - b1 * a12) / determinant
    if x < 0.0:  # a latency below what can be seen
        x, y = 0.0, b2 / a22
    share = 2 * (members - 1) / members
    return Link(bandwidth=share / max(y, 1e-15), latency=x / (2 * (members - 1)))


# --- measured --------------------------------------------------------------------------------------------------------


def measure(workers: int) -> dict[str, Any]:
    """What ``benchmarks.scale_worker`` measures with so many processes on this machine, one thread of work each."""
    held = HeldPorts(workers)
    held.close()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for i in range(workers):
            config = {"cluster": {"worker": held.addresses}, "task": {"type": "worker", "index": i}}
            env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"}
            env |= {"TF_CONFIG": json.dumps(config)} if workers > 1 else {}
            command = [sys.executable, "-m", "benchmarks.scale_worker", folder]
            processes.append(
                subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
        try:
            for process in processes:
                _, errors = process.communicate(timeout=300)
                if process.returncode:
                    raise RuntimeError(f"{workers} workers: code {process.returncode}: {errors[-2000:]}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads((pathlib.Path(folder) / "figures.json").read_text())


def check(rounds: int) -> dict[str, Any]:
    """Measures 1, 2 and 4 processes; predicts the latter two from the first and the link of two."""
    found: dict[int, list[dict[str, Any]]] = {n: [] for n in WORKERS}
    for number in range(rounds):
        for n in WORKERS:
            found[n].append(measure(n))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    seconds = {n: statistics.median(f["step_s"] for f in found[n]) for n in WORKERS}
    sizes = found[2][0]["all_reduce_s"]
    link = fit({float(s): statistics.median(f["all_reduce_s"][s] for f in found[2]) for s in sizes}, 2)
    size = found[1][0]["gradient_bytes"]
    cores = machine.machine()["cores"]
    rows = []
    for n in WORKERS:
        # Processes that share cores wait for each other: this is a machine of so many cores, not a cluster.
        shared = max(1.0, n / cores)
        predicted = predict(seconds[1] * shared, size, n, 1, Link(link.bandwidth / shared, link.latency * shared))
        rows.append({"workers": n, "measured_ms": seconds[n] * 1e3, "predicted_ms": predicted * 1e3})
    return {"gradient_bytes": size, "link": dataclasses.asdict(link), "cores": cores, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_model", description=__doc__.splitlines()[0])
    parser.add_argument("--step_ms", type=float, default=0.0, help="measured local work of a step; 0: measure here")
    parser.add_argument("--gradient_mb", type=float, default=0.0, help="MB of gradients that cross")
    parser.add_argument("--link_gbps", type=float, default=100.0, help="Gbit/s between workers")
    parser.add_argument("--link_us", type=float, default=20.0, help="microseconds of a message between workers")
    parser.add_argument("--inner_gbps", type=float, default=0.0, help="Gbit/s between a worker's devices; 0: one ring")
    parser.add_argument("--inner_us", type=float, default=5.0, help="microseconds of a message between devices")
    parser.add_argument("--devices", type=int, default=1, help="devices of a worker")
    parser.add_argument("--workers", default="1,2,4,8,16,32,64", help="comma separated")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes")
    parser.add_argument("--out", default="", help="result file to write, JSON")
    args = parser.parse_args(argv)
    if not args.step_ms:
        found = check(args.rounds)
        link = found["link"]
        print(
            f"{found['cores']} cores, one thread a process; gradients {found['gradient_bytes'] / 1e6:.2f} MB; link of "
            f"two processes: {link['bandwidth'] / 1e9:.2f} GB/s, {link['latency'] * 1e6:.0f} us"
        )
        print(f"{'workers':>8} {'measured ms':>12} {'predicted ms':>13} {'ratio':>6}")
        for row in found["rows"]:
            ratio = row["predicted_ms"] / row["measured_ms"]
            print(f"{row['workers']:>8} {row['measured_ms']:>12.2f} {row['predicted_ms']:>13.2f} {ratio:>6.2f}")
        if args.out:
            result.write(args.out, {**machine.circumstances(), "rounds": args.rounds, **found})
        return 0
    link, inner = Link(args.link_gbps / 8 * 1e9, args.link_us * 1e-6), None
    if args.inner_gbps:
        inner = Link(args.inner_gbps / 8 * 1e9, args.inner_us * 1e-6)
    compute = args.step_ms * 1e-3
    print(f"{'workers':>8} {'devices':>8} {'step ms':>9} {'efficiency':>11}")
    for n in (int(text) for text in args.workers.split(",")):
        seconds = predict(compute, args.gradient_mb * 1e6, n, args.devices, link, inner)
        print(f"{n:>8} {n * args.devices:>8} {seconds * 1e3:>9.2f} {compute / seconds:>11.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
