"""What all own optimizers share: rules by name, sparse gradients, and a second build when layers are unfrozen."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import LAMB, LARS, SGD, Adafactor, Adam, AdamW, KerasOptimizer, Lion, Muon

MAKERS = {
    "sgd": lambda **rules: SGD(learning_rate=0.1, **rules),
    "momentum": lambda **rules: SGD(learning_rate=0.1, momentum=0.9, **rules),
    "adam": lambda **rules: Adam(learning_rate=0.1, **rules),
    "adamw": lambda **rules: AdamW(learning_rate=0.1, weight_decay=0.3, **rules),
    "lamb": lambda **rules: LAMB(learning_rate=0.1, weight_decay=0.3, **rules),
    "lars": lambda **rules: LARS(learning_rate=0.1, weight_decay=0.3, **rules),
    "lion": lambda **rules: Lion(learning_rate=0.1, weight_decay=0.3, **rules),
    "adafactor": lambda **rules: Adafactor(learning_rate=0.1, weight_decay=0.3, **rules),
    "muon": lambda **rules: Muon(learning_rate=0.1, weight_decay=0.3, **rules),
}

# --- rules by name -------------------------------------------------------------------------------------------------


def sgd(w, g, slots, t, rate, decay, excluded):
    return w - rate * g


def momentum(w, g, slots, t, rate, decay, excluded):
    slots["momentum"] = 0.9 * slots.get("momentum", 0.0) - rate * g
    return w + slots["momentum"]


def adam(w, g, slots, t, rate, decay, excluded):
    slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
    slots["v"] = 0.999 * slots.get("v", 0.0) + 0.001 * g * g
    step = np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * slots["m"] / (np.sqrt(slots["v"]) + 1e-7)
    return w - rate * decay * w - rate * step


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "kind,rule,settings",
    [(SGD, sgd, {}), (SGD, momentum, {"momentum": 0.9}), (Adam, adam, {}), (AdamW, adam, {"weight_decay": 0.3})],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_the_first_multiplier_that_fits_scales_rate_and_decay(follows_table, kind, rule, settings, replicas):
    class Rules(dict):  # the table's arguments; weight_decay and exclude are given to AdamW only
        weight_decay = settings.get("weight_decay", 0.0)
        exclude = ("bias$",) if kind is AdamW else ()
        rate_multipliers = {"wide": 0.0, "bias": 2.0, "dense": 0.25, "conv": 0.5}

        def given(self):
            return {"rate_multipliers": self.rate_multipliers} | ({"exclude": self.exclude} if self.exclude else {})

    follows_table(kind, rule, Rules(), replicas, **settings)


@pytest.mark.parametrize("case", MAKERS)
def test_a_multiplier_of_0_leaves_variable_slots_and_constraint_alone(case):
    w = tf.Variable([[-1.0, 2.0], [3.0, -4.0]], constraint=lambda v: tf.maximum(v, 0.0))
    optimizer = MAKERS[case](rate_multipliers={"backbone": 0.0})
    optimizer.build([w], ["backbone/kernel"])
    optimizer.update([tf.ones([2, 2])])
    np.testing.assert_array_equal(w.numpy(), [[-1.0, 2.0], [3.0, -4.0]])
    assert optimizer.iterations.numpy() == 1
    assert not any(np.any(slot.numpy()) for name, slot in optimizer.state().items() if name != "iterations")


def test_the_rate_that_is_reported_is_before_the_multiplier():
    optimizer = SGD(learning_rate=0.5, rate_multipliers={"w": 0.25})
    w = tf.Variable(1.0)
    optimizer.build([w], ["w"])
    optimizer.update([tf.constant(4.0)])
    assert (float(optimizer.learning_rate()), w.numpy()) == (0.5, 0.5)


@pytest.mark.parametrize(
    "rules,message",
    [
        (
            {"exclude": ("bias", "bais")},
            "exclude: the pattern 'bais' is found in none of the variables a/kernel, a/bias",
        ),
        ({"rate_multipliers": {"head": 0.1}}, "rate_multipliers: the pattern 'head' is found in none of the variables"),
    ],
)
def test_a_pattern_that_fits_no_variable_is_refused_at_build(rules, message):
    optimizer = AdamW(learning_rate=0.1, weight_decay=0.1, **rules)
    with pytest.raises(ConfigError, match=re.escape(message)):
        optimizer.build([tf.Variable([[1.0]]), tf.Variable([1.0])], ["a/kernel", "a/bias"])


def test_a_pattern_may_fit_frozen_variables_alone():
    optimizer = SGD(learning_rate=0.1, rate_multipliers={"backbone": 0.1})
    optimizer.build([tf.Variable(1.0)], ["head/w"], frozen=["backbone/w"])
    assert set(optimizer.state()) == {"iterations"}


def test_many_variables_are_named_in_part():
    optimizer = SGD(learning_rate=0.1, rate_multipliers={"head": 0.1})
    names = [f"w{i}" for i in range(45)]
    with pytest.raises(ConfigError, match=r"w38, w39 and 5 more; correct it"):
        optimizer.build([tf.Variable(0.0) for _ in names], names)


@pytest.mark.parametrize(
    "rules,message",
    [
        ({"rate_multipliers": {"a": -0.1}}, "{'a': -0.1}"),
        ({"rate_multipliers": {"a": float("inf")}}, "{'a': inf}"),
        ({"rate_multipliers": {"a": True}}, "{'a': True}"),
        ({"rate_multipliers": {"(": 1.0}}, "rate_multipliers='(' but it must be a regular expression"),
        ({"rate_multipliers": ["a"]}, "rate_multipliers=['a'] but it must be a mapping"),
    ],
)
def test_multipliers_that_mean_nothing_are_refused(rules, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SGD(learning_rate=0.1, **rules)


# --- sparse gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
@pytest.mark.parametrize("case", [*MAKERS, "keras"])
def test_sparse_gradients_mean_the_dense_ones_bit_for_bit_on_every_copy(mirrored, case, cond):
    strategy = mirrored(2)
    rows = [([0, 2], [[1.0, -2.0], [0.5, 3.0]]), ([1, 2], [[2.0, 0.25], [-1.0, 1.0]]), ([], np.zeros([0, 2]))]
    results = []
    for sparse in (False, True):
        with strategy.scope():
            w = tf.Variable([[1.0, 2.0], [-3.0, 4.0], [5.0, -6.0], [7.0, 8.0]])
            optimizer = KerasOptimizer(keras.optimizers.Adam(0.1)) if case == "keras" else MAKERS[case]()
            optimizer.build([w], ["embedding"])

        def replica_step(indices, values, optimizer=optimizer, sparse=sparse):
            if sparse:
                gradient = tf.IndexedSlices(values, indices)  # without dense_shape
            else:
                gradient = tf.scatter_nd(indices[:, None], values, tf.constant([4, 2], tf.int64))
            if cond:
                tf.cond(tf.size(indices) >= 0, lambda: [optimizer.update([gradient]), 0][1], lambda: 0)
            else:
                optimizer.update([gradient])

        step = tf.function(lambda i, v, f=replica_step: strategy.run(f, (i, v)), reduce_retracing=True)
        for indices, values in rows:
            step(tf.constant(indices, tf.int64), tf.constant(values, tf.float32))
        variables = {"w": w, **optimizer.state()}
        results.append(
            {
                (name, i): copy.numpy()
                for name, variable in variables.items()
                for i, copy in enumerate(strategy.experimental_local_results(variable))
            }
        )
    assert len(results[0]) >= 4
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value, err_msg=str(key))


def test_only_plain_sgd_takes_sparse_gradients_as_they_are():
    assert {case for case, make in MAKERS.items() if make().takes_sparse} == {"sgd"}
    assert not KerasOptimizer(keras.optimizers.SGD(0.1)).takes_sparse


def test_plain_sgd_writes_no_row_that_the_gradient_does_not_name():
    w = tf.Variable([[1.0], [np.nan], [3.0]])
    optimizer = SGD(learning_rate=0.5, rate_multipliers={"w": 0.5})
    optimizer.build([w], ["w"])
    step = tf.function(lambda: optimizer.update([tf.IndexedSlices(tf.constant([[4.0]]), tf.constant([2]))]))
    step()
    np.testing.assert_array_equal(w.numpy(), [[1.0], [np.nan], [2.0]])
    # The whole table is in no op of the update.
    operations = [op for op in step.get_concrete_function().graph.get_operations() if "Shape" not in op.type]
    assert all(output.shape != [3, 1] for op in operations for output in op.outputs)


# --- building again ------------------------------------------------------------------------------------------------


def test_slots_of_known_variables_are_kept_and_new_ones_are_zero_on_every_copy(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        head, backbone = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
        optimizer = Adam(learning_rate=0.1)
        optimizer.build([head], ["head"])
    strategy.run(lambda: optimizer.update([tf.constant([1.0, -1.0])]))
    before = optimizer.state()
    with strategy.scope():
        optimizer.build([backbone, head], ["backbone", "head"])
    after = optimizer.state()
    assert set(after) == {"iterations", "m/head", "v/head", "m/backbone", "v/backbone"}
    assert all(after[name] is variable for name, variable in before.items())
    for copy in strategy.experimental_local_results(after["m/head"]):
        np.testing.assert_allclose(copy.numpy(), [0.1, -0.1], rtol=1e-6)
    assert [copy.numpy() for copy in strategy.experimental_local_results(after["m/backbone"])] == [[0.0], [0.0]]
    strategy.run(lambda: optimizer.update([tf.constant([5.0]), tf.constant([1.0, -1.0])]))
    # m and v of a constant gradient g, corrected, are g and g^2: a step of 0.1. Those of the backbone, which joined one
    # update later, are 0.1 g and 0.001 g^2, and are divided by 1 - 0.9^2 = 0.19 and 1 - 0.999^2 = 0.001999 like them.
    step = 0.1 * 0.1 / 0.19 / np.sqrt(0.001 / 0.001999)
    for copy in strategy.experimental_local_results(head):
        np.testing.assert_allclose(copy.numpy(), [0.8, 2.2], rtol=1e-5)
    for copy in strategy.experimental_local_results(backbone):
        np.testing.assert_allclose(copy.numpy(), [3.0 - step], rtol=1e-5)
    assert optimizer.iterations.numpy() == 2


def test_a_variable_that_is_frozen_again_is_not_updated_and_keeps_its_slots_in_the_state():
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = SGD(learning_rate=1.0, momentum=0.5, rate_multipliers={"b": 1.0})
    optimizer.build([a, b], ["a", "b"])
    optimizer.update([tf.constant(1.0), tf.constant(1.0)])
    optimizer.build([a], ["a"])  # the pattern "b" still fits a known variable
    optimizer.update([tf.constant(1.0)])
    assert (a.numpy(), b.numpy()) == (-1.5, 0.0)
    assert {n: v.numpy() for n, v in optimizer.state().items()} == {
        "iterations": 2,
        "momentum/a": -1.5,
        "momentum/b": -1.0,
    }
    with pytest.raises(ValueError, match="2 gradients for 1 variables"):
        optimizer.update([tf.constant(1.0)] * 2)
    optimizer.build([b, a], ["b", "a"])  # in another order, and b goes on where it was
    optimizer.update([tf.constant(0.0), tf.constant(0.0)])
    assert (a.numpy(), b.numpy()) == (-2.25, -0.5)


def test_building_again_for_the_same_variables_makes_nothing():
    w = tf.Variable(1.0)
    optimizer = AdamW(learning_rate=0.1, weight_decay=0.1)
    optimizer.build([w], ["w"])
    state = optimizer.state()
    optimizer.build([w], ["w"])
    assert {name: id(variable) for name, variable in optimizer.state().items()} == {n: id(v) for n, v in state.items()}


@pytest.mark.parametrize("case", ["other_variable", "renamed", "other_dtype", "repeated"])
def test_a_second_build_that_cannot_be_meant_is_refused_and_changes_nothing(case):
    w = tf.Variable(1.0)
    optimizer = SGD(learning_rate=1.0, momentum=0.5)
    optimizer.build([w], ["w"])
    variables, names, message = {
        "other_variable": ([tf.Variable(1.0)], ["w"], "name 'w' for another variable"),
        "renamed": ([w], ["layer/w"], "a known variable renamed"),
        "other_dtype": ([w, tf.Variable(tf.zeros([], tf.bfloat16))], ["w", "x"], "variable 'x' is bfloat16"),
        "repeated": ([w, w], ["w", "w"], "repeat"),
    }[case]
    with pytest.raises(ConfigError, match=message):
        optimizer.build(variables, names)
    optimizer.update([tf.constant(1.0)])
    assert (w.numpy(), set(optimizer.state())) == (0.0, {"iterations", "momentum/w"})


def test_a_second_build_under_another_strategy_is_refused(mirrored):
    with mirrored(2).scope():
        w = tf.Variable(1.0)
        optimizer = SGD(learning_rate=1.0)
        optimizer.build([w], ["w"])
    with pytest.raises(ConfigError, match=r"build\(\) under .*first built under MirroredStrategy"):
        optimizer.build([w], ["w"])
