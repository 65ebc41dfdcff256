"""When a hook runs: small objects asked with step and time, so that tests never sleep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from framework.errors import ConfigError, LockstepError


class Trigger:
    """Says whether a hook runs at ``step``. The loop cuts its inner loop at ``next_step``."""

    def next_step(self, step: int) -> float:
        """The next step after ``step`` at which the loop must stop for this trigger; ``math.inf``: none."""
        raise NotImplementedError

    def fires(self, step: int, seconds: float) -> bool:
        """Whether the hook runs now, after ``step`` updates, at monotonic time ``seconds``."""
        raise NotImplementedError
