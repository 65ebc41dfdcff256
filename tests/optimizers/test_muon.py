"""Muon against a table in float64 NumPy, on 1, 2 and 3 replicas, and the rule that chooses its matrices."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import Muon
from framework.optimizers.muon import orthogonalized


def muon(w, g, slots, t, rate, decay, excluded, matrix, momentum=0.95):
    if not matrix:
        slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
        slots["v"] = 0.999 * slots.get("v", 0.0) + 0.001 * g * g
        root = np.sqrt(slots["v"]) + 1e-7
        return w - rate * decay * w - rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * slots["m"] / root
    slots["momentum"] = momentum * slots.get("momentum", 0.0) + g
    x = g + momentum * slots["momentum"]
    # The polynomial acts on the singular values alone.
    u, s, v = np.linalg.svd(x / (np.linalg.norm(x) + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return w - rate * decay * w - rate * 0.2 * np.sqrt(max(w.shape)) * (u * s) @ v


def rule(*args, **settings):
    # Of the matrices of the problem, [3, 2], [2, 4] and [4, 2], the last is the embedding.
    return muon(*args, matrix=args[0].shape in ((3, 2), (2, 4)), **settings)


# In float32 the five products multiply an error in a small singular value by up to 3.4445^5 = 485.
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_five_steps_equal_the_table_on_every_copy(follows_table, shared_rules, replicas):
    follows_table(Muon, rule, shared_rules, replicas, atol=3e-6)


@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_float64_variables_follow_the_table_to_1e_10(follows_table, shared_rules, momentum):
    follows_table(
        Muon, lambda *args: rule(*args, momentum=momentum), shared_rules, 2, "float64", 1e-10, momentum=momentum
    )


@pytest.mark.parametrize("shape", [(4, 4), (2, 7), (7, 2), (1, 3)])
def test_singular_values_become_about_1_and_the_singular_vectors_stay(shape):
    x = np.random.default_rng(5).normal(size=shape)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    between = u.T @ orthogonalized(tf.constant(x)).numpy() @ v.T
    assert np.all((np.diag(between) > 0.6) & (np.diag(between) < 1.3))
    np.testing.assert_allclose(between, np.diag(np.diag(between)), atol=1e-9)


def test_a_gradient_of_zero_gives_no_nan():
    w = tf.Variable(tf.ones([2, 2]))
    optimizer = Muon(learning_rate=0.1)
    optimizer.build([w], ["dense/kernel"])
    optimizer.update([tf.zeros([2, 2])])
    np.testing.assert_array_equal(w.numpy(), np.ones([2, 2]))


def test_matrices_are_muons_unless_their_name_says_embedding_or_output():
    shapes = {
        "dense/kernel": (3, 2),
        "dense/bias": (2,),
        "conv/kernel": (3, 3, 2, 2),
        "token_Embedding/table": (5, 2),
        "head/kernel": (2, 5),
        "logits/kernel": (2, 5),
    }
    variables = [tf.Variable(tf.ones(shape)) for shape in shapes.values()]
    optimizer = Muon(learning_rate=0.1)
    optimizer.build(variables, list(shapes))
    others = {f"{slot}/{name}" for slot in "mv" for name in shapes if name != "dense/kernel"}
    assert set(optimizer.state()) == {"iterations", "momentum/dense/kernel"} | others
    optimizer = Muon(learning_rate=0.1, adamw=("^dense",))
    optimizer.build(variables, list(shapes))
    assert {name for name in optimizer.state() if name.startswith("momentum")} == {
        f"momentum/{name}" for name in ("token_Embedding/table", "head/kernel", "logits/kernel")
    }


def test_a_pattern_of_ones_own_must_fit_the_usual_ones_need_not():
    w = tf.Variable(tf.ones([2, 2]))
    Muon(learning_rate=0.1).build([w], ["dense/kernel"])
    with pytest.raises(ConfigError, match="adamw: the pattern 'output' is found in none of the variables dense/kernel"):
        Muon(learning_rate=0.1, adamw=["output"]).build([w], ["dense/kernel"])


@pytest.mark.parametrize("arguments", [{"momentum": 1.0}, {"beta_1": 1.0}, {"weight_decay": -1.0}, {"adamw": "head"}])
def test_arguments_out_of_range_are_refused(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        Muon(learning_rate=0.1, **arguments)
