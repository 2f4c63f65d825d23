"""For the tests of kernels in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from kernels import interpreting


@pytest.fixture(scope="session", autouse=True)
def _interpreted_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where several processes share the tests, each of them has a folder below one of the run's own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        interpreting.shared = tmp_path_factory.getbasetemp().parent


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a module look as if it was not installed, to whoever asks what variants need."""
    module = sys.modules["torchstorm.kernels.variants"]  # in the package the same name is the function that lists them

    def hide(name: str) -> None:
        monkeypatch.setitem(module._found, name, False)
        monkeypatch.setattr(module, "_chosen", set())

    return hide
