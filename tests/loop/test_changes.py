"""What a resume changes is said; what would make it another run is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from typing import Any

import pytest

from framework import ConfigError
from framework.loop.changes import compare
from tests.helpers import Toy, settings, store, tree

OLD: dict[str, Any] = {
    "task_name": "digits",
    "task": "models.Digits",
    "options": {"hidden": 16},
    "strategy": {"num_replicas": 1},
    "workers": [],
    "config": {"seed": 0, "optimizer": "adam", "global_batch_size": 8, "run_dir": "a", "keep_best": ""},
    "versions": {"tensorflow": "2.21.0"},
}


def changed(**parts: Any) -> dict[str, Any]:
    new = copy.deepcopy(OLD)
    for name, value in parts.items():
        new[name] = {**new[name], **value} if isinstance(value, dict) else value
    return new


@pytest.mark.parametrize(
    ("parts", "line", "another"),
    [
        ({}, None, False),
        ({"config": {"run_dir": "b"}}, None, False),
        ({"config": {"global_batch_size": 4}}, "global_batch_size 8 -> 4", False),
        ({"config": {"keep_best": "loss:min"}}, "keep_best '' -> loss:min", False),
        ({"strategy": {"num_replicas": 2}}, "replicas 1 -> 2", False),
        ({"workers": ["a:1", "b:1"]}, "workers 1 -> 2", False),
        ({"versions": {"tensorflow": "2.22.0"}}, "tensorflow 2.21.0 -> 2.22.0", False),
        ({"task_name": "", "task": "models.Other", "options": {}}, "task digits -> models.Other", False),
        ({"config": {"seed": 1}}, "seed 0 -> 1", True),
        ({"config": {"optimizer": "adamw"}}, "optimizer adam -> adamw", True),
        ({"options": {"hidden": 8}}, "hidden 16 -> 8", True),
        ({"options": {"new": 8}}, None, False),
        ({"task_name": "synthetic"}, "task digits -> synthetic", True),
    ],
)
def test_each_change_is_named_and_weighed(parts: Any, line: str | None, another: bool) -> None:
    lines = [line] if line else []
    assert compare(OLD, changed(**parts)) == (lines, lines if another else [])


def test_a_config_of_another_version_is_compared_as_far_as_it_goes() -> None:
    old = {"config": {"seed": 0, "gone": 3}}
    assert compare(old, changed(config={"since": 1}))[1] == []
    assert compare({}, OLD) == ([], [])


@dataclasses.dataclass
class Options:
    width: int = 4
    sizes: Any = (1, 2)  # comes back from JSON as a list, and is no change


class Wide(Toy):
    Options = Options


def test_one_line_says_what_a_resume_changes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    Toy(settings(run_dir=tmp_path, train_steps=8, global_batch_size=2, num_replicas=2, progress="lines")).train()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("going on")]
    right = "replicas 1 -> 2, train_steps 4 -> 8, global_batch_size 4 -> 2"
    assert line == f"going on from the checkpoint of step 4, example 16; changed: {right}"


def test_a_resume_that_changes_nothing_says_no_more(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(run_dir=tmp_path, progress="lines")
    Toy(config).train()
    Toy(config).train(2)
    assert "going on from the checkpoint of step 4, example 16\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"seed": 1}, {}, "seed 0 -> 1"),
        ({"optimizer": "adam"}, {}, "adamw -> adam"),
        ({}, {"width": 8}, "width 4 -> 8"),
    ],
)
def test_another_run_is_refused_and_nothing_is_touched_unless_told(
    tmp_path: pathlib.Path, changes: Any, options: Any, said: str
) -> None:
    Wide(settings(run_dir=tmp_path)).train()
    before = tree(tmp_path)
    config = settings(run_dir=tmp_path, train_steps=8, **changes)
    with pytest.raises(ConfigError, match=rf"started with other settings: .*{said}.*--resume_anyway"):
        Wide(config, **options).train()
    assert tree(tmp_path) == before
    trainer = Wide(config.replace(resume_anyway=True), **options)
    trainer.train()
    assert trainer.step == 8
    Wide(config.replace(train_steps=9), **options).train()  # what was told once is the run from then on


def test_an_evaluation_alone_may_have_other_settings_and_leaves_those_of_the_run(tmp_path: pathlib.Path) -> None:
    class Evaluated(Toy):
        def eval_data(self) -> Any:
            return self.train_data()

    Evaluated(settings(run_dir=tmp_path)).train()
    before = (tmp_path / "config.json").read_bytes()
    assert Evaluated(settings(run_dir=tmp_path, seed=5, num_replicas=2)).evaluate()["examples"] == 12
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_run_has_one_id_however_often_it_goes_on(tmp_path: pathlib.Path) -> None:
    from framework.checkpoint import manifest

    for steps in (2, 4):
        Toy(settings(run_dir=tmp_path, train_steps=steps)).train()
    run_id = json.loads((tmp_path / "config.json").read_text())["run_id"]
    assert {manifest.read(store(tmp_path).path(step)).run for step in (2, 4)} == {run_id}
    Toy(settings(run_dir=tmp_path / "other")).train()
    assert json.loads((tmp_path / "other" / "config.json").read_text())["run_id"] != run_id


def test_a_lost_config_is_said_and_its_run_is_not_taken_over(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Toy(settings(run_dir=tmp_path)).train()
    (tmp_path / "config.json").unlink()
    Toy(settings(run_dir=tmp_path, train_steps=8, keep_checkpoints=1, progress="lines")).train()
    assert "step 4, example 16; config.json is missing, so what changed is not known" in capsys.readouterr().out
    assert store(tmp_path).steps() == [4, 8]  # the one of step 4 is not this run's to delete
