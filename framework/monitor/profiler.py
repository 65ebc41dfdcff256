"""TensorBoard profiles of some steps, asked for beforehand or while a run goes on, and stacks at the same call."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import tensorflow as tf

from framework.hooks.triggers import Trigger
from framework.parse import parse_profile

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

REQUEST = "profile_now"  # in the run folder: touch it
ON_DEMAND = 10  # steps of a profile that was asked for while running
_LOOK = 1.0  # seconds between two looks for the file


class Profiler(Trigger):
    """Profiles the steps of ``config.profile``, and the next few at SIGUSR2 or when ``profile_now`` is touched.

    It is the trigger that cuts the loop, too: at the profile's begin, and inside it behind every step, so that each
    step has a marker. Each worker profiles itself, and needs none of the others for it.

    Args:
      trainer: whose run it is.
      say: prints a line.
      clock: seconds that never go back; passed in by tests.
    """

    def __init__(self, trainer: Trainer, *, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._trainer = trainer
        self._say = say
        self._clock = clock
        config = trainer.config
        self._run_dir = config.run_dir
        self._steps: range | None = parse_profile(config.profile)
        self._until: int | None = None  # the last step of the profile that is being taken
        self._asked = False
        self._looked = -math.inf
        self._touched: int | None = None
        self._stacks: TextIO | None = None

    @property
    def active(self) -> bool:
        """Whether a profile is being taken: times of such steps are not the usual ones."""
        return self._until is not None

    @property
    def folder(self) -> str:
        """Where profiles of this worker go."""
        return os.path.join(self._run_dir or "", "tensorboard", "profile", f"worker-{self._trainer.cluster.index:04d}")

    def describe(self) -> str:
        """A line for the start of a run; empty without ``--profile``."""
        if self._steps is None:
            return ""
        if self._steps.start <= self._trainer.step + 1:  # the first step of a process traces
            return f"profile: none: step {self._steps[0]} comes before {self._trainer.step + 2}"
        return f"profile: steps {self._steps[0]} to {self._steps[-1]}, to {os.path.dirname(self.folder)}"

    # --- as a trigger --------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> float:
        """See ``Trigger``."""
        if self.active:
            return step + 1
        return self._steps.start - 1 if self._steps is not None and self._steps.start - 1 > step else math.inf

    def fires(self, step: int, seconds: float) -> bool:
        """Never: ``at`` is called instead."""
        return False

    # --- while the run goes on -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the steps: listens to the signal, and ends a profile that is still being taken."""
        self._touched, self._asked = self._touch_time(), False
        with self._listening():
            try:
                yield
            finally:
                self._stop()

    def at(self, step: int) -> None:
        """Between two inner loops, after ``step`` steps."""
        if self._until is not None and step >= self._until:
            self._stop()
        if self._steps is not None and step == self._steps.start - 1:
            self._start(self._steps[-1])
        elif not self.active and self._is_asked():
            self._start(step + ON_DEMAND)

    def marked(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Around an inner loop that begins with ``step``: a marker, if a profile is being taken."""
        if not self.active:
            return contextlib.nullcontext()
        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def _start(self, until: int) -> None:
        try:
            tf.profiler.experimental.start(self.folder)
        except tf.errors.OpError as error:  # a caller's own profile is being taken
            print(f"warning: no profile: {error.message}", flush=True)
            return
        self._until = until
        self._say(f"step {self._trainer.step}: profiling up to step {until}, to {self.folder}")

    def _stop(self) -> None:
        if self._until is not None:
            self._until = None
            try:
                tf.profiler.experimental.stop()
            except (tf.errors.OpError, OSError) as error:
                print(f"warning: the profile was not written: {error}", flush=True)

    # --- on demand -----------------------------------------------------------------------------------------------

    def _is_asked(self) -> bool:
        if not self._run_dir:
            return False
        asked, self._asked = self._asked, False
        now = self._clock()
        if not asked and now - self._looked >= _LOOK:
            self._looked = now
            touched = self._touch_time()
            asked = touched is not None and touched != self._touched
            self._touched = touched
            if asked and self._stacks is not None:  # at the signal they have been written
                faulthandler.dump_traceback(self._stacks, all_threads=True)
        return asked

    def _touch_time(self) -> int | None:
        try:
            return os.stat(os.path.join(self._run_dir or "", REQUEST)).st_mtime_ns if self._run_dir else None
        except OSError:
            return None

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Catches SIGUSR2 inside the block: stacks at once, also where Python is stuck; then a profile."""
        number = getattr(signal, "SIGUSR2", None)
        if number is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(*_: Any) -> None:
            self._asked = True

        before = signal.signal(number, ask)
        with self._stacks_file() as file:
            faulthandler.register(number, file=file, all_threads=True, chain=True)
            try:
                yield
            finally:
                faulthandler.unregister(number)
                signal.signal(number, before)

    @contextlib.contextmanager
    def _stacks_file(self) -> Iterator[TextIO]:
        """``RUN_DIR/stacks/worker-NNNN.txt``, removed if nothing was written; stderr without a run folder."""
        if not self._run_dir:
            yield sys.__stderr__ or sys.stderr
            return
        path = os.path.join(self._run_dir, "stacks", f"worker-{self._trainer.cluster.index:04d}.txt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a", encoding="utf-8") as self._stacks:
            yield self._stacks
        self._stacks = None
        with contextlib.suppress(OSError):
            if not os.path.getsize(path):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
