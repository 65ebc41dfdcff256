"""The command line end to end: files, exit codes, signals, and equal figures for any number of replicas."""

from __future__ import annotations

import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import train
from framework import LossOutput, RunConfig, flags
from framework.hooks import read_metrics
from models.digits_task import Digits
from models.registry import Tasks

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--task=digits", "--device=cpu", "--hidden=16", "--global_batch_size=32"]
PLAIN_SGD = ["--optimizer=sgd", "--weight_decay=0", "--schedule=constant", "--warmup_steps=0", "--dropout=0"]
NO_INTERVALS = ["--eval_every=0", "--checkpoint_every=0"]


def main(*args: str) -> int:
    """The command line within this process: what is to be tested needs no process of its own."""
    return train.main(["train.py", *SMALL, *args])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(run_dir: Path, phase: str = "train") -> list[int]:
    return [r["step"] for r in read_metrics(run_dir / "metrics.jsonl") if r["phase"] == phase]


def train_losses(run_dir: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run_dir / "metrics.jsonl") if r["phase"] == "train"]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def tensors(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"step-{step:08d}" / "data"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def error_line(stderr: str) -> str:
    """The one ``error:`` line; TensorFlow's own greeting may stand beside it."""
    errors = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, stderr
    assert "Traceback" not in stderr
    return errors[0]


# --- one run from its command to its files -------------------------------------------------------------------------

FULL = [
    *SMALL,
    "--train_steps=20",
    "--warmup_steps=4",
    "--log_every=5",
    "--eval_every=10",
    "--checkpoint_every=10",
    "--num_replicas=2",
    "--seed=5",
]
_runs: dict[str, tuple[Path, Any]] = {}


@pytest.fixture
def run(run_cli: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished train_and_eval run on two replicas, made once for this file."""
    if "run" not in _runs:
        run_dir = tmp_path_factory.mktemp("full") / "run"
        _runs["run"] = (run_dir, run_cli([*FULL, f"--run_dir={run_dir}"]))
    return _runs["run"]


def test_a_run_ends_with_0_and_says_who_how_and_what(run: tuple[Path, Any]) -> None:
    run_dir, done = run
    assert done.code == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert "cluster: this process alone" in lines
    assert any(x.startswith("strategy: mirrored, 2 replicas on CPU (num_replicas=2") for x in lines)
    assert "batch: 32 examples a step = 2 replicas x 16; any split is exact" in lines
    assert "steps: 0 to 20" in lines
    assert [x.split(":")[0] for x in lines if x.startswith("step ")] == [f"step {n}/20" for n in (5, 10, 15, 20)]
    assert lines[-1].startswith(f"run folder: {run_dir};")
    assert "error:" not in done.stderr


def test_the_files_of_a_run(run: tuple[Path, Any]) -> None:
    run_dir, _ = run
    assert {p.name for p in run_dir.iterdir()} == {
        "config.json",
        "flags.txt",
        "metrics.jsonl",
        "summary.json",
        "stragglers.jsonl",
        "report.html",
        "checkpoints",
        "device_metrics",
        "heartbeats",
        "tensorboard",
    }
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step-00000010", "step-00000020"}
    for folder in ("train", "eval"):
        assert len(list((run_dir / "tensorboard" / folder).iterdir())) == 1


def test_metrics_jsonl(run: tuple[Path, Any]) -> None:
    records = read_metrics(run[0] / "metrics.jsonl")
    assert [(r["step"], r["phase"]) for r in records] == [
        (5, "train"),
        (10, "train"),
        (10, "eval"),
        (15, "train"),
        (20, "train"),
        (20, "eval"),
    ]
    times = [r["time"] for r in records]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 3600
    for record in records:
        assert math.isfinite(record["loss"])
        assert 0.0 <= record["accuracy"] <= 1.0
        if record["phase"] == "eval":
            assert record["examples"] == 360
        else:
            assert record["examples_per_second"] > 0
            assert 0.0 <= record["input_wait"] <= 1.0
            assert record["grad_norm"] > 0
    # Warm-up of 4 to 2e-3, then a cosine over the other 16, read before update 5, 10, ...
    rates = [r["learning_rate"] for r in records if r["phase"] == "train"]
    expected = [2e-3 * 0.5 * (1 + math.cos(math.pi * (n - 1 - 4) / 16)) for n in (5, 10, 15, 20)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_config_json(run: tuple[Path, Any]) -> None:
    value = json.loads((run[0] / "config.json").read_text())
    config = RunConfig(**value["config"])
    assert config.to_dict() == value["config"]
    assert (config.train_steps, config.seed, config.num_replicas, config.run_dir) == (20, 5, 2, str(run[0]))
    assert config.weight_decay == 0.05  # of the task's recipe
    assert value["task"] == "models.digits_task.Digits"
    assert value["options"] == {"hidden": 16, "dropout": 0.2}
    assert value["strategy"]["kind"] == "mirrored"
    assert (value["strategy"]["num_replicas"], value["strategy"]["device"]) == (2, "cpu")
    assert value["versions"]["tensorflow"] == tf.__version__
    assert {"python", "keras", "numpy"} <= set(value["versions"])
    assert value["command"][1:] == [*FULL, f"--run_dir={run[0]}"]


def test_summary_json(run: tuple[Path, Any]) -> None:
    value = summary(run[0])
    last_train, last_eval = read_metrics(run[0] / "metrics.jsonl")[-2:]
    assert (value["status"], value["step"], value["examples"]) == ("done", 20, 640)
    assert value["metrics"]["loss"] == last_train["loss"]
    assert value["metrics"]["eval/accuracy"] == last_eval["accuracy"]
    seconds = value["seconds"]
    phases = {"start_up", "compile", "train", "input_wait", "evaluate", "checkpoint", "checks", "other"}
    assert phases | {"total"} == set(seconds)
    assert sum(seconds[name] for name in phases) == pytest.approx(seconds["total"], abs=0.01)
    assert value["nonfinite_steps"] == 0
    assert value["checks"]


def test_flags_txt_gives_the_same_config(run: tuple[Path, Any]) -> None:
    command = flags.parse(["train.py", f"--flagfile={run[0] / 'flags.txt'}"], tasks=Tasks())
    value = json.loads((run[0] / "config.json").read_text())
    assert (command.task, command.mode) == ("digits", "train_and_eval")
    assert command.config.to_dict() == value["config"]
    assert command.options == value["options"]


def test_flags_txt_repeats_the_run_with_equal_losses(
    run: tuple[Path, Any], run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    again = tmp_path / "again"
    done = run_cli([f"--flagfile={run[0] / 'flags.txt'}", f"--run_dir={again}"])
    assert done.code == 0, done.stderr[-2000:]
    for phase in ("train", "eval"):
        both = [
            [(r["step"], r["loss"], r["accuracy"]) for r in read_metrics(d / "metrics.jsonl") if r["phase"] == phase]
            for d in (run[0], again)
        ]
        assert both[0] == both[1]


def test_the_same_command_again_has_nothing_to_do_and_alters_nothing(
    run: tuple[Path, Any], run_cli: Callable[..., Any]
) -> None:
    before = contents(run[0])
    done = run_cli([*FULL, f"--run_dir={run[0]}"])
    assert done.code == 0, done.stderr[-2000:]
    assert "step 20 of 20 is reached already: nothing is left to do" in done.stdout.splitlines()
    assert contents(run[0]) == before


def test_eval_mode_scores_the_checkpoint_in_a_fresh_process_with_other_replicas(
    run: tuple[Path, Any], run_cli: Callable[..., Any]
) -> None:
    done = run_cli([*SMALL, "--mode=eval", "--num_replicas=1", "--eval_batch_size=77", f"--run_dir={run[0]}"])
    assert done.code == 0, done.stderr[-2000:]
    scored = re.search(r"^eval/loss (\S+)  eval/accuracy (\S+)  eval/examples 360$", done.stdout, re.MULTILINE)
    assert scored
    final = [r for r in read_metrics(run[0] / "metrics.jsonl") if r["phase"] == "eval"][-1]
    assert final["step"] == 20
    np.testing.assert_allclose([float(scored[1]), float(scored[2])], [final["loss"], final["accuracy"]], rtol=1e-3)
    assert steps(run[0], "eval") == [10, 20]


# --- signals -------------------------------------------------------------------------------------------------------


class Live:
    """A started ``train.py`` whose lines can be awaited."""

    def __init__(self, args: Sequence[str], folder: Path):
        self.stderr_path = folder / "stderr"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", *args],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if k != "TF_CONFIG"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, start: str, timeout: float = 90.0) -> str:
        """The first line that starts so."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            assert line is not None, self.stderr_path.read_text()[-2000:]
            if line.startswith(start):
                return line

    def end(self, timeout: float = 30.0) -> int:
        """The exit code; the process must end by itself."""
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    """``start(args)``: a ``train.py`` that is killed at the end of the test, if it still runs."""
    started: list[Live] = []

    def begin(args: Sequence[str]) -> Live:
        started.append(Live(args, tmp_path))
        return started[-1]

    yield begin
    for live in started:
        live.kill()


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", id="ctrl_c"),
        pytest.param(signal.SIGTERM, 5, "preempted", id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on_at_the_next_step(
    number: signal.Signals, code: int, status: str, start: Callable[..., Live], tmp_path: Path
) -> None:
    total, run_dir = 1500, tmp_path / "run"
    args = [*PLAIN_SGD, *NO_INTERVALS, "--mode=train", f"--train_steps={total}", f"--run_dir={run_dir}"]
    args += ["--log_every=1", "--steps_per_loop=1", "--notensorboard", "--hidden=4", "--global_batch_size=8"]
    live = start([*SMALL, *args])
    live.wait_for("step 1/")
    live.process.send_signal(number)
    assert live.end() == code
    error_line(live.stderr_path.read_text())

    stopped = summary(run_dir)
    step = stopped["step"]
    assert (stopped["status"], stopped["examples"]) == (status, 8 * step)
    assert 1 <= step < total
    assert steps(run_dir) == list(range(1, step + 1))
    saved = tensors(run_dir, step)
    assert (int(saved["run/step"]), int(saved["optimizer/iterations"])) == (step, step)

    assert main(*args) == 0
    assert steps(run_dir) == list(range(1, total + 1))
    assert (summary(run_dir)["status"], summary(run_dir)["step"]) == ("done", total)
    assert int(tensors(run_dir, total)["optimizer/iterations"]) == total


def test_a_run_with_tensorboard_goes_on(tmp_path: Path) -> None:
    args = [*PLAIN_SGD, *NO_INTERVALS, f"--run_dir={tmp_path}", "--log_every=2", "--mode=train"]
    assert main(*args, "--train_steps=4") == 0
    assert main(*args, "--train_steps=8") == 0
    assert steps(tmp_path) == [2, 4, 6, 8]


# --- non-finite ----------------------------------------------------------------------------------------------------


def test_nan_ends_with_3_names_the_step_and_leaves_the_last_good_checkpoint(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    args = [*SMALL, *PLAIN_SGD, "--train_steps=20", "--log_every=1", "--checkpoint_every=1", "--learning_rate=1e18"]
    done = run_cli([*args, f"--run_dir={tmp_path}"])
    assert done.code == 3
    line = error_line(done.stderr)
    match = re.match(r"error: step (\d+): replica 0 is not finite: (?:loss (nan|inf)|gradient of )", line)
    assert match, line
    bad = int(match[1])
    assert 1 < bad <= 4
    assert "--learning_rate" in line
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{n:08d}" for n in range(1, bad)]
    assert all(np.all(np.isfinite(value)) for value in tensors(tmp_path, bad - 1).values())
    value = summary(tmp_path)
    assert (value["status"], value["step"], value["nonfinite_steps"]) == ("failed", bad - 1, 1)
    assert f"step {bad}" in value["reason"]
    assert steps(tmp_path) == list(range(1, bad))


def test_the_message_of_a_non_finite_step_names_a_checkpoint_that_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(save: Any = tf.raw_ops.SaveV2, **arguments: Any) -> Any:
        time.sleep(0.5)  # a slow disk
        return save(**arguments)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", slow)
    args = [*PLAIN_SGD, "--train_steps=20", "--log_every=1", "--checkpoint_every=1", "--learning_rate=1e18"]
    assert main(*args, f"--run_dir={tmp_path}") == 3
    last = max(int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").iterdir())
    assert f"the last checkpoint is of step {last}." in error_line(capsys.readouterr().err)


# --- any number of replicas ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Fifty steps of digits with equal seed and global batch on 1 to 4 replicas."""
    folder = tmp_path_factory.mktemp("replicas")
    args = [*PLAIN_SGD, *NO_INTERVALS, "--train_steps=50", "--log_every=1", "--learning_rate=0.05", "--progress=off"]
    # Not seed 0: at its step 19 one ReLU's input is so close to 0 that rounding decides its side.
    args += ["--seed=1"]
    for n in (1, 2, 3, 4):
        more = ["--global_batch_size=96", "--mode=train", f"--num_replicas={n}", f"--run_dir={folder / str(n)}"]
        assert main(*args, *more) == 0
    return {n: folder / str(n) for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_n_replicas_train_as_one_does(by_replicas: dict[int, Path], replicas: int) -> None:
    one, many = by_replicas[1], by_replicas[replicas]
    strategy = json.loads((many / "config.json").read_text())["strategy"]
    assert (strategy["kind"], strategy["num_replicas"]) == ("mirrored", replicas)
    assert steps(many) == list(range(1, 51))
    np.testing.assert_allclose(train_losses(many), train_losses(one), rtol=1e-5)
    assert train_losses(one)[-1] < 0.5 * train_losses(one)[0]  # it learns, so equal is not trivial
    expected, found = tensors(one, 50), tensors(many, 50)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "rule", "cure"),
    [
        ("--larning_rate=0.1", "--larning_rate", "not a flag", "did you mean --learning_rate?"),
        ("--train_steps=many", "many", "a whole number", "for example --train_steps="),
        ("--global_batch_size=0", "global_batch_size", "at least 1", "for example --global_batch_size="),
        ("--task=dogits", "--task=dogits", "not a task", "did you mean --task=digits?"),
    ],
    ids=["unknown_flag", "wrong_type", "out_of_range", "unknown_task"],
)
def test_b27_a_bad_command_line_ends_with_2_and_one_line(
    flag: str, value: str, rule: str, cure: str, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = run_cli([*SMALL, f"--run_dir={run_dir}", flag])
    assert done.code == 2
    line = error_line(done.stderr)
    assert value in line and rule in line and cure in line
    assert done.stdout == ""
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--num_replicas=-1"], ["num_replicas", "at least 0"]),
        (["--strategy=one_device", "--num_replicas=2"], ["num_replicas=2", "one replica", "--num_replicas=1"]),
        (["--strategy=horovod"], ["horovod", "mirrored"]),
        (["--num_replicas=2", "--all_reduce=nccl"], ["all_reduce=nccl", "can do only", "hierarchical"]),
        (["--optimizer=sgd"], ["weight_decay=0.05", "adamw", "recipe"]),
        (["--strategy=multi_worker"], ["strategy=multi_worker", "TF_CONFIG"]),
        (["--learning_rate=nan"], ["learning_rate", "finite"]),
        (["--train_steps=0"], ["train_steps=0", "-1"]),
    ],
)
def test_b19_a_refused_setting_ends_with_2_and_one_line_and_writes_nothing(
    args: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert main(f"--run_dir={run_dir}", *args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    line = error_line(err)
    assert all(part in line for part in said), line
    assert not run_dir.exists()


# Refused when the data or the folder has been looked at, which parsing cannot do.
LATE = {
    "warm_up_longer_than_the_run": ["--train_steps=10", "--warmup_steps=20"],
    "nothing_to_resume": ["--resume=must"],
    "best_of_no_metric": ["--keep_best=nothing:max"],
    "no_evaluation_data": ["--task=synthetic", "--mode=eval"],
}


@pytest.mark.parametrize("case", LATE)
def test_a_late_refusal_too_ends_with_2_and_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--hidden=4", "--device=cpu", f"--run_dir={tmp_path / 'run'}", *LATE[case]]
    assert train.main(["train.py", "--task=digits", *args]) == 2
    error_line(capsys.readouterr().err)


@pytest.mark.parametrize("case", LATE)
def test_a_late_refusal_too_writes_nothing(case: str, tmp_path: Path) -> None:
    args = ["--hidden=4", "--device=cpu", f"--run_dir={tmp_path / 'run'}", *LATE[case]]
    assert train.main(["train.py", "--task=digits", *args]) == 2
    assert not (tmp_path / "run").exists()


def bad_run_dirs(tmp_path: Path) -> list[Path]:
    (tmp_path / "file").write_text("kept")
    return [tmp_path / "file", tmp_path / "file" / "run"]


def test_a_run_dir_that_is_a_file_or_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_dir in bad_run_dirs(tmp_path):
        assert main(f"--run_dir={run_dir}", "--train_steps=100") == 2
        line = error_line(capsys.readouterr().err)
        assert f"run_dir={run_dir}" in line
        assert "--run_dir" in line
    assert contents(tmp_path) == {"file": b"kept"}


def test_a_run_dir_that_is_a_file_in_eval_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_dir in bad_run_dirs(tmp_path):
        assert main(f"--run_dir={run_dir}", "--mode=eval") == 2
        assert f"run_dir={run_dir}" in error_line(capsys.readouterr().err)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_dir_that_may_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    try:
        assert main(f"--run_dir={tmp_path / 'run'}", "--train_steps=100") == 2
        assert "Permission denied" in error_line(capsys.readouterr().err)
    finally:
        tmp_path.chmod(0o700)


STOP = [*PLAIN_SGD, "--checkpoint_every=0", "--train_steps=4", "--eval_every=2", "--progress=off"]


def test_stopping_on_a_metric_that_is_not_there_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*STOP, f"--run_dir={tmp_path}", "--stop_when=nothing<1") == 2
    line = error_line(capsys.readouterr().err)
    assert "nothing" in line and "accuracy" in line
    assert not (tmp_path / "metrics.jsonl").exists()


def test_stopping_on_a_metric_where_nothing_is_evaluated_is_refused_or_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(*STOP, f"--run_dir={tmp_path}", "--stop_when=loss<1", "--mode=train")
    out, err = capsys.readouterr()
    assert code == 2 or "stop_when" in out + err


def test_eval_mode_without_a_checkpoint_is_refused_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(f"--run_dir={tmp_path / 'no_such_run'}", "--mode=eval")
    out, err = capsys.readouterr()
    assert code != 0 or "no checkpoint" in out + err


# --- errors of a task's own code -----------------------------------------------------------------------------------


class Scalar(Digits):
    """Divides the loss itself, which the framework must refuse."""

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        output = super().compute_loss(model, batch, training=training)
        return LossOutput(loss=tf.reduce_mean(output.loss))


class Broken(Digits):
    """Has a fault in its code."""

    def build_model(self) -> Any:
        raise RuntimeError("first line\nsecond line")


def run_task(task: type, *args: str) -> int:
    argv = ["train.py", "--task=own", "--device=cpu", "--global_batch_size=8", *args]
    return flags.run(train.train, argv, tasks={"own": task})


def test_a_rule_broken_in_the_traced_step_is_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_task(Scalar, f"--run_dir={tmp_path}") == 2
    assert error_line(capsys.readouterr().err).startswith("error: compute_loss returned a scalar loss")


def test_an_unexpected_error_ends_with_1_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_task(Broken, f"--run_dir={tmp_path}") == 1
    line = error_line(capsys.readouterr().err)
    assert line == "error: RuntimeError: first line second line (--debug shows the traceback)"


def test_debug_shows_the_traceback_after_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_task(Broken, f"--run_dir={tmp_path}", "--debug") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: RuntimeError: first line second line\nTraceback")
    assert "build_model" in err
