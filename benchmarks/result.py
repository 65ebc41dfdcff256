"""The result of a run of the benchmarks: one JSON object with all that the figures depend on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import figures
from benchmarks.cases import Bound, Case
from benchmarks.figures import Spread
from benchmarks.rounds import Rounds, Run

SCHEMA = 1


def case_result(case: Case, rounds: Rounds, load: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one case; what could not be measured is left out, and a bound on it is not held."""
    present = [n for n in case.contenders if any(n in runs for runs in rounds.runs)]
    ratios = {f"{n}/{case.reference}": n for n in present if n != case.reference and case.reference in present}
    spreads = {text: figures.ratio(rounds.runs, n, case.reference) for text, n in ratios.items()}
    first = {
        f"{text}.first_step": figures.ratio(rounds.runs, n, case.reference, figures.first_step_s)
        for text, n in ratios.items()
    }
    growth = {f"{n}.rss_growth_mb": figures.over_rounds(rounds.runs, n, figures.rss_growth_mb) for n in present}
    return {
        "name": case.name,
        "about": case.about,
        "workload": case.workload.to_dict(),
        "windows": {"steps": case.window_steps, "warm_up": case.warm_up, "measured": case.windows},
        "rounds": len(rounds.runs),
        "load": dict(load),
        "contenders": {n: _contender(case, rounds, n) for n in present},
        "ratios": {text: spread.to_dict() for text, spread in spreads.items()},
        "cpu_ratios": {
            text: figures.ratio(rounds.runs, n, case.reference, figures.cpu_ms).to_dict() for text, n in ratios.items()
        },
        "first_step_ratios": {text.partition(".")[0]: spread.to_dict() for text, spread in first.items()},
        "rejected": dict(rounds.rejected),
        "bounds": [_bound(b, {**spreads, **first, **growth}.get(b.quantity)) for b in case.bounds],
    }


def _contender(case: Case, rounds: Rounds, name: str) -> dict[str, Any]:
    """Steady state and start-up apart: the one never holds time of the other."""
    runs = [one[name] for one in rounds.runs if name in one]

    def over(figure: Callable[[Run], float]) -> dict[str, Any]:
        return Spread(tuple(figure(run) for run in runs)).to_dict()

    curve = zip(*([*run.warm_up, *run.windows] for run in runs))
    return {
        "steady": {
            "step_ms": over(figures.step_ms),
            "cpu_ms": over(figures.cpu_ms),
            "examples_per_second": over(lambda run: case.workload.batch / figures.step_ms(run) * 1e3),
        },
        "start_up": {
            "import_s": over(lambda run: run.start_up.import_s),
            "first_step_s": over(lambda run: run.start_up.first_step_s),
            "warm_up_s": over(lambda run: sum(w.seconds for w in run.warm_up)),
            "warm_up_steps": sum(w.steps for w in runs[0].warm_up),
        },
        "memory": {
            "rss_growth_mb": over(figures.rss_growth_mb),
            "rss_mb_by_step": [[windows[0].step, statistics.median(w.rss_mb for w in windows)] for windows in curve],
        },
        "losses": runs[0].losses,
        "facts": runs[0].start_up.facts,
    }


def _bound(bound: Bound, spread: Spread | None) -> dict[str, Any]:
    value = None if spread is None or not spread.values else spread.median
    held = value is not None and (value >= bound.limit if bound.least else value <= bound.limit)
    return {**dataclasses.asdict(bound), "value": value, "held": held}


def geometric_means(document: Mapping[str, Any]) -> dict[str, float]:
    """Over the cases of a document, of each ratio that more than one case has."""
    found: dict[str, list[float]] = {}
    for case in document["cases"]:
        replicas = case["workload"]["replicas"]
        for text, spread in case["ratios"].items():
            found.setdefault(f"{text}, {replicas} replica(s)", []).append(spread["median"])
    return {text: statistics.geometric_mean(values) for text, values in found.items() if len(values) > 1}


def broken(document: Mapping[str, Any]) -> list[str]:
    """One line for each bound that is not held."""
    lines = []
    for case in document["cases"]:
        for bound in case["bounds"]:
            if not bound["held"]:
                value = "was not measured" if bound["value"] is None else f"is {bound['value']:.4g}"
                side = "below" if bound["least"] else "above"
                lines.append(f"{case['name']}: {bound['quantity']} {value} but must not be {side} {bound['limit']:g}")
    return lines


def write(path: str, document: Mapping[str, Any]) -> None:
    """Writes a result file whole or not at all; a value that is not finite becomes null."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(_finite(document), file, indent=1, allow_nan=False)
        file.write("\n")
    os.replace(temporary, path)


def read(path: str) -> dict[str, Any]:
    """Reads a result file.

    Raises:
      ValueError: it is none, or of another schema.
    """
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result file of schema {SCHEMA}; measure again with this version")
    return document


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
