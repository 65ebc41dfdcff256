"""The decoder: sizes, numbers against NumPy, no look into the future, and cached sampling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from models.generate import generate
from models.language_model import GPT2_SMALL, LanguageModel, LanguageShape, parameter_count
from models.transformer_ops import embed, gelu, layer_norm, rotate

SMALL = LanguageShape(vocabulary=13, length=12, width=8, layers=2, heads=2)


def model(**changes: Any) -> LanguageModel:
    """A small model whose weights are large enough to matter, norms and biases included."""
    made = LanguageModel(dataclasses.replace(SMALL, **changes))
    numbers = np.random.default_rng(3)
    for v in made.trainable_variables:
        v.assign(numbers.normal(1.0 if v.name.endswith("gamma") else 0.0, 0.3, v.shape))
    return made


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, SMALL.vocabulary, shape).astype(np.int32)


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_gpt2_small_has_the_published_number_of_parameters() -> None:
    assert GPT2_SMALL.parameters == 124_439_808


@pytest.mark.parametrize("rope", [False, True])
def test_a_model_has_the_parameters_that_its_shape_says(rope: bool) -> None:
    made = model(rope=rope)
    assert parameter_count(made) == made.shape.parameters
    # By hand: 13 x 8 tokens, 12 x 8 positions, a norm of 16; a block of 2 x 16 in norms, 8 x 24 + 24, 8 x 8 + 8,
    # 8 x 32 + 32 and 32 x 8 + 8.
    assert made.shape.parameters == 104 + (0 if rope else 96) + 16 + 2 * (32 + 216 + 72 + 288 + 264)


def test_names_are_paths_and_say_which_weights_are_not_to_decay() -> None:
    with keras.name_scope("fresh"):
        names = [v.path for v in LanguageModel(SMALL, name="gpt").trainable_variables]
    assert len(set(names)) == len(names) == 4 + 2 * 12
    assert any(n.endswith("gpt/block_1/mlp_in_kernel") for n in names)
    decayed = [n.rpartition("/")[2] for n in names if not any(part in n for part in ("bias", "gamma", "beta"))]
    assert set(decayed) == {
        "embedding",
        "positions",
        "query_key_value_kernel",
        "attention_out_kernel",
        "mlp_in_kernel",
        "mlp_out_kernel",
    }


def test_branches_start_smaller_the_more_of_them_there_are() -> None:
    made = LanguageModel(LanguageShape(vocabulary=300, length=16, width=64, layers=8, heads=4))
    found = {v.name: float(np.std(v.numpy())) for v in made.trainable_variables if v.name.endswith("kernel")}
    for name, deviation in found.items():
        expected = 0.02 / (4.0 if name.endswith("out_kernel") else 1.0)
        assert abs(deviation - expected) < 0.05 * expected, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 9}, "width=9 with heads=2: the width must be a multiple"),
        ({"width": 6, "rope": True}, "each head has 3 numbers"),
        ({"layers": 0}, "layers=0 but it must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **changes)


# --- numbers -------------------------------------------------------------------------------------------------------


def reference(made: LanguageModel, ids: np.ndarray) -> np.ndarray:
    """The logits of one sequence in NumPy and float64, head by head and place by place."""
    s = made.shape
    outer = {n: v.numpy().astype(np.float64) for n, v in made.outer.items()}

    def norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        half = len(x) // 2
        pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * place * 10_000.0 ** (-np.arange(half) / half))
        return np.concatenate([pairs.real, pairs.imag])

    x = outer["embedding"][ids] + (0 if s.rope else outer["positions"][: len(ids)])
    for block in made.blocks:
        w = {n: v.numpy().astype(np.float64) for n, v in block.weights_by_name.items()}
        y = norm(x, w["attention_norm_gamma"], w["attention_norm_beta"])
        q, k, v = np.split(y @ w["query_key_value_kernel"] + w["query_key_value_bias"], 3, -1)
        joined = np.zeros_like(x)
        for h in range(s.heads):
            part = slice(h * s.head_width, (h + 1) * s.head_width)
            for i in range(len(ids)):
                keys = [turned(k[j, part], j) if s.rope else k[j, part] for j in range(i + 1)]
                query = turned(q[i, part], i) if s.rope else q[i, part]
                share = np.exp([query @ key / math.sqrt(s.head_width) for key in keys])
                joined[i, part] = share / share.sum() @ v[: i + 1, part]
        x = x + joined @ w["attention_out_kernel"] + w["attention_out_bias"]
        y = norm(x, w["mlp_norm_gamma"], w["mlp_norm_beta"]) @ w["mlp_in_kernel"] + w["mlp_in_bias"]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w["mlp_out_kernel"] + w["mlp_out_bias"]
    return norm(x, outer["norm_gamma"], outer["norm_beta"]) @ outer["embedding"].T


@pytest.mark.parametrize("rope", [False, True])
def test_logits_are_those_of_numpy(rope: bool) -> None:
    made, ids = model(rope=rope), tokens(3, 7)
    logits = made(ids)
    assert logits.shape == [3, 7, 13] and logits.dtype == tf.float32
    np.testing.assert_allclose(logits, [reference(made, row) for row in ids], atol=2e-5)


def gradients_agree(own: Callable[..., Any], composed: Callable[..., Any], *inputs: Any, atol: float = 1e-12) -> None:
    """Values and gradients of a piece against the same from TensorFlow's ops, in float64."""
    values, found = [], []
    tensors = [tf.constant(x) for x in inputs]
    for function in (own, composed):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = function(*tensors)
            total = tf.reduce_sum(result * np.cos(np.arange(tf.size(result))).reshape(result.shape))
        values.append(result)
        found.append([tf.convert_to_tensor(g) for g in tape.gradient(total, tensors) if g is not None])
    np.testing.assert_allclose(values[0], values[1], atol=atol)
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * atol)


def test_closed_form_gradients_are_those_of_the_composed_ops() -> None:
    numbers = np.random.default_rng(0)
    x, gamma, beta = numbers.normal(size=[5, 6]), numbers.normal(size=6), numbers.normal(size=6)

    def composed_norm(x: Any, gamma: Any, beta: Any) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-5) * gamma + beta

    gradients_agree(layer_norm, composed_norm, x, gamma, beta)
    gradients_agree(gelu, lambda x: tf.nn.gelu(x, approximate=True), x, atol=1e-8)  # its constants are float32
    ids = tf.constant([[3, 0, 3], [1, 1, 1]])
    gradients_agree(lambda t: embed(t, ids), lambda t: tf.gather(t, ids), x)


def test_the_gradient_of_the_tied_embedding_is_dense() -> None:
    made = model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(made(tokens(2, 5)) ** 2)
    gradients = tape.gradient(loss, [v.value for v in made.trainable_variables])
    assert all(isinstance(g, tf.Tensor) for g in gradients)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    numbers = np.random.default_rng(0)
    query, key = (tf.constant(numbers.normal(size=[1, 8])) for _ in range(2))

    def score(i: int, j: int) -> float:
        return float(tf.reduce_sum(rotate(query, tf.constant([i])) * rotate(key, tf.constant([j]))))

    assert score(7, 4) == pytest.approx(score(103, 100), rel=1e-4)
    assert abs(score(7, 4) - score(7, 5)) > 1e-3


# --- what a place sees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True])
def test_a_token_changes_no_bit_of_the_logits_before_it(rope: bool) -> None:
    made, ids = model(rope=rope), tokens(1, 9)
    before = made(ids).numpy()
    for place in range(9):
        other = ids.copy()
        other[0, place] = (other[0, place] + 1) % 13
        after = made(other).numpy()
        np.testing.assert_array_equal(after[0, :place], before[0, :place])
        assert all(np.any(after[0, i] != before[0, i]) for i in range(place, 9))


def test_segments_keep_attention_inside_a_document() -> None:
    made, ids = model(rope=True), tokens(1, 9)
    segments = tf.constant([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
    found = made(ids, segments=segments).numpy()
    np.testing.assert_allclose(found[:, :4], made(ids[:, :4]), atol=1e-5)
    # Rotary positions count distances, so the second document is as if it stood alone.
    np.testing.assert_allclose(found[:, 4:7], made(ids[:, 4:7]), atol=1e-5)
    assert np.abs(found[:, 4:7] - made(ids).numpy()[:, 4:7]).max() > 1e-2


def test_more_places_than_positions_are_refused_unless_they_are_rotary() -> None:
    with pytest.raises(ConfigError, match="13 places but the model has 12"):
        model()(tokens(1, 13))
    assert model(rope=True)(tokens(1, 13)).shape == [1, 13, 13]


def test_a_batch_of_no_example_and_of_unknown_size() -> None:
    made = model(rope=True)
    assert made(tokens(0, 5)).shape == [0, 5, 13]

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def logits(ids: tf.Tensor) -> tf.Tensor:
        return made(ids)

    np.testing.assert_allclose(logits(tokens(3, 7)), made(tokens(3, 7)), atol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    made, ids = model(dropout=0.5), tokens(1, 9)
    np.testing.assert_array_equal(made(ids), made(ids, training=False))
    assert np.any(made(ids, training=True).numpy() != made(ids).numpy())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_gives_float32_logits_near_the_full_ones(policy: str) -> None:
    full, ids = model(), tokens(2, 9)
    half = LanguageModel(SMALL, dtype=policy)
    half.set_weights(full.get_weights())
    assert {v.dtype for v in half.trainable_variables} == {"float32"}
    found = half(ids)
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, full(ids), atol=0.2 if policy == "mixed_bfloat16" else 0.05)
    assert np.any(found.numpy() != full(ids).numpy())


def test_a_model_comes_again_from_its_config() -> None:
    made = model(rope=True, dropout=0.25)
    again = LanguageModel.from_config(made.get_config())
    assert again.shape == made.shape


# --- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True])
def test_cached_sampling_gives_the_tokens_of_whole_passes(rope: bool) -> None:
    made, prompt = model(rope=rope), tokens(3, 4)
    expected = prompt
    for _ in range(8):
        likeliest = np.argmax(made(expected).numpy()[:, -1], -1)
        expected = np.concatenate([expected, likeliest[:, None].astype(np.int32)], 1)
    found = generate(made, prompt, steps=8, temperature=0.0)
    assert found.dtype == tf.int32
    np.testing.assert_array_equal(found, expected)
    # The likeliest of one is the likeliest of all.
    np.testing.assert_array_equal(generate(made, prompt, steps=8, top_k=1), expected)


def test_samples_follow_the_softmax_and_the_seed() -> None:
    made = model(rope=True)
    prompt = np.repeat(tokens(1, 4), 4000, 0)
    drawn = generate(made, prompt, steps=1, temperature=0.5, seed=7).numpy()[:, -1]
    share = tf.nn.softmax(made(prompt[:1])[0, -1] / 0.5).numpy()
    counts = np.bincount(drawn, minlength=13)
    assert np.all(np.abs(counts - 4000 * share) < 6 * np.sqrt(4000 * share * (1 - share)) + 1)
    few = generate(made, prompt, steps=1, top_k=3, seed=7).numpy()[:, -1]
    assert set(few.tolist()) == set(np.argsort(share)[-3:].tolist())
    for seed, equal in ((7, True), (8, False)):
        again = generate(made, prompt, steps=1, temperature=0.5, seed=seed).numpy()[:, -1]
        assert np.array_equal(again, drawn) is equal


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 2], {"steps": 1}, r"the prompt has shape \(2,\)"),
        (np.zeros([1, 0]), {"steps": 1}, "at least one place"),
        ([[1]], {"steps": 0}, "steps=0"),
        ([[1]], {"steps": 1, "temperature": -1.0}, "temperature=-1"),
        ([[1]], {"steps": 12}, "are 13 places but the model has 12"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(model(), prompt, **options)
