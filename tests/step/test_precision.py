"""Half precision: computed in half, kept in float32, with a loss scale that falls, grows and stays at 1 or above."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, Trainer
from framework.step.state import LossScale
from input_pipelines import from_arrays
from tests.helpers import Toy, assert_copies_equal, column, copies, mirrored, settings

X = np.random.RandomState(0).randn(40, 6).astype(np.float32)
Y = np.random.RandomState(1).randint(0, 3, 40)


class Net(Trainer):
    dtypes: Any = ()

    def build_model(self) -> Any:
        hidden = keras.layers.Dense(16, activation="tanh")
        return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3)])

    def train_data(self) -> Any:
        return from_arrays((X, Y), shuffle=False)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        x, y = batch
        hidden = model.layers[0](x)
        logits = model.layers[1](hidden)
        self.dtypes = (hidden.dtype.name, logits.dtype.name, {v.dtype for v in model.variables})
        return LossOutput(loss=tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.cast(logits, tf.float32)))


@functools.cache
def train(precision: str, replicas: int, folder: pathlib.Path, **changes: Any) -> tuple[Net, list[float]]:
    run_dir = folder / f"{precision}-{replicas}-{len(changes)}"
    usual = {"num_replicas": replicas, "global_batch_size": 8, "train_steps": 5, "optimizer": "sgd"}
    trainer = Net(
        settings(**{**usual, "learning_rate": 0.1, "precision": precision, "run_dir": str(run_dir), **changes})
    )
    trainer.train()
    assert_copies_equal(trainer)
    return trainer, column(run_dir, "loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(("precision", "half"), [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_layers_compute_in_half_and_everything_kept_is_float32(precision: str, half: str, folder: Any) -> None:
    trainer, _ = train(precision, 2, folder)
    assert trainer.dtypes == (half, half, {"float32"})
    for name, variable in trainer.state().items():
        assert variable.dtype in (tf.float32, tf.int64), name


@pytest.mark.parametrize(("precision", "unit"), [("mixed_float16", 2.0**-11), ("mixed_bfloat16", 2.0**-8)])
def test_half_precision_is_close_to_float32(precision: str, unit: float, folder: Any) -> None:
    """A loss of about 1 from a few roundings of relative size ``unit``."""
    mine, right = train(precision, 2, folder)[1], train("float32", 2, folder)[1]
    np.testing.assert_allclose(mine, right, rtol=8 * unit)
    assert mine != right
    assert right[-1] < right[0]


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_the_number_of_replicas_changes_roundings_only(precision: str, folder: Any) -> None:
    (two, losses), (one, right) = train(precision, 2, folder), train(precision, 1, folder)
    unit = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}[precision]
    np.testing.assert_allclose(losses, right, rtol=4 * unit)
    for name, value in copies(one)[0].items():
        np.testing.assert_allclose(copies(two)[0][name], value, rtol=8 * unit, atol=8 * unit * 0.1, err_msg=name)


def test_a_fixed_scale_that_is_a_power_of_two_changes_nothing_that_fits(folder: Any) -> None:
    scaled = train("mixed_float16", 2, folder, loss_scale=2.0**10)[1]
    np.testing.assert_allclose(scaled, train("mixed_float16", 2, folder)[1], rtol=2.0**-11)


class Plain(Toy):
    """A ``tf.Module`` that computes in the trainer's dtype."""

    rate = 0.5

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        half = self.compute_dtype
        return LossOutput(loss=tf.cast(model.w, half) * tf.cast(batch, half))


@pytest.mark.parametrize(
    ("precision", "rounded"),
    # 1 + 2**-9 is no float16's neighbour below 1 + 2**-10's half; bfloat16 has 1 and 1 + 2**-7 only.
    [("float32", 1 + 2.0**-9), ("mixed_float16", 1 + 2.0**-9), ("mixed_bfloat16", 1.0)],
)
def test_a_module_computes_in_the_dtype_it_is_told(precision: str, rounded: float) -> None:
    trainer = Plain(settings(num_replicas=2, precision=precision, train_steps=1))
    trainer.xs = np.full(4, 1 + 2.0**-9, np.float32)
    figures = trainer.train()
    assert figures["loss"] == rounded
    # The gradient is the rounded x; the weight itself stays float32.
    assert [c["model/w"] for c in copies(trainer)] == [np.float32(1 - 0.5 * rounded)] * 2


def test_gradients_below_float16_survive_through_the_scale() -> None:
    """2**-26 is 0 in float16; times 2**15 it is not."""

    class Tiny(Plain):
        rate = 1.0
        start = 0.0

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            product = tf.cast(model.w, tf.float16) * tf.cast(batch, tf.float16)
            return LossOutput(loss=tf.cast(product, tf.float32) * 2.0**-20)

    trainer = Tiny(settings(num_replicas=2, precision="mixed_float16", train_steps=1))
    trainer.xs = np.full(4, 2.0**-6, np.float32)
    trainer.train()
    assert copies(trainer)[0]["model/w"] == -(2.0**-26)


@pytest.mark.parametrize("fails", [False, True])
def test_the_keras_policy_is_put_back_after_the_model_was_built(fails: bool) -> None:
    class Failing(Net):
        def build_model(self) -> Any:
            assert keras.config.dtype_policy().name == "mixed_float16"
            if fails:
                raise RuntimeError("no model")
            return super().build_model()

    trainer = Failing(settings(precision="mixed_float16"))
    if fails:
        with pytest.raises(RuntimeError, match="no model"):
            trainer.build()
    else:
        trainer.build()
    assert keras.config.dtype_policy().name == "float32"


def test_a_scale_for_another_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_scale=8\.0 with precision=mixed_bfloat16"):
        settings(loss_scale=8.0, precision="mixed_bfloat16")


# --- LossScale -------------------------------------------------------------------------------------------------------


def walk(steps: str, replicas: int = 2, **options: Any) -> list[float]:
    """The scale after each step: ``g`` good, ``o`` overflow, ``s`` skipped for another reason."""
    strategy = mirrored(replicas)
    with strategy.scope():
        scale = LossScale(**{"initial": 8.0, "dynamic": True, "growth_steps": 3, **options})

    @tf.function
    def step(kind: tf.Tensor) -> Any:
        def replica() -> tf.Tensor:
            def good() -> tf.Tensor:
                scale.good_step()
                return scale.value()

            def bad() -> tf.Tensor:
                scale.bad_step(tf.equal(kind, 1))
                return scale.value()

            return tf.cond(tf.equal(kind, 0), good, bad)  # where the framework has them

        return strategy.experimental_local_results(strategy.run(replica))

    values = [[float(v) for v in step(tf.constant("gos".index(k)))] for k in steps]
    assert all(v == [v[0]] * replicas for v in values)
    return [v[0] for v in values]


def test_it_doubles_after_enough_good_steps_in_a_row() -> None:
    assert walk("gggggg") == [8, 8, 16, 16, 16, 32]


def test_an_overflow_halves_it_and_starts_the_count_again() -> None:
    assert walk("ggogggo") == [8, 8, 4, 4, 4, 8, 4]


def test_a_bad_step_that_is_not_its_fault_leaves_it_but_starts_the_count_again() -> None:
    assert walk("ggsggg") == [8, 8, 8, 8, 8, 16]


def test_it_never_falls_below_1() -> None:
    assert walk("ooooo") == [4, 2, 1, 1, 1]


def test_it_does_not_grow_without_bound() -> None:
    assert walk("ggg", initial=2.0**31) == [2.0**31] * 3


def test_a_fixed_one_stays() -> None:
    assert walk("gggooos", dynamic=False) == [8.0] * 7


@pytest.mark.parametrize(("initial", "dynamic", "can"), [(2.0, True, True), (1.0, True, False), (8.0, False, False)])
def test_only_a_dynamic_one_above_1_can_fall(initial: float, dynamic: bool, can: bool) -> None:
    assert bool(LossScale(initial, dynamic=dynamic).can_fall()) is can
