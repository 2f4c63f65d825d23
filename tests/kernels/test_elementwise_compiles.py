"""Elementwise kernels, dropout's and batch_norm_act's, compiled for sm_80 and sm_90 without a GPU.

Few registers let many threads wait for memory at once, which is all that these kernels do; 16 bytes an access do the
rest. Both are held here, since a kernel without them is slow without being wrong.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import compiled, usage
from torchstorm.kernels.batch_norm.op import batch_norm_act_backward, batch_norm_act_op
from torchstorm.kernels.dropout.op import dropout_op
from torchstorm.kernels.elementwise import op

__all__ = ["compiled"]  # a fixture

Kernels = list[tuple[str, Any]]
# Registers a thread at most, recorded with Triton 3.6.0. Of 65536, 32 leave room for 2048 threads, 64 for 1024.
SUMS = ("sums_kernel", 64), ("sums_kernel", 56)
PRODUCT = ("sums_kernel", 80), ("sums_kernel", 56)
NORM = (
    ("statistics_kernel", 240),
    ("merge_statistics_kernel", 192),
    ("normalise_kernel", 96),
    ("gradient_sums_kernel", 192),
    ("merge_sums_kernel", 40),
    ("x_gradient_kernel", 96),
)


def _norm(x: torch.Tensor) -> None:
    C = torch.zeros(x.shape[1])
    batch_norm_act_op(x, C, C, None, None, 1e-5, "silu", "two-stage")
    batch_norm_act_backward(x, x, C, C, C, C, True, 1e-5, "silu", "two-stage")


RUNS: dict[str, tuple[Any, torch.dtype, tuple[tuple[str, int], ...]]] = {
    "gelu": (lambda x: op.FORWARD["gelu"](x, "vectorised"), torch.bfloat16, (("flat_kernel", 32),)),
    "gelu in fp32": (lambda x: op.FORWARD["gelu"](x, "vectorised"), torch.float32, (("flat_kernel", 40),)),
    "gelu, gradient": (lambda x: op.BACKWARD["gelu"](x, x, "vectorised"), torch.bfloat16, (("flat_kernel", 48),)),
    "silu, gradient": (lambda x: op.BACKWARD["silu"](x, x, "vectorised"), torch.float16, (("flat_kernel", 48),)),
    "silu, persistent": (lambda x: op.FORWARD["silu"](x, "persistent"), torch.bfloat16, (("flat_kernel", 40),)),
    "mul, gradients": (lambda x: op.mul_backward(x, x, x, "vectorised"), torch.bfloat16, (("flat_kernel", 64),)),
    "mul by a bias": (lambda x: op.mul_op(x, x[0], "vectorised"), torch.bfloat16, (("strided_kernel", 40),)),
    "sum over rows": (lambda x: op.product_sum(x, x, x.shape[1:], "vectorised"), torch.bfloat16, SUMS),
    "mul by a bias of 1000": (
        lambda x: op.mul_op(x[:, :1000].contiguous(), x[0, :1000], "vectorised"), torch.bfloat16,
        (("strided_kernel", 40),),
    ),
    "mul by a factor a row, of 1000": (
        lambda x: op.mul_op(x[:, :1000].contiguous(), x[:, :1].contiguous(), "vectorised"), torch.bfloat16,
        (("strided_kernel", 40),),
    ),
    "mul by a bias, gradients": (lambda x: op.mul_backward(x, x, x[0], "vectorised"), torch.bfloat16, PRODUCT),
    "sum over columns": (
        lambda x: op.product_sum(x, None, (x.shape[0], 1), "vectorised"), torch.float16, (("row_sums_kernel", 64),)
    ),
    "dropout": (lambda x: dropout_op(x, torch.tensor(1), 0.5, "vectorised"), torch.bfloat16, (("calls_kernel", 40),)),
    "dropout in fp32": (
        lambda x: dropout_op(x, torch.tensor(1), 0.5, "vectorised"), torch.float32, (("calls_kernel", 40),)
    ),
    "batch_norm_act": (_norm, torch.bfloat16, NORM),
    "batch_norm_act of images": (lambda x: _norm(x.view(64, 16, 256, 16)), torch.bfloat16, NORM),
}  # fmt: skip


@pytest.mark.parametrize(
    ("compiled", "name"),
    [*((90, name) for name in RUNS), (80, "gelu, gradient"), (80, "mul by a bias"), (80, "dropout")],
    indirect=["compiled"],
)
def test_few_registers_no_spills_and_16_bytes_an_access(compiled: Kernels, name: str) -> None:
    run, dtype, recorded = RUNS[name]
    run(torch.zeros(4096, 1024, dtype=dtype))
    capability = compiled[0][1].metadata.target.arch
    assert [kernel for kernel, _ in compiled] == [kernel for kernel, _ in recorded]
    for (kernel_name, kernel), (_, most) in zip(compiled, recorded, strict=True):
        registers, stack = usage(kernel)
        print(f"{kernel_name}: {registers} registers, {stack} bytes of stack")
        assert not stack, f"{kernel_name}: {stack} bytes of stack"
        assert capability != 90 or registers <= most, f"{kernel_name}: {registers} registers, recorded {most}"
        ptx = kernel.asm["ptx"]
        wide = "ld.global.v4.b32" in ptx or re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10, ", ptx)
        assert kernel_name.startswith("merge") or wide, f"{kernel_name}: no 16-byte reads"


def test_dropout_reads_before_it_makes_bits_and_its_threads_exchange_nothing(compiled: Kernels) -> None:
    dropout_op(torch.zeros(4096, 1024, dtype=torch.bfloat16), torch.tensor(1), 0.5, "vectorised")
    ptx = compiled[0][1].asm["ptx"]
    assert ".shared" not in ptx
    assert ptx.index("mul.lo.s64") > ptx.index("ld.global.v4.b32")


def test_batch_norm_of_rows_that_are_not_read_16_bytes_at_once_does_not_spill(compiled: Kernels) -> None:
    _norm(torch.zeros(4000, 1030, dtype=torch.bfloat16))
    for name, kernel in compiled:
        assert not usage(kernel)[1], name


def test_other_sizes_compile_nothing_new(compiled: Kernels) -> None:
    def run(rows: int) -> None:
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        op.BACKWARD["relu"](x, x, "vectorised")
        op.add_op(x, x[0], "vectorised")
        op.product_sum(x, None, (64,), "vectorised")
        dropout_op(x, torch.tensor(rows), 1.0 / rows, "vectorised")
        dropout_op(x, torch.tensor(rows), 1.0 - 1.0 / rows, "vectorised")
        batch_norm_act_op(x, None, None, None, None, 1e-5, "silu", "two-stage")

    for rows in (48, 200, 1500):  # whose sums are made at once, in few parts, in many
        run(rows)
    first = {id(kernel) for _, kernel in compiled}
    for rows in (7, 131, 4096):
        run(rows)
    assert {id(kernel) for _, kernel in compiled} == first
