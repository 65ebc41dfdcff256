"""A picture of a result: how many times the reference's time each contender takes, with least and greatest."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any


def possible() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def write(path: str, document: Mapping[str, Any]) -> None:
    """Writes a PNG file with one bar a contender and case; an empty picture where nothing was compared."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [(f"{case['name']}: {text}", s) for case in document["cases"] for text, s in case["ratios"].items()]
    figure = Figure(figsize=(9.0, 1.0 + 0.3 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    medians = [s["median"] for _, s in bars]
    ranges = [[s["median"] - s["min"] for _, s in bars], [s["max"] - s["median"] for _, s in bars]]
    axes.barh([name for name, _ in bars], medians, xerr=ranges, color="0.6", capsize=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    m = document["machine"]
    axes.set_xlabel(f"time a step / the reference's; {m['cpu']}, {m['cores']} cores; {document['date'][:10]}")
    FigureCanvasAgg(figure).print_png(path)
