"""Whether two contenders did equal work: as many parameters, the same first loss, the same loss curve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.rounds import Run

# The first loss comes from equal weights and equal examples; only the order of a float32 sum may differ.
FIRST = 1e-5
# Later, rounding grows from step to step: in the first window, and in those behind it.
CURVE, LATER = 0.02, 0.05
# Loss below which a relative difference says nothing: the model has learnt its data by heart.
FLOOR = 0.1


def difference(reference: Run, run: Run) -> str:
    """Says how the work of ``run`` differs from the reference's; empty if it does not."""
    want, got = (r.start_up.facts.get("parameters") for r in (reference, run))
    if want != got:
        return f"{got} parameters where the reference has {want}"
    for i, (a, b) in enumerate(zip(reference.losses, run.losses)):
        limit = (LATER if i > 1 else CURVE if i else FIRST) * max(abs(a), FLOOR)
        if not math.isfinite(a) or not math.isfinite(b) or abs(a - b) > limit:
            what = f"the mean loss of window {i}" if i else "the loss of the first step"
            return f"{what} is {b:.6g} where the reference has {a:.6g}; at most {limit:.2g} apart is allowed"
    if len(reference.losses) != len(run.losses):
        return f"{len(run.losses)} losses where the reference has {len(reference.losses)}"
    return ""
