"""Multiplications of a forward pass, counted in its graph, against those that others publish for the same networks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from models.resnet import cifar_resnet, resnet
from models.vit import VisionTransformer, vit_shape


def multiplications(model: Any, *shape: int) -> int:
    """Multiply-adds of all convolutions and products of matrices for one input of the given shape."""
    spec = tf.TensorSpec([1, *shape])
    graph = tf.function(lambda x: model(x, training=False), autograph=False).get_concrete_function(spec).graph
    total = 0
    for op in graph.get_operations():
        if op.type == "Conv2D":
            total += math.prod(op.outputs[0].shape) * math.prod(op.inputs[1].shape[:3])
        elif op.type in ("MatMul", "BatchMatMulV2"):
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            total += math.prod(op.outputs[0].shape) * op.inputs[0].shape[-2 if transposed else -1]
    return total


@pytest.mark.parametrize(("depth", "millions"), [(18, 1814), pytest.param(50, 4089, marks=pytest.mark.slow)])
def test_resnets_take_as_many_as_their_peers(depth: int, millions: int) -> None:
    """He et al. 2015, table 1, give 1.8 and, for the first version of depth 50, 3.8 thousand millions."""
    assert multiplications(resnet(depth), 224, 224, 3) == pytest.approx(millions * 1e6, rel=1e-3)


def test_a_small_resnet_takes_as_many_as_counted_by_hand() -> None:
    """Depth 20: 18 layers of the same cost but for the first of a stage with strides, the first, and the last."""
    whole = 32 * 32 * 9 * 16 * 16
    by_hand = 32 * 32 * 9 * 3 * 16 + 6 * whole + 2 * (whole // 2 + 5 * whole) + 64 * 10
    assert multiplications(cifar_resnet(20), 32, 32, 3) == by_hand


@pytest.mark.parametrize(
    ("variant", "width", "rounded"), [("ti", 192, 1.3), pytest.param("s", 384, 4.6, marks=pytest.mark.slow)]
)
def test_vision_transformers_take_as_many_as_counted_by_hand(variant: str, width: int, rounded: float) -> None:
    """197 places: 12 blocks of 12 x width^2 a place and two products of all places with all, patches, and the head."""
    blocks = 12 * (12 * width**2 * 197 + 2 * 197**2 * width)
    by_hand = blocks + 196 * 768 * width + width * 1000
    model = VisionTransformer(vit_shape(variant, image_size=224, patch=16, classes=1000))
    assert multiplications(model, 224, 224, 3) == by_hand
    assert round(by_hand / 1e9, 1) == rounded
