"""What the devices' readings say, as sentences: imbalance, throttling, memory, errors; only what was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.cluster.nvml import THROTTLES

APART = 0.15  # of utilisation: further from the others' middle is an imbalance
WAITING = 0.10  # share of the time: a worker that waits so long for input is input-bound
THROTTLED = 0.10  # share of looks
FULL = 0.95  # share of memory
LOW = 0.70  # utilisation of all devices together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One replica's GPU over some looks; NaN: not measured.

    Attributes:
      replica, worker, gpu: which it is; ``gpu`` is the number in its worker.
      utilisation: median, 0..1.
      memory: the largest share of its memory in use.
      peak_memory: likewise of what TensorFlow itself had in use.
      temperature: the highest, in degrees Celsius.
      clock: median share of the highest clock.
      throttled: share of looks at which something held its clocks down.
      reasons: bits of ``THROTTLES`` seen.
      ecc: uncorrected errors of memory that came up.
      input_wait: share of the time its worker waited for input.
    """

    replica: float
    worker: float
    gpu: float
    utilisation: float = math.nan
    memory: float = math.nan
    peak_memory: float = math.nan
    temperature: float = math.nan
    clock: float = math.nan
    throttled: float = math.nan
    reasons: float = 0.0
    ecc: float = math.nan
    input_wait: float = math.nan

    @property
    def numbers(self) -> np.ndarray:
        """All fields, float64, to cross workers; ``Row(**dict(zip(FIELDS, numbers)))`` is the row again."""
        return np.array([getattr(self, name) for name in FIELDS], np.float64)


FIELDS = [field.name for field in dataclasses.fields(Row)]


def row(replica: int, worker: int, gpu: int, looks: Sequence[dict[str, Any]], input_wait: float) -> Row:
    """A row from the records of one GPU (``framework.monitor.devices``); without records only the wait is known."""

    def column(name: str) -> np.ndarray:
        return np.array([look[name] for look in looks if name in look], np.float64)

    def of(values: np.ndarray, how: Callable[[np.ndarray], Any]) -> float:
        return float(how(values)) if len(values) else math.nan

    total = column("memory_bytes")
    memory = column("memory_used_bytes") / total if len(total) else total
    peaks = column("peak_memory_bytes")
    clocks, highest = column("sm_clock_mhz"), column("sm_clock_max_mhz")
    held = [look["throttle"] for look in looks if "throttle" in look]
    seen = {name for names in held for name in names}
    return Row(
        replica=replica,
        worker=worker,
        gpu=gpu,
        utilisation=of(column("utilisation"), np.median),
        memory=of(memory, np.max),
        peak_memory=of(peaks, np.max) / of(total, np.max),
        temperature=of(column("temperature_c"), np.max),
        clock=of(clocks, np.median) / of(highest, np.max),
        throttled=of(np.array([bool(names) for names in held], np.float64), np.mean),
        reasons=float(sum(bit for bit, name in THROTTLES.items() if name in seen)),
        ecc=of(column("ecc_uncorrected"), lambda v: v[-1] - v[0]),
        input_wait=input_wait,
    )


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the rows of all replicas say, the most telling first; empty: nothing stands out, or nothing was measured."""
    several = len({r.worker for r in rows}) > 1
    return [*_imbalance(rows, several), *_all_low(rows), *_each(rows, several)]


def _name(r: Row, several: bool) -> str:
    return f"GPU {r.gpu:.0f}" + (f" of worker {r.worker:.0f}" if several else "")


def _imbalance(rows: Sequence[Row], several: bool) -> list[str]:
    known = [r for r in rows if not math.isnan(r.utilisation)]
    found = []
    for r in known:
        others = [o.utilisation for o in known if o is not r]
        if not others or abs(r.utilisation - float(np.median(others))) < APART:
            continue
        if len(others) == 1 and r.utilisation > others[0]:
            continue  # of two it is told once, of the one with less to do
        low, high = min(others), max(others)
        if max(low - r.utilisation, r.utilisation - high) < max(APART / 2, high - low):
            continue  # the others differ as much among themselves
        span = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
        more = "others are" if len(others) > 1 else "other is"
        found.append(f"{_name(r, several)} is at {r.utilisation:.0%} while the {more} at {span}: {_cause(r, rows)}")
    return found


def _cause(r: Row, rows: Sequence[Row]) -> str:
    waits = [o.input_wait for o in rows if o.worker != r.worker and not math.isnan(o.input_wait)]
    if r.input_wait >= WAITING and (not waits or r.input_wait > 2.0 * float(np.median(waits))):
        return f"input-bound worker {r.worker:.0f}, which waits for input {r.input_wait:.0%} of the time"
    if r.throttled >= THROTTLED:
        return f"its clocks were held down at {r.throttled:.0%} of the looks ({_reasons(r)})"
    return "no cause was measured; look at its replica's time to the all-reduce"


def _all_low(rows: Sequence[Row]) -> list[str]:
    known = [r.utilisation for r in rows if not math.isnan(r.utilisation)]
    waits = [r.input_wait for r in rows if not math.isnan(r.input_wait)]
    if not known or max(known) >= LOW or not waits:
        return []
    wait = float(np.median(waits))
    if wait >= WAITING:
        return [f"all GPUs are below {LOW:.0%}, and {wait:.0%} of the time the steps wait for input: the input is slow"]
    return []


def _each(rows: Sequence[Row], several: bool) -> list[str]:
    found = []
    for r in rows:
        name = _name(r, several)
        if r.throttled >= THROTTLED:
            hot = "" if math.isnan(r.temperature) else f", up to {r.temperature:.0f} degrees Celsius"
            clock = "" if math.isnan(r.clock) else f", at {r.clock:.0%} of its highest clock"
            found.append(f"{name}: clocks held down at {r.throttled:.0%} of the looks ({_reasons(r)}{hot}{clock})")
        if r.ecc > 0:
            found.append(f"{name}: {r.ecc:.0f} uncorrected errors of memory came up; take it out of service")
        if r.peak_memory >= FULL:
            found.append(f"{name}: {r.peak_memory:.0%} of its memory was needed; a little more runs out of it")
    return found


def _reasons(r: Row) -> str:
    return ", ".join(name for bit, name in THROTTLES.items() if int(r.reasons) & bit) or "reason not told"
