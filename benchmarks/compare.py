"""Compares two result files: ``python -m benchmarks.compare OLD.json NEW.json``.

Milliseconds of two files are comparable only on one quiet machine. Ratios to a reference, which were measured within
a round, are the safer ground, so both are shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import result, table


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A table of what both files measured, and what differs in where it was measured."""
    rows = [["case", "figure", "old", "new", "new/old", "ranges"]]
    new_figures = _figures(new)
    for (case, name), before in _figures(old).items():
        after = new_figures.get((case, name))
        if after is None or before["median"] is None or after["median"] is None:
            continue
        apart = before["max"] < after["min"] or after["max"] < before["min"]
        quotient = f"{after['median'] / before['median']:.3f}" if before["median"] else "-"
        rows.append([case, name, table.spread(before), table.spread(after), quotient, "apart" if apart else "overlap"])
    lines = [table.align(rows) if len(rows) > 1 else "the two files have no figure in common"]
    for key in ("machine", "versions", "environment", "flags"):
        if old[key] != new[key]:
            lines.append(f"{key} differs: {old[key]} and {new[key]}")
    return "\n".join(lines)


def _figures(document: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(case, figure) -> spread."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for case in document["cases"]:
        for name, contender in case["contenders"].items():
            found[case["name"], f"{name} ms a step"] = contender["steady"]["step_ms"]
            found[case["name"], f"{name} first step s"] = contender["start_up"]["first_step_s"]
        found.update({(case["name"], text): value for text, value in case["ratios"].items()})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Compares two result files.")
    p.add_argument("old")
    p.add_argument("new")
    args = p.parse_args(argv)
    try:
        print(compare(result.read(args.old), result.read(args.new)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
