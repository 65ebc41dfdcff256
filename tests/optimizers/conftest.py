"""Updates as the step makes them: real per-replica gradients, an explicit all-reduce, then the local update."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf


class Trained(NamedTuple):
    """What is left after the updates: arrays by name, one dictionary for each replica's own copies."""

    optimizer: Any
    variables: list[dict[str, np.ndarray]]
    state: list[dict[str, np.ndarray]]


@functools.cache
def mirrored_strategy(replicas: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


@pytest.fixture
def mirrored() -> Callable[[int], tf.distribute.Strategy]:
    """``mirrored(n)``: a MirroredStrategy over n logical CPUs that reduces without collectives."""
    return mirrored_strategy


@pytest.fixture
def train(mirrored: Callable[[int], tf.distribute.Strategy]) -> Callable[..., Trained]:
    """``train(make, initial, gradients, replicas, cond=False)``: one update for each entry of ``gradients``.

    make: returns a new optimizer with the framework's interface; called in the scope.
    initial: value of each variable by name.
    gradients: for each update, for each name, an array [replicas, ...]: what each replica brings, or None.
    cond: the update is made inside tf.cond, with a condition computed from reduced values.
    """

    def run(
        make: Callable[[], Any],
        initial: Mapping[str, np.ndarray],
        gradients: Sequence[Mapping[str, np.ndarray | None]],
        replicas: int,
        cond: bool = False,
    ) -> Trained:
        strategy = mirrored(replicas)
        with strategy.scope():
            variables = {name: tf.Variable(value, name=name) for name, value in initial.items()}
            optimizer = make()
            optimizer.build(list(variables.values()), list(variables))

        def replica_step(local: dict[str, tf.Tensor]) -> None:
            reduced = local
            if replicas > 1:  # MirroredStrategy's all_reduce of one replica fails: "destinations can not be empty"
                reduced = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, local)
            if cond:
                finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in reduced.values()])
                tf.cond(finite, lambda: update(reduced), lambda: 0)
            else:
                update(reduced)

        def update(reduced: dict[str, tf.Tensor]) -> int:
            optimizer.update([reduced.get(name) for name in variables])
            return 0

        @tf.function
        def step(values: dict[str, Any]) -> None:
            strategy.run(replica_step, args=(values,))

        for of_update in gradients:
            given = {name: value for name, value in of_update.items() if value is not None}
            step(per_replica(strategy, given))
        return Trained(optimizer, copies(strategy, variables), copies(strategy, optimizer.state()))

    return run


def per_replica(strategy: tf.distribute.Strategy, values: Mapping[str, np.ndarray]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: {name: tf.constant(value[context.replica_id_in_sync_group]) for name, value in values.items()}
    )


def copies(strategy: tf.distribute.Strategy, variables: Mapping[str, tf.Variable]) -> list[dict[str, np.ndarray]]:
    local = {name: strategy.experimental_local_results(variable) for name, variable in variables.items()}
    for name, results in local.items():
        assert len(results) == strategy.num_replicas_in_sync, f"{name} has {len(results)} copies"
    return [{name: local[name][i].numpy() for name in local} for i in range(strategy.num_replicas_in_sync)]


@pytest.fixture
def problem() -> Callable[..., tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]]:
    """``problem(replicas, dtype="float32")``: (initial values, five updates of uneven per-replica gradients).

    With ``more=True`` there are also a wide matrix, an embedding and a kernel of rank 3.
    """

    def make(
        replicas: int, dtype: str = "float32", more: bool = False
    ) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
        draw = np.random.default_rng(7)
        shapes: dict[str, tuple[int, ...]] = {"dense/kernel": (3, 2), "dense/bias": (2,), "scale": ()}
        if more:
            shapes |= {"wide/kernel": (2, 4), "embedding": (4, 2), "conv/kernel": (2, 3, 2)}
        initial = {name: draw.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
        gradients = [
            {name: draw.normal(size=(replicas, *shape)).astype(dtype) for name, shape in shapes.items()}
            for _ in range(5)
        ]
        return initial, gradients

    return make


# One update of one variable in NumPy, (w, g, slots by name, t from 1, rate, decay, excluded) -> w; changes the slots.
Rule = Callable[[np.ndarray, np.ndarray, dict[str, Any], int, float, float, bool], np.ndarray]


class Rules(NamedTuple):
    """The arguments that all optimizers share; for a table as for the optimizer."""

    weight_decay: float = 0.0
    exclude: tuple[str, ...] = ()
    rate_multipliers: dict[str, float] = {}

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value}


ALL_RULES = Rules(0.3, ("bias$", "^scale"), {"wide": 0.0, "bias": 2.0, "dense": 0.25, "conv": 0.5})


@pytest.fixture(params=[Rules(), ALL_RULES], ids=["plain", "all_rules"])
def shared_rules(request: pytest.FixtureRequest) -> Rules:
    """No rule by name; or decay, exclusion and multipliers, one of them 0 and one hidden by an earlier pattern."""
    return request.param


@pytest.fixture
def table() -> Callable[..., tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]]:
    """``table(rule, initial, gradients, rate, rules)``: (variables, slots by variable) in float64 after all updates.

    gradients: for each update what is summed over its first axis.
    """

    def run(
        rule: Rule,
        initial: Mapping[str, np.ndarray],
        gradients: Sequence[Mapping[str, np.ndarray]],
        rate: float,
        rules: Rules,
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        w = {name: value.astype(np.float64) for name, value in initial.items()}
        slots: dict[str, dict[str, Any]] = {name: {} for name in w}
        for t, of_update in enumerate(gradients, start=1):
            for name, parts in of_update.items():
                factors = [f for pattern, f in rules.rate_multipliers.items() if re.search(pattern, name)]
                factor = factors[0] if factors else 1.0
                excluded = any(re.search(pattern, name) for pattern in rules.exclude)
                if factor:
                    g = parts.astype(np.float64).sum(axis=0)
                    decay = 0.0 if excluded else rules.weight_decay
                    w[name] = rule(w[name], g, slots[name], t, rate * factor, decay, excluded)
        return w, slots

    return run


@pytest.fixture
def follows_table(
    train: Callable[..., Trained], problem: Callable[..., Any], table: Callable[..., Any]
) -> Callable[..., None]:
    """``follows_table(kind, rule, rules, replicas, dtype, atol, **settings)``: five updates, every copy, all slots."""

    def check(
        kind: Any, rule: Rule, rules: Rules, replicas: int, dtype: str = "float32", atol: float = 1e-6, **settings: Any
    ) -> None:
        initial, gradients = problem(replicas, dtype, more=True)
        # 0.125 is exact in float32. In tf.cond with the rules, without it otherwise.
        make = lambda: kind(learning_rate=0.125, **settings, **rules.given())  # noqa: E731
        result = train(make, initial, gradients, replicas, cond=bool(rules.given()))
        expected, slots = table(rule, initial, gradients, 0.125, rules)
        assert len(result.variables) == replicas
        wanted = {f"{slot}/{name}": value for name in slots for slot, value in slots[name].items()}
        for variables, state in zip(result.variables, result.state):
            assert state.pop("iterations") == 5
            for name in initial:
                np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=atol, err_msg=name)
            for name, value in wanted.items():
                np.testing.assert_allclose(state[name], value, rtol=0, atol=atol, err_msg=name)
            for name in set(state) - set(wanted):  # of variables with the multiplier 0
                assert "wide/kernel" in name and not slots["wide/kernel"]
                assert not state[name].any()

    return check
