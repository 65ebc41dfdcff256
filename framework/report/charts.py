"""Charts as SVG text: lines, stacked bars, a histogram. Colours are CSS classes, so that dark mode changes them."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 240  # of the drawing; the page scales it
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 28
COLOURS = 8
_POINTS = 600  # of a line that are drawn: more than columns of the drawing area

Points = Sequence[tuple[float, float]]


def number(value: float) -> str:
    """To 4 significant digits; thousands as k, M, G, T; very small ones with an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    size = abs(value)
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            unit = 1e3 if sign == "k" else factor
            return f"{value / unit:.4g}{sign}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most about ``_POINTS`` of the points; of each stretch the lowest and the highest stay, so no peak is lost."""
    if len(points) <= _POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _POINTS)
    kept = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def lines(title: str, series: Mapping[str, Points], *, x_name: str = "step") -> str:
    """A chart of curves by name; empty text without a point. Names and values show where a pointer is."""
    drawn = {name: thinned([p for p in points if all(map(math.isfinite, p))]) for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    margin = (y_high - y_low) * 0.05 or abs(y_high) * 0.1 or 1.0
    y_low, y_high = (0.0 if 0 <= y_low < 0.3 * y_high else y_low - margin), y_high + margin
    x_scale = (WIDTH - _LEFT - _RIGHT) / (x_high - x_low)
    y_scale = (HEIGHT - _TOP - _BOTTOM) / (y_high - y_low)

    def place(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + (x - x_low) * x_scale, 1), round(HEIGHT - _BOTTOM - (y - y_low) * y_scale, 1)

    parts = []
    for y in ticks(y_low, y_high, 4):
        at = place(x_low, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{number(y)}</text>')
    for x in ticks(x_low, x_high, 6):
        parts.append(
            f'<text class="tick" x="{place(x, y_low)[0]}" y="{HEIGHT - 8}" text-anchor="middle">{number(x)}</text>'
        )
    data = []
    for i, (name, points) in enumerate(drawn.items()):
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        if len(placed) == 1:
            parts.append(f'<circle class="dot c{i % COLOURS}" cx="{placed[0][0]}" cy="{placed[0][1]}" r="3"/>')
        parts.append(f'<polyline class="line c{i % COLOURS} d{i // COLOURS % 3}" points="{path}"/>')
        data.append({"name": name, "points": [[*p, x, number(y)] for p, (x, y) in zip(placed, points, strict=True)]})
    legend = "".join(
        f'<span><i class="key c{i % COLOURS}"></i>{html.escape(name)} <b>{number(points[-1][1])}</b></span>'
        for i, (name, points) in enumerate(drawn.items())
    )
    # "</" would end the script element of a page; in JSON the slash may be written so.
    kept = json.dumps({"x": x_name, "series": data}, allow_nan=False).replace("</", "<\\/")
    return _figure(
        title, "".join(parts) + '<line class="cursor" y1="10" y2="212" visibility="hidden"/>', legend, data=kept
    )


def histogram(title: str, values: Sequence[float], *, unit: str, bins: int = 30) -> str:
    """How often values fall where; the last bar holds what is above the 99th percentile. Empty text without values."""
    found = sorted(v for v in values if math.isfinite(v))
    if not found:
        return ""
    low, high = found[0], found[min(len(found) - 1, math.ceil(0.99 * len(found)))]
    if high <= low:
        low, high = low - 0.5, high + 0.5
    counts = [0] * bins
    for value in found:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    width, tall = (WIDTH - _LEFT - _RIGHT) / bins, HEIGHT - _TOP - _BOTTOM
    parts = []
    for i, count in enumerate(counts):
        size = round(tall * count / max(counts), 1)
        edges = f"{number(low + i * (high - low) / bins)} to {number(low + (i + 1) * (high - low) / bins)} {unit}"
        box = f'x="{_LEFT + i * width:.1f}" y="{HEIGHT - _BOTTOM - size}" width="{width - 1:.1f}" height="{size}"'
        parts.append(f'<rect class="bar c0" {box}><title>{edges}: {count}</title></rect>')
    for value in ticks(low, high, 6):
        at = _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{max(counts)}</text>')
    middle = found[len(found) // 2]
    return _figure(title, "".join(parts), f"<span>{len(found)} values, middle {number(middle)} {unit}</span>")


def bars(title: str, rows: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """One horizontal bar a row, stacked of named parts. Empty text where nothing has a length."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    longest = max((sum(row.values()) for row in rows.values()), default=0.0)
    if longest <= 0:
        return ""
    # Room for the longest name, at about 7 units a letter.
    left = min(max(len(name) for name in rows) * 7 + 14, WIDTH // 3)
    height, parts = len(rows) * 26 + 34, []
    scale = (WIDTH - left - _RIGHT) / longest
    for i, (label, row) in enumerate(rows.items()):
        at, y = float(left), 8 + i * 26
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
        for name, value in row.items():
            size = max(value, 0.0) * scale
            told = f"{html.escape(label)}: {html.escape(name)} {number(value)} {unit}"
            box = f'x="{at:.1f}" y="{y}" width="{size:.1f}" height="20"'
            parts.append(f'<rect class="bar c{names.index(name) % COLOURS}" {box}><title>{told}</title></rect>')
            at += size
    for value in ticks(0.0, longest, 5):
        x = f"{left + value * scale:.1f}"
        parts.append(f'<text class="tick" x="{x}" y="{height - 8}" text-anchor="middle">{number(value)}</text>')
    totals = {name: sum(row.get(name, 0.0) for row in rows.values()) for name in names}
    legend = "".join(
        f'<span><i class="key c{i % COLOURS}"></i>{html.escape(name)}'
        + (f" <b>{number(totals[name])} {unit}</b>" if len(rows) == 1 else "")
        + "</span>"
        for i, name in enumerate(names)
    )
    return _figure(f"{title}, {unit}", "".join(parts), legend, height=height)


def _figure(title: str, drawing: str, legend: str, *, height: int = HEIGHT, data: str = "") -> str:
    name = html.escape(title)
    script = f'<script type="application/json">{data}</script><output hidden></output>' if data else ""
    return (
        f"<figure{' data-lines' * bool(data)}><figcaption>{name}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{drawing}</svg>'
        f'<div class="legend">{legend}</div>{script}</figure>'
    )
