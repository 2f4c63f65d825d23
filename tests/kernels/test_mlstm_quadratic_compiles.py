"""The mLSTM's quadratic Triton kernels and its ladder, compiled for sm_80 and sm_90 without a GPU: nothing spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import SHARED_BYTES, compiled, usage
from torchstorm.kernels.mlstm import ladder_triton, quadratic_triton

__all__ = ["compiled"]  # a fixture


def _forward_and_backward(
    B: int,
    H: int,
    S: int,
    d: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    tensor_cores: bool = True,
    gate: str = "exp",
    state: bool = False,
    packed: bool = False,
) -> None:
    q, k, v, dh = (torch.zeros(B, H, S, size, dtype=dtype) for size in (d[0], *d, d[1]))
    i, f = torch.zeros(B, H, S), torch.zeros(B, H, S)
    cu = torch.tensor([0, 1, S], dtype=torch.int32) if packed else None
    N = 2 if packed else B
    parts = torch.zeros(N, H, *d), torch.zeros(N, H, d[0]), torch.zeros(N, H)
    start = parts if state else (None, None, None)
    options = {"tensor_cores": tensor_cores}
    h, C, n, m, *kept = quadratic_triton.forward(q, k, v, i, f, *start, cu, None, gate, **options)  # type: ignore[arg-type]
    quadratic_triton.backward(
        dh, *start, q, k, v, i, f, *start, cu, h, *kept, C, n, m, None, gate, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("compiled", "d", "options"),
    [
        (90, (64, 64), {}),
        (90, (128, 256), {}),
        (90, (128, 256), {"tensor_cores": False}),
        (90, (256, 512), {"state": True}),
        (90, (96, 40), {"packed": True, "gate": "sigmoid"}),
        (90, (64, 64), {"tensor_cores": False, "dtype": torch.float32}),
        (80, (128, 256), {"state": True}),
    ],
    indirect=["compiled"],
)
def test_nothing_spills(compiled: list[tuple[str, Any]], d: tuple[int, int], options: dict[str, Any]) -> None:
    _forward_and_backward(1, 2, 256, d, **options)
    assert len(compiled) == 9 - (options.get("gate") == "sigmoid") + options.get("state", False)
    is_chosen_for = compiled[0][1].metadata.target.arch == 90
    for name, kernel in compiled:
        registers, stack = usage(kernel)
        limit = SHARED_BYTES[kernel.metadata.target.arch]
        assert kernel.metadata.shared <= limit, f"{name}: {kernel.metadata.shared} bytes of shared memory"
        # ptxas puts a few addresses aside where the tiles were not chosen for: not what the loops compute with.
        assert stack <= (0 if is_chosen_for else 64), f"{name}: {stack} bytes of stack, {registers} registers"


@pytest.mark.parametrize("packed", [False, True])
def test_other_sizes_compile_nothing_new(compiled: list[tuple[str, Any]], packed: bool) -> None:
    B = 1 if packed else 2
    _forward_and_backward(B, 2, 256, (64, 64), packed=packed)
    first = {id(kernel) for _, kernel in compiled}
    for S in (1, 77, 1000):
        _forward_and_backward(1 if packed else 3, 1, S, (64, 64), packed=packed)
    assert {id(kernel) for _, kernel in compiled} == first


@pytest.mark.parametrize(
    ("compiled", "dtype"), [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32)], indirect=["compiled"]
)
def test_no_rung_spills(compiled: list[tuple[str, Any]], dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(1, 2, 256, d, dtype=dtype) for d in (128, 128, 256))
    i, f = torch.zeros(1, 2, 256), torch.zeros(1, 2, 256)
    ladder_triton.matmul_tiles(q, k.mT)
    ladder_triton.qk_v(q, k, v)
    ladder_triton.causal(q, k, v)
    ladder_triton.gated(q, k, v, i, f)
    assert [name for name, _ in compiled] == ["matmul_tiles_kernel", *["pairs_kernel"] * 3]
    for name, kernel in compiled:
        registers, stack = usage(kernel)
        assert stack <= 32, f"{name}: {stack} bytes of stack, {registers} registers"
