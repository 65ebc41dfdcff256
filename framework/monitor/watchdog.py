"""The watchdog: heartbeats of this worker, and an end with code 4 where nothing goes on any more.

A thread looks about once a second. It cannot be stopped by a collective that hangs: that waits in C++, without Python's
lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from framework.cluster.addresses import Cluster
from framework.errors import PeerLost
from framework.monitor import heartbeat
from framework.monitor.heartbeat import Heartbeat
from framework.monitor.ledger import Ledger

FOLDER = "hang"
_REQUEST = "request.json"  # in FOLDER: a worker that found a hang asks all to write their stacks and to end
_TICK = 1.0  # seconds between two looks; heartbeats of many workers come less often
_STOPPED = 5.0  # a look that comes so much too late says that this process itself was stopped
_SILENT = 3.5  # heartbeats that did not come, and a worker counts as silent
_UNKNOWN = 1800.0  # seconds for all else, and for what has not been seen often enough
_LEAST, _TIMES = 60.0, 10.0  # the learned limit: so many times the longest interval, and at least that many seconds
# Intervals after which the limit of a phase is learned. What hooks and saves take differs from time to time.
_SEEN = {"train": 20, "evaluate": 3}
_SLOW = frozenset(["start_up", "recovery", "compile"])  # they happen once: ten times a given limit
_NOBODY = "all workers are there, and none goes on: the network between them, or the program itself"
_DEBUGGERS = frozenset(["bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.terminal.debugger", "ipdb"])


class Watchdog:
    """Watches one worker's progress in its ledger.

    Args:
      ledger: where the run tells its phase and its progress.
      cluster: who takes part.
      run_dir: where heartbeats and stacks go; None: nothing is written, and stacks go to stderr.
      hang_limit: seconds without progress; 0: learned from the run; -1: never.
      last_words: called with the reason before this process is ended; it may raise.
      tell: takes lines that are no warning.
      clock, pause, end, say: time, sleep, the end of the process and stderr; passed in by tests.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        cluster: Cluster,
        run_dir: str | None,
        hang_limit: float,
        last_words: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        end: Callable[[int], Any] = os._exit,
        say: Callable[[str], None] | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self._ledger, self._cluster, self._run_dir, self._given = ledger, cluster, run_dir, hang_limit
        self._files: str | None = None  # the folder, once it may be written to
        self._place: os.stat_result | None = None  # and what it was then
        self._last_words, self._clock, self._pause, self._end = last_words, clock, pause, end
        self._say, self._inform = say or _stderr, tell
        self._main = threading.get_ident()
        self._every = max(_TICK, cluster.num_workers / 16)
        self._looked = self._written = clock()
        self._count = 0
        self._began = time.time()
        self._host = socket.gethostname()
        self._told: float | None = None  # the learned limit that was printed
        self._warned = False  # of this stand-still
        self._old_request: dict[str, Any] = {}
        self._complained = False
        self.earlier: list[Heartbeat] = []  # last heartbeats of the chief's processes before a restart
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the run's side ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches inside the block; nothing is written before ``write_heartbeats``."""
        self._files = None
        self._main = threading.get_ident()
        self._began = time.time() - self._ledger.seconds()["total"]
        self._looked = self._clock()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        status = "done"
        try:
            yield
        except BaseException as error:
            status = _reason(error)
            raise
        finally:
            self._stop.set()
            self._thread.join(5.0)
            self._write(status)

    def write_heartbeats(self) -> None:
        """Begins to write to the run folder, once it is sure that this process trains in it."""
        self._files = self._run_dir
        with contextlib.suppress(OSError):
            self._place = os.stat(self._files) if self._files else None
        self._old_request = self._request()
        if self._files and self._cluster.is_chief:
            self.earlier = heartbeat.close_attempt(self._files, (self._host, os.getpid(), self._began))
        self._write()

    def describe(self) -> str:
        """A line for the start of a run; empty where nothing is watched."""
        if self._given < 0:
            return ""
        if self._given:
            return f"watchdog: the run ends with code 4 after {self._given:g} s without progress (hang_limit)"
        return "watchdog: the longest time without progress is learned from the run; see hang_limit"

    def earlier_seconds(self) -> list[dict[str, float]]:
        """Seconds by phase of each earlier process, with the time behind it in which no process was there."""
        begins = [*(beat.began for beat in self.earlier[1:]), self._began]
        found = []
        for beat, began in zip(self.earlier, begins, strict=False):
            down = max(0.0, began - beat.time)
            seconds = {**beat.seconds, "down": down}
            found.append(seconds | {"total": beat.seconds.get("total", 0.0) + down})
        return found

    def blame(self) -> str:
        """Which workers ended or fell silent, after a look long enough to know; empty: all others are well."""
        if not self._files:
            return ""
        before = self._counts()
        until = self._clock() + _SILENT * self._every
        while not (found := self._ended()) and self._clock() < until:
            self._pause(0.5)
            if threading.current_thread() is self._thread:  # else that goes on by itself
                self._write()
        if found:
            return "; ".join(found)
        beats = {i: beat for i, beat in self._others().items() if beat is not None}
        silent = [
            f"{self._cluster.name(i)} is lost or stopped, last seen at step {beat.step} in {_words(beat.phase)}"
            for i, beat in beats.items()
            if beat.status == heartbeat.RUNNING and before.get(i) == beat.count
        ]
        # At last those that left in good order while the others go on.
        left = [f"{self._cluster.name(i)} left at step {b.step}" for i, b in beats.items() if b.status == "done"]
        return "; ".join(silent or left)

    def _ended(self) -> list[str]:
        """Workers that ended by something else than the loss of another."""
        return [
            f"{self._cluster.name(i)} ended at step {beat.step} with {beat.status}"
            for i, beat in self._others().items()
            if beat is not None and not beat.status.startswith((heartbeat.RUNNING, PeerLost.__name__, "done"))
        ]

    # --- the thread's side ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(_TICK):
            self.look()

    def look(self) -> None:
        """One look: a heartbeat, a warning at half the limit, the end at the limit."""
        now = self._clock()
        gap, self._looked = now - self._looked, now
        debugged = _debugged(self._main)
        if debugged:
            self._ledger.excuse(gap)
        elif gap > _TICK + _STOPPED:
            self._ledger.excuse(gap - _TICK)
        if now - self._written >= self._every * 0.9:
            self._write(phase="debugger" if debugged else "")
        if self._given < 0:
            return
        asked = self._request()
        if asked and asked != self._old_request:
            index = asked.get("worker")  # from a file, so it may be anything
            who = "a worker"
            if type(index) is int and 0 <= index < self._cluster.num_workers:
                who = self._cluster.name(index)
            self._finish(f"{who} found that nothing goes on any more")
            return
        idle, limit = self._ledger.idle(), self.limit()
        if idle < limit / 2:
            self._warned = False
            self._tell(limit)
        elif idle >= limit:
            self._hang(idle, limit)
        elif not self._warned:
            self._warned = True
            self._say(
                f"warning: no progress in {_words(self._ledger.phase)} at step {self._ledger.step} for "
                f"{idle:.0f} s; at {limit:.0f} s the run ends with code 4{self._roll_call()}"
            )

    def limit(self) -> float:
        """Seconds without progress that are too many in the present phase."""
        phase, (times, usual) = self._ledger.phase, self._ledger.usual()
        first = phase in _SLOW or (phase == "evaluate" and times < _SEEN["evaluate"])
        if self._given > 0:
            return max(self._given * (10.0 if first else 1.0), 3.0 * usual)
        if phase not in _SEEN or times < _SEEN[phase]:
            return _UNKNOWN
        return max(_LEAST, _TIMES * usual)

    def _tell(self, limit: float) -> None:
        """Prints the limit of a step when it is learned, or has grown much."""
        if self._given or self._ledger.phase != "train" or limit == _UNKNOWN or self._cluster.index:
            return
        if self._told is None or limit > 2.0 * self._told:
            self._told = limit
            longest = self._ledger.usual()[1]
            self._inform(
                f"watchdog: {limit:.0f} s without a step end the run with code 4 "
                f"({_TIMES:g} x the longest so far, {longest:.2g} s, and at least {_LEAST:g} s)"
            )

    def _hang(self, idle: float, limit: float) -> None:
        others = self._others()
        if any(beat is not None and beat.phase == "debugger" for beat in others.values()):
            self._ledger.excuse(idle)
            return
        why = (
            f"no progress in {_words(self._ledger.phase)} at step {self._ledger.step} for {idle:.0f} s "
            f"(limit {limit:.0f} s)"
        )
        self._ask(why)
        self._finish(why)

    def _finish(self, why: str) -> None:
        """Writes the stacks, says who is where, and ends the process."""
        who = self.blame() or self._apart() or _NOBODY
        where = self._stacks()
        self._say(f"error: {why}: {who}; stacks: {where}{self._roll_call()}")
        with contextlib.suppress(Exception):
            self._last_words(f"hang: {why}: {who}")
        with contextlib.suppress(OSError):
            self._write(f"{PeerLost.__name__}: {why}")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._end(PeerLost.exit_code)

    def _apart(self) -> str:
        """Which workers make another call than this one, and so wait for ever; empty: none."""
        mine = self._ledger.phase
        others = [
            f"{self._cluster.name(i)} in {_words(beat.phase)}"
            for i, beat in self._others().items()
            if beat is not None and beat.status == heartbeat.RUNNING and beat.phase != mine
        ]
        if not others:
            return ""
        return (
            f"this worker is in {_words(mine)} and {', '.join(others[:8])}: what communicates (train, evaluate) has to "
            "be called by all workers alike, never under is_chief"
        )

    def _stacks(self) -> str:
        if self._files:
            name = os.path.join(self._files, FOLDER, f"worker-{self._cluster.index:04d}.txt")
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(name), exist_ok=True)
                with open(name, "w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                return name
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        return "on stderr"

    # --- files ---------------------------------------------------------------------------------------------------

    def _write(self, status: str = heartbeat.RUNNING, *, phase: str = "") -> None:
        self._written = self._clock()
        self._count += 1
        if not self._files:
            return
        beat = Heartbeat(
            worker=self._cluster.index,
            pid=os.getpid(),
            host=self._host,
            began=self._began,
            time=time.time(),
            count=self._count,
            phase=phase or self._ledger.phase,
            step=self._ledger.step,
            idle=round(self._ledger.idle(), 3),
            status=status,
            seconds={name: round(value, 3) for name, value in self._ledger.seconds().items()},
        )
        try:
            # A folder that was removed is not made again, nor is another's in its place written to.
            if self._place is None or os.path.samestat(os.stat(self._files), self._place):
                heartbeat.write(self._files, beat)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(f"warning: no heartbeats in run_dir={self._files}: {error}")

    def _others(self) -> dict[int, Heartbeat | None]:
        """Heartbeats of the other workers; what an earlier run of theirs left, before this process began, is none."""
        if not self._files:
            return {}
        others = [i for i in range(self._cluster.num_workers) if i != self._cluster.index]
        beats = {i: heartbeat.read(self._files, i) for i in others}
        return {i: beat if beat is not None and beat.time >= self._began else None for i, beat in beats.items()}

    def _counts(self) -> dict[int, int]:
        return {i: beat.count for i, beat in self._others().items() if beat is not None}

    def _roll_call(self) -> str:
        """Lines that say where each other worker is; empty with one worker."""
        lines = [
            f"\n  {self._cluster.name(i)}: {beat.describe() if beat is not None else 'has no heartbeat'}"
            for i, beat in self._others().items()
        ]
        return "".join(lines[:64])

    def _request(self) -> dict[str, Any]:
        if not self._files:
            return {}
        try:
            with open(os.path.join(self._files, FOLDER, _REQUEST), encoding="utf-8") as file:
                value = json.load(file)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _ask(self, why: str) -> None:
        """Asks all workers to write their stacks, and to end."""
        if not self._files:
            return
        target = os.path.join(self._files, FOLDER, _REQUEST)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            temporary = f"{target}.{self._cluster.index}.tmp"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"worker": self._cluster.index, "why": why, "time": time.time()}, file)
            os.replace(temporary, target)


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def _stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _debugged(thread: int) -> bool:
    """Whether somebody looks on in a debugger: one of its functions is on the thread's stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _DEBUGGERS or name.partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
