"""SyncBatchNormalization against NumPy over all rows, however these lie on the replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from framework.layers import SyncBatchNormalization
from tests.helpers import mirrored, per_replica

EPSILON = 1e-3
SPLITS = [[4], [3, 1], [4, 0], [2, 2], [0, 3, 1], [0, 0, 4]]


def normalise(
    layer: Any, parts: list[np.ndarray], weights: list[np.ndarray], training: bool = True
) -> list[dict[str, Any]]:
    """On each replica: outputs, gradients of sum(weights x outputs) over all replicas, moving statistics."""
    strategy = mirrored(len(parts))
    with strategy.scope():
        if not layer.built:
            layer.build((None, *parts[0].shape[1:]))

    def replica(x: tf.Tensor, c: tf.Tensor) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training)
            loss = tf.reduce_sum(tf.cast(y, x.dtype) * c)
        dx, *rest = tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])
        return {
            "y": y,
            "dx": dx,
            "d": rest,
            "mean": layer.moving_mean.value + 0,
            "var": layer.moving_variance.value + 0,
        }

    run = tf.function(lambda x, c: strategy.run(replica, args=(x, c)))
    results = run(per_replica(strategy, parts), per_replica(strategy, weights))
    split = tf.nest.map_structure(strategy.experimental_local_results, results)
    return [
        {n: [v[i].numpy() for v in value] if n == "d" else value[i].numpy() for n, value in split.items()}
        for i in range(len(parts))
    ]


def cut(rows: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)[:-1])


def expected(x: np.ndarray, c: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> dict[str, np.ndarray]:
    """In float64; the gradient of the input is equation set of Ioffe and Szegedy 2015, section 3."""
    x, c = x.astype(np.float64), c.astype(np.float64)
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axes), x.var(axes)
    s = np.sqrt(var + EPSILON)
    hat = (x - mean) / s
    g = c * gamma
    dx = (g - g.mean(axes) - hat * (g * hat).mean(axes)) / s
    dg, db = (c * hat).sum(axes), c.sum(axes)
    return {"y": hat * gamma + beta, "dx": dx, "dgamma": dg, "dbeta": db, "mean": mean, "var": var}


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("shape", [(2,), (2, 3, 2)])
def test_output_gradients_and_statistics_are_those_over_all_rows(sizes: list[int], shape: tuple[int, ...]) -> None:
    r = np.random.RandomState(2)
    x, c = (r.randn(4, *shape).astype(np.float32) * [1.0, 4.0] + [0.0, 3.0] for _ in range(2))
    x, c = np.float32(x), np.float32(c)
    layer = SyncBatchNormalization(momentum=0.75)
    gamma, beta = np.float32([1.5, -0.5]), np.float32([0.25, 2.0])
    with mirrored(len(sizes)).scope():
        layer.build((None, *shape))
        layer.gamma.assign(gamma)
        layer.beta.assign(beta)
    results = normalise(layer, cut(x, sizes), cut(c, sizes))
    right = expected(x, c, gamma, beta)
    for name in ("y", "dx"):
        np.testing.assert_allclose(np.concatenate([r[name] for r in results]), right[name], rtol=1e-4, atol=1e-5)
    for i, name in enumerate(("dgamma", "dbeta")):
        np.testing.assert_allclose(sum(r["d"][i] for r in results), right[name], rtol=1e-4, atol=1e-4)
    for one in results:
        np.testing.assert_array_equal(one["mean"], results[0]["mean"])
        np.testing.assert_array_equal(one["var"], results[0]["var"])
        np.testing.assert_allclose(one["mean"], 0.25 * right["mean"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one["var"], 0.75 + 0.25 * right["var"], rtol=1e-5)


def test_it_is_keras_on_one_replica() -> None:
    x = np.random.RandomState(3).randn(6, 3).astype(np.float32) * 2 + 1
    c = np.random.RandomState(4).randn(6, 3).astype(np.float32)
    keras_layer = keras.layers.BatchNormalization(momentum=0.9)
    keras_layer.build((None, 3))
    mine = SyncBatchNormalization(momentum=0.9)
    for training in (True, False):
        with tf.GradientTape() as tape:
            y = keras_layer(x, training=training)
            loss = tf.reduce_sum(y * c)
        wanted = tape.gradient(loss, [v.value for v in keras_layer.trainable_variables])
        (got,) = normalise(mine, [x], [c], training)
        np.testing.assert_allclose(got["y"], y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got["mean"], keras_layer.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(got["var"], keras_layer.moving_variance, rtol=1e-5)
        for a, b in zip(got["d"], wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [[64], [50, 14], [30, 0, 34]])
@pytest.mark.parametrize(("offset", "bound"), [(0.0, 1e-5), (1000.0, 1e-4), (1e5, 1e-2)])
def test_a_large_mean_does_not_cancel_the_variance(sizes: list[int], offset: float, bound: float) -> None:
    """E[x^2] - E[x]^2 in float32 would keep nothing of a variance of 1 beside a mean of 1e5."""
    x = (np.random.RandomState(5).randn(64, 2) + offset).astype(np.float32)
    results = normalise(SyncBatchNormalization(momentum=0.0), cut(x, sizes), cut(np.ones_like(x), sizes))
    right = x.astype(np.float64).var(0)
    for one in results:
        assert (one["var"] >= 0).all()
        np.testing.assert_allclose(one["var"], right, rtol=bound)
        assert np.isfinite(one["y"]).all()


def test_moving_statistics_are_used_and_left_alone_outside_of_training() -> None:
    x = np.float32([[1.0], [3.0]])
    layer = SyncBatchNormalization()
    with mirrored(2).scope():
        layer.build((None, 1))
        layer.moving_mean.assign([1.0])
        layer.moving_variance.assign([4.0 - EPSILON])
    for one, value in zip(normalise(layer, cut(x, [1, 1]), cut(x, [1, 1]), training=False), (0.0, 1.0), strict=True):
        np.testing.assert_allclose(one["y"], [[value]], atol=1e-6)
        assert (one["mean"], one["var"]) == (1.0, np.float32(4.0 - EPSILON))


def test_a_frozen_layer_uses_its_moving_statistics_as_keras_does() -> None:
    layer = SyncBatchNormalization(trainable=False)
    x = np.float32([[5.0], [7.0]])
    for one, value in zip(normalise(layer, cut(x, [1, 1]), cut(x, [1, 1])), (5.0, 7.0), strict=True):
        np.testing.assert_allclose(one["y"], [[value / np.sqrt(1 + EPSILON)]], rtol=1e-6)
        assert (one["mean"], one["var"]) == (0.0, 1.0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_any_example_the_moving_statistics_stay(replicas: int) -> None:
    """A short last batch has fewer examples than micro-batches."""
    empty = [np.zeros([0, 2], np.float32)] * replicas
    for one in normalise(SyncBatchNormalization(momentum=0.5), empty, empty):
        np.testing.assert_array_equal(one["mean"], [0.0, 0.0])
        np.testing.assert_array_equal(one["var"], [1.0, 1.0])


@pytest.mark.parametrize(
    ("policy", "output", "statistics"),
    [
        ("float64", "float64", "float64"),
        ("mixed_float16", "float16", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32"),
    ],
)
def test_statistics_are_float32_or_wider_whatever_the_policy(policy: str, output: str, statistics: str) -> None:
    layer = SyncBatchNormalization(dtype=policy, momentum=0.0)
    # The sum of 2,000 rows of 100 is more than float16 holds, and more than bfloat16 counts.
    x = np.full([2000, 1], 100.0) + np.tile([[1.0], [-1.0]], [1000, 1])
    y = layer(tf.cast(x, output), training=True)
    assert (y.dtype.name, layer.moving_variance.dtype) == (output, statistics)
    assert float(layer.moving_mean.value[0]) == pytest.approx(100.0, rel=1e-3)
    if output != "bfloat16":  # which has no 101
        assert float(layer.moving_variance.value[0]) == pytest.approx(1.0, rel=1e-5)


def test_without_centre_and_scale_it_has_no_trainable_variable() -> None:
    layer = SyncBatchNormalization(center=False, scale=False)
    layer.build((None, 3))
    assert (len(layer.trainable_variables), len(layer.non_trainable_variables)) == (0, 2)


def test_its_config_makes_the_same_layer() -> None:
    layer = SyncBatchNormalization(momentum=0.5, epsilon=0.1, center=False, name="norm")
    assert SyncBatchNormalization.from_config(layer.get_config()).get_config() == layer.get_config()


@pytest.mark.parametrize("momentum", [-0.1, 1.5])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match=f"momentum={momentum}"):
        SyncBatchNormalization(momentum=momentum)
