"""Who takes part: TF_CONFIG and flags, well formed and not. The long form of the generated cases: ``-m slow``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from framework import RunConfig, Trainer
from framework.cluster.cluster import SAMPLE, Cluster, resolve
from framework.errors import ConfigError

A, B, C = "a:2222", "b:2222", "c:2222"


def from_tf_config(value: Any, **config: Any) -> Cluster:
    text = value if isinstance(value, str) else json.dumps(value)
    return resolve(RunConfig(**config), {"TF_CONFIG": text})


def tf_config(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, Any]:
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


# --- what is understood --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "", "  \n", "{}", '{"cluster": {}}', '{"cluster": {}, "task": {}}'])
def test_without_a_cluster_the_process_is_alone(text: str | None) -> None:
    cluster = resolve(RunConfig(), {} if text is None else {"TF_CONFIG": text})
    assert cluster == Cluster()
    assert (cluster.num_workers, cluster.is_chief, cluster.describe()) == (1, True, "cluster: this process alone")


def test_worker_0_is_the_chief_where_none_is_named() -> None:
    first, second = (from_tf_config(tf_config({"worker": [A, B]}, index=i)) for i in (0, 1))
    assert (first.workers, first.index, first.is_chief) == ((A, B), 0, True)
    assert (second.workers, second.index, second.is_chief) == ((A, B), 1, False)
    assert second.describe() == "cluster: worker 1 of 2 (a:2222, b:2222), from TF_CONFIG"


def test_a_chief_comes_first_and_the_workers_follow() -> None:
    group = {"chief": [A], "worker": [B, C]}
    assert from_tf_config(tf_config(group, "chief")) == Cluster((A, B, C), 0, "TF_CONFIG")
    assert from_tf_config(tf_config(group, "worker", 1)) == Cluster((A, B, C), 2, "TF_CONFIG")


def test_an_index_may_be_digits_in_a_string_as_tensorflow_takes_it() -> None:
    assert from_tf_config(tf_config({"worker": [A, B]}, index="1")).index == 1


def test_the_sample_in_messages_is_a_correct_one() -> None:
    assert from_tf_config(SAMPLE) == Cluster(("host1:2222", "host2:2222"), 0, "TF_CONFIG")


def test_an_ipv6_address() -> None:
    assert from_tf_config(tf_config({"worker": ["[::1]:2222"]})).workers == ("[::1]:2222",)


def test_the_environment_of_the_process_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config({"worker": [A, B]}, index=1)))
    assert resolve(RunConfig()).index == 1


def test_flags_give_workers_and_index_and_go_before_tf_config() -> None:
    config = RunConfig(workers=f"{A}, {B}", worker_index=1)
    assert resolve(config, {"TF_CONFIG": SAMPLE}) == Cluster((A, B), 1, "flags")


def test_cluster_none_ignores_tf_config_also_a_bad_one() -> None:
    assert from_tf_config("junk", cluster="none") == Cluster()


# --- what is refused -----------------------------------------------------------------------------------------------


def test_cluster_tf_config_without_tf_config() -> None:
    with pytest.raises(ConfigError, match="TF_CONFIG is not set") as caught:
        resolve(RunConfig(cluster="tf_config"), {})
    assert SAMPLE in str(caught.value)


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}}'])
def test_cluster_tf_config_with_a_tf_config_that_names_nobody(text: str) -> None:
    with pytest.raises(ConfigError, match="TF_CONFIG"):
        from_tf_config(text, cluster="tf_config")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"workers": "a:1,b:2", "worker_index": 2}, "worker_index=2"),
        ({"workers": "a,b", "worker_index": 0}, "'a'"),
        ({"workers": "a:1,a:1", "worker_index": 0}, "twice"),
        ({"workers": "a:0", "worker_index": 0}, "port 0"),
        ({"workers": "a:65536", "worker_index": 0}, "65536"),
        ({"workers": "a:1,,b:1", "worker_index": 0}, "''"),
    ],
)
def test_flags_that_are_malformed(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(RunConfig(**config), {})
    assert said in str(caught.value)


MALFORMED: dict[str, tuple[Any, str]] = {
    "task_type_not_in_the_cluster": (tf_config({"worker": [A, B]}, "chief"), "task type 'chief'"),
    "master": (tf_config({"master": [A], "worker": [B]}), "'master'"),
    "bad_json": ('{"cluster": {"worker": ["a:1"', "not JSON"),
    "index_out_of_range": (tf_config({"worker": [A, B]}, index=2), "index 2"),
    "empty_task": ({"cluster": {"worker": [A, B]}, "task": {}}, "task type None"),
    "no_task": ({"cluster": {"worker": [A, B]}}, "key 'task'"),
    "no_cluster": ({"task": {"type": "worker", "index": 0}}, "key 'cluster'"),
    "negative_index": (tf_config({"worker": [A]}, index=-1), "index -1"),
    "index_is_a_truth_value": (tf_config({"worker": [A, B]}, index=True), "index True"),
    "index_missing": ({"cluster": {"worker": [A]}, "task": {"type": "worker"}}, "index None"),
    "two_chiefs": (tf_config({"chief": [A, B]}, "chief"), "'chief'"),
    "parameter_servers": (tf_config({"worker": [A], "ps": [B]}), "'ps'"),
    "workers_as_text": (tf_config({"worker": A}), "cluster['worker']"),
    "address_without_port": (tf_config({"worker": ["a"]}), "'a'"),
    "a_list": ("[1, 2]", "list"),
    "a_number": ("3", "int"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_c093_a_malformed_tf_config_is_refused_with_key_and_sample(case: str) -> None:
    value, said = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        from_tf_config(value)
    message = str(caught.value)
    assert message.startswith("TF_CONFIG")
    assert said in message
    assert SAMPLE in message


@pytest.mark.parametrize(
    "case", ["task_type_not_in_the_cluster", "master", "bad_json", "index_out_of_range", "empty_task", "no_task"]
)
def test_c093_the_command_line_refuses_it_before_a_server_starts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = MALFORMED[case][0]
    monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))
    run_dir = tmp_path / "run"
    assert train.main(["train.py", "--task=digits", f"--run_dir={run_dir}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: TF_CONFIG")
    assert SAMPLE in lines[0]
    assert not run_dir.exists()


@pytest.mark.parametrize("kind", [["worker"], {"worker": 0}])
def test_c093_a_task_type_that_is_no_text(kind: Any) -> None:
    with pytest.raises(ConfigError, match="type"):
        from_tf_config(tf_config({"worker": [A]}, kind))


# Junk of every depth. A task's type that is a list or an object has a test of its own above.
_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_junk = st.recursive(
    _plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_addresses = st.lists(st.sampled_from([A, B, C, "a", "a:0", ":1", ""]) | _junk, max_size=3) | _junk
_groups = st.dictionaries(st.sampled_from(["worker", "chief", "ps", "master", "w"]), _addresses, max_size=3) | _junk
_task = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["worker", "chief", ""]) | _plain,
        "index": st.integers(-2, 3) | st.sampled_from(["0", "１", "-1", "9" * 30]) | _junk,
    },
)
_values = st.fixed_dictionaries({}, optional={"cluster": _groups, "task": _task | _plain | st.lists(_junk, max_size=2)})


@pytest.mark.parametrize(
    "examples", [pytest.param(200, id="short"), pytest.param(8000, id="long", marks=pytest.mark.slow)]
)
def test_any_tf_config_gives_a_cluster_or_a_config_error(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(text=st.text(max_size=40) | (_values | _junk).map(json.dumps))
    def check(text: str) -> None:
        try:
            cluster = resolve(RunConfig(), {"TF_CONFIG": text})
        except ConfigError as error:
            assert "TF_CONFIG" in str(error) and SAMPLE in str(error) and "\n" not in str(error)
            return
        assert 0 <= cluster.index < cluster.num_workers
        assert len(set(cluster.workers)) == len(cluster.workers)

    check()


# --- C091 ----------------------------------------------------------------------------------------------------------


def test_c091_a_tf_config_set_too_late_stops_the_run(
    make_line: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    trainer = make_line(train_steps=2)
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config({"worker": [A, B]})))
    with pytest.raises(ConfigError, match="TF_CONFIG"):
        trainer.train()


@pytest.fixture
def make_line() -> Callable[..., Trainer]:
    import keras
    import numpy as np

    from framework import LossOutput
    from input_pipelines import from_arrays

    class Line(Trainer):
        def build_model(self) -> Any:
            return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

        def train_data(self) -> Any:
            return from_arrays((np.ones((4, 1), np.float32),))

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=model(batch[0])[:, 0])

    assert "TF_CONFIG" not in os.environ
    return lambda **settings: Line(RunConfig(global_batch_size=2, progress="off", device="cpu", **settings))
