"""Lion against a table in float64 NumPy, on 1, 2 and 3 replicas, and a step worked out by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import Lion


def lion(w, g, slots, t, rate, decay, excluded, beta_1=0.9, beta_2=0.99):
    m = slots.get("m", 0.0)
    slots["m"] = beta_2 * m + (1.0 - beta_2) * g
    return w - rate * (np.sign(beta_1 * m + (1.0 - beta_1) * g) + decay * w)


CASES = {"lion": {}, "other_betas": {"beta_1": 0.25, "beta_2": 0.5}}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_the_table_on_every_copy(follows_table, shared_rules, case, replicas):
    follows_table(Lion, lambda *args: lion(*args, **CASES[case]), shared_rules, replicas, **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_float64_variables_follow_the_table_to_1e_10(follows_table, shared_rules, case):
    follows_table(Lion, lambda *args: lion(*args, **CASES[case]), shared_rules, 2, "float64", 1e-10, **CASES[case])


def test_by_hand_the_decay_is_of_the_weights_before_the_step():
    w = tf.Variable([2.0, -2.0, 0.0])
    optimizer = Lion(learning_rate=0.25, weight_decay=0.5)
    optimizer.build([w], ["w"])
    optimizer.update([tf.constant([1.0, -3.0, 0.0])])
    # 2 - (1 + 0.5 * 2) / 4, and its opposite; no gradient and no weight: no step.
    np.testing.assert_array_equal(w.numpy(), [1.5, -1.5, 0.0])
    np.testing.assert_allclose(optimizer.state()["m/w"].numpy(), [0.01, -0.03, 0.0], rtol=1e-6)
    # Against a momentum of 0.01, a gradient of -0.05 turns the sign (0.009 - 0.005 does not, 0.009 - 0.1 does).
    optimizer.update([tf.constant([-0.05, 1.0, 0.0])])
    np.testing.assert_allclose(w.numpy(), [1.5 - 0.25 - 0.1875, -1.5 - 0.25 + 0.1875, 0.0], rtol=1e-6)


@pytest.mark.parametrize("arguments", [{"beta_1": 1.0}, {"beta_2": -0.1}, {"weight_decay": -1.0}, {"exclude": ["("]}])
def test_arguments_out_of_range_are_refused(arguments):
    name, value = next(iter(arguments.items()))
    value = value[0] if name == "exclude" else value
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        Lion(learning_rate=0.1, **arguments)
