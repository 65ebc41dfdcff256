"""The networks in torch, with the weights of the common start: layers in the order in which Keras numbers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import networks
from benchmarks.workload import Workload

_EPSILON = 1e-3  # of Keras's normalisations


class Residual(nn.Module):
    """A block of ResNet-20."""

    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.stride = stride
        self.conv1, self.norm1 = _conv(channels, filters, stride), _norm(filters)
        self.conv2, self.norm2 = _conv(filters, filters, 1), _norm(filters)
        self.shortcut = nn.Conv2d(channels, filters, 1, 2, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(_padded(x, self.stride))))
        y = self.norm2(self.conv2(y))
        return functional.relu((x if self.shortcut is None else self.shortcut(x)) + y)


class ResNet20(nn.Module):
    """``[batch, 3, 32, 32]`` -> logits ``[batch, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = _conv(3, 16, 1), _norm(16)
        blocks, channels = [], 16
        for filters in (16, 32, 64):
            for block in range(3):
                blocks.append(Residual(channels, filters, 2 if filters > 16 and not block else 1))
                channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.dense = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        return self.dense(x.mean((2, 3)))

    def load(self, w: Mapping[str, np.ndarray]) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Each parameter with its value."""
        convs, norms = [self.conv], [self.norm]
        for block in self.blocks:
            convs += [block.conv1, block.conv2, *([block.shortcut] if block.shortcut is not None else [])]
            norms += [block.norm1, block.norm2]
        for i, layer in enumerate(convs):
            yield layer.weight, w[f"{_numbered('conv2d', i)}/kernel"].transpose(3, 2, 0, 1)
        for i, layer in enumerate(norms):
            yield from _scales(layer, w, _numbered("batch_normalization", i))
        yield from _dense(self.dense, w, "dense")


class TransformerBlock(nn.Module):
    """Attention and a perceptron, norms before them; one product makes query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        width = networks.WIDTH
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, places, width = x.shape
        heads = networks.HEADS
        y = self.qkv(self.norm1(x)).view(batch, places, 3, heads, width // heads)
        query, key, value = y.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, places, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """``[batch, 128]`` -> logits ``[batch, 128, 256]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(networks.BYTES, networks.WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(networks.BLOCKS)))
        self.norm, self.dense = nn.LayerNorm(networks.WIDTH, eps=_EPSILON), nn.Linear(networks.WIDTH, networks.BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(self.blocks(self.embedding(x))))

    def load(self, w: Mapping[str, np.ndarray]) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Each parameter with its value."""
        width = networks.WIDTH
        yield self.embedding.weight, w["embedding/embeddings"]
        for i, block in enumerate(self.blocks):
            mha = _numbered("multi_head_attention", i)
            parts = [f"{mha}/{name}" for name in ("query", "key", "value")]
            yield block.qkv.weight, np.concatenate([w[f"{p}/kernel"].reshape(width, width).T for p in parts])
            yield block.qkv.bias, np.concatenate([w[f"{p}/bias"].ravel() for p in parts])
            yield block.out.weight, w[f"{mha}/attention_output/kernel"].reshape(width, width).T
            yield block.out.bias, w[f"{mha}/attention_output/bias"]
            yield from _scales(block.norm1, w, _numbered("layer_normalization", 2 * i))
            yield from _scales(block.norm2, w, _numbered("layer_normalization", 2 * i + 1))
            # The outer layer of the perceptron is written first, so it has the lower number.
            yield from _dense(block.down, w, _numbered("dense", 2 * i))
            yield from _dense(block.up, w, _numbered("dense", 2 * i + 1))
        yield from _dense(self.dense, w, _numbered("dense", 2 * networks.BLOCKS))
        yield from _scales(self.norm, w, _numbered("layer_normalization", 2 * networks.BLOCKS))


class Perceptron(nn.Sequential):
    """``[batch, features]`` -> logits ``[batch, 10]``."""

    def __init__(self, features: int, hidden: tuple[int, ...]):
        layers: list[nn.Module] = []
        for low, high in zip((features, *hidden), (*hidden, 10)):
            layers += [nn.Linear(low, high), nn.ReLU()]
        super().__init__(*layers[:-1])

    def load(self, w: Mapping[str, np.ndarray]) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Each parameter with its value."""
        for i, layer in enumerate(x for x in self if isinstance(x, nn.Linear)):
            yield from _dense(layer, w, _numbered("dense", i))


def build(workload: Workload, values: Mapping[str, np.ndarray]) -> nn.Module:
    """The workload's network with the given weights.

    Raises:
      ValueError: a parameter got no weight, or one of another shape.
    """
    makers: dict[str, Any] = {
        "mlp": lambda: Perceptron(workload.features, workload.hidden),
        "resnet20": ResNet20,
        "transformer": Transformer,
    }
    model = makers[workload.network]()
    left = {id(p) for p in model.parameters()}
    for parameter, value in model.load(values):
        if tuple(parameter.shape) != value.shape:
            raise ValueError(f"a parameter of {workload.network} has shape {tuple(parameter.shape)}, not {value.shape}")
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(value)))
        left.remove(id(parameter))
    if left:
        raise ValueError(f"{len(left)} parameters of {workload.network} got no weight")
    return model.to(memory_format=torch.channels_last) if workload.network == "resnet20" else model


def _conv(channels: int, filters: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, 3, stride, padding=1 if stride == 1 else 0, bias=False)


def _padded(x: torch.Tensor, stride: int) -> torch.Tensor:
    """With strides, TensorFlow's ``same`` pads below and on the right only."""
    return functional.pad(x, (0, 1, 0, 1)) if stride > 1 else x


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON, momentum=0.01)


def _numbered(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name


def _dense(layer: nn.Linear, w: Mapping[str, np.ndarray], name: str) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    yield layer.weight, w[f"{name}/kernel"].T
    yield layer.bias, w[f"{name}/bias"]


def _scales(layer: Any, w: Mapping[str, np.ndarray], name: str) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    yield layer.weight, w[f"{name}/gamma"]
    yield layer.bias, w[f"{name}/beta"]
