"""A result as Markdown: a table a case, to be pasted into a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.table import circumstances, notes, spread

_HEAD = ("contender", "ms a step", "ratio", "examples/s", "first step s", "ratio of first steps")


def render(document: Mapping[str, Any]) -> str:
    """The whole result. A ratio is of the contender's time over the reference's, whose row has none."""
    lines = ["# Results", "", *circumstances(document), ""]
    for case in document["cases"]:
        lines += [f"## {case['name']}", "", f"{case['about']}; {case['rounds']} round(s).", ""]
        lines += [_row(_HEAD), _row(["---"] * len(_HEAD))]
        lines += [_row(_cells(case, name, figures)) for name, figures in case["contenders"].items()]
        lines += ["", *(f"- {line}" for line in notes(case)), ""]
    means = document.get("geometric_means", {})
    lines += [f"- geometric mean of {text}: {value:.3f}" for text, value in means.items()]
    return "\n".join(lines).rstrip() + "\n"


def write(path: str, document: Mapping[str, Any]) -> None:
    """Writes the text whole or not at all."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(render(document))
    os.replace(temporary, path)


def _cells(case: Mapping[str, Any], name: str, figures: Mapping[str, Any]) -> list[str]:
    steady, start_up = figures["steady"], figures["start_up"]
    key = next((text for text in case["ratios"] if text.startswith(f"{name}/")), "")
    return [
        name,
        spread(steady["step_ms"]),
        spread(case["ratios"].get(key)),
        f"{steady['examples_per_second']['median']:.0f}",
        spread(start_up["first_step_s"], 1),
        spread(case["first_step_ratios"].get(key)),
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
