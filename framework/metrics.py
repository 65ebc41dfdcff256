"""Standard metrics for ``LossOutput.metrics``: right for any split of the examples over batches, replicas and workers.

Each is either one value per example, of which the framework takes the weighted mean, or a ``Derived`` figure, computed
once from sums over all examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from framework.errors import ConfigError
from framework.step.values import Derived


def accuracy(labels: Any, logits: Any) -> tf.Tensor:
    """1.0 where the likeliest class is the label: float32 ``[batch, ...]``.

    Args:
      labels: class numbers, integer ``[batch, ...]``.
      logits: scores or probabilities ``[batch, ..., classes]``.
    """
    return tf.cast(tf.equal(tf.argmax(logits, -1, tf.int64), tf.cast(labels, tf.int64)), tf.float32)


def top_k_accuracy(labels: Any, logits: Any, k: int) -> tf.Tensor:
    """1.0 where fewer than ``k`` classes score higher than the label's: float32 ``[batch, ...]``.

    Args:
      labels: class numbers, integer ``[batch, ...]``.
      logits: scores or probabilities ``[batch, ..., classes]``.
      k: at least 1.

    Raises:
      ConfigError: ``k`` is below 1.
    """
    if k < 1:
        raise ConfigError(f"top_k_accuracy got k={k} but k must be at least 1")
    logits = tf.convert_to_tensor(logits)
    labels = tf.cast(labels, tf.int64)
    mine = tf.gather(logits, labels, axis=-1, batch_dims=labels.shape.rank)
    higher = tf.reduce_sum(tf.cast(logits > mine[..., None], tf.int32), -1)
    finite = tf.math.is_finite(mine)  # a NaN is higher than nothing, and must not count as right
    return tf.cast((higher < k) & finite, tf.float32)


def perplexity(losses: Any, weight: Any = None) -> Derived:
    """exp of the mean cross-entropy.

    Args:
      losses: cross-entropy in nats, ``[batch, ...]``.
      weight: of the losses' shape; None: ones.
    """
    losses = tf.convert_to_tensor(losses)
    weight = tf.ones_like(losses) if weight is None else tf.cast(weight, losses.dtype)
    return Derived(
        [tf.reduce_sum(losses * weight), tf.reduce_sum(weight)],
        lambda sums: float(np.exp(sums[0] / sums[1])) if sums[1] else float("nan"),
    )


def auc(labels: Any, probabilities: Any, weight: Any = None, bins: int = 1000) -> Derived:
    """Area under the ROC curve, from a histogram of the probabilities: exact up to ties within one bin.

    The area is the chance that a positive example scores higher than a negative one, ties counting one half
    (Hanley and McNeil 1982); NaN without both kinds.

    Args:
      labels: 0 or 1, ``[batch]``.
      probabilities: in [0, 1], ``[batch]``.
      weight: ``[batch]``; None: ones.
      bins: of the histogram, of equal width.
    """
    labels = tf.reshape(tf.cast(labels, tf.float32), [-1])
    weight = tf.ones_like(labels) if weight is None else tf.reshape(tf.cast(weight, tf.float32), [-1])
    place = tf.cast(tf.reshape(tf.cast(probabilities, tf.float32), [-1]) * bins, tf.int32)
    place = tf.clip_by_value(place, 0, bins - 1)
    positive = tf.math.unsorted_segment_sum(labels * weight, place, bins)
    negative = tf.math.unsorted_segment_sum((1.0 - labels) * weight, place, bins)

    def finish(sums: Sequence[np.ndarray]) -> float:
        positive, negative = sums
        below = np.cumsum(negative) - negative
        pairs = positive.sum() * negative.sum()
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")

    return Derived([positive, negative], finish)


def _confusion(labels: Any, predictions: Any, classes: int, weight: Any) -> tf.Tensor:
    """float32 ``[classes, classes]``: weight of each pair of label and prediction; others than classes are left out."""
    labels, predictions = (tf.reshape(tf.cast(x, tf.int64), [-1]) for x in (labels, predictions))
    weight = tf.ones_like(labels, tf.float32) if weight is None else tf.reshape(tf.cast(weight, tf.float32), [-1])
    valid = (labels >= 0) & (labels < classes) & (predictions >= 0) & (predictions < classes)
    place = tf.where(valid, labels * classes + predictions, tf.constant(-1, tf.int64))  # -1 is dropped
    return tf.reshape(tf.math.unsorted_segment_sum(weight, place, classes * classes), [classes, classes])


def confusion_matrix(labels: Any, predictions: Any, classes: int, weight: Any = None) -> Derived:
    """Counts by label and prediction, reported as ``NAME/LABEL/PREDICTION``; pairs that never came are left out.

    Args:
      labels: class numbers, integer of any shape; those outside ``[0, classes)`` are not counted.
      predictions: likewise, of the same shape.
      classes: their number.
      weight: of the same shape; None: ones.
    """

    def finish(sums: Sequence[np.ndarray]) -> Mapping[str, float]:
        return {f"{i}/{j}": float(sums[0][i, j]) for i, j in zip(*np.nonzero(sums[0]), strict=True)}

    return Derived([_confusion(labels, predictions, classes, weight)], finish)


def mean_iou(labels: Any, predictions: Any, classes: int, weight: Any = None) -> Derived:
    """Mean over classes of intersection over union (Everingham et al. 2015), of the classes that came at all.

    Args:
      labels: class numbers, integer of any shape; those outside ``[0, classes)`` are not counted.
      predictions: likewise, of the same shape.
      classes: their number.
      weight: of the same shape; None: ones.
    """

    def finish(sums: Sequence[np.ndarray]) -> float:
        counts = sums[0]
        union = counts.sum(0) + counts.sum(1) - np.diag(counts)
        there = union > 0
        return float((np.diag(counts)[there] / union[there]).mean()) if there.any() else float("nan")

    return Derived([_confusion(labels, predictions, classes, weight)], finish)


def keras_metric(metric: Any, labels: Any, predictions: Any, weight: Any = None) -> Derived:
    """Any Keras metric whose state is a sum over examples, which nearly all are, right under replicas.

    The metric's own variables are not touched: what a batch adds to them is computed, summed over replicas and steps
    like every figure, and the result is computed once from the total.

    Args:
      metric: a ``keras.metrics.Metric``, made once (in the task's ``__init__``) and not in the step.
      labels: as the metric wants them.
      predictions: as the metric wants them.
      weight: as the metric wants it.

    Raises:
      ConfigError: the metric makes its variables only when it is used.
    """
    with tf.init_scope():  # values, also while a graph is traced
        initial = [np.asarray(v.value) for v in metric.variables]
    if not initial:
        raise ConfigError(
            f"keras_metric got {type(metric).__name__} without variables; call its update_state once on an example and "
            "reset_state, or use one that makes them at construction"
        )
    start = [tf.constant(value) for value in initial]
    updated = metric.stateless_update_state(start, labels, predictions, sample_weight=weight)
    changes = [tf.cast(new, tf.float32) - tf.cast(old, tf.float32) for new, old in zip(updated, start, strict=True)]

    def finish(sums: Sequence[np.ndarray]) -> float:
        totals = [tf.constant((a + b).astype(a.dtype)) for a, b in zip(initial, sums, strict=True)]
        return float(np.asarray(metric.stateless_result(totals)))

    return Derived(changes, finish)
