"""What recomputation saves: the processes must agree on the loss, and memory must fall."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from benchmarks import recompute


def answers(monkeypatch: pytest.MonkeyPatch, **losses: float) -> None:
    """Processes that answer at once: 1,000 MB and 1 s without recomputation, 400 MB and 2 s with it."""

    def run(command: list[str], **options: Any) -> Any:
        kind = next(part.partition("=")[2] for part in command if part.startswith("--child="))
        figures = {"activations_mb": {"kept": 1000.0, "again": 400.0}[kind], "loss": losses[kind]}
        line = json.dumps({**figures, "step_s": {"kept": 1.0, "again": 2.0}[kind]})
        return types.SimpleNamespace(returncode=0, stdout=f"noise\n{line}\n", stderr="")

    monkeypatch.setattr(recompute, "subprocess", types.SimpleNamespace(run=run))


def test_it_tells_memory_and_time_of_both(monkeypatch, capsys, tmp_path) -> None:
    answers(monkeypatch, kept=5.5, again=5.5)
    assert recompute.main(["--rounds=2", f"--out={tmp_path / 'r.json'}"]) == 0
    assert "again: 400 MB above the model, 2000 ms a step" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["cases"][0]["kept"]["activations_mb"] == 1000.0


def test_losses_that_differ_are_an_error(monkeypatch) -> None:
    answers(monkeypatch, kept=5.5, again=5.6)
    with pytest.raises(RuntimeError, match="the losses differ"):
        recompute.main(["--rounds=1"])


@pytest.mark.slow
def test_the_activations_of_eight_blocks_take_less_than_half(capsys) -> None:
    sizes = ["--width=128", "--layers=8", "--length=128", "--batch=16"]
    found = recompute.measure(recompute.parser().parse_args(["--rounds=1", *sizes]))
    assert found["again"]["activations_mb"] < 0.5 * found["kept"]["activations_mb"]
