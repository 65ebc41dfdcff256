from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.config import RunConfig
from framework.errors import CheckFailed, ConfigError, LockstepError, PeerLost, Preempted
from framework.parse import parse_best, parse_boundaries, parse_condition

FIELDS = dataclasses.fields(RunConfig)


def test_the_defaults_are_legal() -> None:
    config = RunConfig()
    assert (config.run_dir, config.global_batch_size, config.optimizer) == (None, 128, "adamw")


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_field_has_help_group_and_an_illegal_value_that_names_it(field: dataclasses.Field[Any]) -> None:
    assert field.metadata["help"].endswith(".")
    assert field.metadata["group"]
    if field.default is not None:
        with pytest.raises(ConfigError, match=rf"^{field.name}="):
            RunConfig(**{field.name: None})  # type: ignore[arg-type]
    wrong: Any
    for wrong in ([], object(), b"x"):
        with pytest.raises(ConfigError, match=rf"^{field.name}=.*must be a "):
            RunConfig(**{field.name: wrong})


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"num_replicas": -1}, "num_replicas=-1 but it must be at least 0; for example num_replicas=0"),
        ({"steps_per_loop": -1}, "steps_per_loop=-1 but it must be at least 0"),
        ({"log_every": -1}, "log_every=-1 but it must be at least 0"),
        ({"eval_every": -1}, "eval_every=-1 but it must be at least 0"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 but it must be at least 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0 but it must be at least 1"),
        ({"train_steps": -2}, "train_steps=-2 but it must be at least -1"),
        ({"train_steps": 0}, "train_steps=0 but a run needs at least 1 update"),
        ({"global_batch_size": 0}, "global_batch_size=0 but it must be at least 1"),
        ({"seed": 2**31}, "seed=2147483648 but it must be at most 2147483647"),
        ({"schedule_end": 1.5}, "schedule_end=1.5 but it must be at most 1.0"),
        ({"strategy": "horovod"}, "strategy='horovod' but it must be one of auto, one_device"),
        ({"all_reduce": "magic"}, "all_reduce='magic' but it must be one of auto"),
        ({"optimizer": "SGD"}, "optimizer='SGD' but it must be one of sgd, adam, adamw"),
        ({"learning_rate": math.nan}, "learning_rate=nan but it must be finite"),
        ({"learning_rate": math.inf}, "learning_rate=inf but it must be finite"),
        ({"train_steps": True}, "train_steps=True but it must be a int"),
        ({"train_steps": 1.5}, "train_steps=1.5 but it must be a int"),
        ({"train_steps": "100"}, "train_steps='100' but it must be a int"),
        ({"tensorboard": 1}, "tensorboard=1 but it must be a bool"),
        ({"beta_2": 1.0}, "beta_2=1.0 but it must be below 1"),
    ],
)
def test_a_value_is_refused_with_its_rule(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig(**settings_)


@pytest.mark.parametrize(
    ("settings_", "parts"),
    [
        ({"strategy": "one_device", "num_replicas": 2}, ["strategy=one_device", "num_replicas=2", "mirrored"]),
        ({"strategy": "tpu", "device": "cpu"}, ["strategy=tpu", "device=cpu"]),
        ({"strategy": "mirrored", "device": "tpu"}, ["strategy=mirrored", "device=tpu"]),
        ({"weight_decay": 0.1, "optimizer": "sgd"}, ["weight_decay=0.1", "optimizer=sgd", "--optimizer=adamw"]),
        ({"nesterov": True}, ["nesterov=True", "optimizer=adamw", "--optimizer=sgd"]),
        ({"nesterov": True, "optimizer": "sgd", "momentum": 0}, ["nesterov=True", "momentum=0.0"]),
        ({"clip_global_norm": 1, "clip_value": 2}, ["clip_global_norm=1.0", "clip_value=2.0"]),
        ({"schedule": "step"}, ["schedule=step", "schedule_boundaries=''"]),
        ({"schedule_boundaries": "5"}, ["schedule=constant", "schedule_boundaries='5'"]),
        ({"workers": "a:1"}, ["workers='a:1'", "worker_index=None"]),
        ({"worker_index": 0}, ["workers=''", "worker_index=0"]),
        ({"cluster": "flags"}, ["cluster=flags", "workers"]),
        ({"cluster": "none", "workers": "a:1", "worker_index": 0}, ["cluster=none", "workers='a:1'"]),
        ({"keep_every": 10}, ["keep_every=10", "checkpoint_every=0"]),
        ({"keep_every": 10, "checkpoint_every": 4}, ["keep_every=10", "checkpoint_every=4"]),
        ({"init_exclude": "head"}, ["init_exclude=head", "--init_from=PATH"]),
        ({"init_include": "body"}, ["init_include=body", "--init_from=PATH"]),
        ({"init_include": "(", "init_from": "a"}, ["init_include='('", "no regular expression"]),
    ],
)
def test_two_values_that_do_not_go_together_are_both_named(settings_: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings_)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_and_paths_are_taken_in_the_field_s_type() -> None:
    config = RunConfig(learning_rate=1, train_steps=1e3, run_dir=pathlib.Path("a") / "b")  # type: ignore[arg-type]
    assert (config.learning_rate, config.train_steps, config.run_dir) == (1.0, 1000, "a/b")
    assert (type(config.learning_rate), type(config.train_steps), type(config.run_dir)) == (float, int, str)


def test_steps_and_epochs_may_both_be_given() -> None:
    config = RunConfig(train_epochs=10, train_steps=7)
    assert (config.train_epochs, config.train_steps) == (10, 7)


def test_a_config_is_frozen_and_replace_checks_again() -> None:
    config = RunConfig(seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
    assert config.replace(seed=2) == RunConfig(seed=2)
    with pytest.raises(ConfigError, match="seed=-1"):
        config.replace(seed=-1)


def test_only_keywords_are_taken() -> None:
    with pytest.raises(TypeError):
        RunConfig("runs/x")  # type: ignore
    with pytest.raises(TypeError, match="lerning_rate"):
        RunConfig(lerning_rate=1.0)  # type: ignore[call-arg]


def test_json_round_trip() -> None:
    config = RunConfig(run_dir="r", train_steps=3, learning_rate=1e-7, nesterov=True, optimizer="sgd")
    assert config.to_json().endswith("}\n")
    assert RunConfig(**json.loads(config.to_json())) == config
    assert list(config.to_dict()) == [f.name for f in FIELDS]


@pytest.mark.parametrize(("text", "steps"), [("", []), ("30", [30]), ("30,60", [30, 60]), (" 1, 2", [1, 2])])
def test_boundaries(text: str, steps: list[int]) -> None:
    assert parse_boundaries(text) == steps


@pytest.mark.parametrize("text", ["0", "-1", "5,5", "6,5", "a", "1,,2", "1.5", ","])
def test_boundaries_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be rising whole numbers"):
        parse_boundaries(text)


@pytest.mark.parametrize(
    ("text", "best"),
    [("", None), ("accuracy:max", ("accuracy", "max")), ("a/b:c:min", ("a/b:c", "min"))],
)
def test_best(text: str, best: tuple[str, str] | None) -> None:
    assert parse_best(text) == best


@pytest.mark.parametrize("text", ["accuracy", "accuracy:", ":max", "accuracy:best"])
def test_best_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be METRIC:max or METRIC:min"):
        parse_best(text)


@pytest.mark.parametrize(
    ("text", "condition"),
    [("", None), ("loss<0.1", ("loss", "<", 0.1)), ("accuracy > 1e-1", ("accuracy", ">", 0.1))],
)
def test_condition(text: str, condition: tuple[str, str, float] | None) -> None:
    assert parse_condition(text) == condition


@pytest.mark.parametrize("text", ["loss", "<0.1", "loss<", "loss<x", "loss=1", "loss<nan", "loss<inf", "loss<=1"])
def test_condition_that_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be METRIC<NUMBER or METRIC>NUMBER"):
        parse_condition(text)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["step", "adamw", "sgd", "1,2", "a:1", "loss<1", "flags", "tpu"]),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([f.name for f in FIELDS]), JUNK, max_size=5))
def test_a_config_is_made_or_refused_and_nothing_else(values: dict[str, Any]) -> None:
    try:
        config = RunConfig(**values)
    except ConfigError as error:
        assert error.exit_code == 2
    else:
        assert config == RunConfig(**json.loads(config.to_json()))


def test_exit_codes_of_the_errors() -> None:
    kinds = [LockstepError, ConfigError, CheckFailed, PeerLost, Preempted]
    assert [kind.exit_code for kind in kinds] == [1, 2, 3, 4, 5]
    assert issubclass(ConfigError, ValueError)
