"""LARS and LAMB against tables in float64 NumPy, on 1, 2 and 3 replicas, and steps worked out by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import LAMB, LARS


def lars(w, g, slots, t, rate, decay, excluded, momentum=0.9, trust=0.001):
    ratio = 1.0 if excluded else trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    slots["momentum"] = momentum * slots.get("momentum", 0.0) - rate * ratio * (g + decay * w)
    return w + slots["momentum"]


def lamb(w, g, slots, t, rate, decay, excluded, beta_1=0.9, beta_2=0.999, epsilon=1e-6):
    slots["m"] = beta_1 * slots.get("m", 0.0) + (1.0 - beta_1) * g
    slots["v"] = beta_2 * slots.get("v", 0.0) + (1.0 - beta_2) * g * g
    step = slots["m"] / (1.0 - beta_1**t) / (np.sqrt(slots["v"] / (1.0 - beta_2**t)) + epsilon) + decay * w
    return w - rate * (1.0 if excluded else np.linalg.norm(w) / np.linalg.norm(step)) * step


CASES = {
    "lars": (LARS, lars, {}),
    "lars_other": (LARS, lars, {"momentum": 0.5, "trust_coefficient": 0.25}),
    "lamb": (LAMB, lamb, {}),
    "lamb_other": (LAMB, lamb, {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}),
}


def settings_of(case):
    kind, rule, given = CASES[case]
    named = {"trust" if name == "trust_coefficient" else name: value for name, value in given.items()}
    return kind, lambda *args: rule(*args, **named), given


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_the_table_on_every_copy(follows_table, shared_rules, case, replicas):
    kind, rule, given = settings_of(case)
    follows_table(kind, rule, shared_rules, replicas, **given)


@pytest.mark.parametrize("case", CASES)
def test_float64_variables_follow_the_table_to_1e_10(follows_table, shared_rules, case):
    kind, rule, given = settings_of(case)
    follows_table(kind, rule, shared_rules, 2, "float64", 1e-10, **given)


def one_step(optimizer, w, g):
    variable = tf.Variable(np.array(w, np.float32))
    optimizer.build([variable], ["dense/kernel"])
    optimizer.update([tf.constant(g, tf.float32)])
    return variable.numpy()


def test_lars_by_hand():
    # |w| = 5, |g| = 10: the ratio is 0.1 * 5 / (10 + 0.5 * 5) = 0.04; g + w / 2 = [7.5, 10].
    optimizer = LARS(learning_rate=1.0, weight_decay=0.5, trust_coefficient=0.1)
    np.testing.assert_allclose(one_step(optimizer, [3.0, 4.0], [6.0, 8.0]), [2.7, 3.6], rtol=1e-6)


def test_lamb_by_hand():
    # At the first step r = g / |g| for each element, here [1, -1]; |w| = 5 and |r| = sqrt(2).
    optimizer = LAMB(learning_rate=0.2, epsilon=0.0)
    expected = [3.0 - 1.0 / np.sqrt(2.0), 4.0 + 1.0 / np.sqrt(2.0)]
    np.testing.assert_allclose(one_step(optimizer, [3.0, 4.0], [7.0, -0.1]), expected, rtol=1e-6)


def test_lamb_by_hand_with_decay():
    # r + w = [1 + 3, -1 + 4] = [4, 3], as long as w: the ratio is 1.
    optimizer = LAMB(learning_rate=0.5, epsilon=0.0, weight_decay=1.0)
    np.testing.assert_allclose(one_step(optimizer, [3.0, 4.0], [7.0, -0.1]), [1.0, 2.5], rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: LARS(learning_rate=0.5), lambda: LAMB(learning_rate=0.5, epsilon=0.0)])
def test_weights_of_zero_have_the_ratio_1_and_leave_zero(make):
    np.testing.assert_allclose(one_step(make(), [0.0, 0.0], [1.0, -1.0]), [-0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: LARS(learning_rate=0.5), lambda: LAMB(learning_rate=0.5)])
def test_gradients_of_zero_change_nothing_and_are_no_nan(make):
    np.testing.assert_array_equal(one_step(make(), [3.0, 4.0], [0.0, 0.0]), [3.0, 4.0])


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: LARS(learning_rate=0.1, momentum=1.5), "momentum=1.5"),
        (lambda: LARS(learning_rate=0.1, trust_coefficient=0.0), "trust_coefficient=0.0"),
        (lambda: LARS(learning_rate=0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: LAMB(learning_rate=0.1, beta_1=1.0), "beta_1=1.0"),
        (lambda: LAMB(learning_rate=0.1, beta_2=-0.5), "beta_2=-0.5"),
        (lambda: LAMB(learning_rate=0.1, epsilon=-0.5), "epsilon=-0.5"),
        (lambda: LAMB(learning_rate=0.1, exclude="bias"), "exclude='bias'"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()
