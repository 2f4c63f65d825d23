"""The layer with matmul's wgmma kernel, whose idle warps compute the operations besides the products.

Forward: bias and ReLU in the epilogue; other activations from z, one tile after it was stored. Backward: dz for rows
that dx = dz W needs later, and the bias's sums over them. A separate kernel computes dz of the first rows before. For
tensors that the copy engine (TMA) cannot read or write, other variants are used.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import HALVES
from torchstorm.kernels.linear.plain import keeps
from torchstorm.kernels.matmul.wgmma import (
    CONFIG,
    TILE_M,
    Beside,
    along_k_of,
    fills,
    has_wgmma,
    matmul_wgmma,
    product,
    why_not,
)

FOLDER = Path(__file__).parent
ACTIVATIONS = {"": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
"""The activations' numbers in the CUDA sources."""
FIRST_ROWS = CONFIG.group * TILE_M
"""Rows of dz that are computed beforehand: as many as are multiplied at the same time."""


class Following(ctypes.Structure):
    """`Beside` of follow.cuh."""

    _fields_ = (("bias", ctypes.c_void_p), ("z", ctypes.c_void_p), ("y", ctypes.c_void_p))


class Leading(ctypes.Structure):
    """`Beside` of lead.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("dy", "kept", "dz", "sums", "counts")),
        ("num_done", ctypes.c_int),
    )


LEAST, LEAST_FEATURES = 1 << 39, 3072
"""M N K and K from which this variant is the fastest: with small K the idle warps have too little time per tile."""


def is_best_for_a_layer(x: Tensor, weight: Tensor) -> bool:
    """Whether "auto" uses this for x (..., K), weight (N, K) in fp16 or bf16 on Hopper; not while Dynamo traces."""
    N, K = weight.shape
    if torch.compiler.is_compiling() or x.dtype not in HALVES or x.numel() * N < LEAST or K < LEAST_FEATURES:
        return False
    if not has_wgmma(x):  # pragma: gpu
        return False
    # Other variants copy such rows; this one would read them element by element, as fused does.
    if not x.is_contiguous() or why_not(x.view(-1, K), weight.t()):  # pragma: gpu
        return False
    return fills(x.numel() // K, N, x)  # pragma: gpu


def beside(kind: str, activation: str, argument: ctypes.Structure) -> Beside:
    """The additional work of kind "follow" or "lead"."""
    files = FOLDER / "activations.cuh", FOLDER / f"{kind}.cuh"
    return Beside(files=files, argument=argument, defines=(("ACTIVATION", ACTIVATIONS[activation]),))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool
) -> tuple[Tensor, Tensor | None]:  # pragma: gpu
    """y, and z with its bias if it is saved."""
    w_KN = weight.t()
    if why_not(x, w_KN):
        from torchstorm.kernels.linear.gemm_triton import fused_forward

        return fused_forward(x, weight, bias, activation, keep)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    z = torch.empty_like(y) if keep and keeps(activation) == "z" else y
    bias = bias if bias is None or bias.data_ptr() % 4 == 0 else bias.clone()
    given = Following(None if bias is None else bias.data_ptr(), z.data_ptr(), y.data_ptr())
    matmul_wgmma(x, w_KN, out=z, beside=beside("follow", activation, given))
    return y, None if z is y else z


def dx_and_sums(
    dy: Tensor, kept: Tensor, weight: Tensor, activation: str, wants_sums: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """dx, dz and, if required, its fp32 sums over each 128 rows; None if that is slower or not possible."""
    M, N = dy.shape
    if not activation or M <= FIRST_ROWS:
        return None
    dz = dy.new_empty((M, N))
    # The copy engine could treat one column as one row, but the idle warps write rows of whole 16 bytes.
    if why_not(dz, weight) or not along_k_of(dz, -2, -1):
        return None
    from torchstorm.kernels.linear import pointwise_triton as pointwise  # pragma: gpu

    dy, kept = (t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)
                for t in (dy, kept))  # fmt: skip
    bands = -(-M // TILE_M)
    sums = dy.new_empty((bands, N), dtype=torch.float32) if wants_sums else None
    pointwise.gradient_into(dz[:FIRST_ROWS], sums, dy[:FIRST_ROWS], kept[:FIRST_ROWS], activation)
    counts = torch.zeros(1 + bands, dtype=torch.int32, device=dy.device)
    pointers = (None if t is None else t.data_ptr() for t in (dy, kept, dz, sums, counts))
    given = Leading(*pointers, FIRST_ROWS // TILE_M)
    dx = matmul_wgmma(dz, weight, beside=beside("lead", activation, given))
    return dx, dz, sums


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    activation: str,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pragma: gpu
    """dx, dweight and dbias (in fp32), as far as required."""
    from torchstorm.kernels.linear import blas
    from torchstorm.kernels.linear import pointwise_triton as pointwise

    wants_dx, wants_dweight, wants_dbias = wants
    dx = dbias = None
    together = dx_and_sums(dy, kept, weight, activation, wants_dbias) if wants_dx else None
    if together is not None:
        dx, dz, sums = together
        dbias = None if sums is None else pointwise.column_sums(sums, sums.shape[0])[0]
    else:
        dz, dbias = blas.dz_and_dbias(dy, kept, None, activation, "warp-reduced", wants_dbias)
        dx = product(dz, weight) if wants_dx else None
    return dx, product(dz.t(), x) if wants_dweight else None, dbias
