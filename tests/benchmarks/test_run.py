"""The command: which cases run, exit codes, and one real run."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks import run
from benchmarks.cases import CASES, SUITES
from benchmarks.process import ROOT


@pytest.fixture
def command(case, fakes, fake, monkeypatch):
    """``command(args, trainer=...)``: the exit code of the command with fake contenders."""
    monkeypatch.setattr(run, "selected", lambda parsed: [case])
    return lambda args, **by_name: run.main(args, fakes(**{"trainer": fake(), "bare": fake(), **by_name}))


def test_check_fails_on_a_broken_bound_and_says_which(command, fake, capsys):
    assert command(["--check", "--rounds=3"], trainer=fake(ms=(1.2, 1.1, 1.0))) == 1
    captured = capsys.readouterr()
    assert "small: trainer/bare is 1.1 but must not be above 1.05" in captured.err
    assert "BROKEN" in captured.out


def test_check_passes_when_the_median_holds(command, fake):
    assert command(["--check", "--rounds=3"], trainer=fake(ms=(1.2, 1.01, 1.0))) == 0


def test_check_fails_when_a_bound_was_not_measured(command, fake):
    assert command(["--check", "--rounds=1"], trainer=fake(fails_at=1)) == 1


def test_without_check_a_broken_bound_is_shown_and_the_command_succeeds(command, fake, capsys):
    assert command(["--rounds=1"], trainer=fake(ms=(9.0,))) == 0
    assert "BROKEN" in capsys.readouterr().out


def test_out_is_the_result_file(command, tmp_path):
    path = tmp_path / "result.json"
    assert command(["--rounds=1", f"--out={path}"]) == 0
    assert json.loads(path.read_text())["cases"][0]["name"] == "small"


def test_cases_are_those_of_the_suite_or_those_asked_for():
    def names(args):
        return [c.name for c in run.selected(run.parser().parse_args(args))]

    assert names([]) == list(SUITES["smoke"])
    assert names(["--case=memory", "--case=overhead_digits"]) == ["overhead_digits", "memory"]


def test_windows_of_the_command_line_replace_those_of_the_case():
    (case,) = run.selected(run.parser().parse_args(["--case=memory", "--windows=2", "--window_steps=7"]))
    assert case.ends == [1, 7, 14, 21]


def test_no_round_is_refused(command, capsys):
    with pytest.raises(SystemExit) as error:
        command(["--rounds=0"])
    assert error.value.code == 2
    assert "at least 1 round" in capsys.readouterr().err


def test_memory_is_compared_between_step_500_and_step_3000():
    case = CASES["memory"]
    assert case.ends == [1, 500, 1000, 1500, 2000, 2500, 3000]
    assert case.warm_up == 1


@pytest.mark.slow
def test_a_real_run_measures_equal_work_and_writes_its_file(tmp_path):
    path = tmp_path / "result.json"
    args = ["--case=overhead_digits", "--rounds=1", "--windows=2", "--window_steps=8", f"--out={path}"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *args], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    taken = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(path.read_text())["cases"]
    assert case["rejected"] == {}
    assert list(case["contenders"]) == ["trainer", "bare"]
    for contender in case["contenders"].values():
        # 64 x 256 + 256, 256 x 256 + 256, 256 x 10 + 10
        assert contender["facts"]["parameters"] == 85002
        assert [step for step, _ in contender["memory"]["rss_mb_by_step"]] == [8, 16, 24]
        assert (
            0.0 < contender["start_up"]["import_s"]["median"] < contender["start_up"]["first_step_s"]["median"] < taken
        )
        assert 0.0 < contender["steady"]["step_ms"]["median"] < 1000.0
    settings = case["contenders"]["trainer"]["facts"]["settings"]
    assert settings["weight_decay"] == 0.05
    first, *_ = case["contenders"]["trainer"]["losses"]
    assert first == pytest.approx(case["contenders"]["bare"]["losses"][0], rel=1e-5)
    assert "trainer/bare" in done.stdout
