"""For the tests of plans."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def short_search() -> None:
    """Searches for plans are as long here as they are outside of tests: how good plans are is what is held to."""
