"""The console: lines and a bar, figures with their units, time left."""

import io
import math
import threading
import types

import pytest

from framework.errors import ConfigError
from framework.hooks import Progress
from framework.hooks.progress import duration, number

VALUES = {
    "loss": 0.123456,
    "accuracy": 0.97,
    "learning_rate": 1e-3,
    "examples_per_second": 12345.6,
    "step_ms": 10.0,
    "input_wait": 0.0213,
    "grad_norm": 1.5,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def begun(mode, stream, clock, start=0, total=1000):
    progress = Progress(mode, stream, clock)
    progress.begin(types.SimpleNamespace(step=start, total_steps=total))
    return progress


def test_a_line_names_each_figure_with_its_unit(clock):
    stream = io.StringIO()
    progress = begun("lines", stream, clock)
    progress(100, VALUES)
    assert stream.getvalue() == (
        "step 100/1000: loss 0.1235, accuracy 0.97, lr 0.001, 12350 examples/s, input wait 2.1 %\n"
    )


def test_an_evaluation_prints_its_set_step_and_values(clock):
    stream = io.StringIO()
    progress = begun("lines", stream, clock)
    progress.evaluated(100, "", {"loss": 0.123, "accuracy": 0.97})
    progress.evaluated(100, "far", {"loss": 0.5})
    assert stream.getvalue() == "eval step 100: loss 0.123 accuracy 0.97\neval/far step 100: loss 0.5\n"


def test_time_left_counts_the_steps_after_the_first_record_only(clock):
    stream = io.StringIO()
    progress = begun("lines", stream, clock, start=500)
    clock.seconds = 1000.0  # compilation
    progress(510, {})
    clock.seconds = 1010.0
    progress(530, {})  # 20 steps in 10 s, 470 to go: 235 s
    clock.seconds = 1045.0
    progress(560, {})  # 50 steps in 45 s, 440 to go: 396 s
    lines = stream.getvalue().splitlines()
    assert lines == ["step 510/1000", "step 530/1000: 3m55s left", "step 560/1000: 6m36s left"]


def test_time_left_starts_anew_with_each_training(clock):
    stream = io.StringIO()
    progress = begun("lines", stream, clock)
    progress(10, {})
    clock.seconds = 100.0
    progress.begin(types.SimpleNamespace(step=10, total_steps=40))
    progress(20, {})
    clock.seconds = 105.0
    progress(30, {})
    assert stream.getvalue().splitlines()[1:] == ["step 20/40", "step 30/40: 5s left"]


def test_no_time_left_at_the_last_step_nor_without_a_total(clock):
    stream = io.StringIO()
    for total in (20, None):
        progress = begun("lines", stream, clock, total=total)
        for step in (10, 20):
            clock.seconds += 1.0
            progress(step, {"loss": 1.0})
    assert "left" not in stream.getvalue()
    assert stream.getvalue().splitlines()[2:] == ["step 10: loss 1", "step 20: loss 1"]


def test_b07_missing_figures_and_figures_that_are_not_finite_do_not_crash(clock):
    stream = io.StringIO()
    progress = begun("lines", stream, clock)
    progress(1, {"loss": math.nan, "learning_rate": math.inf, "input_wait": math.nan, "examples_per_second": math.nan})
    progress(2, {"accuracy": 0.5})
    progress.evaluated(2, "", {"loss": math.nan})
    progress.evaluated(2, "", {})
    assert stream.getvalue().splitlines() == [
        "step 1/1000: loss nan, lr inf, nan examples/s, input wait nan %",
        "step 2/1000: accuracy 0.5",
        "eval step 2: loss nan",
        "eval step 2",
    ]


def test_auto_is_a_bar_on_a_terminal_and_lines_elsewhere():
    assert Progress("auto", Terminal()).mode == "bar"
    assert Progress("auto", io.StringIO()).mode == "lines"
    assert Progress("lines", Terminal()).mode == "lines"


def test_the_stream_is_the_standard_output_of_now(capsys, clock):
    progress = Progress("lines", clock=clock)
    progress(3, {"loss": 1.0})
    assert capsys.readouterr().out == "step 3: loss 1\n"


def test_off_prints_nothing(clock):
    stream = Terminal()
    progress = begun("off", stream, clock)
    progress(1, VALUES)
    progress.evaluated(1, "", VALUES)
    progress.end(1, "done")
    assert stream.getvalue() == ""


def test_b06_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"^mode='loud'"):
        Progress("loud")


def frames(stream):
    """What the terminal showed, one text for each time the line was drawn."""
    return [part.strip() for part in stream.getvalue().replace("\n", "\r").split("\r") if part.strip()]


def test_a_bar_shows_the_true_step_and_the_figures(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = begun("bar", stream, clock, start=400)
    assert frames(stream)[-1].startswith("step 400/1000 |")
    progress(500, VALUES)
    clock.seconds = 8.0
    progress(600, VALUES)  # 100 steps in 8 s, 400 to go: 32 s
    last = frames(stream)[-1]
    assert last.startswith("step 600/1000 |")
    assert last.endswith("|, 32s left, loss 0.1235, accuracy 0.97, lr 0.001, 12350 examples/s, input wait 2.1 %")


def test_an_evaluation_is_a_whole_line_above_the_bar(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = begun("bar", stream, clock)
    progress(100, {"loss": 1.0})
    progress.evaluated(100, "", {"loss": 0.5})
    assert "\reval step 100: loss 0.5\n" in stream.getvalue()
    assert frames(stream)[-1].startswith("step 100/1000 |")  # drawn again below
    progress.end(100, "done")
    assert stream.getvalue().endswith("\n")


def test_a_bar_without_a_total_counts_steps(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = begun("bar", stream, clock, total=None)
    progress(7, {"loss": 0.5})
    assert frames(stream)[-1] == "step 7, loss 0.5"


def test_a_bar_starts_no_thread(clock):
    progress = begun("bar", Terminal(), clock)
    progress(1, VALUES)
    assert "TMonitor" not in [type(thread).__name__ for thread in threading.enumerate()]
    progress.end(1, "done")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.000123456, "0.0001235"),
        (0.0000123456, "1.235e-05"),
        (-1.23456, "-1.235"),
        (999.96, "1000"),
        (1234.5, "1234"),
        (123456.0, "123500"),
        (-98765.0, "-98760"),
        (2.5e12, "2.5e+12"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (12.3, "12s"),
        (59.7, "1m00s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (3725, "1h02m"),
        (90000, "25h00m"),
    ],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
