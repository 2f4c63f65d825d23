"""What compiled blocks that are built alike share: a compilation a variant, its costs, and which variants agree."""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.agreement import REFERENCE, Agreement
from torchstorm.offload.compiled.partition import GraphCosts, VariantPartitioner
from torchstorm.offload.fast import FastTier
from torchstorm.plan.variants import SAVE, VARIANTS, BlockTable, Variant

WITHOUT_GRADIENTS = ""
"""In place of a variant, for calls that save nothing."""

_INPUTS = 6  # an input, the output, the gradients of both, once more what is compared with it, and what draws them

_numbers = itertools.count()


class Kind:
    """What blocks that are built alike share."""

    def __init__(self, reference: str = REFERENCE) -> None:
        self.agreement = Agreement(reference)
        self.needed_bytes = 0  # that one takes at most, roughly, when it is compared or timed by itself
        self.costs: list[GraphCosts] = []  # of the graphs that one call runs: several where it breaks
        self.partitioners: dict[str, VariantPartitioner] = {}
        self.num_calls: Counter[str] = Counter()  # of each block, in this step
        self._num_calls_before: Counter[str] = Counter()  # in the one that has ended
        self._functions: dict[str, Callable[..., Any]] = {}
        self._told: list[GraphCosts] = []
        self._timed: list[GraphCosts] = []  # those of the sizes for which variants were timed

    def call(self, variant: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block in a variant, compiling it where that has not been done."""
        self._told = []
        out = self._function(variant)(module, args, kwargs)
        if self._told and len(self._told) >= len(self.costs):  # else a part was compiled again, for another shape
            self.costs = self._told
            self.needed_bytes = max(self.needed_bytes, self._alone_bytes(module, (args, kwargs)))
        return out

    def _alone_bytes(self, module: nn.Module, given: object) -> int:
        """What a block takes at most, roughly, in a forward and backward of its own that are compared with others: what
        backward needs, the gradients of both, and inputs, outputs and their gradients, as large as inputs."""
        inputs = sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        weights = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        return max(variant.peak_bytes for variant in self.merged().values()) + 2 * weights + _INPUTS * inputs

    def step_ended(self) -> None:
        """Takes note of how often blocks were called in a step."""
        self._num_calls_before, self.num_calls = self.num_calls, Counter()

    def time(self, fast: FastTier) -> None:
        """Times the variants in use, between steps."""
        self.agreement.time(self.call, fast)
        self._timed = self.costs

    @property
    def is_timed(self) -> bool:
        """Whether variants were timed for the sizes that were compiled last."""
        return self._timed is self.costs and bool(self.agreement.seconds)

    def ran_once(self, name: str) -> bool:
        """Whether a block was called once in the step that has ended."""
        return self._num_calls_before[name] == 1

    def _function(self, variant: str) -> Callable[..., Any]:
        if variant not in self._functions:
            # The first variant to be compiled tells what all of them would save.
            tells = variant != WITHOUT_GRADIENTS and not (self.partitioners.keys() - {WITHOUT_GRADIENTS})
            partitioner = VariantPartitioner(variant or SAVE, self._tell if tells else None)
            self.partitioners[variant] = partitioner
            self._functions[variant] = private.compile_with(
                new_function(_call, f"block_{variant}"), partitioner, cache=not tells
            )
        return self._functions[variant]

    def _tell(self, costs: GraphCosts) -> None:
        self._told.append(costs)

    @property
    def forward_flops(self) -> int:
        return sum(costs.forward_flops for costs in self.costs)

    def merged(self) -> dict[str, Variant]:
        """The variants of all its graphs together, each graph in the nearest that it has."""
        found: dict[str, Variant] = {}
        for name in VARIANTS:
            parts = [
                BlockTable(name="", variants=costs.variants, forward_flops=0).nearest(name) for costs in self.costs
            ]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole.then(part)
            if not found or any(part.name == name for part in parts):
                found[name] = Variant(**{**vars(whole), "name": name})
        return found

    def usable(self) -> dict[str, Variant]:
        """Those that are not dropped, the reference always among them then, and what was timed of each."""
        found = self.merged()
        timed = self.agreement.seconds if self.is_timed else {}
        for name, (forward_s, backward_s) in timed.items():
            if name in found:
                found[name] = replace(found[name], forward_s=forward_s, backward_s=backward_s)
        dropped = self.agreement.dropped
        if not dropped:
            return found
        reference = self.agreement.reference
        nearest = BlockTable(name="", variants=found, forward_flops=0).nearest(reference)
        found[reference] = replace(nearest, name=reference)
        return {name: found[name] for name in VARIANTS if name in found and name not in dropped}


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


def new_function(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of a function: Dynamo counts compilations by code object, and remembers sizes by its name."""
    name = f"{name}_{next(_numbers)}"
    return types.FunctionType(call.__code__.replace(co_name=name), call.__globals__, name)
