"""The watchdog: what trips it and what must not, who is blamed, and what restarts learn from heartbeats."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from framework.cluster.addresses import Cluster
from framework.monitor import heartbeat
from framework.monitor.heartbeat import Heartbeat
from framework.monitor.ledger import Ledger
from framework.monitor.watchdog import Watchdog
from tests.helpers import Toy, settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWO = Cluster(("a:1", "b:1"), 0, "flags")


class Time:
    """A clock that stands still unless it is moved; a pause moves it, and lets others do something."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


class Setting:
    """A watchdog whose time, end and words a test has in its hands."""

    def __init__(self, run_dir: pathlib.Path | None, *, hang_limit: float = 0.0, cluster: Cluster = TWO):
        self.time = Time()
        self.ledger = Ledger(self.time)
        self.ends: list[int] = []
        self.said: list[str] = []
        self.told: list[str] = []
        self.last: list[str] = []
        self.dog = Watchdog(
            ledger=self.ledger,
            cluster=cluster,
            run_dir=str(run_dir) if run_dir else None,
            hang_limit=hang_limit,
            last_words=self.last.append,
            tell=self.told.append,
            clock=self.time,
            pause=self.time.pause,
            end=self.ends.append,
            say=self.said.append,
        )
        self.dog.write_heartbeats()

    def steps(self, count: int, seconds: float) -> None:
        self.ledger.start()
        for _ in range(count):
            with self.ledger.timed("train"):
                self.wait(seconds)
            self.ledger.step += 1

    def wait(self, seconds: float) -> None:
        """Time goes by, and the watchdog looks each second."""
        until = self.time.now + seconds
        while self.time.now < until and not self.ends:
            self.time.now = min(until, self.time.now + 1.0)
            self.dog.look()


def other(run_dir: pathlib.Path, count: int = 1, **changes: Any) -> None:
    """Worker 1 writes a heartbeat."""
    usual: dict[str, Any] = {
        "worker": 1,
        "pid": 1,
        "host": "b",
        "began": 0.0,
        "time": time.time() + 60.0,  # of the present run
        "phase": "train",
        "idle": 0.0,
    }
    heartbeat.write(str(run_dir), Heartbeat(**{**usual, "count": count, "step": 4, **changes}))


def test_a_limit_is_learned_from_the_runs_own_steps_and_told(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path)
    here.steps(25, 8.0)
    assert here.told == [
        "watchdog: 80 s without a step end the run with code 4 (10 x the longest so far, 8 s, and at least 60 s)"
    ]
    with here.ledger.timed("train"):
        here.wait(79.0)
        assert not here.ends
        here.wait(2.0)
    assert here.ends == [4]


def test_a_given_limit_is_warned_of_at_its_half_and_ends_the_run(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=20.0)
    other(tmp_path, phase="evaluate")
    here.steps(3, 1.0)
    with here.ledger.timed("train"):
        here.wait(11.0)
        assert len(here.said) == 1 and not here.ends
        assert here.said[0].startswith("warning: no progress in train at step 3 for 10 s; at 20 s the run ends")
        assert "worker 1 (b:1): in evaluate at step 4" in here.said[0]
        here.wait(20.0)
    assert here.ends == [4]
    assert "worker 1 (b:1) is lost or stopped, last seen at step 4 in evaluate" in here.said[-1]
    stacks = tmp_path / "hang" / "worker-0000.txt"
    assert str(stacks) in here.said[-1] and "test_watchdog.py" in stacks.read_text()
    assert here.last[0].startswith("hang: no progress in train at step 3")
    assert json.loads((tmp_path / "hang" / "request.json").read_text())["worker"] == 0
    mine = heartbeat.read(str(tmp_path), 0)
    assert mine is not None and mine.status.startswith("PeerLost: no progress")


def test_what_goes_on_is_not_ended(tmp_path: pathlib.Path) -> None:
    """A slow first step, a slow first evaluation, longer inner loops, a save of a minute."""
    here = Setting(tmp_path)
    here.wait(890.0)
    with here.ledger.timed("compile"):
        here.wait(890.0)
    here.steps(30, 1.0)
    for _ in range(2):
        with here.ledger.timed("evaluate"):
            for _ in range(3):
                here.wait(400.0)
                here.ledger.beat()
        with here.ledger.timed("train", units=1000):
            here.wait(900.0)
        with here.ledger.timed("checkpoint"):
            here.wait(60.0)
        here.wait(600.0)  # a hook of the task's
    assert here.ends == [] and here.said == []


def test_a_given_limit_grows_with_what_a_loop_is_known_to_take(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=10.0)
    here.steps(5, 2.0)
    with here.ledger.timed("train", units=20):  # 40 s are to be expected
        here.wait(60.0)
    assert here.ends == []


def test_the_start_has_ten_times_a_given_limit(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=5.0)
    with here.ledger.timed("compile"):
        here.wait(45.0)
        assert here.ends == []
        here.wait(10.0)
    assert here.ends == [4]


def test_a_process_that_was_stopped_is_not_ended_when_it_goes_on(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=5.0)
    here.steps(3, 1.0)
    with here.ledger.timed("train"):
        here.time.now += 3600.0  # nobody could look
        here.dog.look()
        here.wait(3.0)
    assert here.ends == []


def test_a_debugger_is_no_hang_for_anybody(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=5.0)
    other(tmp_path, phase="debugger")
    here.steps(3, 1.0)
    with here.ledger.timed("train"):
        here.wait(60.0)
    assert here.ends == []
    # And in this process: a function of pdb is on the stack of the thread that trains.
    space: dict[str, Any] = {"__name__": "pdb", "wait": lambda: here.wait(60.0)}
    exec("def prompt(): wait()", space)
    os.remove(heartbeat.path(str(tmp_path), 1))
    with here.ledger.timed("train"):
        space["prompt"]()
    assert here.ends == []
    beat = heartbeat.read(str(tmp_path), 0)
    assert beat is not None and beat.phase == "debugger"


def test_minus_1_never_ends_a_run(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=-1.0)
    here.steps(30, 1.0)
    with here.ledger.timed("train"):
        here.wait(300.0)
    assert here.ends == here.said == [] and here.dog.describe() == ""


def test_a_worker_that_is_asked_to_writes_its_stacks_and_ends(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path)
    (tmp_path / "hang").mkdir()
    request = tmp_path / "hang" / "request.json"
    request.write_text('{"worker": 1, "time": 1}')  # of an earlier hang
    with here.dog.watching():
        here.dog.write_heartbeats()
        here.dog.look()
        assert here.ends == []
        request.write_text('{"worker": 1, "time": 2}')
        here.dog.look()
    assert here.ends[0] == 4
    assert "worker 1 (b:1) found that nothing goes on any more" in here.said[0]
    assert (tmp_path / "hang" / "worker-0000.txt").exists()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("ValueError: boom", "worker 1 (b:1) ended at step 4 with ValueError: boom"),
        ("done", "worker 1 (b:1) left at step 4"),
        ("PeerLost: worker 0", ""),
    ],
)
def test_a_worker_that_ended_is_blamed_by_how_it_ended(tmp_path: pathlib.Path, status: str, words: str) -> None:
    here = Setting(tmp_path)
    other(tmp_path, status=status)
    assert here.dog.blame() == words


@pytest.mark.parametrize("left", [{"status": "ValueError: boom"}, {"phase": "debugger"}, {}])
def test_what_an_earlier_run_left_blames_and_excuses_nobody(tmp_path: pathlib.Path, left: dict[str, str]) -> None:
    other(tmp_path, time=time.time() - 60.0, **left)
    here = Setting(tmp_path, hang_limit=5.0)
    assert here.dog.blame() == ""
    here.steps(3, 1.0)
    with here.ledger.timed("train"):
        here.wait(20.0)
    assert here.ends == [4] and "boom" not in here.said[-1]


@pytest.mark.parametrize("worker", ['"x"', "99", "-1", "null", "true"])
def test_a_request_with_any_content_ends_the_run_all_the_same(tmp_path: pathlib.Path, worker: str) -> None:
    here = Setting(tmp_path)
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "request.json").write_text(f'{{"worker": {worker}}}')
    here.dog.look()
    assert here.ends == [4] and "a worker found that nothing goes on any more" in here.said[-1]


def test_who_writes_heartbeats_is_not_blamed(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path)
    other(tmp_path)
    beats = iter(range(2, 100))
    here.time.meanwhile = lambda: other(tmp_path, count=next(beats))
    assert here.dog.blame() == ""
    here.time.meanwhile = lambda: None
    assert here.dog.blame().startswith("worker 1 (b:1) is lost or stopped")


def test_c098_an_evaluation_on_the_chief_alone_ends_with_a_hint(tmp_path: pathlib.Path) -> None:
    here = Setting(tmp_path, hang_limit=5.0)
    beats = iter(range(1, 1000))
    here.time.meanwhile = lambda: other(tmp_path, count=next(beats))
    here.steps(3, 1.0)
    with here.ledger.timed("evaluate"):
        here.wait(60.0)
    assert here.ends == [4]
    assert "this worker is in evaluate and worker 1 (b:1) in train" in here.said[-1]
    assert "has to be called by all workers alike, never under is_chief" in here.said[-1]


def test_without_a_folder_it_ends_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    here = Setting(None, hang_limit=5.0, cluster=Cluster())
    here.steps(3, 1.0)
    with here.ledger.timed("train"):
        here.wait(10.0)
    assert here.ends == [4] and "stacks: on stderr" in here.said[-1]


def test_heartbeats_that_cannot_be_written_are_said_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "heartbeats").write_text("a file where the folder should be")
    here = Setting(tmp_path)
    here.wait(10.0)
    assert len(here.said) == 1 and "no heartbeats in run_dir=" in here.said[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"worker": "a"}', '{"worker": 1, "pid": 1, "count": true}'])
def test_a_heartbeat_that_is_none_is_passed_over(tmp_path: pathlib.Path, text: str) -> None:
    other(tmp_path)
    whole = pathlib.Path(heartbeat.path(str(tmp_path), 1))
    assert heartbeat.read(str(tmp_path), 1) is not None
    whole.write_text(text)
    assert heartbeat.read(str(tmp_path), 1) is None
    (tmp_path / "attempts.jsonl").write_text(text + "\n")
    assert heartbeat.attempts(str(tmp_path)) == []


def test_an_earlier_chief_is_counted_once(tmp_path: pathlib.Path) -> None:
    other(tmp_path, worker=0, pid=7, time=50.0, seconds={"train": 5.0, "total": 6.0})
    for _ in range(2):
        found = heartbeat.close_attempt(str(tmp_path), ("a", 8, 60.0))
        assert [(b.pid, b.seconds) for b in found] == [(7, {"train": 5.0, "total": 6.0})]
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 1
    assert [b.pid for b in heartbeat.close_attempt(str(tmp_path), ("b", 7, 0.0))] == [7]  # its own is no earlier one


# --- in a run --------------------------------------------------------------------------------------------------------

HANGS = """
import os, sys, threading, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from framework import AtSteps, Scheduled
from tests.helpers import Toy, settings
class Hangs(Toy):
    def hooks(self):
        return [Scheduled(AtSteps([3]), self.wait_for_ever)]
    def wait_for_ever(self, step, values):
        threading.Event().wait()
Hangs(settings(run_dir=sys.argv[1], hang_limit=2.0, checkpoint_every=1, progress="lines")).train()
"""


def test_a_run_that_hangs_ends_with_4_and_its_time_is_known_after_the_restart(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 4, done.stderr[-2000:]
    assert time.monotonic() - began < 60
    assert "no progress in other at step 3 for " in done.stderr
    assert "wait_for_ever" in (run_dir / "hang" / "worker-0000.txt").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["reason"].startswith("hang: no progress")
    Toy(settings(run_dir=run_dir, train_steps=6)).train()
    after = json.loads((run_dir / "summary.json").read_text())
    assert (after["status"], after["restarts"]) == ("done", 1)
    seconds = after["seconds"]
    assert seconds["other"] > 1.5  # what hung
    assert {"recovery", "down", "start_up", "compile"} <= set(seconds)
    parts = sum(v for n, v in seconds.items() if n != "total")
    assert parts == pytest.approx(seconds["total"], rel=0.01)
    first, second = summary["seconds"]["total"], seconds["total"]
    assert first < second


def test_steps_done_again_after_a_restart_are_told_from_new_ones(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path, train_steps=8, checkpoint_every=4)).train(4)
    mine = heartbeat.read(str(tmp_path), 0)
    assert mine is not None and mine.status == "done"
    # As if that process had been killed at step 40.
    heartbeat.write(str(tmp_path), Heartbeat(**{**vars(mine), "pid": 1, "step": 40, "status": "running"}))
    Toy(settings(run_dir=tmp_path, train_steps=60, steps_per_loop=7)).train()
    seconds = json.loads((tmp_path / "summary.json").read_text())["seconds"]
    assert seconds["again"] > 0 and seconds["train"] > 0


def test_no_thread_is_left(tmp_path: pathlib.Path) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
