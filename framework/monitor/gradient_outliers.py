"""Each replica's own gradients, before the all-reduce, against the others' and against its own history.

After the all-reduce all replicas hold the same gradient, and a wrong part of it can no longer be seen. The norms of
each replica's gradients cross with the sums anyway (``StepSums.norms``); the loop adds up their logarithms, so a factor
is an offset, and the host compares the means of inner loops. Norms of healthy replicas scatter with their examples but
agree in the middle; a median over all variables and over many samples shows offsets below that scatter.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from framework.loop.loop import LoopResult
    from framework.loop.trainer import Trainer

KEPT = 64  # samples: of the newest inner loops, and of the whole run, whose samples grow with it
SAMPLES = 24  # fewer tell nothing
STEPS = 8  # of a sample, at least; with shorter inner loops several are one
_LOOKS = 8  # samples from one look for offsets, and from one history of leaps, to the next
OFFSET = 0.005  # smallest offset of logarithms that is told: half a per cent
SCATTER = 6.0  # an offset is so many standard errors
LEAP = 10.0  # a leap is at least as much as one step with so many times the usual norm
LEAP_SCATTER = 12.0  # and so many standard deviations of the samples: of heavy tails 10 came up by chance
_MAD, _MEDIAN = 1.4826, 1.2533
_NAMED = 3  # variables in a sentence
_CURVES = 64


def wanted(trainer: Trainer) -> bool:
    """Whether the loop is to add up the logarithms."""
    return not _why_not(trainer)


def _why_not(trainer: Trainer) -> str:
    replicas, batch = trainer.strategy.num_replicas_in_sync, trainer.config.global_batch_size
    if not trainer.config.gradient_outliers:
        return "off"
    if replicas == 1:
        return "one replica: nothing to compare"
    if batch % replicas:
        return f"not compared: global_batch_size={batch} is no multiple of {replicas} replicas, so norms differ anyway"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlier:
    """A replica whose gradients are not like the others'.

    Attributes:
      replica: its number.
      kind: ``offset`` (for all of the samples) or ``leap`` (in the last one).
      factor: its norms over the others'.
      samples: how many there were.
      columns: of the variables that differ most.
    """

    replica: int
    kind: str
    factor: float
    samples: int
    columns: tuple[int, ...]


def relative(logs: np.ndarray) -> np.ndarray:
    """Logarithms of norms over the middle of the other replicas': ``[..., replicas, variables]`` to the same shape.

    NaN where a norm was 0, so that a variable without gradient says nothing.
    """
    replicas = logs.shape[-2]
    logs = np.where(np.isfinite(logs), logs, np.nan)
    rows = [np.median(np.delete(logs, r, -2), -2) for r in range(replicas)]
    return logs - np.stack(rows, -2)


def offset(samples: Sequence[np.ndarray]) -> Outlier | None:
    """The replica that differs most for good, or None where none differs by more than samples scatter.

    Args:
      samples: ``relative`` of parts of a run of equal length; each ``[replicas, variables]``.
    """
    if len(samples) < SAMPLES:
        return None
    table, known, middle = _middle(samples)
    usual = np.median(middle, 0)
    errors = _MEDIAN * _MAD * np.median(np.abs(middle - usual), 0) / math.sqrt(len(samples))
    # Of two replicas both differ equally: the larger one is told.
    worst = int(np.argmax(usual if len(usual) == 2 else np.abs(usual)))
    if not known.any() or abs(usual[worst]) < max(OFFSET, SCATTER * errors[worst]):
        return None
    return _outlier("offset", worst, float(usual[worst]), len(samples), np.median(table, 0), known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What is usual: for each replica the middle of its samples and their standard deviation; and how many they are."""

    usual: np.ndarray
    scatter: np.ndarray
    known: np.ndarray
    samples: int


def history(samples: Sequence[np.ndarray]) -> History:
    """The history that some samples make."""
    _, known, middle = _middle(samples)
    usual = np.median(middle, 0)
    scatter = _MAD * np.median(np.abs(middle - usual), 0)
    return History(usual=usual, scatter=scatter, known=known, samples=len(samples))


def leap(before: History, sample: np.ndarray, steps: int) -> Outlier | None:
    """The replica whose sample leaps out of its own history, or None.

    Args:
      before: the history.
      sample: ``relative`` of some steps.
      steps: updates in them.
    """
    known = before.known & np.isfinite(sample).all(0)
    if before.samples < SAMPLES or not known.any():
        return None
    last = np.median(sample[:, known], 1) - before.usual
    worst = int(np.argmax(last if len(last) == 2 else np.abs(last)))
    if abs(last[worst]) < max(math.log(LEAP) / steps, LEAP_SCATTER * before.scatter[worst]):
        return None
    return _outlier("leap", worst, float(last[worst]), before.samples, sample, known)


def _middle(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All samples; which variables have a norm in all of them; the middle over these: ``[samples, replicas]``."""
    table = np.stack(samples)
    known = np.isfinite(table).all((0, 1))
    return table, known, np.median(table[:, :, known], 2) if known.any() else np.zeros(table.shape[:2])


def _outlier(kind: str, replica: int, log: float, samples: int, table: np.ndarray, known: np.ndarray) -> Outlier:
    columns = np.flatnonzero(known)
    order = columns[np.argsort(-np.abs(table[replica, columns]), kind="stable")]
    return Outlier(
        replica=replica,
        kind=kind,
        factor=math.exp(min(log, 700.0)),
        samples=samples,
        columns=tuple(int(c) for c in order[:_NAMED]),
    )


class GradientOutliers:
    """Collects samples of inner loops; all workers see the same norms, so none has to ask another.

    Args:
      trainer: whose replicas are compared.
      say: prints a line.
    """

    def __init__(self, trainer: Trainer, *, say: Callable[[str], None]):
        self._trainer = trainer
        self._say = say
        self._replicas = trainer.strategy.num_replicas_in_sync
        self._newest: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT)
        self._all: list[np.ndarray] = []  # of the whole run, each of so many inner loops:
        self._each = 1
        self._open: list[np.ndarray] = []  # samples of the next one
        self._history: History | None = None
        self._sum = np.zeros(0)  # logarithms of the next sample, and its steps:
        self._updates = 0
        self._count = 0
        self._told: set[tuple[int, str]] = set()
        self._found: list[dict[str, Any]] = []
        self._steps = 0

    def add(self, result: LoopResult) -> None:
        """One inner loop."""
        if result.logs is None or not len(result.logs):
            return
        if len(self._sum) != len(result.logs):  # the first one; or other variables since Trainer.refresh()
            self._start(len(result.logs))
        self._sum = self._sum + result.logs
        self._updates += result.steps - result.skipped
        if self._updates < STEPS:
            return
        # Column 0 is the loss. Norms are sums of squares.
        sample = relative(0.5 * self._sum.reshape(self._replicas, -1)[:, 1:] / self._updates)
        updates, self._updates, self._sum = self._updates, 0, np.zeros(len(self._sum))
        self._steps += updates
        found = leap(self._history, sample, updates) if self._history is not None else None
        if found is not None:  # no part of what is usual
            self._tell(found, updates)
            return
        self._newest.append(sample)
        self._keep(sample)
        self._count += 1
        if self._count % _LOOKS:
            return
        self._history = history(self._newest)
        for samples in (self._newest, self._all):
            found = offset(samples)
            if found is not None:
                self._tell(found, updates)

    def _start(self, size: int) -> None:
        """Forgets all samples."""
        self._newest.clear()
        self._all, self._open, self._each = [], [], 1
        self._sum, self._updates, self._count, self._history = np.zeros(size), 0, 0, None

    def _keep(self, sample: np.ndarray) -> None:
        """Adds to the samples of the whole run; where they are too many, two become one."""
        self._open.append(sample)
        if len(self._open) < self._each:
            return
        self._all.append(np.mean(self._open, 0))
        self._open = []
        if len(self._all) == KEPT:
            self._all = [(a + b) / 2.0 for a, b in zip(self._all[::2], self._all[1::2], strict=True)]
            self._each *= 2

    def _tell(self, found: Outlier, steps: int) -> None:
        """Says it, once for a replica and kind."""
        key = (found.replica, found.kind)
        if key not in self._told:
            self._told.add(key)
            step = self._trainer.step
            says = self._sentence(found, steps)
            self._found.append({**dataclasses.asdict(found), "columns": self._names(found), "step": step, "says": says})
            self._say(f"step {step}: {says}")

    def curves(self) -> dict[str, float]:
        """Each replica's factor, for TensorBoard."""
        if not self._newest or self._replicas > _CURVES:
            return {}
        newest = self._newest[-1]
        known = np.isfinite(newest).all(0)
        if not known.any():
            return {}
        return {f"gradient_factor/replica_{r}": math.exp(np.median(newest[r, known])) for r in range(self._replicas)}

    def summary(self) -> Any:
        """What ``summary.json`` says of it."""
        why_not = _why_not(self._trainer)
        return why_not or {"steps": self._steps, "samples_needed": SAMPLES, "outliers": self._found}

    def _names(self, found: Outlier) -> list[str]:
        columns = self._trainer.stepper.columns[1:]
        return [columns[c] if c < len(columns) else f"variable {c}" for c in found.columns]

    def _sentence(self, found: Outlier, steps: int) -> str:
        t = self._trainer
        worker = f" (worker {found.replica // t.local_replicas})" if t.cluster.num_workers > 1 else ""
        what = f"gradients of replica {found.replica}{worker} are {found.factor:.4g} times the others'"
        when = f"in the last {steps} steps" if found.kind == "leap" else f"over {found.samples} samples"
        which = ", or the other ones are wrong" if self._replicas == 2 else ""
        return (
            f"{what} {when}, in the middle of all variables, before the all-reduce (most: "
            f"{', '.join(self._names(found))}){which}; look for data or weights of its own, a wrong scale, "
            "a faulty device"
        )
