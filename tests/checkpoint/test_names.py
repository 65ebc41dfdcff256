"""Names of variables: by path, the same for the same model wherever and whenever it is built."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, optimizers
from framework.checkpoint.names import fresh_keras_names, variable_names
from tests.helpers import Toy, settings


def test_the_private_name_of_keras_that_is_relied_on_is_there_and_counts_layer_names() -> None:
    from keras.src.backend.common import global_state

    layer = keras.layers.Dense(1)
    uids = global_state.get_global_attribute("object_name_uids")
    assert isinstance(uids, collections.defaultdict) and uids.default_factory is int
    stem, _, number = layer.name.partition("_")
    assert (stem, int(number or 0)) == ("dense", uids["dense"] - 1)
    before = dict(uids)
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        assert keras.layers.Dense(1).name == "dense"
    finally:
        global_state.set_global_attribute("object_name_uids", uids)
    assert dict(uids) == before


def test_names_count_from_the_start_inside_and_go_on_outside() -> None:
    keras.layers.Dense(1)
    outside = keras.layers.Dense(1).name
    with fresh_keras_names():
        assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    after = keras.layers.Dense(1).name
    number = int(outside.partition("_")[2])
    assert after == f"dense_{number + 1}"


def test_names_are_put_back_after_an_error() -> None:
    keras.layers.Dense(1)
    number = int(keras.layers.Dense(1).name.partition("_")[2])
    with pytest.raises(ValueError), fresh_keras_names():
        raise ValueError
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"


class Net(Toy):
    xs = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)

    def build_model(self) -> Any:
        layers = [keras.layers.Dense(3), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((2,)), *layers])

    def build_optimizer(self) -> Any:
        return optimizers.AdamW(learning_rate=0.1, weight_decay=0.1)

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        return LossOutput(loss=model(batch)[:, 0])


def test_two_models_built_in_one_process_have_the_same_names() -> None:
    keras.layers.Dense(1)
    first, second = Net(settings()), Net(settings(num_replicas=2))
    assert list(first.state()) == list(second.state())
    assert "model/sequential/dense_1/kernel" in first.state()
    assert "optimizer/m/sequential/layer_normalization/gamma" in first.state()


def test_a_lazily_built_model_has_the_same_names_each_time() -> None:
    class Sub(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = keras.layers.Dense(3), keras.layers.Dense(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.b(self.a(x))

    class LazyNet(Net):
        def build_model(self) -> Any:
            return Sub()

    names = [list(LazyNet(settings(num_replicas=n)).state()) for n in (1, 2, 1)]
    assert names[0] == names[1] == names[2]
    assert {"model/sub/dense/kernel", "model/sub/dense_1/bias"} <= set(names[0])


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.SGD(0.1, momentum=0.9)])
def test_slots_of_keras_optimizers_have_the_same_names_each_time(make: Any) -> None:
    class KerasNet(Net):
        def build_optimizer(self) -> Any:
            return make()

    names = [list(KerasNet(settings(num_replicas=n)).state()) for n in (1, 2)]
    assert names[0] == names[1]
    assert "optimizer/iterations" in names[0]


class Inner(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(1.0)


def test_variables_of_a_module_are_named_by_their_path() -> None:
    class Outer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = tf.Variable(1.0)
            self.layers = [Inner(), Inner()]
            self.by_name = {"y": Inner(), "x": tf.Variable(2.0)}
            self.pair = (tf.Variable(3.0), "no variable")
            self.shared = self.layers[0]
            self.number = 3

    model = Outer()
    names = variable_names(model)
    assert list(names) == ["b", "by_name/x", "by_name/y/w", "layers/0/w", "layers/1/w", "pair/0"]
    assert names["layers/0/w"] is model.layers[0].w
    assert {v.ref() for v in names.values()} == {v.ref() for v in model.variables}


def test_a_module_may_hold_keras_layers_and_itself() -> None:
    class Mixed(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            with fresh_keras_names():
                self.dense = keras.layers.Dense(1)
            self.dense.build((None, 2))
            self.me = self
            self.w = tf.Variable(1.0)

    assert list(variable_names(Mixed())) == ["dense/dense/kernel", "dense/dense/bias", "w"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_module_is_trained_and_saved_under_its_names(replicas: int) -> None:
    class Nested(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [Inner(), Inner()]
            self.frozen = tf.Variable(5.0, trainable=False)

    class Task(Toy):
        xs, rate = np.ones(4, np.float32), 0.5

        def build_model(self) -> Any:
            return Nested()

        def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
            return LossOutput(loss=(model.parts[0].w - 2 * model.parts[1].w) * batch + 0 * model.frozen)

    trainer = Task(settings(train_steps=2, num_replicas=replicas))
    trainer.train()
    values = {n: float(v.numpy()) for n, v in trainer.state().items()}
    assert values == {"model/frozen": 5.0, "model/parts/0/w": 0.0, "model/parts/1/w": 3.0, "optimizer/iterations": 2.0}


def test_two_variables_of_one_name_are_refused() -> None:
    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twins")
            self.a, self.b = keras.layers.Dense(1, name="same"), keras.layers.Dense(1, name="same")
            self.a.build((None, 2))
            self.b.build((None, 2))

    with pytest.raises(ConfigError, match=r"two variables of the model are named 'same/kernel'; give their layers"):
        variable_names(Twins())


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"build_model returned dict but it must return a keras\.Model"):
        variable_names({"w": tf.Variable(1.0)})
