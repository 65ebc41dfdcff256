"""What happens when something breaks: two workers, one fault each, what is found, in how many seconds, what is lost.

    python -m benchmarks.faults [--fault=kill,stop] [--limit=10]

Prints a Markdown table, and ends with 1 if a fault was not found, the wrong worker was named, it took longer than the
limit and 5 s, more than the steps since the last checkpoint were lost, or a process was left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import psutil

from benchmarks import hosts
from benchmarks.fault_worker import AT, EVERY, STEPS
from framework.checkpoint import find
from framework.launcher.ports import HeldPorts

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLACK = 5.0  # seconds beyond the limit
_LONGEST = 120.0  # seconds for one gang


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and what has to come of it.

    Attributes:
      what: it is, for people.
      codes: exit codes of the workers, in their order.
      words: a regular expression that what a worker says must have; it names who is to blame.
      waits: whether it can show only through a limit of time.
      lost: steps that may be lost.
      needs: ``root``, ``hosts`` or nothing.
      goes_on: whether the same command afterwards goes on to the end.
    """

    what: str
    codes: tuple[int, ...]
    words: str
    waits: bool = False
    lost: int = EVERY
    needs: str = ""
    goes_on: bool = True


_ONE, _ZERO = r"worker 1 \(", r"worker 0 \("
FAULTS = {
    "kill": Fault(what="SIGKILL to worker 1", codes=(4, -9), words=_ONE + ".* is lost or stopped"),
    "stop": Fault(what="SIGSTOP to worker 1", codes=(4, 4), words=_ONE + ".* is lost or stopped", waits=True),
    "cut_link": Fault(
        what="the cable between two hosts is cut",
        codes=(4, 4),
        words="worker [01] .*(is lost|in train at step)",
        waits=True,
        needs="hosts",
    ),
    "slow_link": Fault(what="20 ms more each way between the workers", codes=(0, 0), words="", lost=0),
    "full_disk": Fault(
        what="the disk is full at the save of step 20",
        codes=(1, 4),
        words=_ZERO + r".*? ended at step \d+ with \w+",
        needs="root",
    ),
    "exception": Fault(
        what="an exception in worker 1", codes=(4, 1), words=_ONE + ".* ended at step .*ValueError: an injected fault"
    ),
    "exception_all": Fault(what="an exception in all workers", codes=(1, 1), words="ValueError: an injected fault"),
    "nan": Fault(what="NaN in worker 1", codes=(3, 3), words=r"replica 1"),
    "leave": Fault(what="worker 1 leaves the loop", codes=(4, 0), words=_ONE + r".*? ended at step \d+ with \w+"),
    "no_data": Fault(what="worker 1 has half the data", codes=(0, 0), words="", lost=0, goes_on=False),
    "loops": Fault(
        what="workers cut their steps into loops of other lengths", codes=(0, 0), words="", lost=0, goes_on=False
    ),
    "code": Fault(
        what="worker 1 has other code", codes=(2, 2), words=_ONE + ".* does not run what", lost=0, goes_on=False
    ),
    "term": Fault(what="SIGTERM to worker 1", codes=(5, 5), words="another worker got a signal", lost=0),
    "kill_save": Fault(
        what="SIGKILL to worker 0 in a save", codes=(-9, 4), words=_ZERO + ".* is lost or stopped", lost=2 * EVERY
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one fault.

    Attributes:
      codes: exit codes.
      named: the words that named who is to blame; empty: they were not there.
      seconds: from the fault to the end of the last process.
      lost: steps between the fault and the newest checkpoint.
      left: processes still there 10 s after the end.
      timed: whether the fault had a moment; else it was there from the start.
      went_on: whether the same command went on to the end.
      step_ms: median time of a step before and behind the fault.
    """

    codes: tuple[int | None, ...]
    named: str
    seconds: float
    lost: int
    left: int
    timed: bool = True
    went_on: bool | None = None
    step_ms: tuple[float, float] | None = None

    def wrong(self, fault: Fault, limit: float) -> list[str]:
        """What is not as it has to be."""
        found = []
        if self.codes != fault.codes:
            found.append(f"codes {self.codes} and not {fault.codes}")
        if fault.words and not self.named:
            found.append(f"nobody said {fault.words!r}")
        if fault.words and self.timed and self.seconds > (limit if fault.waits else 0.0) + SLACK + _ENDING:
            found.append(f"{self.seconds:.1f} s")
        if self.lost > fault.lost:
            found.append(f"{self.lost} steps lost")
        if self.left:
            found.append(f"{self.left} processes left")
        if self.went_on is False:
            found.append("the same command did not go on to the end")
        return found


_ENDING = 3.0  # seconds in which a Python process with TensorFlow ends


def why_not(name: str) -> str:
    """Why this fault cannot be made here; empty: it can."""
    needs = FAULTS[name].needs
    if needs == "hosts":
        return hosts.why_not()
    return "a small disk needs root" if needs == "root" and os.geteuid() != 0 else ""


def run(name: str, folder: pathlib.Path, limit: float, *, again: bool = True) -> Row:
    """Runs two workers with one fault in an empty folder, and ``again`` without."""
    fault = FAULTS[name]
    with contextlib.ExitStack() as stack:
        if name == "full_disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        two = stack.enter_context(hosts.two_hosts()) if fault.needs == "hosts" else None
        gang = Gang(name, folder, limit, two)
        row = gang.to_the_end()
        if not (again and fault.goes_on):
            return row
        (folder / "filler").unlink(missing_ok=True)
        if two is not None:
            two.mend()
        second = Gang("none", folder, limit, two).to_the_end()
        newest = max(find.steps_in(str(folder / "run" / find.CHECKPOINTS)), default=0)
        return dataclasses.replace(row, went_on=second.codes == (0, 0) and newest == STEPS)


class Gang:
    """Two workers, and whoever does to them from outside what they cannot do themselves."""

    def __init__(self, name: str, folder: pathlib.Path, limit: float, two: hosts.Hosts | None):
        self._name, self._folder, self._two = name, folder, two
        for mark in ("fault", "go"):
            (folder / mark).unlink(missing_ok=True)
        held = HeldPorts(2)
        held.close()
        ports = [int(address.rpartition(":")[2]) for address in held.addresses]
        names = two.addresses if two is not None else ("127.0.0.1", "127.0.0.1")
        self._links: list[hosts.SlowLink] = []
        if name == "slow_link":
            self._links = [hosts.SlowLink(port) for port in ports]
        self._began = time.time()
        self._processes, self._outputs = [], []
        for i in range(2):
            # Behind a slow link each worker sees the other at the link's end.
            seen = [self._links[j].port if self._links and j != i else port for j, port in enumerate(ports)]
            workers = [f"{host}:{port}" for host, port in zip(names, seen, strict=True)]
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
            command = [sys.executable, "-m", "benchmarks.fault_worker", str(folder), name, str(limit)]
            where = self._other_code() if name == "code" and i == 1 else ROOT
            output = folder / f"worker-{i}.txt"
            self._outputs.append(output)
            with output.open("ab") as file:
                process = subprocess.Popen(
                    two.command(i, command) if two is not None else command,
                    cwd=where,
                    env={**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONPATH": str(where)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            self._processes.append(process)

    def _other_code(self) -> pathlib.Path:
        copy = self._folder / "other"
        for package in ("framework", "benchmarks", "input_pipelines"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
        with (copy / "framework" / "errors.py").open("a") as file:
            file.write("# another version\n")
        return copy

    def to_the_end(self) -> Row:
        """Waits for both, and tells what came of it."""
        deadline = time.monotonic() + _LONGEST
        ended: dict[int, float] = {}
        acted = False
        try:
            while len(ended) < 2 and time.monotonic() < deadline:
                for i, process in enumerate(self._processes):
                    if i not in ended and process.poll() is not None:
                        ended[i] = time.time()
                if not acted and (self._folder / "fault").exists():
                    acted = True
                    self._act()
                if self._name == "stop" and 0 in ended and 1 not in ended:
                    with contextlib.suppress(ProcessLookupError):  # a launcher would end it; here it may go on
                        os.killpg(self._processes[1].pid, signal.SIGCONT)
                time.sleep(0.02)
            left = self._left()
        finally:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for link in self._links:
                link.close()
        last = ended.get(0) if self._name == "stop" else max(ended.values(), default=None)
        return self._row(last or time.time(), left)

    def _act(self) -> None:
        if self._name == "cut_link" and self._two is not None:
            self._two.cut()
        for link in self._links:
            link.delay = 0.02
        (self._folder / "go").touch()

    def _left(self) -> int:
        """Processes of the workers' sessions that are there 10 s after the end."""
        until = time.monotonic() + 10.0
        groups = {process.pid for process in self._processes}
        while True:
            left = list(_of_groups(groups))
            if not left or time.monotonic() > until:
                return len(left)
            time.sleep(0.1)

    def _row(self, ended: float, left: int) -> Row:
        said = "\n".join(path.read_text(errors="replace") for path in self._outputs)
        words = FAULTS[self._name].words if self._name in FAULTS else ""
        found = re.search(words, said) if words else None
        began, step, timed = self._began, 0, False
        with contextlib.suppress(OSError, ValueError):
            text = (self._folder / "fault").read_text().split()
            began, step, timed = float(text[0]), int(text[1]), True
        newest = max(find.steps_in(str(self._folder / "run" / find.CHECKPOINTS)), default=0)
        return Row(
            codes=tuple(process.returncode for process in self._processes),
            named=found[0][:160] if found else "",
            seconds=ended - began,
            lost=max(0, self._reached(step) - newest),
            left=left,
            timed=timed,
            step_ms=self._step_ms() if self._name == "slow_link" else None,
        )

    def _reached(self, step: int) -> int:
        """The last step that was recorded, or that of the fault."""
        steps = [int(record["step"]) for record in self._records()]
        return max([step, *steps]) if self._name != "none" else 0

    def _step_ms(self) -> tuple[float, float]:
        records = [r for r in self._records() if "step_ms" in r]
        before = sorted(r["step_ms"] for r in records if 3 <= r["step"] <= AT)
        behind = sorted(r["step_ms"] for r in records if r["step"] > AT + 1)
        return before[len(before) // 2], behind[len(behind) // 2]

    def _records(self) -> list[dict[str, float]]:
        try:
            lines = (self._folder / "run" / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if '"train"' in line]


def _of_groups(groups: set[int]) -> Iterator[int]:
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) in groups:
                yield process.pid


def table(rows: dict[str, Row | str]) -> str:
    """A Markdown table; a text says why a fault was not tried."""
    lines = [
        "| fault | exit codes | what is said | seconds | steps lost | processes left | goes on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        what = FAULTS[name].what
        if isinstance(row, str):
            lines.append(f"| {what} | not tried: {row} | | | | | |")
            continue
        said = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", row.named).replace("|", "/")
        if row.step_ms is not None:
            said = f"a step takes {row.step_ms[1]:.0f} ms, before {row.step_ms[0]:.0f} ms"
        codes = ", ".join(map(str, row.codes))
        goes_on = {True: "yes", False: "NO", None: ""}[row.went_on]
        timed = f"{row.seconds:.1f}" if FAULTS[name].words and row.timed else ""
        lines.append(f"| {what} | {codes} | {said} | {timed} | {row.lost} | {row.left} | {goes_on} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--fault", default=",".join(FAULTS), help="names, comma separated")
    parser.add_argument("--limit", type=float, default=10.0, help="hang_limit in seconds")
    arguments = parser.parse_args(argv)
    names = [name for name in arguments.fault.split(",") if name]
    if unknown := sorted(set(names) - set(FAULTS)):
        parser.error(f"no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    rows: dict[str, Row | str] = {}
    wrong: list[str] = []
    for name in names:
        reason = why_not(name)
        if reason:
            rows[name] = reason
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = rows[name] = run(name, pathlib.Path(folder), arguments.limit)
        wrong += [f"{name}: {one}" for one in row.wrong(FAULTS[name], arguments.limit)]
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    print(table(rows))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
