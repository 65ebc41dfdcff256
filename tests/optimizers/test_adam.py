"""Adam and AdamW against tables computed here in float64 NumPy, on 1, 2 and 3 replicas."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework.config import RunConfig
from framework.errors import ConfigError
from framework.optimizers import SGD, Adam, AdamW, Constant, WarmUp, from_config


def adam_table(initial, gradients, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7, decay=0.0, exclude=(), start=0):
    """(variables, m, v) after all updates, with epsilon hat and decay before the Adam part."""
    w = {name: value.astype(np.float64) for name, value in initial.items()}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for t, of_update in enumerate(gradients, start=start + 1):
        corrected = lr * np.sqrt(1.0 - beta_2**t) / (1.0 - beta_1**t)
        for name, parts in of_update.items():
            g = parts.astype(np.float64).sum(axis=0)
            if not any(re.search(pattern, name) for pattern in exclude):
                w[name] = w[name] - lr * decay * w[name]
            m[name] = beta_1 * m[name] + (1.0 - beta_1) * g
            v[name] = beta_2 * v[name] + (1.0 - beta_2) * g * g
            w[name] = w[name] - corrected * m[name] / (np.sqrt(v[name]) + epsilon)
    return w, m, v


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (lambda lr: Adam(learning_rate=lr), {}),
    "adam_other_betas": (
        lambda lr: Adam(learning_rate=lr, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
    ),
    "adamw": (lambda lr: AdamW(learning_rate=lr, weight_decay=0.3), {"decay": 0.3}),
    "adamw_exclude": (
        lambda lr: AdamW(learning_rate=lr, weight_decay=0.3, exclude=("bias$", "^scale")),
        {"decay": 0.3, "exclude": ("bias$", "^scale")},
    ),
}


def check(result, initial, table, atol):
    expected, m, v = table
    for variables, state in zip(result.variables, result.state):
        assert state["iterations"] == 5
        assert set(state) == {"iterations"} | {f"{slot}/{name}" for slot in "mv" for name in initial}
        for name in initial:
            np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=atol)
            np.testing.assert_allclose(state[f"m/{name}"], m[name], rtol=0, atol=atol)
            np.testing.assert_allclose(state[f"v/{name}"], v[name], rtol=0, atol=atol)


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_b39_five_steps_equal_the_table_on_every_copy(train, problem, case, replicas, cond):
    make, settings = CASES[case]
    initial, gradients = problem(replicas)
    result = train(lambda: make(0.1), initial, gradients, replicas, cond)
    assert len(result.variables) == replicas
    check(result, initial, adam_table(initial, gradients, 0.1, **settings), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_float64_variables_follow_the_table_to_1e_12(train, problem, case):
    make, settings = CASES[case]
    initial, gradients = problem(2, "float64")
    result = train(lambda: make(0.125), initial, gradients, 2)  # 0.125 is exact in float32
    check(result, initial, adam_table(initial, gradients, 0.125, **settings), 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_a_constant_gradient_each_update_is_the_rate_however_small_1_minus_beta_2(dtype):
    # m / sqrt(v), corrected, is g / |g|. Powers taken in float32, or of the unrounded beta_2, are off by 7e-4 and more.
    w = tf.Variable(tf.zeros([2], dtype))
    optimizer = Adam(learning_rate=1.0, beta_2=0.99999, epsilon=0.0)
    optimizer.build([w], ["w"])
    for _ in range(5):
        optimizer.update([tf.constant([0.3, -7.0], dtype)])
    np.testing.assert_allclose(w.numpy(), [-5.0, 5.0], rtol=0, atol=5e-6)


def test_bias_correction_comes_from_iterations_so_that_a_resume_is_exact(train, problem):
    initial, gradients = problem(1)
    unbroken = train(lambda: AdamW(learning_rate=0.1, weight_decay=0.1), initial, gradients, 1)
    first = train(lambda: AdamW(learning_rate=0.1, weight_decay=0.1), initial, gradients[:3], 1)
    resumed = AdamW(learning_rate=0.1, weight_decay=0.1)
    variables = [tf.Variable(first.variables[0][name]) for name in initial]
    resumed.build(variables, list(initial))
    for name, variable in resumed.state().items():
        variable.assign(first.state[0][name])
    for of_update in gradients[3:]:
        resumed.update([tf.constant(of_update[name][0]) for name in initial])
    for name, variable in zip(initial, variables):
        np.testing.assert_array_equal(variable.numpy(), unbroken.variables[0][name])


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
def test_without_gradient_there_is_no_decay_and_nothing_changes(train, problem, cond):
    initial, gradients = problem(2)
    make = lambda: AdamW(learning_rate=0.1, weight_decay=0.3)  # noqa: E731
    before = train(make, initial, gradients[:2], 2, cond)
    without_bias = [gradients[0], gradients[1], *({**g, "dense/bias": None} for g in gradients[2:])]
    after = train(make, initial, without_bias, 2, cond)
    for i in range(2):
        np.testing.assert_array_equal(after.variables[i]["dense/bias"], before.variables[i]["dense/bias"])
        for slot in ("m/dense/bias", "v/dense/bias"):
            np.testing.assert_array_equal(after.state[i][slot], before.state[i][slot])
        assert after.state[i]["iterations"] == 5


def test_decay_follows_the_schedule_of_the_rate(train):
    # Rates 0.25, then 0.5; gradients 0, so that only the decay acts: 8 (1 - 0.25 / 2) (1 - 0.5 / 2) = 5.25.
    rate = WarmUp(peak=0.5, steps=2, after=Constant(rate=0.5))
    gradients = [{"w": np.zeros([2], np.float32)}] * 2
    result = train(lambda: AdamW(learning_rate=rate, weight_decay=0.5), {"w": np.float32(8.0)}, gradients, 2)
    assert [variables["w"] for variables in result.variables] == [5.25, 5.25]


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Adam(learning_rate=0.1, beta_1=1.0), "beta_1=1.0"),
        (lambda: Adam(learning_rate=0.1, beta_2=-0.1), "beta_2=-0.1"),
        (lambda: Adam(learning_rate=0.1, epsilon=-1.0), "epsilon=-1.0"),
        (lambda: AdamW(learning_rate=0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: AdamW(learning_rate=0.1, weight_decay=0.1, exclude="bias"), "exclude='bias'"),
        (lambda: AdamW(learning_rate=0.1, weight_decay=0.1, exclude=["("]), "regular expression"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_the_configured_optimizer_has_the_configured_settings():
    sgd = from_config(RunConfig(optimizer="sgd", momentum=0.5, nesterov=True, learning_rate=0.2), None)
    assert isinstance(sgd, SGD)
    assert (sgd.momentum, sgd.nesterov) == (0.5, True)
    betas: dict[str, Any] = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-5}
    adam = from_config(RunConfig(optimizer="adam", **betas), 10)
    assert type(adam) is Adam
    adamw = from_config(RunConfig(optimizer="adamw", weight_decay=0.05, **betas), 10)
    assert isinstance(adamw, AdamW)
    assert adamw.weight_decay == 0.05
    for built in (adam, adamw):
        assert (built.beta_1, built.beta_2, built.epsilon) == (0.8, 0.95, 1e-5)


def test_the_configured_schedule_is_the_rate_of_the_next_update():
    optimizer = from_config(
        RunConfig(optimizer="sgd", momentum=0.0, learning_rate=1.0, warmup_steps=4, schedule="polynomial"), 12
    )
    w = tf.Variable(0.0)
    optimizer.build([w], ["w"])
    seen = []
    for _ in range(3):
        seen.append(float(optimizer.learning_rate()))
        optimizer.update([tf.constant(1.0)])
    assert seen == [0.25, 0.5, 0.75]
    assert w.numpy() == -1.5
