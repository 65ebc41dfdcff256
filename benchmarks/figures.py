"""Arithmetic of a measurement: medians with their range, and ratios taken within a round."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rounds import Run


@dataclasses.dataclass(frozen=True)
class Spread:
    """One value a round, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle."""
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a result file."""
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "rounds": list(self.values)}


def step_ms(run: Run) -> float:
    """Milliseconds a step: median over the windows of one round."""
    return statistics.median(w.seconds / w.steps for w in run.windows) * 1e3


def cpu_ms(run: Run) -> float:
    """Milliseconds of processor time a step, of all threads together: median over the windows."""
    return statistics.median(w.cpu_seconds / w.steps for w in run.windows) * 1e3


def first_step_s(run: Run) -> float:
    """Seconds from the start of the process until the loss of the first step was read."""
    return run.start_up.first_step_s


def rss_growth_mb(run: Run) -> float:
    """Memory gained from the end of the warm-up to the end of the run, in MB."""
    return run.windows[-1].rss_mb - run.warm_up[-1].rss_mb


def over_rounds(rounds: Sequence[Mapping[str, Run]], name: str, figure: Callable[[Run], float]) -> Spread:
    """``figure`` of one contender in each round it took part in."""
    return Spread(tuple(figure(one[name]) for one in rounds if name in one))


def ratio(
    rounds: Sequence[Mapping[str, Run]], name: str, reference: str, figure: Callable[[Run], float] = step_ms
) -> Spread:
    """``figure`` of a contender over the reference's, in each round with both: what slows a round slows both."""
    both = [one for one in rounds if name in one and reference in one]
    return Spread(tuple(figure(one[name]) / figure(one[reference]) for one in both))
