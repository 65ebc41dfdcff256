"""What tests of the encoders share: a model with weights that matter, and its blocks in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from models.transformer import Block, Transformer


def randomized(model: Transformer) -> Any:
    """The model with weights large enough to matter, norms and biases included."""
    numbers = np.random.default_rng(3)
    for v in model.trainable_variables:
        v.assign(numbers.normal(1.0 if v.name.endswith("gamma") else 0.0, 0.3, v.shape))
    return model


def weights(layer: Any) -> dict[str, np.ndarray]:
    """Weights by name, in float64."""
    named = layer.weights_by_name if isinstance(layer, Block) else layer.outer
    return {name: v.numpy().astype(np.float64) for name, v in named.items()}


def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str, epsilon: float) -> np.ndarray:
    """Layer normalisation."""
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return unit * w[f"{name}_gamma"] + w[f"{name}_beta"]


def gelu(x: np.ndarray) -> np.ndarray:
    """With a hyperbolic tangent."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def blocks(model: Transformer, x: np.ndarray) -> np.ndarray:
    """All blocks on one sequence ``[places, width]``: every place sees every place."""
    s = model.shape
    for block in model.blocks:
        w = weights(block)
        y = norm(x, w, "attention_norm", s.epsilon) if s.norm_first else x
        q, k, v = np.split(y @ w["query_key_value_kernel"] + w["query_key_value_bias"], 3, -1)
        joined = np.zeros_like(x)
        for h in range(s.heads):
            part = slice(h * s.head_width, (h + 1) * s.head_width)
            share = np.exp(q[:, part] @ k[:, part].T / math.sqrt(s.head_width))
            joined[:, part] = share / share.sum(-1, keepdims=True) @ v[:, part]
        x = x + joined @ w["attention_out_kernel"] + w["attention_out_bias"]
        x = x if s.norm_first else norm(x, w, "attention_norm", s.epsilon)
        y = norm(x, w, "mlp_norm", s.epsilon) if s.norm_first else x
        x = x + gelu(y @ w["mlp_in_kernel"] + w["mlp_in_bias"]) @ w["mlp_out_kernel"] + w["mlp_out_bias"]
        x = x if s.norm_first else norm(x, w, "mlp_norm", s.epsilon)
    return x
