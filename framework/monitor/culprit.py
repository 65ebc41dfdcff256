"""Who holds the others up: judged from each replica's times of several samples, on the host, without TensorFlow.

A culprit is named only if three things say so, each against its own limit: it comes later than the others by a share of
a step that matters; by far more than samples scatter and than the other replicas differ among themselves; and the
others wait in the reduction for about as long. Everything is a median, so a few steps that something else slowed down
change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

WAIT, LOCAL, REDUCE = 0, 1, 2  # columns of samples
COLUMNS = ("input_wait_ms", "local_ms", "reduce_ms")

SAMPLES = 8  # fewer name nobody
LATE = 0.15  # share of a step that a replica comes late, for it to matter
# Healthy replicas on fewer cores come one after the other: then the others differ as much as the last one is late.
# Standard errors of the samples; standard deviations of the other replicas, and lateness of the next one after them.
SCATTER = 4.0
CONFIRMED = 0.5  # share of the lateness that the others must be seen waiting
_MAD = 1.4826  # median absolute deviation -> standard deviation, of normal numbers
_MEDIAN = 1.2533  # standard error of a median over that of a mean, of normal numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Culprit:
    """Who comes late, and what says so. Times in milliseconds a step, medians.

    Attributes:
      replicas: their numbers; all of a worker if ``worker`` is given.
      worker: number of the worker that is late as a whole; None: not a whole worker of several replicas.
      signal: ``input``: its worker waits for input; ``local``: its own work, forward and backward, takes longer.
      late: how much later than the others it comes to the reduction.
      share: the same as a share of a step.
      own: its time of the signal.
      others: the others' median of it.
      waited: how much longer the others wait in the reduction.
      samples: how many there were.
    """

    replicas: tuple[int, ...]
    worker: int | None
    signal: str
    late: float
    share: float
    own: float
    others: float
    waited: float
    samples: int

    def describe(self, who: str) -> str:
        """A sentence; ``who``: the culprit's name."""
        what = "waits for input" if self.signal == "input" else "needs for its own forward and backward pass"
        return (
            f"{who} comes {self.late:.3g} ms ({self.share:.0%} of a step) after the others to the all-reduce: "
            f"it {what} {self.own:.3g} ms, the others {self.others:.3g}; in the all-reduce they wait "
            f"{self.waited:.3g} ms longer (medians of {self.samples} samples)"
        )


def medians(samples: np.ndarray) -> np.ndarray:
    """``[replicas, 3]`` from samples ``[replicas, samples, 3]``; NaN: no sample."""
    return np.nanmedian(samples, axis=1)


def split(table: np.ndarray, step: float) -> dict[str, float]:
    """Where a step goes, the mean over replicas in milliseconds; the parts sum to ``step``.

    ``all_reduce`` is what the replica that comes last spends in it; the others' longer stay is ``waiting``. ``rest`` is
    the update, the figures and the host.

    Args:
      table: what ``medians`` gave.
      step: median milliseconds of a whole step.
    """
    wait, local, reduce = table.mean(0)
    alone = float(table[:, REDUCE].min())
    return {
        "input": float(wait),
        "own_work": float(local),
        "waiting": float(reduce) - alone,
        "all_reduce": alone,
        "rest": max(step - float(wait + local + reduce), 0.0),
    }


def judge(samples: np.ndarray, workers: Sequence[int]) -> Culprit | None:
    """The culprit, or None where the evidence names nobody.

    Args:
      samples: float ``[replicas, samples, 3]``, milliseconds a step: waiting for input (of the replica's worker), own
        work from then to the reduction, time in the reduction. NaN: no sample.
      workers: the worker of each replica.
    """
    replicas = len(samples)
    counts = np.isfinite(samples).all(2).sum(1)
    if replicas < 2 or counts.min() < SAMPLES:
        return None
    middle = medians(samples)
    arrivals = samples[:, :, WAIT] + samples[:, :, LOCAL]
    arrival = np.nanmedian(arrivals, 1)
    errors = _MAD * _MEDIAN * np.nanmedian(np.abs(arrivals - arrival[:, None]), 1) / np.sqrt(counts)
    last = int(np.argmax(arrival))
    reference = float(np.median(np.delete(arrival, last)))
    late = arrival[last] - reference
    step = float(np.median(arrival + middle[:, REDUCE]))
    group = np.flatnonzero(arrival - reference >= late / 2)
    rest = np.setdiff1d(np.arange(replicas), group)
    worker = _whole_worker(group, workers)
    if worker is None and len(group) > max(1, replicas // 4):
        return None
    among = _MAD * float(np.median(np.abs(arrival[rest] - np.median(arrival[rest]))))
    nearest = float(arrival[rest].max() - reference)
    scatter = float(np.hypot(errors[group].max(), errors[rest].max()))
    waited = float(np.median(middle[rest, REDUCE]) - np.median(middle[group, REDUCE]))
    if late < LATE * step or late < SCATTER * max(scatter, among, nearest) or waited < CONFIRMED * late:
        return None
    behind = np.median(middle[group], 0) - np.median(middle[rest], 0)
    column = WAIT if behind[WAIT] > behind[LOCAL] else LOCAL
    return Culprit(
        replicas=tuple(int(r) for r in group),
        worker=worker,
        signal="input" if column == WAIT else "local",
        late=float(late),
        share=float(late / step),
        own=float(np.median(middle[group, column])),
        others=float(np.median(middle[rest, column])),
        waited=waited,
        samples=int(counts.min()),
    )


def _whole_worker(group: np.ndarray, workers: Sequence[int]) -> int | None:
    """The worker whose replicas, more than one, are exactly the group."""
    those = {workers[r] for r in group}
    if len(group) > 1 and len(those) == 1:
        worker = those.pop()
        return worker if list(workers).count(worker) == len(group) else None
    return None
