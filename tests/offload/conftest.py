"""For tests that compile blocks, and for those of what settled steps do in C++ or in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torchstorm.offload import torch_private as private
from torchstorm.offload.native import library
from torchstorm.offload.step.kept import Kept
from torchstorm.offload.step.packed import Placeholder
from torchstorm.transfer.runtime import Event


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet or counted, and Dynamo's limits are afterwards what they were."""
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    limits = config.recompile_limit, config.accumulated_recompile_limit
    yield
    config.recompile_limit, config.accumulated_recompile_limit = limits


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitions of `compile_with`, run operation by operation."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compile_with(function: Callable[..., Any], partitioner: Any, *, cache: bool) -> Callable[..., Any]:
        def split(joint: Any, inputs: Any, **options: Any) -> Any:
            return partitioner(joint, inputs, **options)

        compilers = {"fw_compiler": nop, "bw_compiler": nop, "inference_compiler": nop}
        options = {"partition_fn": split, "decompositions": select_decomp_table()}
        return torch.compile(function, backend=aot_autograd(**compilers, **options))

    monkeypatch.setattr(private, "compile_with", compile_with)


@pytest.fixture(scope="module")
def told_once() -> Iterator[None]:
    """What variants of a compiled block would save is found once for equal graphs: it takes five partitions, and each
    block that is compiled anew asks for it. Each is still partitioned for the variants that it runs in."""
    from torchstorm.offload.compiled import partition
    from torchstorm.offload.compiled.partition import GraphCosts

    graph_costs, told = partition.graph_costs, dict[str, GraphCosts]()

    def costs(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> GraphCosts:
        if any(isinstance(value, torch.SymInt) for value in tree_leaves(inputs)):
            return graph_costs(joint, inputs, **options)  # equal graphs may be of other sizes
        code = joint.print_readable(print_output=False)  # with all shapes and dtypes
        graph = f"{options['num_fwd_outputs']} outputs: {code}"
        if graph not in told:
            told[graph] = graph_costs(joint, inputs, **options)
        return told[graph]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "graph_costs", costs)
        yield


@pytest.fixture(params=["C++", "Python"], scope="module")
def short_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Settled steps take either way."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr(library._building, "found", None)
            patch.setattr(library._building, "why_not", "a test")
            for one in Placeholder, Kept, Event:
                patch.setattr(one, "__del__", one.drop)
        yield
