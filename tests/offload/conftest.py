"""For all of this room; for tests that compile blocks, and for those of what settled steps do in C++ or in Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchstorm.offload.native import library
from torchstorm.offload.step.kept import Kept
from torchstorm.offload.step.packed import Placeholder
from torchstorm.plan import search


@pytest.fixture(autouse=True, scope="module")
def short_search() -> Iterator[None]:
    """Searches for plans end early: what these tests hold is how steps follow plans. How good plans are is held to in
    tests/plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_STEPS", 2)
        yield


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


@pytest.fixture(params=["C++", "Python"], scope="module")
def short_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Settled steps take either way."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr(library._building, "found", None)
            patch.setattr(library._building, "why_not", "a test")
            for one in Placeholder, Kept:
                patch.setattr(one, "__del__", one.drop)
        yield
