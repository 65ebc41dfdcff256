"""Runs a suite: ``python -m benchmarks.run --suite=smoke [--case=NAME ...] [--rounds=7] [--check] [--out=FILE]``.

``--suite=accuracy|communication|input|checkpoint|checks`` runs the script of that subject with its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import machine, markdown, plot, result, start, table
from benchmarks.cases import CASES, SUITES, Case
from benchmarks.peers import PEERS, expanded, missing
from benchmarks.process import ContenderProcess
from benchmarks.rounds import Open, run_rounds

# Suites that are scripts of their own: what they measure is no contender's step.
SCRIPTS = {
    "accuracy": "goal",
    "communication": "all_reduce",
    "input": "input",
    "checkpoint": "checkpoint",
    "checks": "checks",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measures the framework against peers.")
    p.add_argument("--suite", default="smoke", choices=sorted({*SUITES, *SCRIPTS}), help="set of cases")
    p.add_argument("--case", action="append", default=[], choices=sorted(CASES), help="only this case; may be repeated")
    p.add_argument(
        "--against", default="", help=f"only these peers, comma separated: {', '.join(PEERS)}; default: all of a case"
    )
    p.add_argument("--rounds", type=int, default=7, help="rounds of fresh processes; the median over them counts")
    p.add_argument("--windows", type=int, default=0, help="measured windows in a round; 0: as the case says")
    p.add_argument("--window_steps", type=int, default=0, help="steps in a window; 0: as the case says")
    p.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    p.add_argument("--out", default="", help="result file to write, JSON")
    p.add_argument("--markdown", default="", help="table to write, Markdown")
    p.add_argument("--plot", default="", help="picture of the ratios to write, PNG; takes matplotlib")
    return p


def selected(args: argparse.Namespace) -> list[Case]:
    """The cases to run, with windows and peers as the command line wants them.

    Raises:
      ValueError: a peer that there is not, or that no selected case has.
    """
    names = [n for n in SUITES[args.suite] if not args.case or n in args.case]
    names += [n for n in args.case if n not in names]
    changes = {n: v for n, v in (("windows", args.windows), ("window_steps", args.window_steps)) if v}
    cases = [dataclasses.replace(CASES[n], **changes) for n in names]
    against = expanded(args.against)
    unused = [n for n in against if not any(n in case.contenders for case in cases)]
    if unused:
        raise ValueError(f"--against={args.against}: no selected case has {', '.join(unused)}; try --suite=peers")
    return [_against(case, against) for case in cases] if against else cases


def _against(case: Case, peers: Sequence[str]) -> Case:
    """The case with these of its peers only, and the bounds that are left."""
    kept = [n for n in case.contenders if n in peers or n not in PEERS or n == case.reference]
    lost = {n for n in case.contenders if n not in kept}
    bounds = [b for b in case.bounds if b.quantity.partition("/")[0] not in lost]
    return dataclasses.replace(case, contenders=tuple(kept), bounds=tuple(bounds))


@contextlib.contextmanager
def processes(case: Case) -> Iterator[Open]:
    """How contenders of a case are started: each in a process of its own, with the common start where one needs it."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        workload = case.workload
        if any(PEERS[n].shares_start for n in case.contenders if n in PEERS):
            path = os.path.join(folder, "start.npz")
            start.write(workload, case.ends[-1], path)
            workload = dataclasses.replace(workload, start=path)
        yield lambda case, name: ContenderProcess(name, workload, case.ends)


def measure(args: argparse.Namespace, open_contender: Open | None = None) -> dict[str, Any]:
    """Runs the selected cases and returns the document of the result file."""
    defaults = vars(parser().parse_args([]))
    document: dict[str, Any] = {
        "schema": result.SCHEMA,
        **machine.circumstances(),
        "flags": {k: v for k, v in vars(args).items() if v != defaults[k]},
        "cases": [],
    }
    for wanted in selected(args):
        skipped = {n: why for n in wanted.contenders if (why := missing(n))}
        case = dataclasses.replace(wanted, contenders=tuple(n for n in wanted.contenders if n not in skipped))
        _say(f"{case.name}: {case.about}")
        for name, why in skipped.items():
            _say(f"{case.name}: {name} is left out: {why}")
        before = machine.load()
        with contextlib.nullcontext(open_contender) if open_contender else processes(case) as opener:
            rounds = run_rounds(case, min(args.rounds, case.max_rounds), opener, _say)
        load = {"before": before, "after": machine.load()}
        document["cases"].append({**result.case_result(case, rounds, load), "skipped": skipped})
    document["geometric_means"] = result.geometric_means(document)
    return document


def main(argv: Sequence[str] | None = None, open_contender: Open | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    if args.rounds < 1:
        parser().error(f"--rounds={args.rounds} but at least 1 round is needed")
    if args.suite in SCRIPTS:
        return _script(args)
    if args.plot and not plot.possible():  # told now, and not after an hour
        parser().error("--plot takes matplotlib, which is not installed; pip install lockstep-tf[bench]")
    try:
        selected(args)
    except ValueError as error:
        parser().error(str(error))
    document = measure(args, open_contender)
    print(table.render(document), flush=True)
    if args.out:
        result.write(args.out, document)
    if args.markdown:
        markdown.write(args.markdown, document)
    if args.plot:
        plot.write(args.plot, document)
    failed = result.broken(document)
    for line in failed:
        _say(line)
    return 1 if failed and args.check else 0


def _script(args: argparse.Namespace) -> int:
    """Runs the script of a suite that is none of cases; refuses flags that it would not look at."""
    defaults = vars(parser().parse_args([]))
    given = [n for n, v in vars(args).items() if v != defaults[n] and n not in ("suite", "out")]
    if given:
        name = SCRIPTS[args.suite]
        parser().error(f"--suite={args.suite} has no {given[0]}; python -m benchmarks.{name} --help lists its flags")
    script = importlib.import_module(f"benchmarks.{SCRIPTS[args.suite]}")
    return script.main([f"--out={args.out}"] if args.out else [])


def _say(line: str) -> None:
    """Progress goes to standard error: standard output is the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
