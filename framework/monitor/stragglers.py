"""Each replica's time to the all-reduce and in it: a sample of every inner loop, compared over all workers."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.cluster.agree import gather_arrays
from framework.hooks.triggers import EveryNSteps, Never
from framework.monitor.culprit import COLUMNS, LOCAL, REDUCE, SAMPLES, WAIT, Culprit, judge, medians, split
from framework.monitor.stamps import possible

if TYPE_CHECKING:
    from framework.loop.loop import LoopResult
    from framework.loop.trainer import Trainer

KEPT = 32  # newest samples, an inner loop each
_CURVES = 64  # replicas with curves of their own; of more, only the extremes

# A record of the run folder, and figures by name for TensorBoard.
Tell = Callable[[dict[str, Any], dict[str, float]], None]


class Stragglers:
    """Collects samples, and looks at them every ``straggler_every`` steps: at the same steps on all workers.

    Args:
      trainer: whose replicas are watched.
      say: prints a line.
      tell: is given each look's record and curves, on the chief.
    """

    def __init__(self, trainer: Trainer, *, say: Callable[[str], None], tell: Tell):
        self._trainer = trainer
        self._say = say
        self._tell = tell
        self._why_not = possible(trainer)
        every = trainer.config.straggler_every
        self.trigger = Never() if self._why_not else EveryNSteps(every)
        # Of replicas that take turns on a core one is always the last.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._crowded = trainer.choice.device == "cpu" and trainer.local_replicas > cores
        self._samples: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT)
        self._step_ms: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._split: dict[str, float] = {}
        self._table: list[dict[str, Any]] = []
        self._culprit: Culprit | None = None
        self._looked_at: int | None = None
        self._times = 0

    @property
    def on(self) -> bool:
        """Whether replicas are compared."""
        return not self._why_not

    def describe(self) -> str:
        """A line for the start of a run; empty where replicas are not compared."""
        if self._why_not:
            return f"stragglers: {self._why_not}" if self._why_not.startswith("not measured") else ""
        every = self._trainer.config.straggler_every
        nobody = "; nobody is named, because replicas share cores" if self._crowded else ""
        return f"stragglers: each replica's time to the all-reduce, looked at every {every} steps{nobody}"

    def add(self, result: LoopResult) -> None:
        """One inner loop that did not compile: its mean is a sample."""
        if self._why_not or not result.steps or result.times is None or not np.isfinite(result.times).all():
            return
        end, *local = result.times
        rows = [[result.waited, one, end - one] for one in local]
        self._samples.append(1e3 * np.array(rows) / result.steps)
        self._step_ms.append(1e3 * result.seconds / result.steps)

    def look(self) -> None:
        """Brings the samples of all workers together, judges and tells; all workers have to call it at one step."""
        t = self._trainer
        if self._why_not or self._looked_at == t.step:
            return
        self._looked_at = t.step
        kept = np.full((t.local_replicas, KEPT, len(COLUMNS)), np.nan)
        for i, sample in enumerate(self._samples):
            kept[:, i] = sample
        # As bits: what crosses workers is whole numbers.
        samples = gather_arrays(t.strategy, t.cluster, list(kept.view(np.int64))).view(np.float64)
        if not np.isfinite(samples).any(1).all():
            return
        self._times += 1
        workers = [r // t.local_replicas for r in range(len(samples))]
        table = medians(samples)
        step = float(np.median(self._step_ms)) if self._step_ms else 0.0
        self._split = {name: round(value, 4) for name, value in split(table, step).items()}
        self._table = [
            {"replica": r, "worker": w, **{name: round(float(v), 4) for name, v in zip(COLUMNS, table[r], strict=True)}}
            for r, w in enumerate(workers)
        ]
        before, self._culprit = self._culprit, None if self._crowded else judge(samples, workers)
        if self._culprit is not None and (before is None or before.replicas != self._culprit.replicas):
            for line in [f"step {t.step}: {self._sentence()}", *self.table()]:
                self._say(line)
        elif before is not None and self._culprit is None:
            self._say(f"step {t.step}: {self._name(before)} holds the others up no more")
        count = int(np.isfinite(samples).all(2).sum(1).min())
        record = {"step": t.step, "samples": count, "split_ms": self._split, "replicas": self._table}
        record["culprit"] = self._culprit_record()
        self._tell(record, self._curves(table))

    def table(self) -> list[str]:
        """Lines for people: of each time the least, the middle and the largest, and whose they are."""
        if not self._table:
            return []
        names = {"input_wait_ms": "waiting for input", "local_ms": "own work", "reduce_ms": "in the all-reduce"}
        lines = []
        for column, name in names.items():
            order = sorted(self._table, key=lambda row: row[column])
            low, high = order[0], order[-1]
            middle = float(np.median([row[column] for row in order]))
            lines.append(
                f"  {name:<18} ms a step: min {low[column]:.4g} ({self._who(low['replica'])}), median {middle:.4g}, "
                f"max {high[column]:.4g} ({self._who(high['replica'])})"
            )
        return lines

    def summary(self) -> Any:
        """What ``summary.json`` says of it."""
        if self._why_not:
            return self._why_not
        return {
            "every": self._trainer.config.straggler_every,
            "times": self._times,
            "last_step": self._looked_at,
            "samples_needed": SAMPLES,
            "samples": len(self._samples),
            "split_ms": self._split,
            "replicas": self._table,
            "culprit": self._culprit_record(),
            "replicas_share_cores": self._crowded,
        }

    @contextlib.contextmanager
    def common_gc(self) -> Iterator[None]:
        """Inside, with several workers that are watched, Python's garbage is collected by ``collect`` alone.

        Each worker would else stop when its own counter says so, and all would wait for each in turn.
        """
        if self._why_not or self._trainer.cluster.num_workers == 1 or not gc.isenabled():
            yield
            return
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def collect(self) -> None:
        """Collects Python's garbage now, at the same step on all workers."""
        if not self._why_not and self._trainer.cluster.num_workers > 1:
            gc.collect()

    def _curves(self, table: np.ndarray) -> dict[str, float]:
        names = dict(zip(COLUMNS, (WAIT, LOCAL, REDUCE), strict=True))
        found = {}
        for name, column in names.items():
            values = table[:, column]
            extremes: dict[str, Any] = {"min": np.min, "median": np.median, "max": np.max}
            for what, extreme in extremes.items():
                found[f"{name}/{what}"] = float(extreme(values))
            if len(table) <= _CURVES:
                found.update({f"{name}/replica_{r}": value for r, value in enumerate(values)})
        return {name: float(value) for name, value in found.items()}

    def _culprit_record(self) -> dict[str, Any] | None:
        if self._culprit is None:
            return None
        return {**vars(self._culprit), "replicas": list(self._culprit.replicas), "says": self._sentence()}

    def _sentence(self) -> str:
        assert self._culprit is not None
        return self._culprit.describe(self._name(self._culprit))

    def _name(self, culprit: Culprit) -> str:
        if culprit.worker is not None:
            return f"worker {culprit.worker}"
        return " and ".join(self._who(r) for r in culprit.replicas)

    def _who(self, replica: int) -> str:
        t = self._trainer
        worker = f" (worker {replica // t.local_replicas})" if t.cluster.num_workers > 1 else ""
        return f"replica {replica}{worker}"
