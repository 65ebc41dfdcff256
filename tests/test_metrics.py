"""Standard metrics equal NumPy over all examples, for any batch size, replicas and micro-batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from framework import ConfigError, LossOutput, metrics
from framework.step.values import Stat, StatLayout, as_stats
from input_pipelines import from_arrays
from tests.helpers import Toy, settings

CLASSES, COUNT = 4, 37
_random = np.random.RandomState(3)
LOGITS = _random.randn(COUNT, CLASSES).astype(np.float32)
LABELS = _random.randint(0, CLASSES, COUNT).astype(np.int32)
PREDICTED = LOGITS.argmax(1)
SCORES = (1 / (1 + np.exp(-LOGITS[:, 0]))).astype(np.float32)
BINARY = (LABELS > 1).astype(np.int32)


class Scored(Toy):
    """Evaluates given logits with every metric; the model only gives training something to do."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.keras_auc = keras.metrics.AUC(num_thresholds=50)
        self.keras_iou = keras.metrics.MeanIoU(num_classes=CLASSES)

    def train_data(self) -> Any:
        return from_arrays((LOGITS, LABELS, SCORES, BINARY), shuffle=False)

    eval_data = train_data

    def compute_loss(self, model: Any, batch: Any, *, training: bool) -> LossOutput:
        logits, labels, scores, binary = batch
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        predicted = tf.argmax(logits, -1)
        found = {
            "accuracy": metrics.accuracy(labels, logits),
            "top2": metrics.top_k_accuracy(labels, logits, 2),
            "perplexity": metrics.perplexity(losses),
            "auc": metrics.auc(binary, scores, bins=100_000),
            "confusion": metrics.confusion_matrix(labels, predicted, CLASSES),
            "iou": metrics.mean_iou(labels, predicted, CLASSES),
            "keras_auc": metrics.keras_metric(self.keras_auc, binary, scores),
            "keras_iou": metrics.keras_metric(self.keras_iou, labels, predicted),
        }
        return LossOutput(loss=losses + 0.0 * model.w, metrics=found)


def expected() -> dict[str, float]:
    """The same in plain NumPy and Keras, over all examples at once."""
    shifted = LOGITS.astype(np.float64) - LOGITS.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(COUNT), LABELS]
    counts = np.zeros([CLASSES, CLASSES])
    np.add.at(counts, (LABELS, PREDICTED), 1)
    rank = (LOGITS[np.arange(COUNT), LABELS][:, None] < LOGITS).sum(1)
    positive, negative = SCORES[BINARY == 1], SCORES[BINARY == 0]
    wins = (positive[:, None] > negative).mean() + (positive[:, None] == negative).mean() / 2
    iou = np.diag(counts) / (counts.sum(0) + counts.sum(1) - np.diag(counts))
    keras_auc, keras_iou = keras.metrics.AUC(num_thresholds=50), keras.metrics.MeanIoU(num_classes=CLASSES)
    keras_auc.update_state(BINARY, SCORES)
    keras_iou.update_state(LABELS, PREDICTED)
    return {
        "loss": losses.mean(),
        "accuracy": (PREDICTED == LABELS).mean(),
        "top2": (rank < 2).mean(),
        "perplexity": np.exp(losses.mean()),
        "auc": wins,
        "iou": iou.mean(),
        "keras_auc": float(keras_auc.result()),
        "keras_iou": float(keras_iou.result()),
        **{f"confusion/{i}/{j}": counts[i, j] for i in range(CLASSES) for j in range(CLASSES) if counts[i, j]},
    }


@pytest.mark.parametrize(("replicas", "batch"), [(1, 37), (1, 8), (2, 8), (3, 7)])
def test_an_evaluation_gives_the_figures_of_all_examples_at_once(replicas: int, batch: int) -> None:
    result = Scored(settings(num_replicas=replicas, eval_batch_size=batch)).evaluate()
    assert result.pop("examples") == COUNT
    assert result == pytest.approx(expected(), rel=1e-5)
    assert all(type(v) is float for v in result.values())


@pytest.mark.parametrize(("replicas", "micros"), [(1, 3), (2, 2)])
def test_a_record_of_training_gives_them_over_its_steps_and_micro_batches(replicas: int, micros: int) -> None:
    config = settings(
        num_replicas=replicas,
        accumulate_steps=micros,
        global_batch_size=8,
        train_steps=None,
        train_epochs=1,
        log_every=9,
    )
    result = Scored(config).train(evaluate=False)
    assert {n: result[n] for n in expected()} == pytest.approx(expected(), rel=1e-5)


def test_a_nan_score_is_not_among_the_best() -> None:
    logits = np.float32([[np.nan, 0.0, 0.0]])
    assert metrics.top_k_accuracy([0], logits, 1).numpy() == [0.0]


def test_what_has_no_value_is_nan_and_not_zero() -> None:
    def value(metric: metrics.Derived) -> float:
        stats = as_stats({"m": metric}, "a step")
        layout = StatLayout(stats)
        return layout.figures([v.numpy() for v in layout.vectors(stats)])["m"]

    assert np.isnan(value(metrics.auc([1, 1], [0.2, 0.4])))
    assert np.isnan(value(metrics.perplexity(tf.zeros([0]))))
    assert np.isnan(value(metrics.mean_iou([], [], 3)))
    assert value(metrics.auc([0, 1, 1], [0.5, 0.5, 0.9], weight=[1.0, 1.0, 2.0])) == pytest.approx(2.5 / 3)


def test_pairs_outside_of_the_classes_are_not_counted() -> None:
    stats = as_stats({"m": metrics.confusion_matrix([0, 1, 255, 1], [0, 3, 0, 1], 2)}, "a step")
    layout = StatLayout({"loss": Stat("mean", tf.constant(1.0), tf.constant(1.0)), **stats})
    vectors = layout.vectors({"loss": Stat("mean", tf.constant(1.0), tf.constant(1.0)), **stats})
    assert layout.figures([v.numpy() for v in vectors]) == {"loss": 1.0, "m/0/0": 1.0, "m/1/1": 1.0}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="k=0 but k must be at least 1"):
        metrics.top_k_accuracy([0], [[1.0]], 0)

    class Late(keras.metrics.Metric):
        pass

    with pytest.raises(ConfigError, match="keras_metric got Late without variables"):
        metrics.keras_metric(Late(), [0], [1.0])
