"""Masked tokens, as BERT learns from (Devlin et al. 2019, section 3.1, task 1), chosen by the example's key."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from framework import ConfigError
from input_pipelines.order import uniforms

# Of the chosen places 8 of 10 show the mask, 1 of 10 a random id, and 1 of 10 what stands there.
_MASK, _RANDOM = 0.8, 0.9


class MaskTokens:
    """Hides some ids of each window; for ``from_text`` and ``from_tokens``, as ``corrupt``.

    A window of ``length`` ids has ``count`` = max(1, share x length) places to learn from, rounded; where only some ids
    may be chosen, a window uses that share of them. The batch becomes a dict: ``inputs`` int32 ``[rows, length]`` with
    ids hidden, ``places`` int32 ``[rows, count]``, ``targets`` int32 ``[rows, count]``, the ids that stood there,
    ``weights`` float32 ``[rows, count]``, 0 where there was no such place, and, where documents can be told apart,
    ``segments`` int32 ``[rows, length]`` as of ``from_text``.

    Args:
      mask: the id that hides another one.
      vocabulary: random ids are below it.
      share: of the ids that are chosen; from above 0 to 1.
      keep: the id of a document's end, which is never chosen; None: there is none.

    Raises:
      ConfigError: a share out of range.
    """

    def __init__(self, *, mask: int, vocabulary: int, share: float = 0.15, keep: int | None = None):
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"mask_share={share} but it must be above 0 and at most 1; for example 0.15")
        self._mask, self._vocabulary, self._share, self._keep = mask, vocabulary, share, keep

    def count(self, length: int) -> int:
        """Places to learn from in a window of ``length`` ids."""
        return max(1, round(self._share * length))

    def __call__(self, rows: Any, keys: tf.Tensor) -> dict[str, tf.Tensor]:
        """The changed batch.

        Args:
          rows: a dict with ``inputs`` and maybe ``segments`` (0 in padding, which is never chosen), or a tuple that
            begins with the inputs; int32 ``[rows, length]``.
          keys: int64 ``[rows, 2]``, a key for each window.
        """
        ids = rows["inputs"] if isinstance(rows, dict) else rows[0]
        segments = rows.get("segments") if isinstance(rows, dict) else None
        if segments is None and self._keep is not None:
            segments = 1 + tf.cumsum(tf.cast(ids == self._keep, tf.int32), 1, exclusive=True)
        length = ids.shape[1]
        draws = uniforms(keys, 2 * length)
        allowed = tf.ones_like(ids, tf.bool) if segments is None else segments > 0
        if self._keep is not None:
            allowed &= ids != self._keep
        # The places of the smallest draws: a random subset of that size.
        order = tf.where(allowed, draws[:, :length], 2.0)
        _, places = tf.math.top_k(-order, self.count(length))
        chosen = tf.reduce_sum(tf.cast(allowed, tf.float32), 1)
        wanted = tf.minimum(tf.maximum(tf.round(self._share * chosen), 1.0), chosen)
        weights = tf.cast(tf.range(places.shape[1], dtype=tf.float32) < wanted[:, None], tf.float32)
        targets = tf.gather(ids, places, batch_dims=1)
        # One draw says both what is shown and, of the tenth that shows a random id, which one.
        second = tf.gather(draws[:, length:], places, batch_dims=1)
        other = tf.cast((second - _MASK) / (_RANDOM - _MASK) * self._vocabulary, tf.int32)
        other = tf.clip_by_value(other, 0, self._vocabulary - 1)
        shown = tf.where(second < _MASK, self._mask, tf.where(second < _RANDOM, other, targets))
        shown = tf.where(weights > 0.0, shown, targets)
        row = tf.broadcast_to(tf.range(tf.shape(ids)[0])[:, None], tf.shape(places))
        inputs = tf.ensure_shape(tf.tensor_scatter_nd_update(ids, tf.stack([row, places], 2), shown), ids.shape)
        made = {"inputs": inputs, "places": places, "targets": targets, "weights": weights}
        return made if segments is None else {**made, "segments": segments}
