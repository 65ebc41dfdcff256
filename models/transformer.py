"""What the transformers share: sizes, the block of attention and perceptron, and a model that is a stack of blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import keras
import tensorflow as tf

from framework import ConfigError, Trainer
from models.transformer_ops import gelu, layer_norm, recomputed, rotate

# Added to the score of a place that is not to be seen: its weight becomes exactly 0, so it changes no bit of a logit.
UNSEEN = -1e9

_DROPS = ("drop_attention", "drop_attention_out", "drop_mlp_out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a stack of blocks; a subclass says which weights stand outside of them.

    Attributes:
      width: of the residual stream; a multiple of ``heads``.
      layers: blocks of attention and a perceptron of 4 x width units.
      heads: of each attention.
      rope: rotary positions in each attention; then width / heads is even.
      dropout: share dropped of embeddings, attention weights and branches, while training.
      recompute: while training keep only what goes into each block, and compute the rest again for its gradients.

    Raises:
      ConfigError: sizes that do not go together.
    """

    width: int
    layers: int
    heads: int
    rope: bool = False
    dropout: float = 0.0
    recompute: bool = False

    norm_first: ClassVar[bool] = True  # norms stand before the branches; else behind each sum
    epsilon: ClassVar[float] = 1e-5  # of the norms

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"{field.name}={value} but it must be at least 1")
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
        raise NotImplementedError

    def start(self, name: str, shape: tuple[int, ...]) -> Any:
        """The initializer of a weight: normal with a deviation of 0.02; factors start at 1 and offsets at 0."""
        if name.endswith("gamma"):
            return "ones"
        return "zeros" if len(shape) == 1 else keras.initializers.RandomNormal(stddev=0.02)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        outer = sum(map(math.prod, self.outer_weights().values()))
        return outer + self.layers * sum(map(math.prod, self.block_weights().values()))


class Cache(NamedTuple):
    """Keys and values of the places seen so far, ``[batch, heads, places, head width]`` each."""

    keys: tf.Tensor
    values: tf.Tensor


class Block(keras.layers.Layer):
    """Attention and a perceptron, each a branch beside the residual stream, with a norm before it or behind the sum."""

    def __init__(self, shape: TransformerShape, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape = shape
        self.drop = [keras.layers.Dropout(shape.dropout, name=n) for n in _DROPS] if shape.dropout else []

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights of ``TransformerShape.block_weights``."""
        del input_shape
        self.weights_by_name = make_weights(self, self.shape.block_weights(), self.shape.start)
        for layer in self.drop:
            layer.build(None)

    def call(
        self,
        x: tf.Tensor,
        bias: tf.Tensor | None,
        positions: tf.Tensor,
        *,
        rows: Any,
        training: bool = False,
        cache: Cache | None = None,
    ) -> tuple[tf.Tensor, Cache | None]:
        """The stream after this block, and its keys and values.

        Args:
          x: the stream, ``[rows * places, width]``.
          bias: float32, added to the scores; broadcasts to ``[rows, heads, places, places seen]``; None: all see all.
          positions: int32 ``[places]``.
          rows: sequences in the batch, an int or a scalar; or -1 where the number of places is known.
          training: whether to drop. With ``recompute`` there are then no keys and values: None.
          cache: keys and values with room for ``positions``, which is one place; None: the places see each other.
        """
        weights = weight_values(self.weights_by_name, x.dtype)
        # Drawn here and not where they are used: the same numbers again when the block is computed again.
        seeds = [_seed(layer) for layer in self.drop] if training else []

        def forward(x: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, Cache]:
            named = dict(zip(weights, values, strict=True))
            return self._forward(named, x, bias, positions, rows=rows, seeds=seeds, cache=cache)

        if training and self.shape.recompute:
            return recomputed(lambda *tensors: forward(*tensors)[0], x, *weights.values()), None
        return forward(x, *weights.values())

    def _forward(
        self,
        weight: Mapping[str, tf.Tensor],
        x: tf.Tensor,
        bias: tf.Tensor | None,
        positions: tf.Tensor,
        *,
        rows: Any,
        seeds: list[tf.Tensor],
        cache: Cache | None,
    ) -> tuple[tf.Tensor, Cache]:
        """``call`` as a function of tensors alone."""
        s = self.shape

        def norm(x: tf.Tensor, which: str) -> tf.Tensor:
            return layer_norm(x, weight[f"{which}_norm_gamma"], weight[f"{which}_norm_beta"], epsilon=s.epsilon)

        def dropped(which: int, x: tf.Tensor) -> tf.Tensor:
            return tf.nn.experimental.stateless_dropout(x, s.dropout, seeds[which]) if seeds else x

        y = norm(x, "attention") if s.norm_first else x
        y = tf.matmul(y, weight["query_key_value_kernel"]) + weight["query_key_value_bias"]
        y = tf.reshape(y, [rows, positions.shape[0] or tf.size(positions), 3, s.heads, s.head_width])
        query, key, value = tf.unstack(tf.transpose(y, [2, 0, 3, 1, 4]), num=3)
        if s.rope:
            query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            here = tf.equal(tf.range(tf.shape(cache.keys)[2]), positions[0])[:, None]
            key, value = tf.where(here, key, cache.keys), tf.where(here, value, cache.values)
        query *= tf.cast(s.head_width**-0.5, x.dtype)
        scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
        share = tf.nn.softmax(scores if bias is None else scores + bias)
        share = dropped(0, tf.cast(share, x.dtype))
        y = tf.reshape(tf.transpose(tf.matmul(share, value), [0, 2, 1, 3]), [-1, s.width])
        y = tf.matmul(y, weight["attention_out_kernel"]) + weight["attention_out_bias"]
        x += dropped(1, y)
        if not s.norm_first:
            x = norm(x, "attention")
        y = norm(x, "mlp") if s.norm_first else x
        y = gelu(tf.matmul(y, weight["mlp_in_kernel"]) + weight["mlp_in_bias"])
        y = tf.matmul(y, weight["mlp_out_kernel"]) + weight["mlp_out_bias"]
        x += dropped(2, y)
        return x if s.norm_first else norm(x, "mlp"), Cache(key, value)


class Transformer(keras.Model):
    """A stack of blocks with weights before and behind it; a subclass writes ``call``. Weights are made here.

    Args:
      shape: the sizes.
    """

    shape_class: ClassVar[type[TransformerShape]]

    def __init__(self, shape: TransformerShape, **kwargs: Any):
        super().__init__(**kwargs)
        self.shape: Any = shape
        self.blocks = [Block(shape, name=f"block_{i}", dtype=self.dtype_policy) for i in range(shape.layers)]
        self.drop = keras.layers.Dropout(shape.dropout, name="drop") if shape.dropout else None
        self.build()

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights, the blocks' included."""
        del input_shape
        if self.built:
            return
        self.outer = make_weights(self, self.shape.outer_weights(), self.shape.start)
        for layer in [*self.blocks, *([self.drop] if self.drop else [])]:
            layer.build(None)

    def through(
        self,
        x: tf.Tensor,
        bias: tf.Tensor | None,
        positions: tf.Tensor,
        *,
        rows: Any,
        training: bool = False,
        caches: list[Cache] | None = None,
    ) -> tuple[tf.Tensor, list[Any]]:
        """The stream after all blocks, and keys and values of each block; arguments as of ``Block``.

        Args:
          x: embeddings, ``[rows, places, width]`` or ``[rows * places, width]``, in any floating dtype.
          bias: see ``Block``.
          positions: see ``Block``.
          rows: see ``Block``.
          training: whether to drop.
          caches: one a block; None: the places see each other.
        """
        x = tf.reshape(tf.cast(x, self.compute_dtype), [-1, self.shape.width])
        if self.drop is not None:
            x = self.drop(x, training=training)
        made = []
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches is not None else None
            # Not block(...): Keras would cast the bias to half precision.
            x, new = block.call(x, bias, positions, rows=rows, training=training, cache=cache)
            made.append(new)
        return x, made

    def norm(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Layer normalisation with the outer weights ``NAME_gamma`` and ``NAME_beta``; ``[rows, width]``."""
        gamma, beta = (tf.convert_to_tensor(self.outer[f"{name}_{part}"].value) for part in ("gamma", "beta"))
        return layer_norm(x, gamma, beta, epsilon=self.shape.epsilon)

    def get_config(self) -> dict[str, Any]:
        """See ``keras.layers.Layer``."""
        return {**super().get_config(), "shape": dataclasses.asdict(self.shape)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Transformer:
        """See ``keras.layers.Layer``."""
        return cls(**{**config, "shape": cls.shape_class(**config["shape"])})


def make_weights(
    layer: Any, shapes: Mapping[str, tuple[int, ...]], start: Callable[[str, tuple[int, ...]], Any]
) -> dict[str, Any]:
    """Weights of the given shapes, by name; computations cast them, so Keras is not to."""
    return {
        name: layer.add_weight(shape=shape, name=name, initializer=start(name, shape), autocast=False)
        for name, shape in shapes.items()
    }


def weight_values(weights: Mapping[str, Any], dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Tensors of the weights in ``dtype``; those of norms as they are, since norms compute in float32."""
    tensors = {name: tf.convert_to_tensor(v.value) for name, v in weights.items()}
    return {name: t if "norm" in name else tf.cast(t, dtype) for name, t in tensors.items()}


def row_count(x: tf.Tensor) -> Any:
    """The first size of ``x``, an int where it is known and else a scalar."""
    return x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]


def check_recompute(task: Trainer, recompute: bool) -> None:
    """Refuses recomputation where XLA compiles the step: it would join the second forward pass with the first.

    Raises:
      ConfigError: ``recompute`` with ``jit=on`` or on a TPU.
    """
    if recompute and (task.config.jit == "on" or isinstance(task.strategy, tf.distribute.TPUStrategy)):
        where = "jit=on" if task.config.jit == "on" else "a TPU"
        raise ConfigError(
            f"recompute with {where}: XLA joins equal computations, so nothing would be computed again and no memory "
            "saved; pass --norecompute, or --jit=off on another device"
        )


def _seed(layer: keras.layers.Dropout) -> tf.Tensor:
    """The next seed of a dropout layer's generator: int32 ``[2]``, the dtype that XLA wants."""
    return tf.cast(tf.math.floormod(layer.seed_generator.next(), tf.int32.max - 1), tf.int32)
