"""Floating point operations of a step, counted in its traced graph: products of matrices and convolutions.

A multiplication and an addition are two. What is counted is what the graph does, backward pass and recomputation
included; all other ops, and products whose result nobody reads, are left out. A loop counts as often as its condition
says, of a branch the larger side counts. Nothing is guessed: where a shape is not known there is no count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf


class Uncounted(ValueError):
    """The operations cannot be counted; the message says why."""


def count(graph: tf.Graph) -> float:
    """Operations of one pass through ``graph``, of the functions it calls, and of one step of a training loop.

    Args:
      graph: of a ``tf.function``; loops whose number of steps is an argument count once.

    Raises:
      Uncounted: the shape of a product, or how often an inner loop runs, is not known while tracing.
    """
    definition = graph.as_graph_def(add_shapes=True)
    functions = {f.signature.name: f for f in definition.library.function}
    return _Counter(functions).nodes(definition.node, {}, (), outer=True)


# A tensor's shape by its name; None: not known.
_Shapes = Mapping[str, "list[int] | None"]


class _Counter:
    """Counts nodes and functions; each function once."""

    def __init__(self, functions: Mapping[str, Any]):
        self._functions = functions
        self._known: dict[tuple[str, bool], float] = {}

    def nodes(self, nodes: Sequence[Any], arguments: _Shapes, results: Iterable[str], *, outer: bool) -> float:
        """Operations of all nodes; ``outer``: a loop of unknown length is the training loop."""
        # The gradient of a convolution's input is in the graph also where it is of no use: of an image.
        read = {name.split(":")[0] for names in (results, *(node.input for node in nodes)) for name in names}
        shapes: dict[str, list[int] | None] = dict(arguments)
        for node in nodes:
            for i, shape in enumerate(node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()):
                shapes[f"{node.name}:{i}"] = None if shape.unknown_rank else [int(d.size) for d in shape.dim]
        total = 0.0
        for node in nodes:
            if node.op in _FORMULAS and node.name in read:
                total += _FORMULAS[node.op](node, _Inputs(node, shapes))
            elif node.op in ("PartitionedCall", "StatefulPartitionedCall"):
                total += self.function(node.attr["f"].func.name, outer=outer)
            elif node.op in ("If", "StatelessIf"):
                branches = (node.attr[name].func.name for name in ("then_branch", "else_branch"))
                total += max(self.function(name, outer=outer) for name in branches)
            elif node.op in ("Case", "StatelessCase"):
                total += max(self.function(f.name, outer=outer) for f in node.attr["branches"].list.func)
            elif node.op in ("While", "StatelessWhile"):
                body, steps = self._functions[node.attr["body"].func.name], self._trips(node)
                inside = self.function(body.signature.name, outer=outer and steps is not None)
                if inside and steps is None and not outer:
                    raise Uncounted(f"how often the loop {node.name} runs is not known while tracing")
                total += inside * (1 if steps is None else steps)
        return total

    def function(self, name: str, *, outer: bool) -> float:
        """Operations of one call."""
        key = (name, outer)
        if key not in self._known:
            function = self._functions[name]
            arguments = {}
            for i, arg in enumerate(function.signature.input_arg):
                shapes = list(function.arg_attr[i].attr["_output_shapes"].list.shape) if i in function.arg_attr else []
                known = [[int(d.size) for d in shape.dim] for shape in shapes if not shape.unknown_rank]
                arguments[f"{arg.name}:0"] = known[0] if known else None
            self._known[key] = self.nodes(function.node_def, arguments, function.ret.values(), outer=outer)
        return self._known[key]

    def _trips(self, node: Any) -> int | None:
        """How often a loop that counts from 0 runs, from the constant that its condition compares with."""
        condition = self._functions[node.attr["cond"].func.name]
        constants = {n.name: n for n in condition.node_def if n.op == "Const"}
        limits = []
        for one in condition.node_def:
            source = one.input[1].split(":")[0] if one.op == "Less" else ""
            if source in constants:
                value = tf.make_ndarray(constants[source].attr["value"].tensor)
                limits += [int(value)] if value.ndim == 0 else []
        return min(limits) if limits else None


class _Inputs:
    """Shapes of a node's inputs and outputs, all known, or ``Uncounted``."""

    def __init__(self, node: Any, shapes: _Shapes):
        self._node = node
        self._shapes = shapes

    def __getitem__(self, i: int) -> list[int]:
        name, *rest = self._node.input[i].split(":")
        # In a function an output is NODE:NAME:INDEX, in a graph NODE or NODE:INDEX; the products' sources have one.
        return self._whole(f"{name}:{rest[-1] if rest else 0}")

    @property
    def output(self) -> list[int]:
        return self._whole(f"{self._node.name}:0")

    def _whole(self, name: str) -> list[int]:
        shape = self._shapes.get(name)
        if shape is None or min(shape, default=0) < 0:
            raise Uncounted(
                f"the shape {shape} of {name} is not known while tracing; batches of a known size have one "
                "(drop_remainder=True)"
            )
        return shape


def _matmul(node: Any, inputs: _Inputs) -> float:
    rows, inner = inputs[0]
    if node.attr["transpose_a"].b:
        rows, inner = inner, rows
    return 2.0 * rows * inner * inputs.output[1]


def _batch_matmul(node: Any, inputs: _Inputs) -> float:
    inner = inputs[0][-2 if node.attr["adj_x"].b else -1]
    return 2.0 * math.prod(inputs.output) * inner


def _einsum(node: Any, inputs: _Inputs) -> float:
    """Twice the product of all sizes, for two factors; an ellipsis counts with what the output has."""
    terms = node.attr["equation"].s.decode().replace(" ", "").split("->")[0].split(",")
    if len(terms) < 2:
        return 0.0
    sizes: dict[str, int] = {}
    for i, term in enumerate(terms):
        shape = inputs[i]
        before, dots, after = term.partition("...")
        pairs = list(zip(before, shape, strict=False))
        if dots:
            middle = shape[len(before) : len(shape) - len(after)]
            pairs += [(f".{len(middle) - j}", size) for j, size in enumerate(middle)]
            pairs += list(zip(after, shape[len(shape) - len(after) :], strict=True))
        for label, size in pairs:
            sizes[label] = max(size, sizes.get(label, 1))
    return 2.0 * math.prod(sizes.values())


def _convolution(spread: int, filters: int, *, of_filter: bool = False) -> Callable[[Any, _Inputs], float]:
    """A convolution or its gradients.

    Args:
      spread: the input whose elements are each a sum of products: the gradient of the output, or -1: the output.
      filters: the input that holds the filters, ``[..., channels in, channels out]``; -1: the output does.
      of_filter: depthwise: the last two sizes do not multiply.
    """

    def formula(node: Any, inputs: _Inputs) -> float:
        del node
        elements = math.prod(inputs.output if spread < 0 else inputs[spread])
        kernel = inputs.output if filters < 0 else inputs[filters]
        return 2.0 * elements * math.prod(kernel[:-2] if of_filter else kernel[:-1])

    return formula


_FORMULAS: dict[str, Callable[[Any, _Inputs], float]] = {
    "MatMul": _matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution(-1, 1),
    "Conv2DBackpropInput": _convolution(2, 1),
    "Conv2DBackpropFilter": _convolution(2, -1),
    "Conv3D": _convolution(-1, 1),
    "Conv3DBackpropInputV2": _convolution(2, 1),
    "Conv3DBackpropFilterV2": _convolution(2, -1),
    "DepthwiseConv2dNative": _convolution(-1, 1, of_filter=True),
    "DepthwiseConv2dNativeBackpropInput": _convolution(2, 1, of_filter=True),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(2, -1, of_filter=True),
}
