"""The shared block: computed again with equal gradients, norms before and behind, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from models.language_model import LanguageModel, LanguageShape
from models.language_task import Language
from models.transformer import Block, TransformerShape
from models.transformer_ops import recomputed
from tests.helpers import settings

SMALL = LanguageShape(vocabulary=13, length=12, width=8, layers=2, heads=2, dropout=0.3)


def gradients(model: LanguageModel, ids: np.ndarray, *, compiled: bool) -> list[np.ndarray]:
    """Of the sum of squared logits while training, from the same state of the masks' generators."""
    generators = [v for v in model.non_trainable_variables if "seed_generator" in v.path]
    for i, v in enumerate(generators):
        v.assign([100 + i, 0])

    def compute() -> Any:
        variables = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids, training=True) ** 2)
        return [loss, *tape.gradient(loss, variables)]

    return [g.numpy() for g in (tf.function(compute) if compiled else compute)()]


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_computed_again_have_equal_gradients_masks_included(compiled: bool) -> None:
    kept = LanguageModel(SMALL)
    again = LanguageModel(dataclasses.replace(SMALL, recompute=True))
    again.set_weights(kept.get_weights())
    ids = np.random.default_rng(1).integers(0, 13, [3, 7]).astype(np.int32)
    for a, b in zip(gradients(kept, ids, compiled=compiled), gradients(again, ids, compiled=compiled), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(kept(ids), again(ids))


def test_what_is_computed_again_waits_for_the_gradient_and_is_no_copy_of_the_first_pass() -> None:
    """Else TensorFlow's graph optimiser joins the two, and nothing is saved."""
    options = tf.config.optimizer.get_experimental_options()
    assert not options.get("disable_meta_optimizer"), "the optimiser must run, or this shows nothing"
    runs = []

    def heavy(x: tf.Tensor) -> tf.Tensor:
        runs.append(x)
        return tf.sin(tf.py_function(lambda v: runs.append(v) or v, [x], tf.float32) * 2.0)

    @tf.function
    def slope(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(heavy, x)
        return tape.gradient(y, x)

    assert float(slope(tf.constant(0.25))) == pytest.approx(2 * np.cos(0.5), rel=1e-6)
    symbolic = [r for r in runs if not hasattr(r, "numpy")]
    assert len(symbolic) == 2  # traced twice
    assert len(runs) == 4  # and run twice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behind(TransformerShape):
    """Norms behind the sums."""

    norm_first = False
    epsilon = 1e-12


def test_a_block_with_norms_behind_its_sums_is_that_of_numpy() -> None:
    """Vaswani et al. 2017, section 3.1: x = norm(x + branch(x)), twice."""
    block = Block(Behind(width=4, layers=1, heads=1))
    block.build()
    numbers = np.random.default_rng(0)
    for v in block.trainable_variables:
        v.assign(numbers.normal(size=v.shape))
    x = numbers.normal(size=[3, 4])
    w = {n: v.numpy().astype(np.float64) for n, v in block.weights_by_name.items()}

    def norm(x: np.ndarray, which: str) -> np.ndarray:
        unit = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return unit * w[f"{which}_norm_gamma"] + w[f"{which}_norm_beta"]

    q, k, v = np.split(x @ w["query_key_value_kernel"] + w["query_key_value_bias"], 3, -1)
    share = np.exp(q @ k.T / 2)  # a head of 4 numbers
    share /= share.sum(-1, keepdims=True)
    y = norm(x + share @ v @ w["attention_out_kernel"] + w["attention_out_bias"], "attention")
    z = y @ w["mlp_in_kernel"] + w["mlp_in_bias"]
    z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    expected = norm(y + z @ w["mlp_out_kernel"] + w["mlp_out_bias"], "mlp")
    found, cache = block.call(tf.constant(x, tf.float32), None, tf.range(3), rows=1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert cache is not None and cache.keys.shape == [1, 1, 3, 4]


def test_recomputation_under_xla_is_refused(tmp_path: Any) -> None:
    task = Language(settings(jit="on", run_dir=str(tmp_path / "run")), recompute=True, layers=1, width=8, heads=2)
    with pytest.raises(ConfigError, match="recompute with jit=on: XLA joins equal computations"):
        task.train()
