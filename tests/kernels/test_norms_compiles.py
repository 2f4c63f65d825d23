"""Every kernel of softmax and the norms, compiled for sm_80 and sm_90 without a GPU: all fits, and little spills.

A kernel that spills keeps registers in memory and is slow without being wrong, so nothing else would notice. The
compiler is asked through the launches themselves, with a driver that only says which GPU is meant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import SHARED_BYTES, compiled, usage
from kernels.norm_cases_interpreted import TRITON
from torchstorm.kernels.norms import launch_triton as norms
from torchstorm.kernels.rows import holds
from torchstorm.kernels.softmax import launch_triton as softmax

__all__ = ["compiled"]  # a fixture

# Registers a thread at most in bf16, recorded with Triton 3.6.0 for sm_90: softmax forward and backward, LayerNorm
# forward and backward. Programs of 512 threads have 128 at most.
REGISTERS = {
    (1024, "persistent"): (80, 96, 80, 128),
    (4096, "fused"): (32, 32, 48, 80),
    (16384, "persistent"): (64, 96, 128, 128),
    (16384, "fused"): (32, 48, 40, 128),
    (32768, "fused"): (32, 48, 32, 64),
    (65536, "online"): (64, 48, 128, 64),
    (65536, "split"): (0, 0, 128, 96),
}
# Bytes of stack a thread where registers do not suffice: of rows of 64 KB backward, and of 32 KB beside the sums of dw.
STACK_BYTES = {(32768, "fused"): 80, (16384, "persistent"): 152}


def _launch(N: int, variant: str, dtype: torch.dtype, *, mask: torch.Tensor | None = None) -> None:
    x, params = torch.zeros(8, N, dtype=dtype), torch.zeros(N, dtype=dtype)
    if variant != "split":
        y = softmax.forward(x, mask, mask is not None, variant)
        softmax.backward(x, y, mask, mask is not None, variant)
    _, mean, rstd = norms.forward(x, params, params, 1e-5, True, variant)
    norms.backward(x, x, params, mean, rstd, True, True, True, dtype, variant)


def _main(kernels: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, kernel) for name, kernel in kernels if name not in ("columns_kernel", "totals_kernel")]


@pytest.mark.parametrize(("N", "variant"), REGISTERS)
def test_registers_shared_memory_and_spills_are_as_recorded(
    compiled: list[tuple[str, Any]], N: int, variant: str
) -> None:
    _launch(N, variant, torch.bfloat16)
    recorded = REGISTERS[N, variant][2 if variant == "split" else 0 :]
    assert len(_main(compiled)) == len(recorded)
    most = iter(recorded)
    for name, kernel in compiled:
        registers, stack = usage(kernel)
        print(f"{name}: {registers} registers, {stack} bytes of stack, {kernel.metadata.shared} of shared memory")
        assert kernel.metadata.shared <= SHARED_BYTES[90]
        assert stack <= STACK_BYTES.get((N, variant), 0), f"{name}: {stack} of stack"
        allowed = next(most) if (name, kernel) in _main(compiled) else 64
        assert registers <= allowed, f"{name}: {registers} registers, recorded {allowed}"


@pytest.mark.parametrize(
    ("compiled", "N", "dtype"),
    [(80, 1000, torch.float32), (90, 2048, torch.bfloat16)],
    indirect=["compiled"],
)
def test_everything_compiles_and_short_rows_do_not_spill(
    compiled: list[tuple[str, Any]], N: int, dtype: torch.dtype
) -> None:
    for variant in TRITON:
        assert holds(variant, N, dtype)
        _launch(N, variant, dtype, mask=torch.ones(1, N, dtype=torch.bool) if dtype == torch.float32 else None)
    for name, kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES[kernel.metadata.target.arch], name
        assert usage(kernel)[1] <= 8, name


def test_another_number_of_rows_compiles_nothing_new(compiled: list[tuple[str, Any]]) -> None:
    kernels = []
    for M in (1, 2, 77, 256):
        x, params = torch.zeros(M, 2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
        for variant in TRITON:
            if variant != "split":
                softmax.backward(x, softmax.forward(x, None, False, variant), None, False, variant)
            _, mean, rstd = norms.forward(x, params, params, 1e-5, True, variant)
            norms.backward(x, x, params, mean, rstd, True, True, True, x.dtype, variant)
        kernels.append({id(kernel) for _, kernel in compiled})
        compiled.clear()
    assert kernels[0] == kernels[1] == kernels[2] == kernels[3]
