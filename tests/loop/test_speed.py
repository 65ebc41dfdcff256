"""What is measured: windows of steps, rates without compilation."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework.loop.loop import LoopResult
from framework.loop.window import Window
from framework.step.values import Stat, StatLayout
from tests.helpers import Toy, ToyWithEval, records, settings

# --- windows ---------------------------------------------------------------------------------------------------------

LAYOUT = StatLayout(
    {
        "examples": Stat("sum", tf.constant(0.0)),
        "loss": Stat("mean", tf.constant(0.0), tf.constant(0.0)),
        "most": Stat("max", tf.constant(0.0)),
        "least": Stat("min", tf.constant(0.0)),
        "learning_rate": Stat("last", tf.constant(0.0)),
    }
)


def made(
    steps: int, examples: float, loss: float, *, seconds: float = 1.0, waited: float = 0.0, **other: Any
) -> LoopResult:
    """An inner loop whose mean loss, of weight ``examples``, is ``loss``."""
    extremes = other.pop("extremes", (loss, loss))
    sums = np.array([examples, loss * examples, examples])
    vectors = (sums, np.array([extremes[1]]), np.array([extremes[0]]), np.array([other.pop("rate", 0.5)]))
    return LoopResult(
        steps=steps,
        ended=False,
        failed=False,
        asked=0.0,
        next_steps=0,
        skipped=other.pop("skipped", 0),
        alarms=0,
        alarm_step=0,
        examples=float(examples),
        waited=waited,
        seconds=seconds,
        vectors=vectors,
        norms=np.zeros(0),
    )


def test_b45_throughput_is_examples_over_the_seconds_of_the_window() -> None:
    window = Window()
    window.add(made(4, 32, 2.0, seconds=0.5, waited=0.1))
    window.add(made(6, 48, 4.5, seconds=1.5, waited=0.3))
    figures = window.figures(LAYOUT)
    assert figures["examples_per_second"] == pytest.approx(80 / 2.0)
    assert figures["step_ms"] == pytest.approx(200.0)
    assert figures["input_wait"] == pytest.approx(0.2)
    assert figures["loss"] == pytest.approx((32 * 2 + 48 * 4.5) / 80)
    assert "examples" not in figures and "nonfinite" not in figures


def test_b45_the_loop_that_compiled_is_in_the_means_and_in_no_rate() -> None:
    window = Window()
    window.add(made(1, 8, 10.0, seconds=60.0, waited=5.0), timed=False)
    window.add(made(3, 24, 2.0, seconds=0.3))
    figures = window.figures(LAYOUT)
    assert figures["loss"] == 4.0
    assert figures["step_ms"] == pytest.approx(100.0)
    assert figures["examples_per_second"] == pytest.approx(24 / 0.3)
    assert figures["input_wait"] == 0.0


def test_b45_the_examples_of_a_rate_are_those_of_the_timed_steps() -> None:
    """Batches of 4 and then 1: the timed step had 1 example in 1 second."""
    window = Window()
    window.add(made(1, 4, 1.0, seconds=60.0), timed=False)
    window.add(made(1, 1, 1.0, seconds=1.0))
    assert window.figures(LAYOUT)["examples_per_second"] == pytest.approx(1.0)


def test_b47_a_window_of_the_first_step_alone_has_no_rate() -> None:
    window = Window()
    window.add(made(1, 8, 10.0, seconds=60.0), timed=False)
    assert set(window.figures(LAYOUT)) == {"loss", "most", "least", "learning_rate"}


def test_a_window_keeps_extremes_last_values_and_skipped_steps_until_cleared() -> None:
    window = Window()
    window.add(made(2, 8, 1.0, extremes=(-3.0, 5.0), rate=0.25, skipped=1))
    window.add(made(2, 8, 2.0, extremes=(-1.0, 4.0), rate=0.125, skipped=2))
    figures = window.figures(LAYOUT)
    assert (figures["least"], figures["most"], figures["learning_rate"], figures["nonfinite"]) == (
        -3.0,
        5.0,
        0.125,
        3.0,
    )
    assert window.steps == 4
    window.clear()
    assert window.steps == 0 and window.figures(LAYOUT) == {} and window.totals(LAYOUT) == {}
    window.add(made(1, 8, 7.0))
    assert window.figures(LAYOUT)["loss"] == 7.0


def test_an_inner_loop_without_a_step_adds_nothing() -> None:
    window = Window()
    window.add(made(0, 0, 0.0, seconds=9.0))
    assert window.figures(LAYOUT) == {}
    window.add(made(1, 8, 7.0, seconds=1.0))
    window.add(made(0, 0, 0.0, seconds=9.0))
    assert window.figures(LAYOUT)["step_ms"] == pytest.approx(1000.0)


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_b45_b47_start_up_is_apart_from_the_steady_state(
    tmp_path: pathlib.Path, replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(run_dir=tmp_path, train_steps=60, log_every=30, num_replicas=replicas, progress="lines")
    Toy(config.replace(steps_per_loop=10)).train()
    seconds = json.loads((tmp_path / "summary.json").read_text())["seconds"]
    assert {"compile", "train", "input_wait", "checkpoint", "total"} <= set(seconds)
    # Tracing and compiling took longer than all 59 steps that came after, and no record shows it.
    first, *_ = records(tmp_path)
    assert first["step_ms"] * 30 / 1e3 < seconds["compile"]
    assert sum(v for k, v in seconds.items() if k != "total") <= seconds["total"] + 0.01
    for record in records(tmp_path):
        assert record["examples_per_second"] * record["step_ms"] / 1e3 == pytest.approx(4.0, rel=1e-6)
        assert 0.0 <= record["input_wait"] <= 1.0
    assert "first step done after " in capsys.readouterr().out


def test_b47_a_record_of_the_first_step_alone_states_no_speed(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    first, *rest = records(tmp_path)
    assert not {"examples_per_second", "step_ms", "input_wait"} & set(first)
    for record in rest:
        assert {"examples_per_second", "step_ms", "input_wait"} <= set(record)


def test_seconds_of_evaluation_and_saving_are_booked_under_their_names(tmp_path: pathlib.Path) -> None:
    ToyWithEval(settings(run_dir=tmp_path, eval_every=2, checkpoint_every=2)).train()
    seconds = json.loads((tmp_path / "summary.json").read_text())["seconds"]
    assert 0.0 < seconds["evaluate"] < seconds["total"]
    assert 0.0 <= seconds["checkpoint"] < seconds["total"]
