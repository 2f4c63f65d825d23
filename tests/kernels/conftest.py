"""For the tests of kernels in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

from kernels import interpreting


@pytest.fixture(scope="session", autouse=True)
def _interpreted_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where several processes share the tests, each of them has a folder below one of the run's own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        interpreting.shared = tmp_path_factory.getbasetemp().parent
