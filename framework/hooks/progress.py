"""What a person at the console sees: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from framework.errors import ConfigError
from framework.hooks.hook import Hook, Values

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

MODES = ("auto", "bar", "lines", "off")
# Figures of the framework; what else a record holds are the task's metrics, shown under their own names.
_FRAMEWORK = ("loss", "learning_rate", "examples_per_second", "step_ms", "input_wait", "grad_norm", "tflops", "mfu")


class _Bar(tqdm):
    monitor_interval = 0  # no watcher thread: the bar is redrawn when there is something to say, and only then


class Progress(Hook):
    """Prints loss, metrics, rate, speed, share of time waiting for input and time left.

    Time left is figured from the steps this process made after its first record, so that compilation, warm-up and the
    steps before a resume do not count. It is not shown before the second record, nor without a total.

    Args:
      mode: ``bar``, ``lines``, ``off``, or ``auto``: a bar if ``stream`` is a terminal, else lines.
      stream: where to print; None: standard output.
      clock: gives monotonic seconds.

    Raises:
      ConfigError: an unknown ``mode``.
    """

    def __init__(self, mode: str = "auto", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} but it must be one of {', '.join(MODES)}")
        # Taken now and not as a default value: standard output may have been redirected since import.
        self._stream: TextIO = sys.stdout if stream is None else stream
        self.mode = mode if mode != "auto" else ("bar" if self._stream.isatty() else "lines")
        self._clock = clock
        self._total: int | None = None
        self._base: tuple[int, float] | None = None  # step and time of the first record
        self._bar: _Bar | None = None

    def begin(self, trainer: Trainer) -> None:
        self._close()
        self._base = None
        self._total = trainer.total_steps
        if self.mode == "bar":
            end = "step {n_fmt}/{total_fmt} |{bar}|{postfix}" if self._total is not None else "step {n_fmt}{postfix}"
            self._bar = _Bar(
                total=self._total, initial=trainer.step, file=self._stream, bar_format=end, dynamic_ncols=True
            )

    def __call__(self, step: int, values: Values) -> None:
        if self.mode == "off":
            return
        figures = _figures(values)
        left = self._seconds_left(step)
        time_left = [] if left is None else [f"{duration(left)} left"]
        if self._bar is not None:
            self._bar.n = step
            # Time left comes first: a narrow terminal cuts a bar's line at its end.
            self._bar.set_postfix_str(", ".join(time_left + figures), refresh=False)
            self._bar.refresh()
            return
        total = "" if self._total is None else f"/{self._total}"
        self._print(f"step {step}{total}", ", ".join(figures + time_left))

    def evaluated(self, step: int, name: str, values: Values) -> None:
        if self.mode == "off":
            return
        phase = f"eval/{name}" if name else "eval"
        self._print(f"{phase} step {step}", " ".join(f"{key} {number(value)}" for key, value in values.items()))

    def end(self, step: int, status: str) -> None:
        self._close()

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if self._base is None:
            self._base = (step, now)
        base_step, base_time = self._base
        if self._total is None or step >= self._total or step <= base_step or now <= base_time:
            return None
        return (self._total - step) * (now - base_time) / (step - base_step)

    def _print(self, head: str, figures: str) -> None:
        line = f"{head}: {figures}" if figures else head
        if self._bar is not None:
            _Bar.write(line, file=self._stream)  # above the bar, which is drawn again below
        else:
            print(line, file=self._stream, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _figures(values: Values) -> list[str]:
    """``["loss 0.1234", "accuracy 0.97", "lr 0.001", ...]`` of those that ``values`` holds."""
    metrics = {key: value for key, value in values.items() if key not in _FRAMEWORK}
    figures = [f"loss {number(values['loss'])}"] if "loss" in values else []
    figures += [f"{key} {number(value)}" for key, value in metrics.items()]
    if "learning_rate" in values:
        figures.append(f"lr {number(values['learning_rate'])}")
    if "examples_per_second" in values:
        figures.append(f"{number(values['examples_per_second'])} examples/s")
    if "mfu" in values:
        figures.append(f"mfu {100.0 * float(values['mfu']):.1f} %")
    if "input_wait" in values:
        figures.append(f"input wait {100.0 * float(values['input_wait']):.1f} %")
    return figures


def number(value: float) -> str:
    """``value`` to 4 significant digits, with an exponent only below 1e-4 and from 1e9."""
    value = float(value)
    if not math.isfinite(value) or not 1e3 <= abs(value) < 1e9:
        return f"{value:.4g}"
    return f"{float(f'{value:.4g}'):.0f}"


def duration(seconds: float) -> str:
    """``seconds`` as ``1h02m``, ``3m05s`` or ``12s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"
