"""Updates as the step makes them: real per-replica gradients, an explicit all-reduce, then the local update."""

from __future__ import annotations

import functools
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
    """``problem(replicas, dtype="float32")``: (initial values, five updates of uneven per-replica gradients)."""

    def make(replicas: int, dtype: str = "float32") -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
        draw = np.random.default_rng(7)
        shapes = {"dense/kernel": (3, 2), "dense/bias": (2,), "scale": ()}
        initial = {name: draw.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
        gradients = [
            {name: draw.normal(size=(replicas, *shape)).astype(dtype) for name, shape in shapes.items()}
            for _ in range(5)
        ]
        return initial, gradients

    return make
