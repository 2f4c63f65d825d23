"""What the nodes of a graph are that AOTAutograd has made of a block's forward and backward."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

_TILE = 128  # what fused attention computes at least, whatever is asked of it


def value_of(node: fx.Node) -> Any:
    """What a node gives, as tensors without memory."""
    return node.meta.get("val")


def is_forward(node: fx.Node) -> bool:
    """Whether a node of a joint graph is an operation of the user's forward, or made of those alone."""
    return node.op == "call_function" and node.meta.get("partitioner_tag") in (None, "is_forward")


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws, or may draw, random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operation works element by element, or only looks differently at its input."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or is_view(node) or packet_of(node) in _FUSED


def is_view(node: fx.Node) -> bool:
    """Whether an operation makes no bytes of its own."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target.is_view)
    return getattr(target, "__name__", "") == "getitem"


def matmul_flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product or convolution; 0 for everything else, attention included."""
    return 0 if _is_attention(node) else _flops(node)


def attention_flops(node: fx.Node) -> int:
    """Floating-point operations of attention, half of all pairs where it is causal; 0 for everything else."""
    return _flops(node) // (2 if _argument(node, "is_causal") else 1) if _is_attention(node) else 0


def flops_as_products(node: fx.Node) -> int:
    """Floating-point operations of matrix products that take a GPU roughly as long as a node takes it: its own of a
    product or convolution; of attention those of whole tiles of 128 queries and 128 keys, in heads of at least 128.
    0 for everything else."""
    flops = attention_flops(node)
    given = [_argument(node, name) for name in ("query", "key", "value")] if flops else []
    shapes = [_shape(value_of(one)) for one in given if isinstance(one, fx.Node)]
    if [len(shape) for shape in shapes] != [4, 4, 4]:
        return matmul_flops(node) + flops
    tiled = [(*shape[:2], -(-shape[2] // _TILE) * _TILE, max(shape[3], _TILE)) for shape in shapes]
    return round(Fraction(flops * _grouped_attention_flops(*tiled), _grouped_attention_flops(*shapes)))


def _flops(node: fx.Node) -> int:
    packet = packet_of(node)
    if node.op != "call_function" or packet not in flop_registry:
        return 0
    args, kwargs, out = fx.map_arg((node.args, node.kwargs, node), lambda other: _shape(other.meta["val"]))
    try:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    except AssertionError:  # PyTorch 2.11's count of attention wants as many heads of keys as of queries
        is_known = _is_attention(node) and "backward" not in str(packet)
        return _grouped_attention_flops(*args[:3]) if is_known else 0


def _grouped_attention_flops(query: Any, key: Any, value: Any) -> int:
    """Of queries (B, H, S, D), keys (B, G, T, D) and values (B, G, T, E), where each of G heads serves several of H."""
    if not all(isinstance(shape, tuple) and len(shape) == 4 for shape in (query, key, value)):
        return 0
    batch, heads, rows, width = query
    return int(2 * batch * heads * rows * key[2] * (width + value[3]))


def _is_attention(node: fx.Node) -> bool:
    return "attention" in str(packet_of(node))


def is_attention_without_dropout(node: fx.Node) -> bool:
    """Whether a node is attention's forward, and draws nothing, though PyTorch has it among the random operations."""
    return _is_attention(node) and is_forward(node) and is_random(node) and _argument(node, "dropout_p") == 0.0


def _argument(node: fx.Node, name: str) -> object:
    """What an operation is given, or takes otherwise, by the name in its schema; None where it has no such argument."""
    for place, argument in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def nbytes_of(node: fx.Node) -> int:
    """Bytes of a node's elements; 0 for what is no tensor. Of sizes that vary, what they are this time."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    return int(math.prod(_shape(value))) * value.element_size()


def _shape(value: Any) -> Any:
    """A tensor's sizes as plain numbers: asking a symbolic one for its value would tie the graph to it."""
    return tuple(_plain(size) for size in value.shape) if isinstance(value, torch.Tensor) else value


def _plain(size: int | torch.SymInt) -> int:
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


_aten = torch.ops.aten
_FUSED = {
    torch.ops.prims.convert_element_type,
    torch.ops.prims.iota,
    _aten.where,
    _aten.full,
    _aten.clone,
    _aten._to_copy,
    _aten._unsafe_view,
}


def outputs_of(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a graph returns, in order."""
    (output,) = graph.graph.find_nodes(op="output")
    return [node for node in output.args[0] if isinstance(node, fx.Node)]
