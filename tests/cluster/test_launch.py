"""The launcher: its workers here are tiny programs without TensorFlow, but for the last test."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from framework import launch
from framework.checkpoint import manifest
from framework.cluster.roll_call import taken_mark
from framework.errors import ConfigError
from framework.launcher.gang import Outcome
from framework.launcher.ports import HeldPorts
from framework.launcher.supervisor import supervise
from tests.conftest import ROOT, Finished
from tests.helpers import saved

# What each child can use.
HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
here = pathlib.Path(sys.argv[1])
def once(name):
    "True the first time in this test"
    try:
        (here / name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
def wait_for_0():
    "Until worker 0 has counted its start"
    while not ((here / "starts-0").exists() and (here / "starts-0").read_text()): time.sleep(0.01)
def count():
    with open(here / f"starts-{me}", "a") as file:
        file.write("x")
"""


class Launched:
    """A launcher that runs; ``end`` waits for it."""

    def __init__(self, folder: pathlib.Path, options: Sequence[str], source: str):
        self.folder, self.token = folder, uuid.uuid4().hex
        self.out, self.err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "framework.launch", *options]
        command += ["--", "-c", HEAD + source, str(folder), self.token]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)

    def wait_for(self, words: str, times: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.out.read_text().count(words) < times:
            assert time.monotonic() < deadline and self.process.poll() is None, self.err.read_text()
            time.sleep(0.01)

    def left(self) -> list[int]:
        """Processes of this test that still run."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            mine = self.token in (process.info["cmdline"] or [])
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found

    def end(self, timeout: float = 30) -> Finished:
        code = self.process.wait(timeout)
        assert self.left() == []
        return Finished(code, self.out.read_text(), self.err.read_text())


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Launched]]:
    """``start(source, *options)``: a launcher whose workers run ``source``; nothing of it outlives the test."""
    started: list[Launched] = []

    def begin(source: str, *options: str) -> Launched:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Launched(folder, [*(options or ["--workers=2"]), "--backoff=0.01"], source))
        return started[-1]

    yield begin
    for one in started:
        for pid in [one.process.pid, *one.left()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.wait()


def starts(launched: Launched, index: int = 0) -> int:
    path = launched.folder / f"starts-{index}"
    return len(path.read_text()) if path.exists() else 0


# --- output --------------------------------------------------------------------------------------------------------


def test_every_line_has_its_worker_before_it_and_is_in_a_file_of_the_worker(
    start: Callable[..., Launched], tmp_path: pathlib.Path
) -> None:
    source = "print('out', me); print('err', me, file=sys.stderr); os.write(1, b'\\xff no end')"
    logs = tmp_path / "deep" / "logs"
    launched = start(source, "--workers=2", f"--log_dir={logs}")
    assert launched.process.wait(30) == 0
    assert sorted(launched.out.read_bytes().splitlines()) == [
        b"[0] out 0",
        b"[0] \xff no end",
        b"[1] out 1",
        b"[1] \xff no end",
    ]
    assert sorted(launched.err.read_text().splitlines()) == ["[0] err 0", "[1] err 1"]
    for i in (0, 1):
        first, *lines = (logs / f"worker-{i}.log").read_bytes().splitlines()
        assert re.fullmatch(rb"--- start 1, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first)
        assert sorted(lines) == [f"err {i}".encode(), f"out {i}".encode(), b"\xff no end"]
    assert launched.left() == []


def test_much_output_from_all_arrives_whole(start: Callable[..., Launched]) -> None:
    done = start("[print(f'{me} {i:06d} ' + 'x' * 80) for i in range(5000)]", "--workers=3").end()
    lines = done.stdout.splitlines()
    assert done.code == 0 and len(lines) == 15_000
    for worker in range(3):
        own = [line for line in lines if line.startswith(f"[{worker}]")]
        assert own == [f"[{worker}] {worker} {i:06d} " + "x" * 80 for i in range(5000)]


def test_a_reader_that_goes_away_ends_nothing(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("for i in range(20000): print('word' * 20)\nopen(__file__ + '.done', 'w')\n")
    command = f"{sys.executable} -m framework.launch --workers=1 -- {script} | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, timeout=60)
    assert (tmp_path / "talk.py.done").exists() and done.returncode == 0, done.stderr


# --- ends ----------------------------------------------------------------------------------------------------------


def test_workers_get_their_place_and_distinct_ports(start: Callable[..., Launched]) -> None:
    done = start("print(os.environ['TF_CONFIG'])", "--workers=3").end()
    found = [json.loads(line[4:]) for line in sorted(done.stdout.splitlines())]
    assert [f["task"] for f in found] == [{"type": "worker", "index": i} for i in range(3)]
    workers = found[0]["cluster"]["worker"]
    assert [f["cluster"]["worker"] for f in found] == [workers] * 3 and len(set(workers)) == 3


def test_the_first_that_fails_ends_all(start: Callable[..., Launched]) -> None:
    began = time.monotonic()
    done = start("sys.exit(7) if me == 1 else time.sleep(100)").end()
    assert done.code == 7 and "launch: worker 1 ended with code 7" in done.stderr
    assert time.monotonic() - began < 20


def test_a_worker_that_does_not_end_is_killed_with_what_it_started(start: Callable[..., Launched]) -> None:
    source = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if me == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", *sys.argv[1:]])
    print("started", flush=True)
    time.sleep(100)
while not (here / "out").read_text().count("started"): time.sleep(0.01)
sys.exit(1)
"""
    done = start(source, "--workers=2", "--grace=0.3").end()
    assert done.code == 1


def test_what_a_worker_left_behind_is_gone_with_it(start: Callable[..., Launched]) -> None:
    source = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)', *sys.argv[1:]])"
    assert start(source).end().code == 0


@pytest.mark.parametrize("code", [2, 3])
def test_a_refusal_says_more_than_the_peer_that_ended_before(code: int, start: Callable[..., Launched]) -> None:
    source = f"""
def stop(*_): sys.exit({code})
signal.signal(signal.SIGTERM, stop)
if me == 0:
    (here / "ready").touch()
    time.sleep(100)
while not (here / "ready").exists(): time.sleep(0.01)
sys.exit(1)
"""
    assert start(source, "--workers=2", "--max_restarts=3").end().code == code


def test_a_worker_killed_by_a_signal_gives_128_and_its_number(start: Callable[..., Launched]) -> None:
    assert start("os.kill(os.getpid(), signal.SIGKILL) if me else time.sleep(100)").end().code == 137


# --- signals -------------------------------------------------------------------------------------------------------

SAVES = """
def stop(number, frame):
    time.sleep(0.2)
    print("saved after", number, flush=True)
    sys.exit({15: 5, 2: 130}[number])
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
count()
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(("sent", "seen", "code"), [("SIGTERM", 15, 5), ("SIGINT", 2, 130), ("SIGHUP", 15, 5)])
def test_a_signal_is_passed_on_and_nothing_is_started_again(
    sent: str, seen: int, code: int, start: Callable[..., Launched]
) -> None:
    launched = start(SAVES, "--workers=2", "--max_restarts=5")
    launched.wait_for("ready", 2)
    launched.process.send_signal(getattr(signal, sent))
    done = launched.end()
    assert done.code == code
    assert done.stdout.count(f"saved after {seen}") == 2
    assert (starts(launched, 0), starts(launched, 1)) == (1, 1)


def test_a_worker_that_still_saves_is_not_cut_short_by_one_that_has_stopped(start: Callable[..., Launched]) -> None:
    source = SAVES.replace("time.sleep(0.2)", "time.sleep(0 if me else 1)")
    launched = start(source, "--workers=2", "--grace=0.1")
    launched.wait_for("ready", 2)
    launched.process.send_signal(signal.SIGTERM)
    done = launched.end()
    assert done.code == 5 and "[0] saved after 15" in done.stdout


def test_a_worker_that_fails_while_the_others_stop_ends_them(start: Callable[..., Launched]) -> None:
    source = SAVES.replace("time.sleep(0.2)", "time.sleep(100) if me == 0 else sys.exit(1)")
    launched = start(source, "--workers=2", "--grace=0.1")
    launched.wait_for("ready", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end().code == 1


def test_a_second_signal_kills(start: Callable[..., Launched]) -> None:
    source = """
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True: time.sleep(1)
"""
    launched = start(source, "--workers=2", "--grace=100")
    launched.wait_for("ready", 2)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait_for("asked", 2)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end().code == 137


def test_a_launcher_that_is_killed_takes_workers_and_their_children_with_it(start: Callable[..., Launched]) -> None:
    source = """
subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(100)", *sys.argv[1:]])
time.sleep(100)
"""
    launched = start(source)
    launched.wait_for("ready", 2)
    assert len(launched.left()) >= 5  # the launcher, two workers and what each started
    launched.process.kill()
    launched.process.wait()
    deadline = time.monotonic() + 10
    while launched.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launched.left() == []


# --- restarts ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_started_again_with_its_peers(
    start: Callable[..., Launched], tmp_path: pathlib.Path
) -> None:
    source = """
count()
if me == 1 and once("killed"):
    wait_for_0()
    os.kill(os.getpid(), signal.SIGKILL)
if me == 0 and len((here / "starts-0").read_text()) < 2: time.sleep(100)
while len((here / "starts-0").read_text()) < 2: time.sleep(0.01)
print("done")
"""
    launched = start(source, "--workers=2", "--max_restarts=1", f"--log_dir={tmp_path}")
    done = launched.end()
    assert done.code == 0, done.stderr
    assert (starts(launched, 0), starts(launched, 1)) == (2, 2)
    assert "launch: worker 1 ended with code 137; restart 1 of 1" in done.stderr
    assert (tmp_path / "worker-1.log").read_text().count("--- start") == 2


@pytest.mark.parametrize("code", [2, 3, 6])
def test_a_refusal_or_a_check_is_final(code: int, start: Callable[..., Launched]) -> None:
    launched = start(f"count(); sys.exit({code} * me); time.sleep(100)", "--workers=2", "--max_restarts=5")
    assert launched.end().code == code
    assert starts(launched, 1) == 1


@pytest.mark.parametrize("code", [1, 4, 5])
def test_other_codes_are_restarted_as_often_as_asked(code: int, start: Callable[..., Launched]) -> None:
    launched = start(f"count(); sys.exit({code})", "--workers=1", "--max_restarts=2")
    done = launched.end()
    assert done.code == code and starts(launched) == 3
    assert "no run_dir is known" in done.stderr and "all 2 restarts are used" in done.stderr


def test_three_restarts_without_a_newer_checkpoint_end_with_6(
    start: Callable[..., Launched], tmp_path: pathlib.Path
) -> None:
    launched = start("count(); sys.exit(4)", "--workers=1", "--max_restarts=10", f"--run_dir={tmp_path}")
    done = launched.end()
    assert done.code == 6 and starts(launched) == 4
    assert "3 restarts in a row went no further than no checkpoint at all" in done.stderr


def test_c095_a_port_that_is_taken_brings_other_ports_and_is_no_restart(start: Callable[..., Launched]) -> None:
    source = """
count()
mine = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][me]
if me == 1 and once("taken"):
    wait_for_0()
    print(f"error: the address {mine} is taken: by a test", file=sys.stderr)
    sys.exit(2)
if me == 0 and len((here / "starts-0").read_text()) < 2: time.sleep(100)
while len((here / "starts-0").read_text()) < 2: time.sleep(0.01)
print(mine)
"""
    launched = start(source)
    done = launched.end()
    assert done.code == 0, done.stderr
    assert starts(launched, 1) == 2 and "starting again with other ports" in done.stderr
    assert taken_mark("a:1") == "the address a:1 is taken"


def test_c095_jobs_at_once_meet_only_their_own(start: Callable[..., Launched]) -> None:
    source = """
sys.path.insert(0, os.getcwd())
from framework import RunConfig
from framework.cluster.cluster import resolve
from framework.cluster.roll_call import roll_call
roll_call(resolve(RunConfig()), 20.0)
print("met")
"""
    for done in [launched.end() for launched in [start(source) for _ in range(3)]]:
        assert done.code == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[0] met", "[1] met"]


class Story:
    """Attempts that end as told, with the newest step after each; what was paused and said."""

    def __init__(self, *ends: tuple[int | Outcome, int | None], before: int | None = -1):
        self._ends, self._step = list(ends), before
        self.pauses: list[float] = []
        self.said: list[str] = []

    def attempt(self) -> Outcome:
        end, self._step = self._ends.pop(0)
        return end if isinstance(end, Outcome) else Outcome(code=end, worker=0 if end else None)

    def run(self, max_restarts: int = 100, stopped: Callable[[], bool] = lambda: False) -> int:
        code = supervise(
            self.attempt,
            max_restarts=max_restarts,
            newest_step=lambda: self._step,
            backoff=1.0,
            pause=self.pauses.append,
            stopped=stopped,
            say=self.said.append,
        )
        assert self._ends == []
        return code


def test_pauses_double_while_nothing_is_gained_and_start_anew_with_a_checkpoint() -> None:
    story = Story((4, -1), (4, -1), (4, -1), (1, 10), (1, 10), (5, 20), (0, 30))
    assert story.run() == 0
    assert story.pauses == [1, 2, 4, 1, 2, 1]


def test_the_first_attempt_is_no_restart_and_steps_of_before_are_no_gain() -> None:
    assert Story((1, 50), (1, 50), (1, 50), (1, 50), before=50).run() == 6
    assert Story((1, 50), (1, 60), (1, 60), (1, 60), (0, 70), before=50).run() == 0
    assert Story((1, 50), (1, 40), (1, 50), (1, 45), before=50).run() == 6  # a step that was there before


def test_without_a_run_folder_only_the_number_of_restarts_ends_it() -> None:
    story = Story(*[(4, None)] * 9, before=None)
    assert story.run(max_restarts=8) == 4
    assert len(story.pauses) == 8


def test_a_pause_has_a_longest() -> None:
    story = Story(*[(4, None)] * 3, (0, None), before=None)
    assert story.run() == 0
    assert max(story.pauses) <= 60


def test_ports_that_are_always_taken_end_it() -> None:
    story = Story(*[(Outcome(code=2, worker=1, marked=True), -1)] * 6)
    assert story.run() == 2
    assert story.pauses == []


def test_a_signal_in_a_pause_ends_it() -> None:
    story = Story((4, 1))
    assert story.run(stopped=lambda: bool(story.pauses)) == 4


# --- pieces --------------------------------------------------------------------------------------------------------


def checkpoint(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"1234")
    manifest.write(str(folder), step=step, run="", figures={}, variables={})
    return folder


def test_the_newest_step_is_that_of_a_checkpoint_with_all_its_bytes(tmp_path: pathlib.Path) -> None:
    assert launch.newest_step("") is None
    assert launch.newest_step(str(tmp_path)) == -1
    checkpoint(tmp_path, 5)
    (checkpoint(tmp_path, 10) / "data").write_bytes(b"12")
    (tmp_path / "checkpoints" / "step-00000020").mkdir()
    assert launch.newest_step(str(tmp_path)) == 5


def test_the_run_folder_is_read_from_the_commands_flags(tmp_path: pathlib.Path) -> None:
    flags = tmp_path / "flags.txt"
    flags.write_text("# a comment\n--run_dir=from/file\n--seed=3\n")
    loop = tmp_path / "loop.txt"
    loop.write_text(f"--flagfile={loop}\n")
    told = {
        ("train.py", "--task=digits"): "runs/digits",
        ("train.py", "--task", "digits", "--run_dir", "a"): "a",
        ("train.py", "-run_dir=a", "--run_dir=b", "--task=digits"): "b",
        ("train.py", f"--flagfile={flags}"): "from/file",
        ("train.py", f"--flagfile={flags}", "--run_dir=later"): "later",
        ("train.py", "--run_dir=earlier", f"--flagfile={flags}"): "from/file",
        ("train.py", "--flagfile=missing", "--task=x"): "runs/x",
        ("train.py", f"--flagfile={loop}"): "",
        ("train.py", "run_dir=no"): "",
        ("train.py", "--run_dir"): "",
    }
    assert {words: launch.run_dir_of(words) for words in told} == told


def test_each_worker_gets_its_own_gpus() -> None:
    def visible(base: dict[str, str], count: int) -> list[str | None]:
        return [launch.environment(base, ["a:1", "b:1"], i, count).get("CUDA_VISIBLE_DEVICES") for i in range(2)]

    assert visible({}, 0) == [None, None]
    assert visible({}, 2) == ["0,1", "2,3"]
    assert visible({"CUDA_VISIBLE_DEVICES": "5, 3,GPU-a,1"}, 1) == ["5", "3"]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=5,3 has 2; for example --gpus_per_worker=1"):
        visible({"CUDA_VISIBLE_DEVICES": "5,3"}, 2)


def test_ports_are_held_until_they_are_let_go() -> None:
    held = HeldPorts(20)
    assert len(set(held.addresses)) == 20
    port = int(held.addresses[0].rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    held.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_script_gets_this_python_and_other_programs_are_themselves() -> None:
    assert launch.program(["train.py", "-x"]) == [sys.executable, "train.py", "-x"]
    assert launch.program(["-m", "mine"]) == [sys.executable, "-m", "mine"]
    assert launch.program(["env", "train.py"]) == ["env", "train.py"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--workers=2"], "no command follows the --"),
        (["--workers=2", "--"], "no command follows the --"),
        (["--workers=2", "--", "/no/such/program"], "'/no/such/program' cannot be started"),
        (["--workers=1", "--log_dir=/proc/x", "--", "-c", "pass"], "log_dir=/proc/x may not be written"),
    ],
)
def test_what_cannot_be_started_ends_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["--workers=0"], ["--workers=x"], ["--workers=1", "--grace=nan"], ["--workers=1", "--w"]]
)
def test_options_that_are_wrong_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main([*argv, "--", "-c", "pass"])
    assert caught.value.code == 2


def test_it_loads_no_tensorflow_and_takes_well_under_a_second() -> None:
    source = (
        "import sys, time; start = time.process_time(); import framework.launch; print(time.process_time() - start); "
    )
    source += "print([m for m in ('tensorflow', 'keras', 'numpy', 'absl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    seconds, loaded = done.stdout.splitlines()
    assert loaded == "[]" and float(seconds) < 0.5, done


# --- real training -------------------------------------------------------------------------------------------------


def train_under_launcher(tmp_path: pathlib.Path, name: str) -> subprocess.CompletedProcess[str]:
    args: list[Any] = [
        sys.executable,
        "-m",
        "framework.launch",
        "--workers=2",
        "--max_restarts=2",
        "--backoff=0.1",
        "--grace=2",
    ]
    args += [
        f"--log_dir={tmp_path / name / 'logs'}",
        "--",
        "-m",
        "tests.cluster.killed_once",
        str(tmp_path / f"{name}.mark"),
    ]
    args += ["--task=digits", f"--run_dir={tmp_path / name / 'run'}", "--device=cpu", "--mode=train", "--hidden=16"]
    args += ["--global_batch_size=32", "--train_steps=10", "--checkpoint_every=5", "--nocheckpoint_in_background"]
    args += ["--steps_per_loop=1", "--deterministic", "--notensorboard", "--collective_timeout=60"]
    return subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=250)


def test_a_run_whose_worker_is_killed_goes_on_and_ends_in_the_same_bits(tmp_path: pathlib.Path) -> None:
    (tmp_path / "whole.mark").touch()
    whole = train_under_launcher(tmp_path, "whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert "restart" not in whole.stderr
    killed = train_under_launcher(tmp_path, "killed")
    assert killed.returncode == 0, killed.stderr[-3000:]
    assert "launch: worker 1 ended with code 137; restart 1 of 2 from step 5 in 0.1 s" in killed.stderr
    assert "steps: 5 to 10" in killed.stdout
    first, second = (saved(tmp_path / name / "run", 10) for name in ("whole", "killed"))
    assert set(first) == set(second) and len(first) > 4
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value, err_msg=key)
