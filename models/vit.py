"""Vision transformers: an image as a sequence of patches (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words")."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import tensorflow as tf

from framework import ConfigError
from models.transformer import Transformer, TransformerShape, row_count, weight_values

# Width, blocks and heads: B of table 1 of the paper; Ti and S of Touvron et al. 2021 ("DeiT"), table 1.
VARIANTS = {"ti": (192, 12, 3), "s": (384, 12, 6), "b": (768, 12, 12)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitShape(TransformerShape):
    """Sizes of a ``VisionTransformer``.

    Attributes:
      image_size: in pixels; a multiple of ``patch``.
      patch: pixels of a patch's side.
      channels: of a pixel.
      classes: logits.
    """

    image_size: int
    patch: int
    channels: int = 3
    classes: int

    epsilon: ClassVar[float] = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch:
            raise ConfigError(
                f"patch={self.patch} with images of {self.image_size} pixels: an image must be a whole number of "
                "patches; pass a divisor"
            )

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch) ** 2

    def outer_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights outside of the blocks by name."""
        w = self.width
        return {
            "patch_kernel": (self.patch**2 * self.channels, w),
            "patch_bias": (w,),
            "class_token": (w,),
            "positions": (self.patches + 1, w),
            "norm_gamma": (w,),
            "norm_beta": (w,),
            "head_kernel": (w, self.classes),
            "head_bias": (self.classes,),
        }

    def start(self, name: str, shape: tuple[int, ...]) -> Any:
        """Kernels by Glorot and Bengio 2010, the head 0: all classes are equally likely at first.

        So narrow models start as wide ones do; with a deviation of 0.02 a width of 64 learnt little in 100 steps.
        """
        if name == "head_kernel":
            return "zeros"
        if name in ("patch_kernel", "query_key_value_kernel"):
            return "lecun_normal"  # three square kernels side by side: as each alone
        return "glorot_normal" if name.endswith("kernel") else super().start(name, shape)


def vit_shape(variant: str, *, image_size: int, patch: int, classes: int, **changes: Any) -> VitShape:
    """The sizes of ViT-Ti, ViT-S or ViT-B; ViT-B/16 at 224 pixels with 1,000 classes has 86,567,656 parameters.

    Args:
      variant: ``ti``, ``s`` or ``b``.
      image_size: see ``VitShape``.
      patch: see ``VitShape``.
      classes: see ``VitShape``.
      **changes: further fields of ``VitShape``, also ``width``, ``layers`` and ``heads``.

    Raises:
      ConfigError: another variant, or sizes that do not go together.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"variant={variant!r} but it must be one of {', '.join(VARIANTS)}")
    sizes = dict(zip(("width", "layers", "heads"), VARIANTS[variant]))
    return VitShape(**{**sizes, "image_size": image_size, "patch": patch, "classes": classes, **changes})


class VisionTransformer(Transformer):
    """Images ``[batch, image_size, image_size, channels]`` -> logits float32 ``[batch, classes]``.

    A learnt token stands before the patches; what became of it behind the last block gives the class.

    Args:
      shape: the sizes.
    """

    shape_class: ClassVar[type[TransformerShape]] = VitShape

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Logits; see the class."""
        s, dtype = self.shape, tf.as_dtype(self.compute_dtype)
        weight, rows, side = weight_values(self.outer, dtype), row_count(images), s.image_size // s.patch
        # A convolution with as large strides as kernels is one product of matrices.
        x = tf.reshape(tf.cast(images, dtype), [rows, side, s.patch, side, s.patch, s.channels])
        x = tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, s.patch**2 * s.channels])
        x = tf.reshape(tf.matmul(x, weight["patch_kernel"]) + weight["patch_bias"], [rows, s.patches, s.width])
        first = tf.broadcast_to(weight["class_token"], [rows, 1, s.width])
        x = tf.concat([first, x], 1) + weight["positions"]
        x, _ = self.through(x, None, tf.range(s.patches + 1), rows=rows, training=training)
        x = tf.reshape(x, [rows, s.patches + 1, s.width])[:, 0]
        logits = tf.matmul(self.norm(x, "norm"), weight["head_kernel"]) + weight["head_bias"]
        return tf.cast(logits, tf.float32)
