"""Runs a suite: ``python -m benchmarks.run --suite=smoke [--case=NAME ...] [--rounds=7] [--check] [--out=FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, result, table
from benchmarks.cases import CASES, SUITES, Case
from benchmarks.process import ContenderProcess
from benchmarks.rounds import Open, run_rounds


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measures the framework against peers.")
    p.add_argument("--suite", default="smoke", choices=sorted(SUITES), help="set of cases")
    p.add_argument("--case", action="append", default=[], choices=sorted(CASES), help="only this case; may be repeated")
    p.add_argument("--rounds", type=int, default=7, help="rounds of fresh processes; the median over them counts")
    p.add_argument("--windows", type=int, default=0, help="measured windows in a round; 0: as the case says")
    p.add_argument("--window_steps", type=int, default=0, help="steps in a window; 0: as the case says")
    p.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    p.add_argument("--out", default="", help="result file to write, JSON")
    return p


def selected(args: argparse.Namespace) -> list[Case]:
    """The cases to run, with windows as the command line wants them."""
    names = [n for n in SUITES[args.suite] if not args.case or n in args.case]
    names += [n for n in args.case if n not in names]
    changes = {n: v for n, v in (("windows", args.windows), ("window_steps", args.window_steps)) if v}
    return [dataclasses.replace(CASES[n], **changes) for n in names]


def open_process(case: Case, name: str) -> ContenderProcess:
    """Starts a contender in a process of its own."""
    return ContenderProcess(name, case.workload, case.ends)


def measure(args: argparse.Namespace, open_contender: Open = open_process) -> dict[str, Any]:
    """Runs the selected cases and returns the document of the result file."""
    defaults = vars(parser().parse_args([]))
    document: dict[str, Any] = {
        "schema": result.SCHEMA,
        **machine.circumstances(),
        "flags": {k: v for k, v in vars(args).items() if v != defaults[k]},
        "cases": [],
    }
    for case in selected(args):
        _say(f"{case.name}: {case.about}")
        before = machine.load()
        rounds = run_rounds(case, min(args.rounds, case.max_rounds), open_contender, _say)
        load = {"before": before, "after": machine.load()}
        document["cases"].append(result.case_result(case, rounds, load))
    return document


def main(argv: Sequence[str] | None = None, open_contender: Open = open_process) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    if args.rounds < 1:
        parser().error(f"--rounds={args.rounds} but at least 1 round is needed")
    document = measure(args, open_contender)
    print(table.render(document), flush=True)
    if args.out:
        result.write(args.out, document)
    failed = result.broken(document)
    for line in failed:
        _say(line)
    return 1 if failed and args.check else 0


def _say(line: str) -> None:
    """Progress goes to standard error: standard output is the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
