"""Triton's kernels compiled in place of run, by a driver that only says which GPU is meant."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Of a block, by capability."""


class _NoDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # kernels are remembered by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[tuple[str, Any]]:
    """Kernels as they are compiled in place of run, by name."""
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.fn.__name__, kernel))
        return kernel

    monkeypatch.setattr(JITFunction, "run", only_compile)
    monkeypatch.setattr(triton.runtime.driver, "_active", _NoDevice(getattr(request, "param", 90)))
    return found


def usage(kernel: Any) -> tuple[int, int]:
    """Registers a thread and bytes of stack, from the compiled code."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    path = Path(kernel.metadata_group[next(name for name in kernel.metadata_group if name.endswith(".cubin"))])
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{what}:(\d+)", text) for what in ("REG", "STACK"))
    assert registers is not None, text
    assert stack is not None, text
    return int(registers[1]), int(stack[1])
