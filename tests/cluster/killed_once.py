"""Trains digits; worker 1 is killed by SIGKILL after step 7, once: not where the file MARK is there already.

python -m tests.cluster.killed_once MARK --task=digits ...
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import train
from framework import AtSteps, Scheduled, flags
from models.registry import Tasks

MARK = pathlib.Path(sys.argv[1])


class Killed(Tasks()["digits"]):  # type: ignore[misc]
    """The task, with a hook."""

    def hooks(self) -> Sequence[Scheduled]:
        def kill(step: int, values: Any) -> None:
            if self.cluster.index == 1 and not MARK.exists():
                MARK.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return [*super().hooks(), Scheduled(AtSteps([7]), kill)]


if __name__ == "__main__":
    sys.exit(flags.run(train.train, ["train.py", *sys.argv[2:]], tasks={"digits": Killed}))
