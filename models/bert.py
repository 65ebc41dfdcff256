"""A bidirectional encoder and its head for masked tokens (Devlin et al. 2019, "BERT")."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from framework import ConfigError
from models.transformer import UNSEEN, Transformer, TransformerShape, row_count, weight_values
from models.transformer_ops import embed, gelu


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertShape(TransformerShape):
    """Sizes of a ``Bert``.

    Attributes:
      vocabulary: token ids are below it.
      length: most tokens that are looked at together.
      rope: rotary positions instead of learnt ones (Su et al. 2021, section 4.2).
      types: kinds of tokens, such as those of a first and of a second sentence.
      pooler: whether there is a layer that makes one vector of the first place, for tasks on whole texts.
      head: whether there is the head for masked tokens; its last kernel is the embedding.
    """

    vocabulary: int
    length: int
    types: int = 2
    pooler: bool = False
    head: bool = True

    norm_first: ClassVar[bool] = False
    epsilon: ClassVar[float] = 1e-12

    def outer_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights outside of the blocks by name."""
        w = self.width
        positions = {} if self.rope else {"positions": (self.length, w)}
        pooler = {"pooler_kernel": (w, w), "pooler_bias": (w,)} if self.pooler else {}
        head = {
            "transform_kernel": (w, w),
            "transform_bias": (w,),
            "head_norm_gamma": (w,),
            "head_norm_beta": (w,),
            "head_bias": (self.vocabulary,),
        }
        return {
            "embedding": (self.vocabulary, w),
            **positions,
            "types": (self.types, w),
            "embedding_norm_gamma": (w,),
            "embedding_norm_beta": (w,),
            **pooler,
            **(head if self.head else {}),
        }


# 109,482,240 parameters, as of the published encoder.
BERT_BASE = BertShape(vocabulary=30522, length=512, width=768, layers=12, heads=12, pooler=True, head=False)


class Bert(Transformer):
    """Token ids ``[batch, places]`` -> logits float32 ``[batch, places, vocabulary]`` of what stands at each place.

    Args:
      shape: the sizes.
    """

    shape_class: ClassVar[type[TransformerShape]] = BertShape

    def encode(
        self,
        tokens: tf.Tensor,
        *,
        segments: tf.Tensor | None = None,
        types: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        """What became of each place, ``[batch, places, width]``.

        Args:
          tokens: integers ``[batch, places]``, at most ``length`` places unless positions are rotary.
          segments: integers ``[batch, places]``: a place sees only places of its own segment; None: all of them.
          types: integers ``[batch, places]``; None: all are of type 0.
          training: whether to drop.

        Raises:
          ConfigError: there are more places than the model has positions for.
        """
        s, weight, rows = self.shape, weight_values(self.outer, tf.float32), row_count(tokens)
        places = tokens.shape[1] or tf.shape(tokens)[1]
        if not s.rope and tokens.shape[1] and tokens.shape[1] > s.length:
            raise ConfigError(f"{tokens.shape[1]} places but the model has {s.length}; pass shorter sequences")
        positions = tf.range(places)
        kinds = weight["types"][0] if types is None else embed(weight["types"], types)
        x = embed(weight["embedding"], tokens) + kinds
        if not s.rope:
            x += embed(weight["positions"], positions)
        x = self.norm(tf.reshape(x, [-1, s.width]), "embedding_norm")
        bias = None
        if segments is not None:
            bias = tf.where(tf.equal(segments[:, None, :, None], segments[:, None, None, :]), 0.0, UNSEEN)
        x, _ = self.through(x, bias, positions, rows=rows, training=training)
        return tf.reshape(x, [rows, places, s.width])

    def call(
        self,
        tokens: tf.Tensor,
        places: tf.Tensor | None = None,
        segments: tf.Tensor | None = None,
        types: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        """Logits of what stands at each place, or ``[batch, count, vocabulary]`` at ``places`` ``[batch, count]``.

        Args:
          tokens: see ``encode``.
          places: integers, where to look; the head then works for these only. None: at all places.
          segments: see ``encode``.
          types: see ``encode``.
          training: see ``encode``.
        """
        x = self.encode(tokens, segments=segments, types=types, training=training)
        if places is not None:
            x = tf.gather(x, places, batch_dims=1)
        count = x.shape[1] or tf.shape(x)[1]
        weight = weight_values(self.outer, x.dtype)
        x = tf.reshape(x, [-1, self.shape.width])
        x = gelu(tf.matmul(x, weight["transform_kernel"]) + weight["transform_bias"])
        x = self.norm(x, "head_norm")
        logits = tf.matmul(x, weight["embedding"], transpose_b=True) + weight["head_bias"]
        return tf.reshape(tf.cast(logits, tf.float32), [row_count(tokens), count, self.shape.vocabulary])

    def pooled(self, encoded: tf.Tensor) -> tf.Tensor:
        """One vector for each text, ``[batch, width]``, of what ``encode`` gave; the shape must have a pooler."""
        weight = weight_values(self.outer, encoded.dtype)
        return tf.tanh(tf.matmul(encoded[:, 0], weight["pooler_kernel"]) + weight["pooler_bias"])
