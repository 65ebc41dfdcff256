"""Guards: these fail when Keras changes a private name or a behaviour that the adapter for its optimizers relies on."""

from __future__ import annotations

import inspect

import keras
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import KerasOptimizer, keras_local

TFOptimizer = keras_local.TFOptimizer


def test_the_base_with_the_distribution_is_the_one_we_know():
    assert f"{TFOptimizer.__module__}.{TFOptimizer.__qualname__}" == (
        "keras.src.backend.tensorflow.optimizer.TFOptimizer"
    )
    assert keras.optimizers.Optimizer.__mro__[1] is TFOptimizer


@pytest.mark.parametrize(
    "name,parameters",
    [
        ("_all_reduce_sum_gradients", ["self", "grads_and_vars"]),
        ("_backend_update_step", ["self", "grads", "trainable_variables", "learning_rate"]),
        ("_apply_weight_decay", ["self", "variables"]),
        ("_use_weight_decay", ["self", "variable"]),
        ("add_variable_from_reference", ["self", "reference_variable", "name", "initializer"]),
        ("apply", ["self", "grads", "trainable_variables"]),
        ("build", ["self", "variables"]),
    ],
)
def test_methods_overridden_or_used_have_the_arguments_we_know(name, parameters):
    assert list(inspect.signature(getattr(TFOptimizer, name)).parameters) == parameters
    if name in keras_local.OVERRIDDEN:
        assert list(inspect.signature(getattr(keras_local.LocalUpdates, name)).parameters) == parameters
    assert name in (*keras_local.OVERRIDDEN, *keras_local.USED)


def test_every_place_where_keras_talks_to_other_replicas_is_known():
    """Overridden, called only by what is overridden, or of a feature that the adapter refuses."""
    words = ("merge_call", "all_reduce", "extended.update")
    found = {
        name
        for kind in TFOptimizer.__mro__
        if kind.__module__.startswith("keras.")
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and any(word in inspect.getsource(member) for word in words)
    }
    assert found == {
        "_all_reduce_sum_gradients",
        "_apply_weight_decay",
        "_backend_update_step",
        "_distributed_tf_update_step",  # called by _backend_update_step alone
        "_overwrite_model_variables_with_average_value",  # ema_overwrite_frequency; finalize_variable_values
        "_backend_increment_gradient_accumulators",  # gradient_accumulation_steps
    }


def test_attributes_read_or_set_exist_and_mean_what_we_think():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])
    assert optimizer._distribution_strategy is tf.distribute.get_strategy()
    assert [v is w for v, w in zip(optimizer._variables, optimizer.variables, strict=True)] == [True] * 3
    assert optimizer._trainable_variables == [weight]
    iteration = optimizer.iterations
    assert iteration is optimizer._iterations
    assert (iteration.aggregation, iteration._aggregation) == ("only_first_replica", "only_first_replica")
    assert iteration.value is iteration._value
    assert isinstance(iteration._value, tf.Variable)
    assert optimizer.momentums[0].aggregation == "none"


def test_the_order_of_bases_puts_the_local_steps_between_the_users_class_and_keras():
    class Users(keras.optimizers.Nadam):
        pass

    users = Users(0.1)
    KerasOptimizer(users).build([tf.Variable(1.0)], ["w"])
    names = [kind.__name__ for kind in type(users).__mro__]
    assert names[:6] == ["Users", "Users", "Nadam", "Optimizer", "LocalUpdates", "TFOptimizer"]


def test_a_view_is_the_variable_it_was_given():
    w = tf.Variable([1.0, 2.0], name="other")
    view = keras_local.View(w, "layers/0/w")
    assert view.value is w
    assert (view.path, view.name, view.dtype, tuple(view.shape)) == ("layers/0/w", "w", "float32", (2,))
    view.assign([3.0, 4.0])
    assert list(w.numpy()) == [3.0, 4.0]


@pytest.mark.parametrize("name", ["_all_reduce_sum_gradients", "_backend_update_step"])
def test_keras_without_a_private_name_is_refused_and_not_used_wrongly(monkeypatch, name):
    monkeypatch.setattr(keras_local, "OVERRIDDEN", (*keras_local.OVERRIDDEN, name + "_renamed"))
    with pytest.raises(ConfigError, match=f"lacks TFOptimizer.{name}_renamed, .*use Keras 3.15"):
        KerasOptimizer(keras.optimizers.SGD(0.1))
