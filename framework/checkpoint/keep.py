"""Which checkpoints stay: the newest, every n-th step, the best by a figure. Pure functions of what is there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """What is kept; a checkpoint that one rule keeps is safe from the others.

    Attributes:
      last: so many of the newest, at least 1.
      every: those whose step is a multiple of this, for good; 0: none.
      best: (figure, ``min`` or ``max``): the best one, the first of equals; None: none.
    """

    last: int = 5
    every: int = 0
    best: tuple[str, str] | None = None

    def superfluous(self, steps: Collection[int], figures: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Steps, rising, whose checkpoints may go.

        Args:
          steps: of the whole checkpoints there are.
          figures: step -> evaluation figures, where there are some.
        """
        kept = set(sorted(steps)[-self.last :])
        kept |= {step for step in steps if self.every and step % self.every == 0}
        best = self.best_step({s: figures[s] for s in steps if s in figures})
        return sorted(set(steps) - kept - {best})

    def best_step(self, figures: Mapping[int, Mapping[str, float]]) -> int | None:
        """The step with the best figure, the first of equals; None: no ``best`` is asked for, or no step has it.

        A figure that is not finite is never the best.
        """
        if self.best is None:
            return None
        name, direction = self.best
        sign = 1 if direction == "max" else -1
        values = {step: one.get(name, math.nan) for step, one in figures.items()}
        scored = [(sign * value, -step) for step, value in values.items() if math.isfinite(value)]
        return -max(scored)[1] if scored else None

    def is_better(self, new: Mapping[str, float], figures: Mapping[int, Mapping[str, float]]) -> bool:
        """Whether a checkpoint with the figures ``new`` would be better than every one of ``figures``."""
        if self.best is None:
            return False
        name, direction = self.best
        value, step = new.get(name, math.nan), self.best_step(figures)
        if not math.isfinite(value) or step is None:
            return math.isfinite(value)
        return value > figures[step][name] if direction == "max" else value < figures[step][name]
