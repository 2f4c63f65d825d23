"""Every Triton kernel of the mLSTM, compiled for sm_80 and sm_90 without a GPU: all fits, and hardly anything spills.

A kernel that spills keeps registers in memory and is slow without being wrong, so nothing else would notice. The
compiler is asked through the launches themselves, with a driver that only says which GPU is meant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import SHARED_BYTES, compiled, usage
from torchstorm.kernels.mlstm import chunkwise_triton

__all__ = ["compiled"]  # a fixture

KERNELS = ("gates", "states", "outputs", "gates", "denominator", "states", "state_gradients", "q_gradients",
           "k_v_gradients", "gate_gradients")  # fmt: skip
# Registers a thread at most, kernel by kernel as they run, recorded with Triton 3.6.0; 255 is all there are.
REGISTERS = {
    (64, 64): (80, 168, 168, 80, 40, 128, 168, 168, 168, 48),
    (128, 256): (80, 255, 255, 80, 56, 255, 255, 255, 255, 48),
    (256, 512): (80, 255, 192, 80, 56, 255, 255, 255, 255, 48),
}
# The fastest tiles spill a little. Bytes of stack a thread, at most: of those tiles, and of all others.
STACK_BYTES = {(64, 64): 32, (128, 256): 48, (256, 512): 32, (512, 64): 16}


def _forward_and_backward(
    B: int,
    H: int,
    S: int,
    d_qk: int,
    d_v: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gate: str = "exp",
    state: bool = False,
    packed: bool = False,
) -> None:
    q, k, v, dh = (torch.zeros(B, H, S, d, dtype=dtype) for d in (d_qk, d_qk, d_v, d_v))
    i, f = torch.zeros(B, H, S), torch.zeros(B, H, S)
    cu = torch.tensor([0, 1, S], dtype=torch.int32) if packed else None
    N = 2 if packed else B
    parts = torch.zeros(N, H, d_qk, d_v), torch.zeros(N, H, d_qk), torch.zeros(N, H)
    start = parts if state else (None, None, None)
    h, C, n, m, *kept = chunkwise_triton.forward(q, k, v, i, f, *start, cu, None, gate)
    chunkwise_triton.backward(dh, *start, q, k, v, i, f, *start, cu, h, *kept, C, n, m, None, gate)


@pytest.mark.parametrize(
    ("compiled", "d_qk", "d_v", "dtype", "options"),
    [
        (90, 64, 64, torch.bfloat16, {}),
        (90, 128, 256, torch.bfloat16, {}),
        (90, 256, 512, torch.bfloat16, {}),
        (90, 512, 64, torch.bfloat16, {}),
        (90, 96, 40, torch.bfloat16, {"packed": True, "gate": "sigmoid", "state": True}),
        (90, 128, 128, torch.float32, {}),
        (80, 128, 256, torch.bfloat16, {}),
        (80, 64, 64, torch.float16, {"packed": True, "state": True}),
    ],
    indirect=["compiled"],
)
def test_registers_shared_memory_and_spills_are_as_recorded(
    compiled: list[tuple[str, Any]], d_qk: int, d_v: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    _forward_and_backward(1, 2, 256, d_qk, d_v, dtype=dtype, **options)
    wanted = [f"{name}_kernel" for name in KERNELS if name != "denominator" or options.get("gate") != "sigmoid"]
    assert [name for name, _ in compiled] == wanted
    capability = compiled[0][1].metadata.target.arch
    recorded = REGISTERS.get((d_qk, d_v)) if capability == 90 and dtype == torch.bfloat16 else None
    for number, (name, kernel) in enumerate(compiled):
        registers, stack = usage(kernel)
        shared = kernel.metadata.shared
        print(f"{name}: {registers} registers, {stack} bytes of stack, {shared} of shared memory")
        assert shared <= SHARED_BYTES[capability], f"{name}: {shared} bytes of shared memory"
        assert stack <= (STACK_BYTES.get((d_qk, d_v), 0) if dtype == torch.bfloat16 else 0), f"{name}: {stack} of stack"
        if recorded is not None:
            assert registers <= recorded[number], f"{name}: {registers} registers, recorded {recorded[number]}"


@pytest.mark.parametrize("packed", [False, True])
def test_other_sizes_compile_nothing_new(compiled: list[tuple[str, Any]], packed: bool) -> None:
    B = 1 if packed else 2
    _forward_and_backward(B, 2, 256, 64, 64, packed=packed)
    first = {id(kernel) for _, kernel in compiled}
    for S in (1, 77, 1000):
        _forward_and_backward(1 if packed else 3, 1, S, 64, 64, packed=packed)
    assert {id(kernel) for _, kernel in compiled} == first
