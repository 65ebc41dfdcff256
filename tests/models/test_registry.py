"""Tasks by name: looked up late, registered once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from framework import Trainer
from framework.errors import ConfigError
from models import registry
from models.registry import Tasks, register

TASKS = [
    "cifar10",
    "dcgan",
    "digits",
    "imagenet",
    "language",
    "masked_language",
    "ranking",
    "simclr",
    "synthetic",
    "vit",
]


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield


def task(where: str = "lab.first", name: str = "Blobs") -> Any:
    return type(name, (Trainer,), {"__module__": where, "__qualname__": name})


def test_a_registered_task_is_found_by_its_name() -> None:
    blobs = task()
    assert register("blobs")(blobs) is blobs
    assert Tasks()["blobs"] is blobs
    assert "blobs" in Tasks()


def test_the_package_brings_tasks_and_they_are_trainers() -> None:
    assert list(Tasks()) == TASKS
    assert len(Tasks()) == len(TASKS)
    for kind in Tasks().values():
        assert issubclass(kind, Trainer)
        assert kind.recipe


def test_names_come_in_order_with_the_registered_ones() -> None:
    register("a_first")(task())
    register("zebra")(task())
    every = ["a_first", *TASKS, "zebra"]
    assert list(Tasks()) == every
    assert len(Tasks()) == len(every)


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Tasks()["nope"]
    assert "nope" not in Tasks()
    assert Tasks().get("nope") is None


def test_b29_two_tasks_under_one_name_and_both_places_are_named() -> None:
    first = register("blobs")(task("lab.first", "Blobs"))
    with pytest.raises(ConfigError, match="'blobs'") as caught:
        register("blobs")(task("lab.second", "Other"))
    assert "lab.first.Blobs" in str(caught.value)
    assert "lab.second.Other" in str(caught.value)
    assert "rename" in str(caught.value)
    assert Tasks()["blobs"] is first


def test_b29_the_name_of_a_task_of_the_package() -> None:
    with pytest.raises(ConfigError) as caught:
        register("digits")(task("lab.first", "Mine"))
    assert "lab.first.Mine" in str(caught.value)
    assert "models.digits_task.Digits" in str(caught.value)


def test_one_task_may_be_registered_twice_and_under_two_names() -> None:
    blobs = task()
    register("blobs")(register("blobs")(blobs))
    register("spots")(blobs)
    assert Tasks()["blobs"] is Tasks()["spots"] is blobs
    digits = Tasks()["digits"]
    assert register("digits")(digits) is digits


def test_a_script_or_notebook_cell_that_is_run_again_replaces_its_task() -> None:
    register("blobs")(task())
    again = register("blobs")(task())
    assert Tasks()["blobs"] is again


def test_every_option_of_a_task_of_the_package_is_explained_and_has_the_right_type() -> None:
    for name in TASKS:
        options = Tasks()[name].Options
        assert options is not None
        for field in dataclasses.fields(options):
            text = field.metadata["help"]
            assert text[0].isupper() or text[0].isdigit(), (name, field.name)
            assert text.endswith("."), (name, field.name)
