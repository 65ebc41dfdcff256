"""Time to a goal, from the start of the process: ``python -m benchmarks.goal [--goals=digits,language] [--rounds=3]``.

The framework and its peers train the same model from the same weights on the same examples, evaluate it as often, and
are stopped at the first evaluation that reaches the goal. A contender's time is from the start of its process, with
imports, tracing and evaluations, but without the time in which another one ran: they take turns, evaluation by
evaluation. What evaluations tell must agree, or the contender is thrown out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import machine, result, start, table
from benchmarks.cases import DIGITS
from benchmarks.peers import missing
from benchmarks.process import ContenderFailed, ContenderProcess
from benchmarks.workload import Workload

CONTENDERS = ("trainer", "keras_fit", "torch")
# How far apart figures of one evaluation may be: rounding grows from step to step.
TOLERANCE = 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure that is to be reached.

    Attributes:
      workload: what is trained; ``eval_every`` says how often it is evaluated.
      limit: what its figure must reach; an accuracy from below, bits from above.
      most: evaluations; a contender that has not reached the goal by then is thrown out.
    """

    workload: Workload
    limit: float
    most: int

    def reached(self, figure: float) -> bool:
        """Whether an evaluation reaches the goal."""
        return figure >= self.limit if self.workload.figure == "accuracy" else figure <= self.limit

    @property
    def ends(self) -> list[int]:
        """Steps at which a contender reports: the first, then each evaluation."""
        return [1, *(self.workload.eval_every * (i + 1) for i in range(self.most))]


GOALS = {
    "digits": Goal(workload=dataclasses.replace(DIGITS, learning_rate=2e-3, eval_every=50), limit=0.97, most=40),
    "language": Goal(
        workload=Workload(data="library", network="transformer", batch=16, learning_rate=2e-3, eval_every=50),
        limit=3.0,
        most=40,
    ),
}
# Starts a contender: (name, goal) -> process.
Open = Callable[[str, Goal], Any]


@dataclasses.dataclass
class Run:
    """One contender in one round."""

    seconds: float  # from the start of the process, while it was its turn
    figures: list[float]  # of each evaluation
    steps: int = 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.goal", description="Time to a goal, from a process's start.")
    p.add_argument("--goals", default=",".join(GOALS), help=f"of {', '.join(GOALS)}, comma separated")
    p.add_argument("--against", default=",".join(CONTENDERS[1:]), help="peers, comma separated")
    p.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes; the median over them counts")
    p.add_argument("--out", default="", help="result file to write, JSON")
    return p


def run_round(goal: Goal, order: Sequence[str], open_contender: Open) -> tuple[dict[str, Run], dict[str, str]]:
    """One round: runs of those that reached the goal, and why the others did not."""
    processes: dict[str, Any] = {}
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    try:
        for name in order:
            processes[name] = open_contender(name, goal)
            try:
                runs[name] = Run(processes[name].start_up().first_step_s, [])
            except ContenderFailed as error:
                failures[name] = str(error)
        going = [n for n in order if n not in failures]
        for _ in range(goal.most):
            for name in list(going):
                try:
                    window = processes[name].window()
                except ContenderFailed as error:
                    failures[name] = str(error)
                    going.remove(name)
                    continue
                runs[name].seconds += window.seconds
                runs[name].figures.append(window.loss)
                runs[name].steps = window.step
                if goal.reached(window.loss):
                    going.remove(name)
        for name in going:
            failures[name] = f"{goal.limit:g} was not reached in {runs[name].steps} steps: {runs[name].figures[-1]:.4g}"
    finally:
        for process in processes.values():
            process.close()
    return {n: run for n, run in runs.items() if n not in failures}, failures


def unequal(runs: dict[str, Run]) -> dict[str, str]:
    """Contenders whose evaluations are not those of the framework."""
    if "trainer" not in runs:
        return {}
    found = {}
    for name, run in runs.items():
        for i, (a, b) in enumerate(zip(runs["trainer"].figures, run.figures)):
            if abs(a - b) > TOLERANCE * max(abs(a), abs(b)):
                found[name] = f"evaluation {i + 1} tells {b:.4g} where the trainer's tells {a:.4g}"
                break
    return found


def measure(goal: Goal, names: Sequence[str], rounds: int, open_contender: Open) -> dict[str, Any]:
    """Seconds and steps of each contender, ratios to the trainer within a round, and who was thrown out."""
    all_runs: list[dict[str, Run]] = []
    rejected: dict[str, str] = {}
    for number in range(rounds):
        left = [n for n in names if n not in rejected]
        runs, failures = run_round(goal, left if number % 2 == 0 else left[::-1], open_contender)
        rejected.update({**failures, **unequal(runs)})
        all_runs.append(runs)
    kept = [n for n in names if n not in rejected]
    found: dict[str, Any] = {"rejected": rejected, "contenders": {}, "ratios": {}}
    for name in kept:
        seconds = [runs[name].seconds for runs in all_runs]
        found["contenders"][name] = {"seconds": _spread(seconds), "steps": all_runs[0][name].steps}
        if name != "trainer" and "trainer" in kept:
            ratios = [runs[name].seconds / runs["trainer"].seconds for runs in all_runs]
            found["ratios"][f"{name}/trainer"] = _spread(ratios)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    goals, wanted = args.goals.split(","), ["trainer", *filter(None, args.against.split(","))]
    unknown = [n for n in goals if n not in GOALS] + [n for n in wanted if n not in CONTENDERS]
    if unknown or args.rounds < 1:
        parser().error(f"{unknown or args.rounds}: goals are {', '.join(GOALS)}, peers {', '.join(CONTENDERS[1:])}")
    names = [n for n in wanted if not missing(n)]
    for name in set(wanted) - set(names):
        print(f"{name} is left out: {missing(name)}", file=sys.stderr, flush=True)
    cases = []
    for text in goals:
        load, goal = machine.load(), GOALS[text]
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            path = os.path.join(folder, "start.npz")
            start.write(goal.workload, goal.ends[-1], path)
            goal = dataclasses.replace(goal, workload=dataclasses.replace(goal.workload, start=path))
            found = measure(goal, names, args.rounds, _open)
        cases.append({"goal": text, "limit": goal.limit, "figure": goal.workload.figure, "load": load, **found})
        rows = [["goal", "contender", "seconds", "steps", "ratio"]]
        for name, figures in found["contenders"].items():
            ratio = table.spread(found["ratios"].get(f"{name}/trainer"))
            rows.append([text, name, table.spread(figures["seconds"], 1), str(figures["steps"]), ratio])
        print(table.align(rows) if len(rows) > 1 else f"{text}: nobody reached {goal.limit:g}")
        for name, why in found["rejected"].items():
            print(f"{text}: {name} was thrown out: {why}", flush=True)
    if args.out:
        result.write(args.out, {**machine.circumstances(), "rounds": args.rounds, "cases": cases})
    return 0


def _open(name: str, goal: Goal) -> ContenderProcess:
    return ContenderProcess(name, goal.workload, goal.ends, function="reach")


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


if __name__ == "__main__":
    sys.exit(main())
