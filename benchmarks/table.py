"""Results as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def spread(value: Mapping[str, Any] | None, digits: int = 3) -> str:
    """``1.234 (1.200..1.300)``: median, least and greatest over rounds."""
    if value is None:
        return "-"
    median, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "min", "max"))
    return median if len(value["rounds"]) == 1 else f"{median} ({low}..{high})"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns, the first row underlined."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def render(document: Mapping[str, Any]) -> str:
    """The whole result: where it was measured, one row a contender, memory, bounds."""
    parts = circumstances(document)
    rows = [["case", "contender", "ms a step", "ratio", "CPU ratio", "examples/s", "import s", "first step s"]]
    for case in document["cases"]:
        rows += [_row(case, name, figures) for name, figures in case["contenders"].items()]
    parts.append(align(rows) if len(rows) > 1 else "nothing was measured")
    parts += [line for case in document["cases"] for line in notes(case)]
    means = document.get("geometric_means", {})
    parts += [f"geometric mean of {text}: {value:.3f}" for text, value in means.items()]
    return "\n".join(parts)


def _row(case: Mapping[str, Any], name: str, figures: Mapping[str, Any]) -> list[str]:
    steady, start_up = figures["steady"], figures["start_up"]
    own = [key for key in case["ratios"] if key.startswith(f"{name}/")]
    return [
        case["name"],
        name,
        spread(steady["step_ms"]),
        spread(case["ratios"][own[0]]) if own else "-",
        spread(case["cpu_ratios"][own[0]]) if own else "-",
        f"{steady['examples_per_second']['median']:.0f}",
        f"{start_up['import_s']['median']:.1f}",
        f"{start_up['first_step_s']['median']:.1f}",
    ]


def circumstances(document: Mapping[str, Any]) -> list[str]:
    """Lines that say on what was measured."""
    m, c = document["machine"], document["commit"]
    commit = f"{(c['hash'] or 'unknown')[:12]}{' with changes' if c['dirty'] else ''}"
    return [
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gb']:g} GB; commit {commit}; {document['date']}",
        ", ".join(f"{name} {version or 'missing'}" for name, version in document["versions"].items()),
    ]


def notes(case: Mapping[str, Any]) -> list[str]:
    """Lines on what was thrown out or left out, and on bounds."""
    lines = [f"{case['name']}: {name} was thrown out: {why}" for name, why in case["rejected"].items()]
    lines += [f"{case['name']}: {name} was left out: {why}" for name, why in case.get("skipped", {}).items()]
    for bound in case["bounds"]:
        contender, _, figure = bound["quantity"].partition(".")
        if figure and contender in case["contenders"]:
            curve = case["contenders"][contender]["memory"]["rss_mb_by_step"]
            lines.append(f"{case['name']}: " + ", ".join(f"step {step} {mb:.1f} MB" for step, mb in curve))
        value = "not measured" if bound["value"] is None else f"{bound['value']:.4g}"
        side = "at least" if bound["least"] else "at most"
        verdict = "held" if bound["held"] else "BROKEN"
        lines.append(f"{case['name']}: {bound['quantity']} {value}, {side} {bound['limit']:g}: {verdict}")
    return lines
