"""Non-finite steps: which replica and tensor, how many are borne, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from framework.errors import CheckFailed
from framework.loop.loop import LoopResult

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_NAMED = 3  # tensors named per replica; the rest are counted


class Alarms:
    """Counts a run's alarms (non-finite steps that no loss scale explains) and stops it when there are too many."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self.count = 0
        self.rollbacks = 0

    def look(self, result: LoopResult, saved: int | None) -> str:
        """Returns a warning about the alarms of an inner loop, empty if there were none.

        Raises:
          CheckFailed: the run is to stop at the first, or the budget is used up.
        """
        if not result.alarms:
            return ""
        t, config = self._trainer, self._trainer.config
        self.count += result.alarms
        what = f"step {result.alarm_step}: {describe(result.norms, t.stepper.columns, t.strategy.num_replicas_in_sync)}"
        where = "" if saved is None else f"; the last checkpoint is of step {saved}"
        if config.on_nonfinite == "stop":
            raise CheckFailed(
                f"{what}; no update was made{where}. Lower --learning_rate, pass --clip_global_norm=1, look at the "
                "data, or go on with --on_nonfinite=skip"
            )
        if self.count > config.nonfinite_budget:
            raise CheckFailed(
                f"{what}; {self.count} such steps are more than nonfinite_budget={config.nonfinite_budget}{where}. "
                "Lower --learning_rate, look at the data, or raise --nonfinite_budget"
            )
        if config.on_nonfinite == "rollback":
            self.rollbacks += 1
        done = "going back to the last checkpoint" if config.on_nonfinite == "rollback" else "skipped"
        return f"warning: {what}; {done} ({self.count} of {config.nonfinite_budget} borne)"


def describe(norms: np.ndarray, columns: Sequence[str], replicas: int) -> str:
    """Names replicas and tensors that were not finite before the reduction.

    Args:
      norms: flat ``[replicas, columns]``: losses and sums of squares of gradients.
      columns: name of each column; ``loss``, or the variable of a gradient.
      replicas: number of rows.
    """
    if not norms.size or norms.size != replicas * len(columns):
        return "the loss or a gradient is not finite"
    parts = []
    for replica, row in enumerate(norms.reshape(replicas, -1)):
        bad = [i for i in range(len(columns)) if not np.isfinite(row[i])]
        names = [f"loss {row[i]}" if columns[i] == "loss" else f"gradient of {columns[i]}" for i in bad]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            parts.append(f"replica {replica} is not finite: {', '.join(names[:_NAMED])}{more}")
    return "; ".join(parts) or "every replica is finite, but the sum over replicas overflows"
