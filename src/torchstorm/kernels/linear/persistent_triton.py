"""The fused layer with one program per SM, tiles loaded by TMA, and an epilogue in two parts.

A program processes several tiles, so the first loads of the next tile run while the last one is stored. One thread
requests a whole tile with a TMA descriptor. The sums of a tile are stored in two halves, which need half the shared
memory, so the product keeps its pipeline stages.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torchstorm.errors import ShapeError
from torchstorm.kernels.linear import activations_triton as activations
from torchstorm.kernels.linear.gemm_triton import Tile, tile_position
from torchstorm.kernels.linear.plain import keeps

TILE = Tile(128, 256, 64, 8, 3)
_TMA_BYTES = 16


@triton.jit
def _finish(total, bias_ptr, y_tma, z_tma, row, column, N, ACTIVATION: tl.constexpr, KEEP: tl.constexpr):
    """Bias, activation and stores of a part of a tile."""
    if bias_ptr is not None:
        at = column + tl.arange(0, total.shape[1])
        total += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        z_tma.store([row, column], total.to(z_tma.dtype))
    y_tma.store([row, column], activations.activate(total, ACTIVATION, y_tma.dtype != tl.float32).to(y_tma.dtype))


@triton.jit(do_not_specialize=["M"])
def persistent_kernel(
    x_tma, w_tma, bias_ptr, y_tma, z_tma, M, N, K, NUM_PROGRAMS: tl.constexpr, ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # A count of its own for what is stored, so that no store holds up the next tile's loads.
    stored = tl.program_id(0)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_tma.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_tma.load([tile_n * BLOCK_N, step * BLOCK_K])
            total = tl.dot(x, w.T, total)
        stored_m, stored_n = tile_position(stored, tiles_m, tiles_n, GROUP)
        stored += NUM_PROGRAMS
        row, column = stored_m * BLOCK_M, stored_n * BLOCK_N
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        _finish(left, bias_ptr, y_tma, z_tma, row, column, N, ACTIVATION, KEEP)
        _finish(right, bias_ptr, y_tma, z_tma, row, column + HALF, N, ACTIVATION, KEEP)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool, tile: Tile = TILE
) -> tuple[Tensor, Tensor | None]:
    """y, and z if it is saved.

    Raises:
        ShapeError: rows of K or N elements are not multiples of 16 bytes, as TMA requires.
    """
    (M, K), N = x.shape, weight.shape[0]
    least = _TMA_BYTES // x.element_size()
    if K % least or N % least:
        raise ShapeError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: variant='persistent' needs K and N to be multiples of "
            f"{least}; 'fused' takes any."
        )
    x, weight = (t if _suits_tma(t) else t.clone(memory_format=torch.contiguous_format) for t in (x, weight))
    y = x.new_empty((M, N))
    keep = keep and keeps(activation) == "z"
    z = x.new_empty((M, N)) if keep else None
    block, half = [tile.block_m, tile.block_k], [tile.block_m, tile.block_n // 2]
    x_tma = TensorDescriptor(x, list(x.shape), list(x.stride()), block)
    w_tma = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tile.block_n, tile.block_k])
    y_tma = TensorDescriptor(y, [M, N], [N, 1], half)
    z_tma = y_tma if z is None else TensorDescriptor(z, [M, N], [N, 1], half)
    programs = min(_num_sms(x.device), triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n))
    persistent_kernel[(programs,)](
        x_tma, w_tma, bias, y_tma, z_tma, M, N, K, NUM_PROGRAMS=_num_sms(x.device), ACTIVATION=activation, KEEP=keep,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return y, z


def _suits_tma(x: Tensor) -> bool:
    begins = x.stride(0) * x.element_size() % _TMA_BYTES or x.data_ptr() % _TMA_BYTES
    return not begins and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # for compilation without a GPU
    return torch.cuda.get_device_properties(device).multi_processor_count  # pragma: gpu
