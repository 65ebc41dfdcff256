"""Peers: who is measured, who is left out, the common start, and goals that must be reached and not kept below."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest

from benchmarks import markdown, peers, plot, result, run, start, table
from benchmarks.cases import CASES, SUITES, Bound
from benchmarks.workload import Workload


def test_fit_is_measured_with_1_and_with_20_steps_an_execution() -> None:
    assert peers.expanded("bare, keras_fit,torch,keras_fit") == ["bare", "keras_fit", "keras_fit_20", "torch"]
    assert peers.expanded("") == []
    with pytest.raises(ValueError, match="--against=jax: there is no 'jax', only bare, keras_fit"):
        peers.expanded("jax")


def test_every_peer_of_a_case_fits_its_number_of_replicas() -> None:
    for name in SUITES["peers"]:
        case = CASES[name]
        assert case.reference == "trainer" and case.warm_up >= 2
        assert all(case.workload.replicas in peers.PEERS[n].replicas for n in case.contenders if n != "trainer")
        assert {b.quantity for b in case.bounds} <= {f"{n}/trainer" for n in case.contenders}
        assert all(end % 20 == 0 for end in case.ends[1:])


def selected(*flags: str) -> list[tuple[str, ...]]:
    return [c.contenders for c in run.selected(run.parser().parse_args(flags))]


def test_against_keeps_the_asked_peers_and_their_goals() -> None:
    assert selected("--case=peers_mlp", "--against=torch,bare") == [("trainer", "bare", "torch")]
    [case] = run.selected(run.parser().parse_args(["--case=peers_mlp_2", "--against=torch_ddp"]))
    assert case.bounds == (Bound("torch_ddp/trainer", 1.8, least=True),)
    with pytest.raises(ValueError, match="no selected case has torch; try --suite=peers"):
        selected("--suite=smoke", "--against=torch")


def test_an_unknown_peer_and_a_flag_that_a_script_does_not_know_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--suite=peers", "--against=jax"], "there is no 'jax'"),
        (["--suite=input", "--rounds=3"], "--suite=input has no rounds; python -m benchmarks.input --help"),
    ):
        with pytest.raises(SystemExit) as error:
            run.main(flags)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_a_suite_that_is_a_script_is_run_with_the_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import checks

    seen: list[list[str]] = []
    monkeypatch.setattr(checks, "main", lambda argv: seen.append(argv) or 0)
    assert run.main(["--suite=checks", "--out=x.json"]) == 0
    assert seen == [["--out=x.json"]]


def test_a_peer_without_its_packages_is_left_out_by_name(case, fakes, fake, monkeypatch, capsys, tmp_path) -> None:
    wanted = dataclasses.replace(
        case,
        contenders=("trainer", "bare", "torch"),
        reference="trainer",
        bounds=(Bound("bare/trainer", 2.0, least=True), Bound("torch/trainer", 1.0, least=True)),
    )
    monkeypatch.setattr(run, "selected", lambda args: [wanted])
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    document = run.measure(
        run.parser().parse_args(["--rounds=3"]), fakes(trainer=fake(), bare=fake(ms=(2.0, 3.0, 4.0)))
    )
    [found] = document["cases"]
    assert found["skipped"] == {"torch": "torch not installed; pip install lockstep-tf[bench]"}
    assert found["ratios"]["bare/trainer"]["median"] == pytest.approx(3.0)
    assert found["first_step_ratios"]["bare/trainer"]["median"] == 1.0
    assert [b["held"] for b in found["bounds"]] == [True, False]
    assert result.broken(document) == ["small: torch/trainer was not measured but must not be below 1"]
    text = table.render(document)
    assert "small: torch was left out: torch not installed" in text
    assert "small: bare/trainer 3, at least 2: held" in text
    assert "torch is left out" in capsys.readouterr().err
    path = tmp_path / "result.md"
    markdown.write(str(path), document)
    assert "| bare | 3.000 (2.000..4.000) | 3.000 (2.000..4.000) | 32000 | 9.0 (9.0..9.0) | 1.000 (1.000..1.000) |" in (
        path.read_text()
    )


def test_a_picture_is_refused_before_anything_is_measured(monkeypatch, capsys) -> None:
    monkeypatch.setattr(plot, "possible", lambda: False)
    with pytest.raises(SystemExit):
        run.main(["--plot=x.png"])
    assert "--plot takes matplotlib" in capsys.readouterr().err


def test_geometric_means_are_over_cases_of_equally_many_replicas() -> None:
    def case(replicas: int, ratio: float) -> dict:
        return {"workload": {"replicas": replicas}, "ratios": {"torch/trainer": {"median": ratio}}}

    document = {"cases": [case(1, 2.0), case(1, 8.0), case(2, 5.0)]}
    assert result.geometric_means(document) == {"torch/trainer, 1 replica(s)": pytest.approx(4.0)}


def test_the_common_start_holds_the_weights_and_the_examples_of_every_step(tmp_path) -> None:
    keras.utils.clear_session()  # names count from here, as in the process that this is made for
    workload = Workload(data="digits", features=64, hidden=(4,), batch=96, seed=3)
    path = str(tmp_path / "start.npz")
    start.main([json.dumps(workload.to_dict()), "30", path])
    values, order = start.weights(path)
    shapes = {name: value.shape for name, value in values.items()}
    assert shapes == {"dense/kernel": (64, 4), "dense/bias": (4,), "dense_1/kernel": (4, 10), "dense_1/bias": (10,)}
    assert order.shape == (30, 96)
    # Epochs of 1,437 digits follow each other without a gap.
    flat = order.ravel()
    assert sorted(flat[:1437]) == sorted(flat[1437:2874].tolist()) == list(range(1437))
    assert np.any(flat[:1437] != flat[1437:2874])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sequential/dense_1/kernel", "dense_1/kernel"),
        ("dense/bias:0", "dense/bias"),
        ("multi_head_attention_1/query/kernel", "multi_head_attention_1/query/kernel"),
    ],
)
def test_names_of_weights_are_without_the_model_and_the_number(path: str, name: str) -> None:
    assert start.weight_name(path) == name


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case", ["peers_mlp", "peers_transformer", "peers_resnet20", "peers_mlp_2", "peers_resnet20_2"]
)
def test_every_peer_that_is_here_does_the_same_work(tmp_path, case: str) -> None:
    """Peers whose packages are missing are left out; nobody is thrown out."""
    path = tmp_path / "result.json"
    assert run.main([f"--case={case}", "--rounds=1", "--windows=1", "--window_steps=20", f"--out={path}"]) == 0
    [found] = json.loads(path.read_text())["cases"]
    assert found["rejected"] == {}
    assert {*found["contenders"], *found["skipped"]} == set(CASES[case].contenders)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_worker_processes_are_measured_as_one_contender(tmp_path) -> None:
    path = tmp_path / "result.json"
    assert run.main(["--case=workers_mlp", "--rounds=1", "--windows=1", "--window_steps=20", f"--out={path}"]) == 0
    [found] = json.loads(path.read_text())["cases"]
    assert found["rejected"] == {} and "workers" in found["contenders"]
