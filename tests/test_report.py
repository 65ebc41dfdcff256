"""The page of a run: one file that asks for nothing, with all its parts, whatever is missing, torn or not finite."""

from __future__ import annotations

import html.parser
import json
import math
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree
from typing import Any

import pytest

from framework import report
from framework.report import __main__ as command
from framework.report import charts
from framework.report.style import SCRIPT
from tests.helpers import ToyWithEval, settings

_VOID = {"meta", "link", "br", "input"}


class Strict(html.parser.HTMLParser):
    """Raises where elements are not closed in order; collects elements and attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.seen)


def lines_of(path: pathlib.Path, records: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def whole_run(folder: pathlib.Path) -> pathlib.Path:
    """All files a run can have, written by hand."""
    train = [
        {"step": 10 * i, "phase": "train", "time": 1.0, "loss": 2.0 / i, "step_ms": 5.0 + i % 3} for i in range(1, 9)
    ]
    train[3]["loss"] = None  # it was not finite
    lines_of(
        folder / "metrics.jsonl", [*train, {"step": 80, "phase": "eval", "time": 2.0, "loss": 0.5, "accuracy": 0.9}]
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 90, "pha')  # torn by a kill
    config = {
        "task_name": "<script>alert(1)</script>",
        "config": {"global_batch_size": 32, "learning_rate": 0.1},
        "strategy": {"num_replicas": 2, "device": "gpu"},
        "versions": {"tensorflow": "2.21"},
        "command": ["train.py", "--task=x"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    says = "replica 1 comes 5 ms after the others"
    summary = {
        "status": "done",
        "step": 80,
        "metrics": {"loss": 0.25},
        "seconds": {"train": 30.0, "compile": 5.0, "total": 35.0},
        "checks": {
            "finite": "every step",
            "stragglers": {"times": 2, "culprit": {"says": says}},
            "devices": {"says": ["GPU 1 is at 61% while the other is at 95%"]},
        },
        "throughput": {"step_ms": {"p50": 5.0}, "step_flops": 1e9},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"replica": r, "worker": 0, "input_wait_ms": 1.0, "local_ms": 10.0 + 5 * r, "reduce_ms": 6.0 - 5 * r}
        for r in range(2)
    ]
    lines_of(
        folder / "stragglers.jsonl",
        [{"step": 80, "samples": 9, "replicas": rows, "split_ms": {"own_work": 12.0, "rest": 1.0}}],
    )
    for worker in range(2):
        looks = [
            {
                "time": 100.0 + i,
                "step": i,
                "host": {"cpu": 0.5},
                "gpus": [{"gpu": 0, "utilisation": 0.9, "power_w": 300.0}],
            }
            for i in range(3)
        ]
        lines_of(folder / f"device_metrics/worker-{worker:04d}.jsonl", looks)
    return folder


def parsed(path: pathlib.Path) -> tuple[str, Strict]:
    text = path.read_text()
    found = Strict(text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        xml.etree.ElementTree.fromstring(drawing)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())
    # One file: nothing is loaded from anywhere.
    for _, attributes in found.seen:
        assert not {"src", "href"} & set(attributes) or attributes.get("href") == "data:,"
    assert "url(" not in text and "@import" not in text
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL):
        assert json.loads(data)["series"]
    return text, found


def test_a_whole_run_has_all_parts(tmp_path: pathlib.Path) -> None:
    run_dir = whole_run(tmp_path / "run")
    report.write([str(run_dir)], str(run_dir / "report.html"))
    text, found = parsed(run_dir / "report.html")
    for part in ("Overview", "Advice", "Curves", "Where the time went", "Replicas", "Devices", "Checks", "Settings"):
        assert f"<h2>{part}</h2>" in text
    assert "replica 1 comes 5 ms after the others" in text
    assert "GPU 1 is at 61% while the other is at 95%" in text
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    # loss, step_ms and accuracy; histogram; phases; replicas and a step; utilisation, power and cores.
    assert found.count("figure") == 10
    assert 'aria-label="GPU utilisation, %"' in text and "GPU 0 worker 1" in text
    assert "prefers-color-scheme:dark" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found.seen
    assert [p.name for p in run_dir.glob("report*")] == ["report.html"]


def test_several_runs_stand_side_by_side(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [whole_run(tmp_path / name / "run") for name in ("a", "b")]
    assert command.main([*map(str, runs), "--out", str(tmp_path / "both.html")]) == 0
    text, _ = parsed(tmp_path / "both.html")
    assert "a/run: train" in text and "b/run: eval" in text
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"


def test_a_run_that_has_only_begun_has_a_page_and_no_run_has_none(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert command.main([str(tmp_path)]) == 0
    text, found = parsed(tmp_path / "report.html")
    assert "no summary yet" in text and found.count("figure") == 0
    assert command.main([str(tmp_path / "none")]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_a_run_makes_its_page_at_the_end(tmp_path: pathlib.Path) -> None:
    ToyWithEval(settings(run_dir=str(tmp_path), eval_every=2)).train()
    text, found = parsed(tmp_path / "report.html")
    assert "<td>done</td>" in text
    assert found.count("figure") >= 4


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (0.13, 0.29, [0.15, 0.2, 0.25]), (-3.0, 3.0, [-2, 0, 2]), (5.0, 5.0, [5])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1234"), (12345.0, "12.35k"), (2.5e9, "2.5G"), (1e-7, "1e-07"), (math.nan, "-")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert charts.number(value) == text


def test_a_long_curve_keeps_its_peak_and_its_ends_in_place() -> None:
    points = [(float(i), 0.0 if i != 7777 else 9.0) for i in range(20_000)]
    kept = charts.thinned(points)
    assert len(kept) <= 700
    assert (7777.0, 9.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_charts_without_anything_to_draw_are_left_out() -> None:
    assert charts.lines("x", {}) == charts.lines("x", {"a": [(1.0, math.nan)]}) == ""
    assert charts.bars("x", {"a": {"b": 0.0}}, unit="s") == charts.histogram("x", [], unit="s") == ""
    for drawing in (charts.lines("x", {"a": [(1.0, 5.0)]}), charts.histogram("x", [5.0, 5.0], unit="s")):
        assert "<svg" in drawing and "nan" not in drawing


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to read the script")
def test_the_script_can_be_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "script.js"
    path.write_text(SCRIPT)
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
