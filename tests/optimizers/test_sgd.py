"""SGD against tables computed here in float64 NumPy, on 1, 2 and 3 replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import SGD, KerasOptimizer


def sgd_table(initial, gradients, lr, momentum=0.0, nesterov=False):
    """(variables, velocities) after all updates: v <- mu v - lr g; w <- w + v, or w + mu v - lr g (Nesterov)."""
    w = {name: value.astype(np.float64) for name, value in initial.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for of_update in gradients:
        for name, parts in of_update.items():
            g = parts.astype(np.float64).sum(axis=0)
            v[name] = momentum * v[name] - lr * g
            w[name] = w[name] + (momentum * v[name] - lr * g if nesterov else v[name])
    return w, v


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)], ids=["sgd", "mom", "nesterov"])
def test_b39_five_steps_equal_the_table_on_every_copy(train, problem, momentum, nesterov, replicas, cond):
    initial, gradients = problem(replicas)
    expected, velocities = sgd_table(initial, gradients, 0.1, momentum, nesterov)
    result = train(
        lambda: SGD(learning_rate=0.1, momentum=momentum, nesterov=nesterov), initial, gradients, replicas, cond
    )
    assert len(result.variables) == replicas
    for variables, state in zip(result.variables, result.state):
        assert state["iterations"] == 5
        for name in initial:
            np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=1e-6)
            if momentum:
                np.testing.assert_allclose(state[f"momentum/{name}"], velocities[name], rtol=0, atol=1e-6)
    names = {"iterations"} | ({f"momentum/{name}" for name in initial} if momentum else set())
    assert set(result.state[0]) == names


@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, True)], ids=["sgd", "nesterov"])
def test_float64_variables_follow_the_table_to_1e_12(train, problem, momentum, nesterov):
    initial, gradients = problem(2, "float64")
    expected, velocities = sgd_table(initial, gradients, 0.125, momentum, nesterov)  # 0.125 is exact in float32
    result = train(lambda: SGD(learning_rate=0.125, momentum=momentum, nesterov=nesterov), initial, gradients, 2)
    for variables, state in zip(result.variables, result.state):
        for name in initial:
            np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=1e-12)
            if momentum:
                np.testing.assert_allclose(state[f"momentum/{name}"], velocities[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
@pytest.mark.parametrize(
    "make",
    [lambda: SGD(learning_rate=1.0), lambda: KerasOptimizer(keras.optimizers.SGD(1.0))],
    ids=["framework", "keras"],
)
def test_b31_gradients_1_and_2_move_both_copies_by_minus_3(train, make, cond):
    gradients = [{"w": np.array([1.0, 2.0], np.float32)}]
    result = train(make, {"w": np.float32(0.0)}, gradients, 2, cond)
    assert [variables["w"] for variables in result.variables] == [-3.0, -3.0]
    assert [state["iterations"] for state in result.state] == [1, 1]


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
def test_a_variable_without_gradient_and_its_slot_stay_bit_identical(train, problem, cond):
    initial, gradients = problem(2)
    make = lambda: SGD(learning_rate=0.1, momentum=0.9)  # noqa: E731
    before = train(make, initial, gradients[:2], 2, cond)
    without_bias = [gradients[0], gradients[1], *({**g, "dense/bias": None} for g in gradients[2:])]
    after = train(make, initial, without_bias, 2, cond)
    for i in range(2):
        np.testing.assert_array_equal(after.variables[i]["dense/bias"], before.variables[i]["dense/bias"])
        np.testing.assert_array_equal(after.state[i]["momentum/dense/bias"], before.state[i]["momentum/dense/bias"])
        assert np.all(after.variables[i]["dense/kernel"] != before.variables[i]["dense/kernel"])
        assert after.state[i]["iterations"] == 5


def test_an_update_skipped_by_cond_changes_nothing_and_is_not_counted(train, problem):
    initial, gradients = problem(2)
    gradients = [{name: np.full_like(value, np.nan) for name, value in gradients[0].items()}]
    result = train(lambda: SGD(learning_rate=0.1, momentum=0.9), initial, gradients, 2, cond=True)
    for variables, state in zip(result.variables, result.state):
        assert state.pop("iterations") == 0
        assert all(np.all(slot == 0.0) for slot in state.values())
        assert all(np.array_equal(variables[name], initial[name]) for name in initial)


@pytest.mark.parametrize("device", [None, "CPU:1"], ids=["no_strategy", "one_device"])
def test_plain_variables_need_no_mirrored_strategy(device):
    strategy = tf.distribute.OneDeviceStrategy(device) if device else tf.distribute.get_strategy()
    with strategy.scope():
        w = tf.Variable([1.0, 2.0])
        optimizer = SGD(learning_rate=0.5, momentum=0.5)
        optimizer.build([w], ["w"])
    for _ in range(2):
        strategy.run(lambda: optimizer.update([tf.constant([1.0, -1.0])]))
    # v: -0.5, then 0.5 * -0.5 - 0.5 = -0.75; w: 1 - 0.5 - 0.75 = -0.25, and 2 + 1.25.
    np.testing.assert_array_equal(w.numpy(), [-0.25, 3.25])
    np.testing.assert_array_equal(optimizer.state()["momentum/w"].numpy(), [-0.75, 0.75])


def test_the_constraint_of_a_keras_variable_holds_after_the_update(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_constraint="non_neg", kernel_initializer="ones")
        layer.build((None, 2))
        optimizer = SGD(learning_rate=1.0)
        optimizer.build(layer.trainable_variables, ["kernel"])
    step = tf.function(lambda: strategy.run(lambda: optimizer.update([tf.constant([[0.25], [3.0]])])))
    step()
    for copy in strategy.experimental_local_results(layer.kernel.value):
        np.testing.assert_array_equal(copy.numpy(), [[0.75], [0.0]])


def test_slots_are_zero_not_trainable_mirrored_and_of_the_variables_dtype(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        variables = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([4], tf.float64))]
        optimizer = SGD(learning_rate=0.1, momentum=0.9)
        optimizer.build(variables, ["layers[0]/w", "b"])
    state = optimizer.state()
    assert set(state) == {"iterations", "momentum/layers[0]/w", "momentum/b"}
    assert state["iterations"].dtype == tf.int64
    for slot, variable in ((state["momentum/layers[0]/w"], variables[0]), (state["momentum/b"], variables[1])):
        assert (slot.shape, slot.dtype, slot.trainable) == (variable.shape, variable.dtype, False)
        assert [float(tf.reduce_sum(copy)) for copy in strategy.experimental_local_results(slot)] == [0.0, 0.0]


def test_update_outside_the_replica_context_of_its_strategy_is_refused(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(1.0)
        optimizer = SGD(learning_rate=0.1)
        with pytest.raises(RuntimeError, match="before build"):
            optimizer.update([tf.constant(1.0)])
        optimizer.build([w], ["w"])
        with pytest.raises(RuntimeError, match="outside the replica context of MirroredStrategy"):
            optimizer.update([tf.constant(1.0)])
    # Outside of the scope the handle of a mirrored variable is the first copy's: the copies would differ.
    with pytest.raises(RuntimeError, match="outside the replica context of MirroredStrategy"):
        optimizer.update([tf.constant(1.0)])
    assert [copy.numpy() for copy in strategy.experimental_local_results(w)] == [1.0, 1.0]
    with pytest.raises(ValueError, match="2 gradients for 1 variables"):
        strategy.run(lambda: optimizer.update([tf.constant(1.0)] * 2))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1'"),
        ({"learning_rate": 0.1, "momentum": 1.5}, "momentum=1.5"),
        ({"learning_rate": 0.1, "nesterov": True}, "nesterov=True with momentum=0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SGD(**arguments)


@pytest.mark.parametrize(
    "variables,names,message",
    [
        ([tf.float32, tf.float32], ["a", "a"], "repeat"),
        ([tf.float32, tf.float32], ["a"], "2 variables but 1 names"),
        ([tf.bfloat16], ["a"], "variable 'a' is bfloat16"),
    ],
)
def test_variables_it_cannot_hold_are_refused(variables, names, message):
    optimizer = SGD(learning_rate=0.1)
    with pytest.raises(ConfigError, match=message):
        optimizer.build([tf.Variable(tf.zeros([2], dtype)) for dtype in variables], names)
