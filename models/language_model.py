"""A decoder language model in the shapes of GPT-2: causal attention, norms before the branches, tied embeddings.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; rotary positions are Su et al.
2021, "RoFormer", section 3.4.2. Sampling from it is in ``models/generate.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from framework import ConfigError
from models.language_ops import embed, gelu, layer_norm, rotate

# Added to the score of a place that is not to be seen: its weight becomes exactly 0, so it changes no bit of a logit.
_UNSEEN = -1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageShape:
    """Sizes of a ``LanguageModel``.

    Attributes:
      vocabulary: token ids are below it.
      length: most tokens that are looked at together.
      width: of the residual stream; a multiple of ``heads``.
      layers: blocks of attention and a perceptron of 4 x width units.
      heads: of each attention.
      rope: rotary positions instead of learnt ones; then width / heads is even.
      dropout: share dropped of embeddings, attention weights and branches, while training.

    Raises:
      ConfigError: sizes that do not go together.
    """

    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int
    rope: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} but it must be at least 1")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} with heads={self.heads}: the width must be a multiple of the heads")
        if self.rope and self.head_width % 2:
            raise ConfigError(
                f"rope with width={self.width} and heads={self.heads}: each head has {self.head_width} numbers but "
                "rotary positions turn pairs; pass an even share or --norope"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout={self.dropout} but it must be from 0 to below 1")

    @property
    def head_width(self) -> int:
        """Numbers in a head's query."""
        return self.width // self.heads

    def block_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one block's weights by name."""
        w = self.width
        return {
            "attention_norm_gamma": (w,),
            "attention_norm_beta": (w,),
            "query_key_value_kernel": (w, 3 * w),
            "query_key_value_bias": (3 * w,),
            "attention_out_kernel": (w, w),
            "attention_out_bias": (w,),
            "mlp_norm_gamma": (w,),
            "mlp_norm_beta": (w,),
            "mlp_in_kernel": (w, 4 * w),
            "mlp_in_bias": (4 * w,),
            "mlp_out_kernel": (4 * w, w),
            "mlp_out_bias": (w,),
        }

    def outer_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights outside of the blocks by name."""
        positions = {} if self.rope else {"positions": (self.length, self.width)}
        norm = {"norm_gamma": (self.width,), "norm_beta": (self.width,)}
        return {"embedding": (self.vocabulary, self.width), **positions, **norm}

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        outer = sum(map(math.prod, self.outer_weights().values()))
        return outer + self.layers * sum(map(math.prod, self.block_weights().values()))


GPT2_SMALL = LanguageShape(vocabulary=50257, length=1024, width=768, layers=12, heads=12)


class Cache(NamedTuple):
    """Keys and values of the places seen so far, ``[batch, heads, places, head width]`` each."""

    keys: tf.Tensor
    values: tf.Tensor


class Block(keras.layers.Layer):
    """Attention and a perceptron, each a branch beside the residual stream, with a norm before it."""

    def __init__(self, shape: LanguageShape, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape = shape
        self.drop = [keras.layers.Dropout(shape.dropout, name=n) for n in _DROPS] if shape.dropout else []

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights of ``LanguageShape.block_weights``."""
        del input_shape
        self.weights_by_name = _make(self, self.shape.block_weights(), layers=self.shape.layers)
        for layer in self.drop:
            layer.build(None)

    def call(
        self,
        x: tf.Tensor,
        bias: tf.Tensor,
        positions: tf.Tensor,
        *,
        rows: Any,
        training: bool = False,
        cache: Cache | None = None,
    ) -> tuple[tf.Tensor, Cache]:
        """The stream after this block, and its keys and values.

        Args:
          x: the stream, ``[rows * places, width]``.
          bias: float32, added to the scores; broadcasts to ``[rows, heads, places, places seen]``.
          positions: int32 ``[places]``.
          rows: sequences in the batch, an int or a scalar; or -1 where the number of places is known.
          training: whether to drop.
          cache: keys and values with room for ``positions``, which is one place; None: the places see each other.
        """
        weight = _values(self.weights_by_name, x.dtype)
        s = self.shape
        y = layer_norm(x, weight["attention_norm_gamma"], weight["attention_norm_beta"])
        y = tf.matmul(y, weight["query_key_value_kernel"]) + weight["query_key_value_bias"]
        y = tf.reshape(y, [rows, positions.shape[0] or tf.size(positions), 3, s.heads, s.head_width])
        query, key, value = tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]), num=3)
        if s.rope:
            query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            here = tf.equal(tf.range(tf.shape(cache.keys)[2]), positions[0])[:, None]
            key, value = tf.where(here, key, cache.keys), tf.where(here, value, cache.values)
        query *= tf.cast(s.head_width**-0.5, x.dtype)
        scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32) + bias
        share = self._dropped(0, tf.cast(tf.nn.softmax(scores), x.dtype), training)
        y = tf.reshape(tf.transpose(tf.matmul(share, value), [0, 2, 1, 3]), [-1, s.width])
        y = tf.matmul(y, weight["attention_out_kernel"]) + weight["attention_out_bias"]
        x += self._dropped(1, y, training)
        y = layer_norm(x, weight["mlp_norm_gamma"], weight["mlp_norm_beta"])
        y = gelu(tf.matmul(y, weight["mlp_in_kernel"]) + weight["mlp_in_bias"])
        y = tf.matmul(y, weight["mlp_out_kernel"]) + weight["mlp_out_bias"]
        return x + self._dropped(2, y, training), Cache(key, value)

    def _dropped(self, which: int, x: tf.Tensor, training: bool) -> tf.Tensor:
        return self.drop[which](x, training=training) if self.drop else x


_DROPS = ("drop_attention", "drop_attention_out", "drop_mlp_out")


class LanguageModel(keras.Model):
    """Token ids ``[batch, places]`` -> logits float32 ``[batch, places, vocabulary]`` of the token after each place.

    The embedding is also the last layer's kernel (tied). Weights are made here; initial values are normal with a
    deviation of 0.02, divided by the root of 2 x layers where a branch ends in the stream.

    Args:
      shape: the sizes.
    """

    def __init__(self, shape: LanguageShape, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape = shape
        self.sampler: Any = None  # what generate() compiled for this model
        self.blocks = [Block(shape, name=f"block_{i}", dtype=self.dtype_policy) for i in range(shape.layers)]
        self.drop = keras.layers.Dropout(shape.dropout, name="drop") if shape.dropout else None
        self.build()

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights, the blocks' included."""
        del input_shape
        if self.built:
            return
        self.outer = _make(self, self.shape.outer_weights(), layers=self.shape.layers)
        for layer in [*self.blocks, *([self.drop] if self.drop else [])]:
            layer.build(None)

    def call(self, tokens: tf.Tensor, segments: tf.Tensor | None = None, training: bool = False) -> tf.Tensor:
        """Logits; see the class.

        Args:
          tokens: integers ``[batch, places]``, at most ``length`` places unless positions are rotary.
          segments: integers ``[batch, places]``: a place sees only places of its own segment; None: all before it.
          training: whether to drop.
        """
        places = tokens.shape[1] or tf.shape(tokens)[1]
        positions = tf.range(places)
        bias = tf.where(positions[:, None] >= positions, 0.0, _UNSEEN)
        if segments is not None:
            same = tf.equal(segments[:, None, :, None], segments[:, None, None, :])
            bias = tf.where(same, bias, _UNSEEN)
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
        weight = _values(self.outer, tf.float32)
        x = embed(weight["embedding"], tokens)
        if not s.rope:
            x += embed(weight["positions"], positions)
        x = tf.reshape(tf.cast(x, dtype), [-1, s.width])
        if self.drop is not None:
            x = self.drop(x, training=training)
        rows = tokens.shape[0] if tokens.shape[0] is not None else tf.shape(tokens)[0]
        made = []
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches is not None else None
            # Not block(...): Keras would cast the bias to half precision.
            x, new = block.call(x, bias, positions, rows=rows, training=training, cache=cache)
            made.append(new)
        x = layer_norm(x, weight["norm_gamma"], weight["norm_beta"])
        logits = tf.matmul(x, tf.cast(weight["embedding"], dtype), transpose_b=True)
        places = tokens.shape[1] or tf.shape(tokens)[1]
        return tf.reshape(tf.cast(logits, tf.float32), [rows, places, s.vocabulary]), made

    def get_config(self) -> dict[str, Any]:
        """See ``keras.layers.Layer``."""
        return {**super().get_config(), "shape": dataclasses.asdict(self.shape)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LanguageModel:
        """See ``keras.layers.Layer``."""
        return cls(**{**config, "shape": LanguageShape(**config["shape"])})


def _make(layer: Any, shapes: Mapping[str, tuple[int, ...]], *, layers: int) -> dict[str, Any]:
    """Weights of the given shapes, by name; computations cast them, so Keras is not to."""
    made = {}
    for name, shape in shapes.items():
        deviation = 0.02 / math.sqrt(2 * layers) if name.endswith("out_kernel") else 0.02
        if name.endswith("gamma"):
            start: Any = "ones"
        elif len(shape) == 1:
            start = "zeros"
        else:
            start = keras.initializers.RandomNormal(stddev=deviation)
        made[name] = layer.add_weight(shape=shape, name=name, initializer=start, autocast=False)
    return made


def _values(weights: Mapping[str, Any], dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Tensors of the weights in ``dtype``; those of norms as they are, since norms compute in float32."""
    tensors = {name: tf.convert_to_tensor(v.value) for name, v in weights.items()}
    return {name: t if "norm" in name else tf.cast(t, dtype) for name, t in tensors.items()}


def parameter_count(model: LanguageModel) -> int:
    """Numbers in the trainable weights of a model that was made."""
    return int(sum(np.prod(v.shape) for v in model.trainable_variables))
