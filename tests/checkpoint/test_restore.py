"""A start from other weights: what the patterns choose is loaded, all else is named, and a misfit is refused."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, RunConfig, Trainer
from framework.checkpoint.restore import assign_part
from input_pipelines import from_arrays
from tests.helpers import assert_copies_equal, mirrored, saved, settings, tree


def variables(**shapes: int) -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros([size])) for name, size in shapes.items()}


def arrays(**shapes: int) -> dict[str, np.ndarray]:
    return {name: np.full(size, 7, np.float32) for name, size in shapes.items()}


def test_what_the_patterns_leave_is_loaded_and_the_rest_is_named() -> None:
    mine = variables(body_a=2, body_b=3, head=4)
    loaded = assign_part(mine, arrays(body_a=2, body_b=3, head=9, extra_head=1), "here", exclude=["head"])
    assert (loaded.loaded, loaded.kept, loaded.unused) == (["body_a", "body_b"], ["head"], ["extra_head", "head"])
    assert {n: float(v.numpy().max()) for n, v in mine.items()} == {"body_a": 7.0, "body_b": 7.0, "head": 0.0}
    assert loaded.describe("PATH", 9) == [
        "initial weights: 2 variables from PATH (step 9): body_a, body_b",
        "initial weights: 1 kept as they were made: head",
        "initial weights: 2 of that checkpoint left out: extra_head, head",
    ]


def test_include_and_exclude_together() -> None:
    mine = variables(body_a=2, body_norm=3, head=4)
    loaded = assign_part(mine, arrays(body_a=2, other=1), "here", include=["^body"], exclude=["norm"])
    assert (loaded.loaded, loaded.kept, loaded.unused) == (["body_a"], ["body_norm", "head"], ["other"])


@pytest.mark.parametrize(
    ("theirs", "options", "message"),
    [
        ({"a": 2, "b": 3}, {}, "missing in the checkpoint: c"),
        ({"a": 2, "b": 3, "c": 1, "d": 1}, {}, "not in this model: d"),
        ({"a": 2, "b": 4, "c": 1}, {}, r"b: shape \(4,\) in the checkpoint, \(3,\) in this model"),
        ({"a": 2}, {"exclude": ["b", "typo"]}, "init_exclude has the pattern 'typo' but no variable"),
        ({"a": 2}, {"include": ["nothing"]}, "init_include has the pattern 'nothing' but no variable"),
        ({"a": 2, "d": 1}, {"exclude": ["."]}, "leave no variable"),
    ],
)
def test_a_misfit_is_refused_and_nothing_is_written(theirs: Any, options: Any, message: str) -> None:
    mine = variables(a=2, b=3, c=1)
    with pytest.raises(ConfigError, match=message):
        assign_part(mine, arrays(**theirs), "here", **options)
    assert all(not np.any(v.numpy()) for v in mine.values())


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_copy_gets_the_value(replicas: int) -> None:
    strategy = mirrored(replicas)
    with strategy.scope():
        mine = variables(a=2, b=3)
    assign_part(mine, arrays(a=2), "here", exclude=["b"])
    for copy in strategy.experimental_local_results(mine["a"]):
        np.testing.assert_array_equal(copy.numpy(), [7, 7])


# --- through the trainer ---------------------------------------------------------------------------------------------

X = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)


class Net(Trainer):
    """A backbone of two layers, the second with dropout, and a head of ``classes`` outputs."""

    classes, rate = 4, 0.1

    def build_model(self) -> keras.Model:
        body = [keras.layers.Dense(5, activation="tanh", name="body"), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((3,)), *body, keras.layers.Dense(self.classes, name="head")])

    def train_data(self) -> Any:
        return from_arrays(X)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.reduce_sum(model(batch, training=training) ** 2, 1))


class Fine(Net):
    """The same backbone under a new head."""

    classes = 2


def config(run_dir: pathlib.Path, **changes: Any) -> RunConfig:
    return settings(**{"run_dir": run_dir, "optimizer": "adam", "learning_rate": 0.1, **changes})


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("pretrained")
    Net(config(folder, checkpoint_every=2)).train()
    return folder


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_backbone_is_loaded_and_a_new_head_is_kept(
    pretrained: pathlib.Path, tmp_path: pathlib.Path, replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = {n: v.numpy() for n, v in Fine(config(tmp_path / "fresh")).state().items()}
    before = tree(pretrained)
    trainer = Fine(
        config(
            tmp_path / "fine",
            init_from=str(pretrained),
            init_exclude="head",
            num_replicas=replicas,
            learning_rate=0.0,
            ema_decay=0.5,
            progress="lines",
        )
    )
    trainer.train(1)
    out = capsys.readouterr().out
    assert f"initial weights: 2 variables from {pretrained}/checkpoints/step-00000004 (step 4): " in out
    assert "initial weights: 3 kept as they were made: " in out  # the head and the generator of the dropout
    assert "initial weights: 3 of that checkpoint left out: " in out
    right, state = saved(pretrained, 4), {n: v.numpy() for n, v in trainer.state().items()}
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(state[f"model/sequential/body/{part}"], right[f"model/sequential/body/{part}"])
        np.testing.assert_array_equal(state[f"model/sequential/head/{part}"], fresh[f"model/sequential/head/{part}"])
    # The average starts from the loaded weights, the optimizer from nothing, the run from step 0.
    np.testing.assert_array_equal(state["ema/sequential/body/kernel"], state["model/sequential/body/kernel"])
    assert (state["optimizer/iterations"], trainer.step, trainer.examples_seen) == (1, 1, 4)
    assert_copies_equal(trainer)
    assert tree(pretrained) == before


def test_another_head_without_a_pattern_is_refused(pretrained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"init_from=.*--init_exclude") as error:
        Fine(config(tmp_path / "run", init_from=str(pretrained))).train()
    assert "sequential/head/kernel: shape (5, 4) in the checkpoint, (5, 2) in this model" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_named_itself_is_the_one_that_is_read(
    pretrained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = pretrained / "checkpoints" / "step-00000002"
    trainer = Net(config(tmp_path, init_from=str(path), learning_rate=0.0))
    trainer.train(1)
    name = "model/sequential/head/kernel"
    np.testing.assert_array_equal(trainer.state()[name].numpy(), saved(pretrained, 2)[name])


def test_a_resume_does_not_read_it_again_and_says_so(
    pretrained: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"init_from": str(pretrained), "progress": "lines"}
    Net(config(tmp_path, train_steps=2, **changes)).train()
    mine = saved(tmp_path, 2)["model/sequential/head/kernel"]
    capsys.readouterr()
    again = Net(config(tmp_path, train_steps=4, learning_rate=0.0, **changes))
    again.train()
    assert "is not read: the run has weights of its own" in capsys.readouterr().out
    np.testing.assert_array_equal(again.state()["model/sequential/head/kernel"].numpy(), mine)


@pytest.mark.parametrize("what", ["missing", "empty", "damaged"])
def test_a_path_without_a_whole_checkpoint_is_refused(
    pretrained: pathlib.Path, tmp_path: pathlib.Path, what: str
) -> None:
    path = tmp_path / "other"
    if what != "missing":
        path.mkdir()
    if what == "damaged":
        (path / "step-00000001").mkdir()
    message = {
        "missing": "is not a folder",
        "empty": "has no checkpoint",
        "damaged": "is whole: step-00000001: manifes",
    }
    with pytest.raises(ConfigError, match=message[what]):
        Net(config(tmp_path / "run", init_from=str(path))).train()
