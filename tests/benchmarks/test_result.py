"""Result files: what is in them, and what is read back."""

import json

import pytest

from benchmarks import compare, result, run, table


@pytest.fixture
def document(case, fakes, fake, monkeypatch):
    """``document(trainer=..., bare=..., args=[...])``: what a run with these contenders gives."""

    def make(args=(), **by_name):
        monkeypatch.setattr(run, "selected", lambda parsed: [case])
        contenders = {"trainer": fake(), "bare": fake(), **by_name}
        return run.measure(run.parser().parse_args(list(args)), fakes(**contenders))

    return make


def test_b46_a_result_file_says_what_the_figures_depend_on(document, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    path = str(tmp_path / "result.json")
    result.write(path, document(["--rounds=3"]))
    value = result.read(path)
    assert set(value["versions"]) >= {"python", "tensorflow", "keras", "numpy", "psutil", "torch"}
    assert value["flags"] == {"rounds": 3}  # only what differs from default
    assert value["environment"]["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert set(value["machine"]) == {"cpu", "cores", "memory_gb", "platform"}
    assert value["machine"]["cores"] >= 1
    assert set(value["commit"]) == {"hash", "dirty"}
    assert value["date"].endswith("+00:00")
    (case,) = value["cases"]
    assert case["bounds"] == [{"quantity": "trainer/bare", "limit": 1.05, "least": False, "value": 1.0, "held": True}]
    assert case["workload"]["batch"] == 96
    assert len(case["load"]["before"]) == len(case["load"]["after"]) == 3
    assert case["contenders"]["trainer"]["facts"] == {"parameters": 10, "settings": {}}


def test_b47_start_up_and_warm_up_stand_apart_from_the_steady_state(document, fake):
    slow_start = fake(ms=(2.0,), import_s=5.0, first_step_s=100.0, warm_up_ms=1000.0)
    (case,) = document(["--rounds=1"], trainer=slow_start)["cases"]
    trainer = case["contenders"]["trainer"]
    assert trainer["steady"]["step_ms"]["median"] == pytest.approx(2.0)
    assert trainer["steady"]["examples_per_second"]["median"] == pytest.approx(96 / 0.002)
    assert trainer["start_up"]["import_s"]["median"] == 5.0
    assert trainer["start_up"]["first_step_s"]["median"] == 100.0
    assert trainer["start_up"]["warm_up_s"]["median"] == pytest.approx(9.0)  # steps 2 to 10
    assert trainer["start_up"]["warm_up_steps"] == 9
    assert case["ratios"]["trainer/bare"]["median"] == pytest.approx(2.0)


def test_what_was_thrown_out_is_not_measured_and_its_bound_not_held(document, fake):
    value = document(["--rounds=1"], trainer=fake(parameters=11))
    (case,) = value["cases"]
    assert case["rejected"] == {"trainer": "11 parameters where the reference has 10"}
    assert list(case["contenders"]) == ["bare"]
    assert case["bounds"] == [{"quantity": "trainer/bare", "limit": 1.05, "least": False, "value": None, "held": False}]
    assert result.broken(value) == ["small: trainer/bare was not measured but must not be above 1.05"]
    assert "small: trainer was thrown out: 11 parameters" in table.render(value)


def test_a_bound_holds_at_its_limit_and_not_above(document, fake):
    at = document(["--rounds=1"], trainer=fake(ms=(1.05,)))
    assert result.broken(at) == []
    above = document(["--rounds=1"], trainer=fake(ms=(1.06,)))
    assert result.broken(above) == ["small: trainer/bare is 1.06 but must not be above 1.05"]


def test_the_table_shows_median_and_range(document, fake):
    text = table.render(document(["--rounds=3"], trainer=fake(ms=(3.0, 1.0, 2.0))))
    row = next(line for line in text.splitlines() if line.startswith("small") and " trainer " in line)
    assert "2.000 (1.000..3.000)" in row
    assert "9.0" in row  # the first step


def test_a_value_that_is_not_finite_is_null(tmp_path):
    path = str(tmp_path / "result.json")
    result.write(path, {"schema": result.SCHEMA, "loss": [float("nan"), 1.0]})
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == {"schema": result.SCHEMA, "loss": [None, 1.0]}


def test_another_schema_is_refused(tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="no result file of schema 1"):
        result.read(str(path))
    assert compare.main([str(path), str(path)]) == 2
    assert "measure again" in capsys.readouterr().err


def test_compare_shows_both_files_their_quotient_and_whether_ranges_overlap(document, fake):
    old = document(["--rounds=3"], trainer=fake(ms=(2.0, 2.2, 2.1)))
    new = document(["--rounds=3"], trainer=fake(ms=(1.0, 1.1, 1.05)))
    lines = compare.compare(old, new).splitlines()
    row = next(line for line in lines if "trainer ms a step" in line)
    assert " ".join(row.split()) == "small trainer ms a step 2.100 (2.000..2.200) 1.050 (1.000..1.100) 0.500 apart"
    assert next(line for line in lines if "bare ms a step" in line).endswith("1.000    overlap")
    new["machine"] = {**new["machine"], "cpu": "another"}
    assert "machine differs" in compare.compare(old, new)
