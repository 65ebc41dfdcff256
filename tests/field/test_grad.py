"""Field cases GRAD: gradients that are missing, sparse, clipped or accumulated."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Max, Min, RunConfig, Sum, Trainer, optimizers
from input_pipelines import from_arrays
from tests.helpers import Toy, assert_copies_equal, copies, settings

X = np.random.RandomState(0).randn(24, 3).astype(np.float32)


class TwoHeads(Trainer):
    """The loss uses one of two heads."""

    def build_model(self) -> Any:
        x = keras.Input((3,))
        hidden = keras.layers.Dense(4, name="trunk")(x)
        return keras.Model(x, [keras.layers.Dense(1, name=n)(hidden) for n in ("used", "unused")])

    def train_data(self) -> Any:
        return from_arrays(X)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.square(model(batch)[0])[:, 0])


@pytest.mark.parametrize("micros", [1, 2])
def test_c029_a_head_without_a_part_in_the_loss_is_left_alone_and_named_once(micros: int, capsys: Any) -> None:
    config = settings(
        num_replicas=2,
        accumulate_steps=micros,
        optimizer="adamw",
        weight_decay=0.1,
        learning_rate=0.1,
        steps_per_loop=1,
    )
    trainer = TwoHeads(config)
    before = copies(trainer)[0]
    trainer.train()
    assert_copies_equal(trainer)
    after = copies(trainer)[0]
    for name, value in after.items():
        if "unused" in name:
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        elif "kernel" in name:
            assert not np.array_equal(value, before[name]), name
    assert sum("unused" in name for name in after) == 6  # two weights, each with two moments
    warnings = [line for line in capsys.readouterr().out.splitlines() if "does not depend" in line]
    assert warnings == ["warning: the loss does not depend on unused/kernel, unused/bias; left unchanged"]


class Branches(Trainer):
    """One of two weights takes part, as a flag in the data says: loss a x or b x."""

    def build_model(self) -> Any:
        model = tf.Module()
        model.a, model.b = tf.Variable(10.0), tf.Variable(20.0)
        return model

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=1.0)

    def train_data(self) -> Any:
        return from_arrays((np.float32([1, 2, 4, 8]), self.flags), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, flag = batch
        return LossOutput(loss=tf.cond(tf.reduce_any(flag), lambda: model.a * x, lambda: model.b * x))


@pytest.mark.parametrize(
    ("replicas", "micros", "flags"),
    [
        (2, 1, [True, True, False, False]),  # replica 0 takes a, replica 1 takes b
        (1, 2, [True, True, False, False]),  # micro-batch 1 takes a, micro-batch 2 takes b
        (2, 2, [True, True, False, False]),
        (2, 2, [True, False, True, False]),
    ],
)
def test_c030_both_branches_get_the_gradient_of_the_whole_batch(replicas: int, micros: int, flags: list[bool]) -> None:
    trainer = Branches(settings(num_replicas=replicas, accumulate_steps=micros, train_steps=1))
    trainer.flags = np.array(flags)
    trainer.train()
    assert_copies_equal(trainer)
    x = np.float32([1, 2, 4, 8])
    part = x[np.array(flags)].sum()
    state = copies(trainer)[0]
    assert (state["model/a"], state["model/b"]) == (10 - part / 4, 20 - (15 - part) / 4)


class Lookup(Trainer):
    """Embedding 5 x 2; replica 0 looks up rows 0 and 1, replica 1 rows 1 and 4; a look-up's gradient is 1."""

    def build_model(self) -> Any:
        table = keras.layers.Embedding(5, 2, embeddings_initializer="zeros", name="table")
        return keras.Sequential([keras.Input((), dtype="int32"), table])

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=1.0)

    def train_data(self) -> Any:
        return from_arrays(np.int32([0, 1, 1, 4]), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=4.0 * tf.reduce_sum(model(batch), -1))  # the mean over 4 examples takes the 4 out again


@pytest.mark.parametrize("sparse", ["dense", "sparse", "auto"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_c031_rows_looked_up_by_two_replicas_get_both_gradients(replicas: int, sparse: str) -> None:
    trainer = Lookup(settings(num_replicas=replicas, sparse_gradients=sparse, train_steps=1))
    trainer.train()
    for one in copies(trainer):
        np.testing.assert_array_equal(
            one["model/sequential/table/embeddings"], -np.float32([[1, 1], [2, 2], [0, 0], [0, 0], [1, 1]])
        )


class Vector(Trainer):
    """Loss <w, x>: the gradient of w is the mean row; ``parts`` cuts w into variables."""

    xs: Any
    parts = (2,)

    def build_model(self) -> Any:
        model = tf.Module()
        model.w = [tf.Variable(tf.zeros([n])) for n in self.parts]
        return model

    def build_optimizer(self) -> Any:
        return optimizers.SGD(learning_rate=1.0)

    def train_data(self) -> Any:
        return from_arrays(np.float32(self.xs), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=tf.linalg.matvec(batch, tf.concat(model.w, 0)))


def applied(xs: list[list[float]], parts: tuple[int, ...], replicas: int = 2, **changes: Any) -> list[float]:
    """The gradient that was applied."""
    trainer = Vector(settings(num_replicas=replicas, global_batch_size=len(xs), train_steps=1, **changes))
    trainer.xs, trainer.parts = xs, parts
    trainer.train()
    assert_copies_equal(trainer)
    state = copies(trainer)[0]
    return [-float(v) for i in range(len(parts)) for v in state[f"model/w/{i}"]]


@pytest.mark.parametrize("option", ["clip_global_norm", "clip_norm", "clip_value"])
def test_c033_clipping_acts_on_the_global_gradient_not_on_each_replicas(option: str) -> None:
    # Means over two examples: of 12 and -8 it is 2, below the limit; each alone is above.
    assert applied([[12.0], [-8.0]], (1,), **{option: 3.0}) == [2.0]


@pytest.mark.parametrize("option", ["clip_global_norm", "clip_norm"])
def test_c033_two_replicas_with_different_directions(option: str) -> None:
    # (4, 3) of norm 5 becomes (2, 1.5); clipped on each replica it would be (2.5, 2.5).
    assert applied([[8.0, 0.0], [0.0, 6.0]], (2,), **{option: 2.5}) == pytest.approx([2.0, 1.5], rel=1e-6)


def test_b32_the_norm_of_the_update_is_the_limit() -> None:
    got = applied([[20.0, 0.0], [0.0, 20.0]], (2,), clip_global_norm=1.0)
    assert np.linalg.norm(got) == pytest.approx(1.0, rel=1e-6)
    assert got[0] == got[1]


def test_c034_one_norm_over_all_variables_or_one_for_each() -> None:
    xs = [[6.0, 0.0], [0.0, 8.0]]
    assert applied(xs, (1, 1), clip_global_norm=1.0) == pytest.approx([0.6, 0.8], rel=1e-6)
    assert applied(xs, (1, 1), clip_norm=1.0) == pytest.approx([1.0, 1.0], rel=1e-6)


def test_c034_the_help_tells_them_apart_and_both_at_once_are_refused() -> None:
    helps = {n: RunConfig.__dataclass_fields__[n].metadata["help"] for n in ("clip_global_norm", "clip_norm")}
    assert "all gradients together" in helps["clip_global_norm"] and "each variable" in helps["clip_norm"]
    with pytest.raises(ConfigError, match=r"clip_global_norm=1\.0 with clip_norm=2\.0"):
        RunConfig(clip_global_norm=1.0, clip_norm=2.0)


def test_c035_two_micro_batches_on_two_replicas_equal_one_step_on_their_examples() -> None:
    def state(replicas: int, micros: int) -> dict[str, np.ndarray]:
        trainer = TwoHeads(
            settings(
                num_replicas=replicas, accumulate_steps=micros, global_batch_size=8, train_steps=1, optimizer="sgd"
            )
        )
        trainer.train()
        assert_copies_equal(trainer)
        return copies(trainer)[0]

    mine, right = state(2, 2), state(1, 1)
    for name, value in right.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


class Window(Toy):
    """Shows the range of every weight, slot and counter over the micro-batches of a step."""

    xs = np.float32([1, 2, 3, 4, 5, 6, 7, 8])
    keras = False

    def build_optimizer(self) -> Any:
        if self.keras:
            return keras.optimizers.AdamW(learning_rate=0.1, weight_decay=0.1)
        return optimizers.AdamW(learning_rate=0.1, weight_decay=0.1)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        figures: dict[str, Any] = {"micros": Sum(tf.ones([]))}
        for name, variable in self.state().items():
            value = tf.cast(variable.read_value(), tf.float64)
            figures[f"low {name}"], figures[f"high {name}"] = Min(value), Max(value)
        return LossOutput(loss=model.w * batch, metrics=figures)


@pytest.mark.parametrize("own", [True, False])
def test_c036_c037_nothing_moves_until_the_last_micro_batch_and_updates_are_counted(own: bool) -> None:
    """8 examples as 4 micro-batches on each of 2 replicas; three steps, the last two with slots that are not 0."""
    trainer = Window(settings(num_replicas=2, accumulate_steps=4, global_batch_size=8, train_steps=3))
    trainer.keras = not own
    for step in range(1, 4):
        before = copies(trainer)[0]
        figures = trainer.train(1)
        assert figures["micros"] == 2 * 4
        for name, value in before.items():
            assert figures[f"low {name}"] == figures[f"high {name}"] == value, name
        assert_copies_equal(trainer)
        counters = {n: v for n, v in copies(trainer)[0].items() if n.rpartition("/")[2] in ("iterations", "iteration")}
        assert counters and all(v == step for v in counters.values())
