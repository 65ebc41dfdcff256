"""Adafactor against a table in float64 NumPy, on 1, 2 and 3 replicas, and steps worked out by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import Adafactor


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def adafactor(w, g, slots, t, rate, decay, excluded, power=0.8, clip=1.0, epsilon_1=1e-30, epsilon_2=1e-3, scale=True):
    b = 1.0 - t**-power
    square = g * g + epsilon_1
    if w.ndim < 2:
        v = slots["v"] = b * slots.get("v", 0.0) + (1.0 - b) * square
    else:
        # The paper's sums; the slots hold means.
        rows, columns = w.shape[-2:]
        r = b * slots.get("v_row", 0.0) * columns + (1.0 - b) * square.sum(axis=-1)
        c = b * slots.get("v_col", 0.0) * rows + (1.0 - b) * square.sum(axis=-2)
        v = r[..., :, None] * c[..., None, :] / r.sum(axis=-1)[..., None, None]
        slots["v_row"], slots["v_col"] = r / columns, c / rows
    u = g / np.sqrt(v)
    u = u / max(1.0, rms(u) / clip)
    size = max(epsilon_2, rms(w)) if scale else 1.0
    return w - rate * decay * w - rate * size * u


CASES = {
    "adafactor": ({}, {}),
    "other": (
        {"decay_power": 0.5, "clip_threshold": 0.5, "epsilon_1": 0.1, "epsilon_2": 2.0},
        {"power": 0.5, "clip": 0.5, "epsilon_1": 0.1, "epsilon_2": 2.0},
    ),
    "not_relative": ({"scale_by_parameter": False}, {"scale": False}),
}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_the_table_on_every_copy(follows_table, shared_rules, case, replicas):
    settings, named = CASES[case]
    follows_table(Adafactor, lambda *args: adafactor(*args, **named), shared_rules, replicas, **settings)


@pytest.mark.parametrize("case", CASES)
def test_float64_variables_follow_the_table_to_1e_10(follows_table, shared_rules, case):
    settings, named = CASES[case]
    follows_table(Adafactor, lambda *args: adafactor(*args, **named), shared_rules, 2, "float64", 1e-10, **settings)


def one_step(optimizer, w, g):
    variable = tf.Variable(np.array(w, np.float32))
    optimizer.build([variable], ["w"])
    optimizer.update([tf.constant(g, tf.float32)])
    return variable.numpy()


def test_slots_of_rank_2_and_above_are_rows_and_columns():
    optimizer = Adafactor(learning_rate=0.1)
    shapes = {"a": (), "b": (5,), "c": (5, 3), "d": (2, 4, 5, 3)}
    optimizer.build([tf.Variable(tf.ones(shape)) for shape in shapes.values()], list(shapes))
    assert {name: tuple(slot.shape) for name, slot in optimizer.state().items()} == {
        "iterations": (),
        "v/a": (),
        "v/b": (5,),
        "v_row/c": (5,),
        "v_col/c": (3,),
        "v_row/d": (2, 4, 5),
        "v_col/d": (2, 4, 3),
    }


def test_the_first_step_by_hand_is_the_rate_times_the_size_of_the_weights():
    # v = g^2, so u = [1, -1]; RMS(w) = 2.
    np.testing.assert_allclose(one_step(Adafactor(learning_rate=0.25), [2.0, -2.0], [3.0, -4.0]), [1.5, -1.5])
    # A gradient of rank one is factored without error: u is its signs. RMS(w) = 0 counts as epsilon_2.
    stepped = one_step(Adafactor(learning_rate=1.0), [[0.0, 0.0], [0.0, 0.0]], [[1.0, -2.0], [3.0, -6.0]])
    np.testing.assert_allclose(stepped, [[-1e-3, 1e-3], [-1e-3, 1e-3]], rtol=1e-6)


def test_a_gradient_of_zero_and_a_row_of_zeros_give_no_nan():
    np.testing.assert_array_equal(one_step(Adafactor(learning_rate=0.25), [2.0, -2.0], [0.0, 0.0]), [2.0, -2.0])
    stepped = one_step(Adafactor(learning_rate=0.25), np.full([2, 2], 2.0), [[0.0, 0.0], [1e-12, 1e-12]])
    np.testing.assert_array_equal(stepped[0], [2.0, 2.0])
    assert np.all(stepped[1] < 2.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"decay_power": 0.0},
        {"clip_threshold": 0.0},
        {"epsilon_1": 0.0},
        {"epsilon_2": -1.0},
        {"weight_decay": -1.0},
    ],
)
def test_arguments_out_of_range_are_refused(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value}")):
        Adafactor(learning_rate=0.1, **arguments)
