"""metrics.jsonl: order and types of a record, torn lines, what is left by a killed run."""

import json
import logging
import math
import types

import numpy as np
import pytest

from framework.errors import ConfigError, LockstepError
from framework.hooks import MetricsLog, read_metrics


def at(step):
    return types.SimpleNamespace(step=step, total_steps=None)


def strict(text):
    """Parses JSON that has none of the constants JSON does not know."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def log_to(path, start=None, clock=lambda: 1.5):
    log = MetricsLog(path, clock)
    if start is not None:
        log.begin(at(start))
    return log


def steps(path):
    return [(record["phase"], record["step"]) for record in read_metrics(path)]


def test_a_record_has_step_phase_time_and_then_the_values_in_their_order(path):
    times = iter([100.25, 101.5, 102.0])
    log = log_to(path, 0, clock=lambda: next(times))
    log(10, {"loss": 0.5, "accuracy": np.float32(0.25), "learning_rate": 1e-3})
    log.evaluated(10, "", {"loss": 2})
    log.evaluated(10, "far", {"loss": 0.75})
    assert path.read_text() == (
        '{"step": 10, "phase": "train", "time": 100.25, "loss": 0.5, "accuracy": 0.25, "learning_rate": 0.001}\n'
        '{"step": 10, "phase": "eval", "time": 101.5, "loss": 2}\n'
        '{"step": 10, "phase": "eval/far", "time": 102.0, "loss": 0.75}\n'
    )


def test_time_is_unix_seconds_unless_a_clock_is_given(path):
    log = MetricsLog(path)
    log(1, {})
    assert read_metrics(path)[0]["time"] > 1.7e9  # later than 2023


def test_values_that_are_not_finite_become_null_and_every_line_stays_json(path):
    log = log_to(path, 0)
    log(1, {"loss": math.nan, "a": math.inf, "b": -math.inf, "c": np.float32("nan"), "d": 1.0})
    record = strict(path.read_text())
    assert [record[key] for key in ("loss", "a", "b", "c", "d")] == [None, None, None, None, 1.0]


def test_b07_a_record_may_lack_any_value(path):
    log = log_to(path, 0)
    log(1, {})
    log.evaluated(1, "", {"loss": 0.5})
    assert steps(path) == [("train", 1), ("eval", 1)]


def test_each_record_is_in_the_file_when_the_call_returns(path):
    log = log_to(path, 0)
    for step in (1, 2):
        log(step, {"loss": 1.0})
        assert len(path.read_text().splitlines()) == step


def test_nothing_is_written_before_the_first_record(path):
    log_to(path, 0).end(0, "done")
    assert not path.parent.exists()


@pytest.mark.parametrize("name", ["step", "phase", "time"])
def test_a_metric_named_like_a_key_of_the_record_is_refused(path, name):
    log = log_to(path, 0)
    with pytest.raises(ConfigError, match=f"metric '{name}'"):
        log(1, {name: 1.0})
    assert not path.exists()


def killed_run(path, last=5):
    log = log_to(path, 0)
    for step in range(1, last + 1):
        log(step, {"loss": float(step)})
        if step % 2 == 0:
            log.evaluated(step, "", {"loss": float(step)})


def test_after_a_resume_steps_have_no_gap_and_no_repeat(path, caplog):
    killed_run(path)
    with caplog.at_level(logging.WARNING):
        log = log_to(path, 3)
    assert steps(path) == [("train", 1), ("train", 2), ("eval", 2), ("train", 3)]
    assert len(caplog.records) == 1 and "moved 3 records" in caplog.text
    for step in (4, 5, 6):
        log(step, {"loss": 0.0})
    assert [step for phase, step in steps(path) if phase == "train"] == [1, 2, 3, 4, 5, 6]
    discarded = read_metrics(path.with_name("metrics.discarded.jsonl"))
    assert [(r["phase"], r["step"], r["loss"]) for r in discarded] == [("train", 4, 4), ("eval", 4, 4), ("train", 5, 5)]


def test_records_discarded_by_several_resumes_are_all_kept(path):
    killed_run(path)
    log_to(path, 4)(5, {"loss": 50.0})
    log_to(path, 4)
    discarded = read_metrics(path.with_name("metrics.discarded.jsonl"))
    assert [record["loss"] for record in discarded] == [5.0, 50.0]


def test_a_resume_where_the_run_ended_leaves_the_file_untouched(path):
    killed_run(path)
    before = path.stat()
    log_to(path, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_takes_over_no_record_not_even_an_evaluation_at_step_0(path):
    killed_run(path, last=2)
    with path.open("a") as file:
        file.write('{"step": 0, "phase": "eval", "loss": 9.0}\n')
    log = log_to(path, 0)
    assert read_metrics(path) == []
    log.evaluated(0, "", {"loss": 1.0})
    assert read_metrics(path) == [{"step": 0, "phase": "eval", "time": 1.5, "loss": 1.0}]


def test_an_evaluation_before_training_stays(path):
    log = log_to(path)
    log.evaluated(0, "", {"loss": 1.0})
    log.begin(at(0))
    assert steps(path) == [("eval", 0)]


def test_an_evaluation_repeated_at_its_step_is_not_written_again(path, caplog):
    killed_run(path, last=4)
    log = log_to(path, 4)
    with caplog.at_level(logging.WARNING):
        log.evaluated(4, "", {"loss": 77.0})
    assert "phase eval at step 4 already" in caplog.text
    log.evaluated(4, "far", {"loss": 0.5})
    log(5, {"loss": 5.0})
    log(5, {"loss": 6.0})
    assert steps(path)[-3:] == [("eval", 4), ("eval/far", 4), ("train", 5)]
    assert [r["loss"] for r in read_metrics(path) if r["phase"] == "eval"] == [2.0, 4.0]


def test_a_torn_last_line_is_repaired_when_a_run_begins(path):
    killed_run(path, last=3)
    torn = '{"step": 4, "phase": "train", "ti'
    with path.open("a") as file:
        file.write(torn)
    log = log_to(path, 3)
    log(4, {"loss": 4.0})
    assert [step for phase, step in steps(path) if phase == "train"] == [1, 2, 3, 4]
    assert all(strict(line) for line in path.read_text().splitlines())
    assert path.with_name("metrics.discarded.jsonl").read_text() == torn + "\n"


def test_a_torn_last_line_is_repaired_before_an_evaluation_without_training(path):
    killed_run(path, last=3)
    with path.open("a") as file:
        file.write('{"step": 4, "pha')
    log_to(path).evaluated(1, "", {"loss": 1.0})
    assert steps(path) == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 1)]


def test_a_last_record_that_lacks_only_its_newline_is_kept(path):
    killed_run(path, last=2)
    path.write_text(path.read_text()[:-1])
    log_to(path, 2)(3, {"loss": 3.0})
    assert steps(path) == [("train", 1), ("train", 2), ("eval", 2), ("train", 3)]
    assert not path.with_name("metrics.discarded.jsonl").exists()


def test_the_file_is_replaced_as_a_whole_so_a_kill_while_rewriting_loses_nothing(path, monkeypatch):
    killed_run(path)
    before = path.read_text()

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", killed)
        log_to(path, 3)
    assert path.read_text() == before
    log_to(path, 3)
    assert steps(path)[-1] == ("train", 3)


def test_lines_of_another_process_are_not_lost_when_the_file_was_replaced(path):
    evaluator = log_to(path)
    evaluator.evaluated(5, "", {"loss": 1.0})
    trainer = log_to(path, 4)  # replaces the file, now without step 5
    evaluator.evaluated(6, "", {"loss": 1.0})
    trainer(7, {"loss": 1.0})
    assert steps(path) == [("eval", 6), ("train", 7)]


def test_the_reader_passes_over_a_torn_last_line_and_refuses_one_before_it(path):
    path.parent.mkdir()
    path.write_text('{"step": 1, "phase": "train"}\n{"step": 2, "ph')
    assert read_metrics(path) == [{"step": 1, "phase": "train"}]
    path.write_text('{"step": 1, "ph\n{"step": 2, "phase": "train"}\n')
    with pytest.raises(LockstepError, match=r"metrics\.jsonl, line 1"):
        read_metrics(path)
