"""What a check of the replicas costs: ``python -m benchmarks.checks [--cases=mlp,resnet20] [--rounds=5]``.

A task of the benchmarks trains on two logical CPU replicas. A round is some steps and then some checks of all replicas'
variables (weights, AdamW's slots, moving statistics); both are wall clock, the median of the rounds counts, and the
first round, which traces and compiles, is told apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import machine, result
from benchmarks.workload import Workload

CASES = {
    "mlp": Workload(features=784, hidden=(512, 512), batch=256, replicas=2),
    "resnet20": Workload(network="resnet20", batch=64, replicas=2),
}
_CHECKS = 10  # in a round


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.checks", description="What a check of the replicas costs.")
    p.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}, comma separated")
    p.add_argument("--rounds", type=int, default=5, help="the median of the rounds counts")
    p.add_argument("--steps", type=int, default=20, help="steps in a round")
    p.add_argument("--out", default="", help="result file to write, JSON")
    return p


def measure(workload: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step and of a check, and the check's share of a run that checks every 1000 steps."""
    from benchmarks.trainer import Workbench
    from framework import AtSteps, RunConfig, Scheduled
    from framework.monitor.ledger import Ledger
    from framework.monitor.replica_check import ReplicaCheck

    times: dict[str, list[float]] = {"step": [], "check": []}
    first: list[float] = []

    class Checked(Workbench):
        def hooks(self) -> Sequence[Scheduled]:
            return [Scheduled(AtSteps([steps * (i + 1) for i in range(rounds)]), self.check)]

        def check(self, step: int, values: Any) -> None:
            times["step"].append(values["step_ms"])
            start = time.perf_counter()
            checks.compare()
            if not first:
                first.append(1e3 * (time.perf_counter() - start))
                start = time.perf_counter()
            for _ in range(_CHECKS):
                checks.compare()
            times["check"].append(1e3 * (time.perf_counter() - start) / (_CHECKS + (len(times["check"]) > 0)))

    config = RunConfig(
        train_steps=rounds * steps,
        global_batch_size=workload.batch,
        device="cpu",
        num_replicas=workload.replicas,
        optimizer="adamw",
        progress="off",
    )
    trainer = Checked(config, workload, [], lambda *_: None)  # type: ignore[arg-type]
    checks = ReplicaCheck(trainer, Ledger())
    trainer.train()
    step, check = (statistics.median(times[name]) for name in ("step", "check"))
    state = trainer.state().values()
    return {
        "variables": len(state),
        "megabytes": round(sum(v.shape.num_elements() * v.dtype.size for v in state) / 1e6, 2),
        "step_ms": round(step, 3),
        "check_ms": round(check, 3),
        "check_in_steps": round(check / step, 3),
        "share_every_1000": check / step / 1000,
        "first_check_ms": round(first[0], 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    cases = {}
    for name in args.cases.split(","):
        case = cases[name] = {"load": machine.load(), **measure(CASES[name], args.rounds, args.steps)}
        print(
            f"{name}: {case['variables']} variables, {case['megabytes']} MB a replica; a step {case['step_ms']} ms, "
            f"a check {case['check_ms']} ms ({case['check_in_steps']} steps; every 1000 steps "
            f"{case['share_every_1000']:.1e} of the time); the first one, with tracing, {case['first_check_ms']} ms",
            flush=True,
        )
    if args.out:
        result.write(args.out, {**machine.circumstances(), "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main())
