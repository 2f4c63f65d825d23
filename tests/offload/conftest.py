"""For tests that compile blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
