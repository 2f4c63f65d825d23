"""What a compiled block saves for backward, by variant.

    save     what PyTorch would save
    cheap    as little as possible without running a matrix product, convolution or attention twice
    lean     also runs those matrix products again that give back most memory for their time, until about half of what
             they occupy is gone
    inputs   also runs every other one again; attention's and random operations' outputs stay saved
    least    also runs attention again where nothing is dropped out, so that little but the block's input stays

In each variant PyTorch's own min-cut decides; a variant only says what may run again, and which products must. Random
operations never run again: dropout's mask is saved, so it is the same mask in every variant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled import graphs
from torchstorm.plan.variants import CHEAP, INPUTS, LEAN, LEAST, SAVE, VARIANTS, Variant

# A value counts as an own tensor in memory from here on; below it lie scalars and seeds.
_SMALL_BYTES = 1024


@dataclass(frozen=True)
class GraphCosts:
    """What one compiled graph saves in every variant.

    Attributes:
        variants: by name, "save" first; a variant that equals the one before is left out.
        forward_flops: of its matrix products, convolutions and attention, as `Variant.backward_flops` counts them.
        failed: variants that PyTorch could not partition, with the reason.
    """

    variants: dict[str, Variant]
    forward_flops: int
    failed: dict[str, str]


class VariantPartitioner:
    """A partition function for one variant, as `torch_private.compile_with` takes it.

    Args:
        variant: its name.
        tell: called with the costs of every graph, for all variants; None to leave the others alone.
    """

    def __init__(self, variant: str, tell: Callable[[GraphCosts], None] | None = None) -> None:
        self.variant = variant
        self._tell = tell

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> private.Graphs:
        """Splits a joint graph; in the next variant that saves more where PyTorch finds no cut for this one."""
        if self._tell is not None:
            self._tell(graph_costs(gm, joint_inputs, **kwargs))
        for variant in VARIANTS[VARIANTS.index(self.variant) : 0 : -1]:
            try:
                return _split_as(variant, private.copy_of(gm), joint_inputs, **kwargs)
            except RuntimeError:
                continue
        return _split_as(SAVE, gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Tells it from others in Inductor's cache on disk."""
        return f"{self.variant}-{_version()}"

    def __reduce__(self) -> tuple[type[VariantPartitioner], tuple[str]]:
        return VariantPartitioner, (self.variant,)  # into the cache's key

    def __deepcopy__(self, memo: object) -> VariantPartitioner:
        return self  # PyTorch copies the options of a compilation


def graph_costs(joint: fx.GraphModule, inputs: Any, **options: Any) -> GraphCosts:
    """Partitions copies of a joint graph in every variant, and looks at what each saves."""
    found: dict[str, Variant] = {}
    failed: dict[str, str] = {}
    saved: list[str] | None = None
    for name in VARIANTS:
        try:
            forward, backward = _split_as(name, private.copy_of(joint), inputs, saved_by_cheap=saved, **options)
        except RuntimeError as error:
            failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        if name == CHEAP:
            saved = [node.name for node in _saved(forward, options["num_fwd_outputs"])]
        variant = _costs(name, forward, backward, options["num_fwd_outputs"])
        if not found or variant.saved_bytes < min(other.saved_bytes for other in found.values()):
            found[name] = variant
    nodes = [node for node in joint.graph.nodes if graphs.is_forward(node)]
    flops = sum(graphs.flops_as_products(node) for node in nodes)
    return GraphCosts(found, flops, failed)


def _split_as(
    variant: str, joint: fx.GraphModule, inputs: Any, *, saved_by_cheap: list[str] | None = None, **options: Any
) -> private.Graphs:
    """Splits a joint graph, which it changes; `saved_by_cheap` names what "cheap" saves, where that is known."""
    again: set[str] = set()
    if variant in (LEAN, INPUTS, LEAST):
        if saved_by_cheap is None:
            forward, _ = private.partition(private.copy_of(joint), inputs, lift_bans=True, again=set(), **options)
            saved_by_cheap = [node.name for node in _saved(forward, options["num_fwd_outputs"])]
        again = _products_to_repeat(joint, saved_by_cheap, half=variant == LEAN)
        # PyTorch's min-cut never computes these again of itself, and saves what is made of them.
        again |= {node.name for node in joint.graph.nodes if _joins_what_was_made(node)}
    if variant == LEAST:
        again |= {node.name for node in joint.graph.nodes if graphs.is_attention_without_dropout(node)}
    return private.partition(joint, inputs, lift_bans=variant != SAVE, again=again, **options)


def _products_to_repeat(joint: fx.GraphModule, saved_by_cheap: list[str], *, half: bool) -> set[str]:
    """Names of the matrix products and convolutions whose outputs, or what is made of them, "cheap" would save."""
    flops = {node.name: graphs.matmul_flops(node) for node in joint.graph.nodes if graphs.is_forward(node)}
    nodes = {node.name: node for node in joint.graph.nodes}
    saved = [nodes[name] for name in saved_by_cheap if name in nodes]
    nbytes: dict[str, int] = {}
    seen: set[int] = set()
    for node in saved:
        makers = _makers(node, flops, {other.name for other in saved} - {node.name})
        for maker in makers:
            size = 0 if id(_root(node)) in seen else graphs.nbytes_of(_root(node))
            nbytes[maker] = nbytes.get(maker, 0) + size // len(makers)
        seen.add(id(_root(node)))
    order = sorted(nbytes, key=lambda name: (-nbytes[name] / flops[name], -nbytes[name]))
    if not half:
        return set(order)
    chosen: set[str] = set()
    for name in order:
        if 2 * sum(nbytes[other] for other in chosen) >= sum(nbytes.values()):
            break
        chosen.add(name)
    return chosen


def _makers(node: fx.Node, flops: dict[str, int], saved: set[str]) -> set[str]:
    """The nearest products that a saved value is made of."""
    found: set[str] = set()
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        if flops.get(here.name):
            found.add(here.name)
            continue
        if graphs.is_random(here) or (here is not node and here.name in saved):
            continue
        fresh = [other for other in here.all_input_nodes if other not in seen and other.op == "call_function"]
        if not graphs.is_view(here) and not graphs.is_pointwise(here):
            # Attention, a reduction, an unknown operation: it is saved itself, and never run again.
            continue
        seen.update(fresh)
        waiting += fresh
    return found


def _costs(name: str, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> Variant:
    saved = _saved(forward, num_outputs)
    roots: dict[fx.Node, int] = {}
    outputs = {_root(node) for node in graphs.outputs_of(forward)[:num_outputs]}
    for node in saved:
        root = _root(node)
        if root.op != "placeholder" and root not in outputs:
            roots[root] = graphs.nbytes_of(root)
    repeated = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in repeated]
    peak = backward_peak(backward)
    return Variant(
        name=name,
        sizes=tuple(size for size in roots.values() if size >= _SMALL_BYTES),
        small_bytes=sum(size for size in roots.values() if size < _SMALL_BYTES),
        backward_flops=sum(graphs.flops_as_products(node) for node in again),
        backward_bytes=sum(graphs.nbytes_of(node) for node in again if _has_memory(node)),
        peak_bytes=peak,
    )


def _saved(forward: fx.GraphModule, num_outputs: int) -> list[fx.Node]:
    """What a forward graph returns beyond the user's outputs: the saved values."""
    return graphs.outputs_of(forward)[num_outputs:]


def backward_peak(graph: fx.GraphModule) -> int:
    """Bytes that a backward graph holds at most: saved values not yet used, gradients, temporaries; no inputs.

    An estimate before fusion: values are freed after their last use, and element-wise ones take no memory unless
    something else than another element-wise operation reads them.
    """
    order = list(graph.graph.nodes)
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        for other in node.all_input_nodes:
            root = _root(other)
            # What is fused away is read where its reader is.
            last[root] = index
    for node in reversed(order):
        if node in last and not _has_memory(node):
            for other in node.all_input_nodes:
                root = _root(other)
                last[root] = max(last[root], last[node])
    held = 0
    freed: dict[int, int] = {}
    for node in order:
        if node.op == "placeholder" and node in last and not node.name.startswith("primals"):
            held += graphs.nbytes_of(node)
            freed[last[node]] = freed.get(last[node], 0) + graphs.nbytes_of(node)
    peak = held
    for index, node in enumerate(order):
        if node.op == "call_function" and _has_memory(node) and node in last:
            held += graphs.nbytes_of(node)
            freed[last[node]] = freed.get(last[node], 0) + graphs.nbytes_of(node)
        peak = max(peak, held)
        held -= freed.get(index, 0)
    return peak


def _has_memory(node: fx.Node) -> bool:
    """Whether a node's output lies in memory of its own."""
    if graphs.is_view(node) or not isinstance(graphs.value_of(node), torch.Tensor):
        return False
    if not graphs.is_pointwise(node):
        return True
    return any(not graphs.is_pointwise(user) for user in _readers(node))


def _readers(node: fx.Node) -> Sequence[fx.Node]:
    """Who reads a node's output, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if graphs.is_view(user) else [user]
    return found


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and graphs.is_view(node) and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if not isinstance(graphs.value_of(source), torch.Tensor) and not graphs.is_view(source):
            return node  # one of several outputs: each has memory of its own
        node = source
    return node


def _joins_what_was_made(node: fx.Node) -> bool:
    """Whether a node joins tensors that the forward has made, as rotary embeddings do. Buffers may change meanwhile."""
    return (
        graphs.packet_of(node) is torch.ops.aten.cat
        and graphs.is_forward(node)
        and all(_root(part).op == "call_function" for part in node.all_input_nodes)
    )


def _version() -> str:
    """Changes with this file, so that Inductor's cache on disk forgets what an older one made."""
    texts = [Path(name).read_bytes() for name in (__file__, graphs.__file__, private.__file__)]
    return hashlib.sha256(b"".join(texts)).hexdigest()
