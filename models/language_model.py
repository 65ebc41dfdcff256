"""A decoder language model in the shapes of GPT-2: causal attention, norms before the branches, tied embeddings.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; rotary positions are Su et al.
2021, "RoFormer", section 3.4.2. Sampling from it is in ``models/generate.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from framework import ConfigError
from models.transformer import UNSEEN, Cache, Transformer, TransformerShape, row_count, weight_values
from models.transformer_ops import embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageShape(TransformerShape):
    """Sizes of a ``LanguageModel``.

    Attributes:
      vocabulary: token ids are below it.
      length: most tokens that are looked at together.
      rope: rotary positions instead of learnt ones.
    """

    vocabulary: int
    length: int

    def outer_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights outside of the blocks by name."""
        positions = {} if self.rope else {"positions": (self.length, self.width)}
        norm = {"norm_gamma": (self.width,), "norm_beta": (self.width,)}
        return {"embedding": (self.vocabulary, self.width), **positions, **norm}

    def start(self, name: str, shape: tuple[int, ...]) -> Any:
        """As of all transformers, but divided by the root of 2 x layers where a branch ends in the stream."""
        if name.endswith("out_kernel"):
            return keras.initializers.RandomNormal(stddev=0.02 / math.sqrt(2 * self.layers))
        return super().start(name, shape)


GPT2_SMALL = LanguageShape(vocabulary=50257, length=1024, width=768, layers=12, heads=12)


class LanguageModel(Transformer):
    """Token ids ``[batch, places]`` -> logits float32 ``[batch, places, vocabulary]`` of the token after each place.

    The embedding is also the last layer's kernel (tied).

    Args:
      shape: the sizes.
    """

    shape_class: ClassVar[type[TransformerShape]] = LanguageShape

    def __init__(self, shape: LanguageShape, **kwargs: Any):
        super().__init__(shape, **kwargs)
        self.sampler: Any = None  # what generate() compiled for this model

    def call(self, tokens: tf.Tensor, segments: tf.Tensor | None = None, training: bool = False) -> tf.Tensor:
        """Logits; see the class.

        Args:
          tokens: integers ``[batch, places]``, at most ``length`` places unless positions are rotary.
          segments: integers ``[batch, places]``: a place sees only places of its own segment; None: all before it.
          training: whether to drop.
        """
        places = tokens.shape[1] or tf.shape(tokens)[1]
        positions = tf.range(places)
        bias = tf.where(positions[:, None] >= positions, 0.0, UNSEEN)
        if segments is not None:
            same = tf.equal(segments[:, None, :, None], segments[:, None, None, :])
            bias = tf.where(same, bias, UNSEEN)
        return self.run(tokens, positions, bias, training=training)[0]

    def run(
        self,
        tokens: tf.Tensor,
        positions: tf.Tensor,
        bias: tf.Tensor,
        *,
        training: bool = False,
        caches: list[Cache] | None = None,
    ) -> tuple[tf.Tensor, list[Cache]]:
        """Logits, and keys and values of each block, which a next call may take.

        Args:
          tokens: integers ``[batch, places]``.
          positions: int32 ``[places]``, where they stand in their sequence.
          bias: float32, added to attention's scores; broadcasts to ``[batch, heads, places, places seen]``.
          training: whether to drop.
          caches: one a block, with room for the only place in ``tokens``; None: the places see each other.

        Raises:
          ConfigError: there are more places than the model has positions for.
        """
        s, dtype = self.shape, tf.as_dtype(self.compute_dtype)
        if not s.rope and positions.shape[0] and positions.shape[0] > s.length:
            raise ConfigError(f"{positions.shape[0]} places but the model has {s.length}; pass shorter sequences")
        weight = weight_values(self.outer, tf.float32)
        x = embed(weight["embedding"], tokens)
        if not s.rope:
            x += embed(weight["positions"], positions)
        rows = row_count(tokens)
        x, made = self.through(x, bias, positions, rows=rows, training=training, caches=caches)
        x = self.norm(x, "norm")
        logits = tf.matmul(x, tf.cast(weight["embedding"], dtype), transpose_b=True)
        places = tokens.shape[1] or tf.shape(tokens)[1]
        return tf.reshape(tf.cast(logits, tf.float32), [rows, places, s.vocabulary]), made


def parameter_count(model: keras.Model) -> int:
    """Numbers in the trainable weights of a model that was made."""
    return int(sum(np.prod(v.shape) for v in model.trainable_variables))
