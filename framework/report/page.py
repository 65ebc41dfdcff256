"""The page: sections of charts and tables of one run, or of several side by side."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

from framework.report import charts
from framework.report.read import RunFiles, read
from framework.report.style import CSS, SCRIPT

_FIRST = ("loss", "accuracy", "learning_rate", "grad_norm", "examples_per_second", "step_ms", "mfu", "input_wait")


def write(run_dirs: Sequence[str], path: str) -> None:
    """Writes the page of some runs.

    Args:
      run_dirs: their folders.
      path: of the page.

    Raises:
      FileNotFoundError: a folder is no run's; OSError: the page cannot be written.
    """
    text = page([read(run_dir, name) for run_dir, name in zip(run_dirs, _short(run_dirs), strict=True)])
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def page(runs: Sequence[RunFiles]) -> str:
    """The HTML of some runs; it asks for no other file."""
    title = ", ".join(run.name for run in runs)
    sections = {
        "Overview": _overview(runs),
        "Advice": _advice(runs),
        "Curves": _curves(runs),
        "Where the time went": _time(runs),
        "Replicas": _replicas(runs),
        "Devices": _devices(runs),
        "Checks": "".join(_titled(run, runs, _table(_flat(run.summary.get("checks", {})))) for run in runs),
        "Settings": "".join(_titled(run, runs, _settings(run)) for run in runs),
    }
    body = "".join(f"<section><h2>{name}</h2>{text}</section>" for name, text in sections.items() if text)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _short(run_dirs: Sequence[str]) -> list[str]:
    """Names that tell folders apart: the last part of the path, or as many as are needed."""
    paths = [os.path.abspath(run_dir) for run_dir in run_dirs]
    for depth in range(1, 20):
        names = [os.sep.join(path.split(os.sep)[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return paths


def _titled(run: RunFiles, runs: Sequence[RunFiles], text: str) -> str:
    """``text``, with the run's name above it where there are several."""
    if not text or len(runs) == 1:
        return text
    return f"<h3>{html.escape(run.name)}</h3>{text}"


def _overview(runs: Sequence[RunFiles]) -> str:
    columns = {}
    for run in runs:
        summary, strategy = run.summary, run.config.get("strategy", {})
        speed = summary.get("throughput", {})
        facts: dict[str, Any] = {
            "status": summary.get("status", "no summary yet"),
            "reason": summary.get("reason"),
            "step": summary.get("step"),
            "task": run.config.get("task_name") or run.config.get("task"),
            "replicas": strategy.get("num_replicas"),
            "device": strategy.get("device"),
            "workers": len(run.config.get("workers", [])) or None,
            "global batch": run.config.get("config", {}).get("global_batch_size"),
        }
        facts.update(summary.get("metrics", {}))
        if isinstance(speed, Mapping):
            facts.update({f"step ms {name}": value for name, value in speed.get("step_ms", {}).items()})
            facts["operations a step"] = speed.get("step_flops")
        facts.update(run.config.get("versions", {}))
        columns[run.name] = {name: value for name, value in facts.items() if value not in (None, "")}
    rows = list(dict.fromkeys(name for column in columns.values() for name in column))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns) if len(runs) > 1 else ""
    body = "".join(
        f"<tr><th>{html.escape(row)}</th>"
        + "".join(f"<td>{_value(c.get(row))}</td>" for c in columns.values())
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>{f"<tr><th></th>{head}</tr>" if head else ""}{body}</table></div>'


def _advice(runs: Sequence[RunFiles]) -> str:
    parts = []
    for run in runs:
        checks = run.summary.get("checks", {})
        culprit = _at(checks, "stragglers", "culprit", "says")
        said = [culprit] if culprit else []
        devices = _at(checks, "devices", "says")
        said += devices if isinstance(devices, list) else []
        text = "".join(f"<li>{html.escape(str(line))}</li>" for line in said)
        parts.append(_titled(run, runs, f"<ul>{text}</ul>" if text else ""))
    return "".join(parts)


def _curves(runs: Sequence[RunFiles]) -> str:
    """One chart a figure, with a curve for each phase and run."""
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    found = []
    for name in names:
        series = {}
        for run in runs:
            for phase in run.phases():
                label = phase if len(runs) == 1 else f"{run.name}: {phase}"
                series[label] = run.series(phase, name)
        found.append(charts.lines(name, series))
    for run in runs:
        label = "step_ms of the records" + (f", {run.name}" if len(runs) > 1 else "")
        found.append(charts.histogram(label, [value for _, value in run.series("train", "step_ms")], unit="ms"))
    return _grid(found)


def _time(runs: Sequence[RunFiles]) -> str:
    rows = {}
    for run in runs:
        seconds = run.summary.get("seconds", {})
        parts = {n.replace("_", " "): v for n, v in seconds.items() if n != "total" and isinstance(v, (int, float))}
        if parts:
            rows[run.name] = parts
    return _grid([charts.bars("seconds by phase, over restarts", rows, unit="s")]) if rows else ""


def _replicas(runs: Sequence[RunFiles]) -> str:
    found = []
    names = {"input_wait_ms": "waiting for input", "local_ms": "own work", "reduce_ms": "in the all-reduce"}
    for run in runs:
        if not run.stragglers:
            continue
        last = run.stragglers[-1]
        rows = {
            f"replica {row.get('replica')}": {text: float(row.get(name) or 0.0) for name, text in names.items()}
            for row in last["replicas"]
        }
        title = f"a step of each replica, up to step {last.get('step')}" + (f", {run.name}" if len(runs) > 1 else "")
        found.append(charts.bars(title, rows, unit="ms"))
        parts = {n.replace("_", " "): float(v) for n, v in last.get("split_ms", {}).items() if v is not None}
        found.append(charts.bars("where a step goes, mean over replicas", {run.name: parts}, unit="ms"))
    return _grid(found)


# Title, part of a record, figure, factor.
_TIMELINES: tuple[tuple[str, str, str, float], ...] = (
    ("GPU utilisation, %", "gpus", "utilisation", 100.0),
    ("GPU memory in use, GB", "gpus", "memory_used_bytes", 1e-9),
    ("GPU temperature, degrees Celsius", "gpus", "temperature_c", 1.0),
    ("GPU power, W", "gpus", "power_w", 1.0),
    ("GPU clock, MHz", "gpus", "sm_clock_mhz", 1.0),
    ("cores of the machine busy, %", "host", "cpu", 100.0),
    ("cores that the process keeps busy", "host", "process_cores", 1.0),
    ("memory of the process, GB", "host", "process_memory_bytes", 1e-9),
    ("disk read, MB/s", "host", "disk_read_bytes_per_s", 1e-6),
    ("disk written, MB/s", "host", "disk_written_bytes_per_s", 1e-6),
    ("network received, MB/s", "host", "net_received_bytes_per_s", 1e-6),
)


def _devices(runs: Sequence[RunFiles]) -> str:
    found = []
    for run in runs:
        records = [record for worker in run.devices.values() for record in worker]
        if not records:
            continue
        begin = min(record["time"] for record in records)
        for title, part, name, factor in _TIMELINES:
            series: dict[str, list[tuple[float, float]]] = {}
            for worker, looks in run.devices.items():
                where = f"worker {worker}" if len(run.devices) > 1 else ""
                for look in looks:
                    for one in look.get("gpus", []) if part == "gpus" else [look.get("host", {})]:
                        label = f"GPU {one.get('gpu')} {where}" if part == "gpus" else where or "this machine"
                        if isinstance(one.get(name), (int, float)):
                            at = (look["time"] - begin, one[name] * factor)
                            series.setdefault(label.strip(), []).append(at)
            full = f"{title}, {run.name}" if len(runs) > 1 else title
            found.append(charts.lines(full, series, x_name="seconds"))
    return _grid(found)


def _settings(run: RunFiles) -> str:
    config = run.config.get("config", {})
    command = run.config.get("command", [])
    text = f"<p><code>{html.escape(' '.join(map(str, command)))}</code></p>" if command else ""
    options = run.config.get("options", {})
    table = _table({**options, **config})
    return f"{text}<details><summary>all settings</summary>{table}</details>" if config else text


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{_value(v)}</td></tr>" for n, v in values.items())
    return f'<div class="wide"><table>{rows}</table></div>' if rows else ""


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, without lists of objects: those are in charts."""
    found: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{name}: "))
        elif isinstance(value, list):
            if value and not isinstance(value[0], Mapping):
                found[prefix + name] = ", ".join(map(str, value))
        elif value is not None:
            found[prefix + name] = value
    return found


def _value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else html.escape(str(value))
    return str(value) if isinstance(value, int) else charts.number(value)


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _grid(found: Sequence[str]) -> str:
    text = "".join(found)
    return f'<div class="grid-of-charts">{text}</div>' if text else ""
