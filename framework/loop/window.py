"""A window of steps: sums added over inner loops until a hook asks for them."""

from __future__ import annotations

import math

import numpy as np

from framework.loop.loop import LoopResult
from framework.step.values import StatLayout


class Window:
    """Figures since a hook last fired."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts over."""
        self._vectors: tuple[np.ndarray, ...] | None = None
        self._steps = 0
        self._skipped = 0
        self._timed_steps = 0
        self._examples = 0.0  # of the timed steps
        self._seconds = 0.0
        self._waited = 0.0

    @property
    def steps(self) -> int:
        """Steps in the window."""
        return self._steps

    def add(self, result: LoopResult, *, timed: bool = True) -> None:
        """Adds one inner loop; ``timed=False`` for the one that traced and compiled."""
        if not result.steps:
            return
        new = result.vectors
        if self._vectors is not None:
            old = self._vectors
            new = (old[0] + new[0], np.maximum(old[1], new[1]), np.minimum(old[2], new[2]), new[3])
        self._vectors = new
        self._steps += result.steps
        self._skipped += result.skipped
        if timed:
            self._timed_steps += result.steps
            self._examples += result.examples
            self._seconds += result.seconds
            self._waited += result.waited

    def totals(self, layout: StatLayout) -> dict[str, float]:
        """Weighted means, sums and extremes of the window alone, without speed."""
        return {} if self._vectors is None else layout.figures(self._vectors)

    def figures(self, layout: StatLayout) -> dict[str, float]:
        """Weighted means, sums and extremes of the window, and its speed; what was not measured is left out."""
        if self._vectors is None:
            return {}
        values = self.totals(layout)
        values.pop("examples", None)
        if self._skipped:
            values["nonfinite"] = float(self._skipped)
        if self._timed_steps:
            values["examples_per_second"] = self._examples / self._seconds
            values["step_ms"] = self._seconds / self._timed_steps * 1e3
            if not math.isnan(self._waited):
                values["input_wait"] = min(1.0, self._waited / self._seconds)
        return values
