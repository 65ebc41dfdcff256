"""The bidirectional encoder: its size, numbers against NumPy, what a place sees, and what the task reads."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError
from input_pipelines.pack import write_tokens
from models.bert import BERT_BASE, Bert, BertShape
from models.language_model import parameter_count
from models.masked_language_task import MaskedLanguage
from tests.helpers import settings
from tests.models.encoders import blocks, gelu, norm, randomized, weights

SMALL = BertShape(vocabulary=13, length=12, width=8, layers=2, heads=2, pooler=True)
IDS = np.random.default_rng(1).integers(0, 13, [3, 7]).astype(np.int32)


def test_the_base_encoder_has_the_published_number_of_parameters() -> None:
    assert BERT_BASE.parameters == 109_482_240


def test_a_model_has_the_parameters_that_its_shape_says() -> None:
    made = Bert(SMALL)
    assert parameter_count(made) == SMALL.parameters
    # By hand: tokens, positions and types, a norm, a pooler; the head's layer, norm and bias; blocks as of a small GPT.
    assert SMALL.parameters == 104 + 96 + 16 + 16 + 72 + (72 + 16 + 13) + 2 * 872


def test_logits_and_the_pooled_vector_are_those_of_numpy() -> None:
    made = randomized(Bert(SMALL))
    w = weights(made)
    types = np.array([[0, 0, 1, 1, 1, 0, 1]] * 3)
    logits, pooled = [], []
    for ids, kinds in zip(IDS, types):
        x = norm(w["embedding"][ids] + w["positions"][:7] + w["types"][kinds], w, "embedding_norm", 1e-12)
        x = blocks(made, x)
        pooled.append(np.tanh(x[0] @ w["pooler_kernel"] + w["pooler_bias"]))
        y = norm(gelu(x @ w["transform_kernel"] + w["transform_bias"]), w, "head_norm", 1e-12)
        logits.append(y @ w["embedding"].T + w["head_bias"])
    found = made(IDS, types=types)
    assert found.shape == [3, 7, 13] and found.dtype == tf.float32
    np.testing.assert_allclose(found, logits, atol=5e-5)
    np.testing.assert_allclose(made.pooled(made.encode(IDS, types=types)), pooled, atol=2e-5)
    places = np.array([[6, 0], [1, 1], [3, 2]])
    expected = np.take_along_axis(np.array(logits), places[:, :, None], 1)
    np.testing.assert_allclose(made(IDS, places=places, types=types), expected, atol=5e-5)


def test_rotary_positions_take_the_place_of_learnt_ones() -> None:
    turned = dataclasses.replace(SMALL, rope=True)
    assert turned.parameters == SMALL.parameters - 96
    made = randomized(Bert(turned))
    assert made(np.zeros([1, 13], np.int32)).shape == [1, 13, 13]
    # Order counts: other places see the same tokens in another order.
    swapped = IDS[:, [1, 0, 2, 3, 4, 5, 6]]
    assert np.abs(made(IDS).numpy() - made(swapped).numpy())[IDS[:, 0] != IDS[:, 1], 2:].max() > 1e-3


def test_every_place_sees_every_other_but_for_other_segments() -> None:
    made = randomized(Bert(SMALL))
    other = IDS.copy()
    other[:, 6] = (other[:, 6] + 1) % 13
    assert np.all(np.any(made(IDS).numpy() != made(other).numpy(), axis=2))
    segments = np.array([[1, 1, 1, 1, 1, 0, 0]] * 3)
    before, after = made(IDS, segments=segments).numpy(), made(other, segments=segments).numpy()
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    np.testing.assert_allclose(before[:, :5], made(IDS[:, :5]), atol=1e-5)


def test_more_places_than_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="13 places but the model has 12"):
        Bert(SMALL)(np.zeros([1, 13], np.int32))


# --- the task --------------------------------------------------------------------------------------------------------


def task(**options: Any) -> MaskedLanguage:
    return MaskedLanguage(settings(), **{"length": 8, "width": 8, "layers": 1, "heads": 2, **options})


def test_figures_by_hand() -> None:
    """Equal logits: ln 258 nats for each token that counts; padding is told apart, documents only if asked."""
    batch = {
        "inputs": tf.constant([[97, 257, 256, 120, 0, 0, 0, 0]]),
        "places": tf.constant([[1, 7]]),
        "targets": tf.constant([[98, 0]]),
        "weights": tf.constant([[1.0, 0.0]]),
        "segments": tf.constant([[1, 1, 1, 2, 0, 0, 0, 0]]),
    }
    seen = []

    def model(ids: Any, *, places: Any, segments: Any, training: bool) -> tf.Tensor:
        seen.append(segments.numpy().tolist())
        return tf.one_hot(places * 0, 258) * 0.0

    output = task().compute_loss(model, batch, training=True)
    np.testing.assert_allclose(output.loss, [[math.log(258)] * 2], rtol=1e-6)
    assert output.weight is batch["weights"]
    assert output.metrics["accuracy"].numpy().tolist() == [[False, True]]
    task(separate_documents=True).compute_loss(model, batch, training=True)
    assert seen == [[[1, 1, 1, 1, 0, 0, 0, 0]], [[1, 1, 1, 2, 0, 0, 0, 0]]]


def test_the_mask_is_one_id_more_or_the_one_that_the_vocabulary_keeps_for_it(tmp_path: pathlib.Path) -> None:
    assert task().model.shape.vocabulary == 258
    write_tokens([np.arange(60)], tmp_path / "train.bin", vocabulary_size=100)
    assert task(data_dir=str(tmp_path)).model.shape.vocabulary == 101
    kept = task(data_dir=str(tmp_path), mask_id=99)
    assert kept.model.shape.vocabulary == 100
    assert kept.train_data().size == 7 and kept.eval_data() is None
    with pytest.raises(ConfigError, match="mask_id=100 but it must be below the vocabulary of 100"):
        task(data_dir=str(tmp_path), mask_id=100).train_data()
    with pytest.raises(ConfigError, match="no end_of_document, so documents cannot be told apart"):
        task(data_dir=str(tmp_path), separate_documents=True).train_data()
    with pytest.raises(ConfigError, match=r"mask_share=2\.0"):
        task(mask_share=2.0)
