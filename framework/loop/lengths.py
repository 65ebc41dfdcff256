"""How many steps the next inner loop has: chosen by measurement, and the same on all workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from framework.loop.loop import LoopResult

# Length of an inner loop that is chosen by measurement: long enough that the host's part (about 0.3 ms a
# call, two logical CPUs) is below 0.2 %, short enough that Ctrl-C and SIGTERM are answered at once.
_SECONDS = 0.2


class Lengths:
    """The length of inner loops, cut where something is to be done between two of them.

    Workers must cut their steps into the same loops: TensorFlow tells a collective apart by the call it is in, and one
    worker would wait for ever in a call that the others are not in. But each measures other times, and may have other
    hooks. So each says with the steps of one loop how long the next may be, and the least of it counts.

    Args:
      fixed: steps of a loop; 0: chosen by measurement.
      tell: tells the other workers, with the steps of the next loop; None: there are none.
    """

    def __init__(self, fixed: int, tell: Callable[[int], None] | None):
        self._fixed = fixed
        self._per_loop = fixed or 1
        self._tell = tell
        self._agreed = 1

    def next(self, room: Callable[[int], float], *, compiled: bool) -> int:
        """Steps of the loop that begins now.

        Args:
          room: steps ahead -> steps from there to the next place where the loop must end.
          compiled: else it is the first loop, which traces and compiles and has one step.
        """
        count = 1
        if compiled:
            count = self._wish(room(0)) if self._tell is None else self._agreed
        if self._tell is not None:
            self._tell(self._wish(room(count)))
        return count

    def account(self, result: LoopResult, count: int, *, compiled: bool) -> None:
        """Learns from a loop that was to have ``count`` steps."""
        # What workers told each other holds behind all these steps only.
        self._agreed = max(1, result.next_steps) if result.steps == count else 1
        if compiled and result.steps == count:
            self._measure(result)

    def _wish(self, room: float) -> int:
        return max(1, int(min(room, self._per_loop)))

    def _measure(self, result: LoopResult) -> None:
        """Loops of 1, then of 8 steps, then about ``_SECONDS`` long."""
        if self._fixed or self._per_loop > 8:
            return
        if self._per_loop < 8:
            self._per_loop = 8 if result.seconds < _SECONDS / 4 else self._per_loop
        elif result.steps == 8:
            self._per_loop = int(np.clip(_SECONDS / (result.seconds / 8), 9, 1000))
