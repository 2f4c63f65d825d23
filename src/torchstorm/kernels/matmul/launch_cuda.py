"""Grids, blocks and compile-time choices of the kernels for CUDA cores and for Ampere's tensor cores.

Operands have any strides. Each is read along its contiguous dimension, in wide reads if addresses, strides and sizes
allow it. The kernel is compiled for the given case.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchstorm.kernels.matmul.batches import batches_of
from torchstorm.kernels.matmul.headers import CUTLASS_ADVICE, cutlass_includes, cutlass_version
from torchstorm.nvrtc import Source, launch

FOLDER = Path(__file__).parent
ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The macro ELEMENT by dtype."""

STAGES = 4
_TENSOR_CORE_TILE_BYTES = 128 * 64
_CUTLASS_STAGES = 3
_CUTLASS_SHARED_BYTES = _CUTLASS_STAGES * (128 + 256) * 64 * 2
_CHUNK_BYTES = 16
_FOUR = 4
_MOST_BLOCKS_Y = 65535


class Problem(ctypes.Structure):
    """`Problem` of elements.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("M", "N", "K", "num_inner", "first_batch")),
        *((name, ctypes.c_longlong) for name in ("a_m", "a_k", "a_inner", "a_outer")),
        *((name, ctypes.c_longlong) for name in ("b_k", "b_n", "b_inner", "b_outer")),
    )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The parameters of a kernel.

    Attributes:
        file: the source file, in this folder.
        tile: rows and columns of a block's results.
        threads: threads per block.
        reads: how operands are read: "any" strides; "fours" of elements; "chunks" of 16 bytes.
        defines: constant macros.
        shared_bytes: dynamic shared memory per block.
        uses_cutlass: whether it includes CUTLASS.
    """

    file: str
    tile: tuple[int, int]
    threads: int
    reads: str = "any"
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    uses_cutlass: bool = False

    def source(self, dtype: torch.dtype, layouts: tuple[tuple[str, int], ...]) -> Source:
        """The source with its macros."""
        files = ("elements.cuh", *(("fours.cuh",) if self.reads == "fours" else ()), self.file)
        return Source(
            kernel=f"matmul_{Path(self.file).stem}",
            files=tuple(FOLDER / file for file in files),
            defines=(("ELEMENT", ELEMENTS[dtype]), *layouts, *self.defines),
            shared_bytes=self.shared_bytes,
            includes=cutlass_includes() if self.uses_cutlass else (),
            headers=cutlass_version() if self.uses_cutlass else "",
            advice=CUTLASS_ADVICE if self.uses_cutlass else "",
        )


KERNELS = {
    "naive": Kernel(file="naive.cu", tile=(8, 32), threads=256),
    "tiled": Kernel(file="tiled.cu", tile=(32, 32), threads=1024),
    "vectorised": Kernel(file="vectorised.cu", tile=(64, 64), threads=256, reads="fours"),
    "coarsened": Kernel(file="coarsened.cu", tile=(128, 128), threads=256, reads="fours", defines=(("STEP_K", 8),)),
    "tensor-cores": Kernel(
        file="tensor_cores.cu",
        tile=(128, 128),
        threads=256,
        reads="chunks",
        defines=(("STAGES", STAGES),),
        shared_bytes=STAGES * 2 * _TENSOR_CORE_TILE_BYTES,
    ),
    "cutlass": Kernel(
        file="cutlass.cu",
        tile=(128, 256),
        threads=256,
        reads="chunks",
        defines=(("STAGES", _CUTLASS_STAGES), ("SHARED_BYTES", _CUTLASS_SHARED_BYTES)),
        shared_bytes=_CUTLASS_SHARED_BYTES,
        uses_cutlass=True,
    ),
}


def layout_of(x: Tensor, mn_dim: int, k_dim: int, reads: str) -> tuple[bool, bool]:
    """(whether an operand is read along k, whether in wide reads)."""
    along_k = _step(x, k_dim) <= _step(x, mn_dim)
    fast = (k_dim if along_k else mn_dim) % x.dim()
    wide = _FOUR if reads == "fours" else _CHUNK_BYTES // x.element_size()
    others = [stride for dim, stride in enumerate(x.stride()) if dim != fast and x.shape[dim] > 1]
    aligned = x.data_ptr() % (wide * x.element_size()) == 0 and all(stride % wide == 0 for stride in others)
    # Four elements are always read together; cp.async can read a part of a chunk.
    whole = reads == "chunks" or x.shape[fast] % wide == 0
    return along_k, aligned and whole and (x.stride(fast) == 1 or x.shape[fast] == 1)


def whole_chunks(a: Tensor, b: Tensor) -> bool:
    """Whether both operands and the result are aligned to whole 16 bytes, as CUTLASS's kernel requires."""
    (a_along_k, a_wide), (b_along_k, b_wide) = layout_of(a, -2, -1, "chunks"), layout_of(b, -1, -2, "chunks")
    sizes = a.shape[-1 if a_along_k else -2], b.shape[-2 if b_along_k else -1], b.shape[-1]
    return a_wide and b_wide and all(size % (_CHUNK_BYTES // a.element_size()) == 0 for size in sizes)


def matmul_cuda(name: str, a: Tensor, b: Tensor) -> Tensor:  # pragma: gpu
    """a (..., M, K) @ b (..., K, N), of the same batch sizes, by a kernel of this file."""
    kernel = KERNELS[name]
    M, N, K = a.shape[-2], b.shape[-1], a.shape[-1]
    c = a.new_empty((*a.shape[:-1], N))
    layouts: tuple[tuple[str, int], ...] = ()
    if kernel.reads != "any":
        a_along_k, a_wide = layout_of(a, -2, -1, kernel.reads)
        b_along_k, b_wide = layout_of(b, -1, -2, kernel.reads)
        layouts = (
            *(("A_ALONG_K", int(a_along_k)), ("A_WIDE", int(a_wide))),
            *(("B_ALONG_K", int(b_along_k)), ("B_WIDE", int(b_wide))),
        )
    source = kernel.source(a.dtype, layouts)
    tiles = -(-M // kernel.tile[0]) * -(-N // kernel.tile[1])
    for batches in batches_of(a, b):
        places = (
            a.data_ptr() + batches.a_offset * a.element_size(),
            b.data_ptr() + batches.b_offset * b.element_size(),
            c.data_ptr() + batches.first * M * N * c.element_size(),
        )
        for first in range(0, batches.count, _MOST_BLOCKS_Y):
            problem = Problem(
                *(M, N, K, batches.sizes[1], first),
                *(a.stride(-2), a.stride(-1), batches.a_strides[1], batches.a_strides[0]),
                *(b.stride(-2), b.stride(-1), batches.b_strides[1], batches.b_strides[0]),
            )
            grid = (tiles, min(batches.count - first, _MOST_BLOCKS_Y), 1)
            pointers = [ctypes.c_void_p(place) for place in places]
            launch(source, *pointers, problem, grid=grid, threads=kernel.threads, device=a.device)
    return c


def _step(x: Tensor, dim: int) -> float:
    """The stride, or infinity for a dimension of size 1."""
    return x.stride(dim) if x.shape[dim] > 1 and x.stride(dim) > 0 else float("inf")
