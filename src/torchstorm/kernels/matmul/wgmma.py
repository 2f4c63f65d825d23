"""The kernel for Hopper's tensor cores: tensor maps, shared memory and the grid of wgmma.cu.

The copy engine (TMA) requires addresses and strides that are multiples of 16 bytes, one contiguous dimension of each
matrix, and result rows of whole 16 bytes. `why_not` returns the reason if they are not. Such operands use the variant
for Ampere's tensor cores.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import HALVES
from torchstorm.kernels.hopper import HOPPER
from torchstorm.kernels.matmul.batches import Batches, batches_of
from torchstorm.kernels.matmul.launch_cuda import ELEMENTS, FOLDER
from torchstorm.kernels.rows import num_sms
from torchstorm.nvrtc import Source, TensorMap, is_usable, launch, num_clusters, tensor_map

TILE_M = 128
TILE_K = 64
SLICE = 64
"""Elements of 128 bytes, the width of every box."""
_ALIGN = 8  # elements of 16 bytes
LEAST, LEAST_RESULTS = 1 << 38, 1 << 26
"""M N K and M N from which this kernel is faster than cuBLAS."""
LEAST_FILLED = 0.9
"""Smallest utilization of the multiprocessors by the tiles."""
_WARPGROUP = 128
_CONSUMERS = 2


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Additional work of the kernel: sources that define `Beside`, macros, and the value of that structure."""

    files: tuple[Path, ...]
    argument: ctypes.Structure
    defines: tuple[tuple[str, int], ...] = ()


class _Nothing(ctypes.Structure):
    """`Beside` of alone.cuh."""

    _fields_ = (("nothing", ctypes.c_int),)


ALONE = Beside(files=(FOLDER / "alone.cuh",), argument=_Nothing())


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning parameters.

    Attributes:
        tile_n: columns of a block's results, 128 or 256.
        stages: number of operand tiles in shared memory.
        cluster: number of blocks that share b's tile, 1, 2 or 4.
        group: tiles per column in the order of processing, a multiple of `cluster`.
    """

    tile_n: int = 256
    stages: int = 4
    cluster: int = 2
    group: int = 16

    @property
    def shared_bytes(self) -> int:
        """Bytes of tiles, two result buffers and a row per consumer, barriers, counts, and padding for alignment."""
        tiles = self.stages * (TILE_M + self.tile_n) * TILE_K * 2
        results = _CONSUMERS * 2 * 64 * SLICE * 2
        return 1024 + tiles + results + 2 * self.stages * 8 + _CONSUMERS * (4 + self.tile_n * 2)

    def source(self, dtype: torch.dtype, a_along_k: bool, b_along_k: bool, beside: Beside = ALONE) -> Source:
        """The source with its macros."""
        return Source(
            kernel="matmul_wgmma",
            files=(HOPPER, FOLDER / "elements.cuh", *beside.files, FOLDER / "wgmma.cu"),
            defines=(
                ("ELEMENT", ELEMENTS[dtype]),
                *(("A_ALONG_K", int(a_along_k)), ("B_ALONG_K", int(b_along_k))),
                *(("TILE_N", self.tile_n), ("STAGES", self.stages), ("CLUSTER", self.cluster), ("GROUP", self.group)),
                ("SHARED_BYTES", self.shared_bytes),
                *beside.defines,
            ),
            shared_bytes=self.shared_bytes,
        )


CONFIG = Config()


class WgmmaProblem(ctypes.Structure):
    """`WgmmaProblem` of wgmma.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("M", "N", "K", "num_inner", "num_batches", "a_inner", "a_outer", "b_inner", "b_outer")
    )


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """An operand or the result for a tensor map, with the contiguous dimension first. Strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of all dimensions but the first
    box: tuple[int, ...]


def along_k_of(x: Tensor, mn_dim: int, k_dim: int) -> bool | None:
    """Whether k is the contiguous dimension; None if the copy engine supports neither dimension."""
    for fast, slow in ((k_dim, mn_dim), (mn_dim, k_dim)):
        packed = x.stride(fast) == 1 or x.shape[fast] == 1
        spaced = x.stride(slow) % _ALIGN == 0 and x.stride(slow) >= x.shape[fast]
        if packed and (spaced or x.shape[slow] == 1):
            return fast == k_dim
    return None


def why_not(a: Tensor, b: Tensor) -> str:
    """Why the copy engine does not support a (..., M, K) @ b (..., K, N), as the end of a sentence; "" if it does."""
    N = b.shape[-1]
    if N % _ALIGN:
        return f"rows of {N} results are not a multiple of {_ALIGN}"
    for name, x, mn_dim, k_dim in (("a", a, -2, -1), ("b", b, -1, -2)):
        if x.data_ptr() % 16:
            return f"{name} starts {x.data_ptr() % 16} bytes after a multiple of 16"
        if along_k_of(x, mn_dim, k_dim) is None:
            return f"{name} has strides {x.stride()}, but one must be 1 and the others multiples of {_ALIGN}"
        if any(step % _ALIGN for size, step in zip(x.shape[:-2], x.stride()[:-2], strict=True) if size > 1):
            return f"{name} has strides {x.stride()}, but those of batches must be multiples of {_ALIGN}"
    return ""


def operand_boxes(x: Tensor, mn_dim: int, k_dim: int, batches: Batches, steps: tuple[int, int], rows: int) -> Boxes:
    """The boxes of an operand, with both batch dimensions, of size 1 for a broadcast matrix.

    Args:
        x: the operand.
        mn_dim, k_dim: indices of the dimensions M or N, and K.
        batches: the batch dimensions.
        steps: x's strides of the batch dimensions, (outer, inner).
        rows: rows of M or N per copy, if k is the contiguous dimension.
    """
    along_k = along_k_of(x, mn_dim, k_dim)
    fast, slow = (k_dim, mn_dim) if along_k else (mn_dim, k_dim)
    (outer, inner), (outer_step, inner_step) = batches.sizes, steps
    row = _round_up(x.shape[fast])
    slow_step = x.stride(slow) if x.shape[slow] > 1 else row
    sizes = (x.shape[fast], x.shape[slow], inner if inner_step else 1, outer if outer_step else 1)
    # The stride of a dimension of size 1 is unused, but must be valid.
    strides = (slow_step, inner_step or row, outer_step or row)
    return Boxes(sizes=sizes, strides=strides, box=(SLICE, rows if along_k else TILE_K, 1, 1))


def matmul_wgmma(
    a: Tensor, b: Tensor, *, out: Tensor | None = None, beside: Beside = ALONE, config: Config = CONFIG
) -> Tensor:  # pragma: gpu
    """a (..., M, K) @ b (..., K, N) with equal batch sizes, in fp16 or bf16; `why_not` must return "".

    Args:
        a, b: the operands.
        out: (..., M, N), contiguous, to be filled; None for a new tensor.
        beside: additional work.
        config: tuning parameters.
    """
    M, N, K = a.shape[-2], b.shape[-1], a.shape[-1]
    c = a.new_empty((*a.shape[:-1], N)) if out is None else out
    a_along_k, b_along_k = bool(along_k_of(a, -2, -1)), bool(along_k_of(b, -1, -2))
    source = config.source(a.dtype, a_along_k, b_along_k, beside)
    threads = (_CONSUMERS + 1) * _WARPGROUP
    clusters = num_clusters(source, cluster=config.cluster, threads=threads, device=a.device)
    for batches in batches_of(a, b):
        count = batches.count
        tiles = -(-M // (TILE_M * config.cluster)) * -(-N // config.tile_n) * count
        maps = [
            _map(a, batches.a_offset, operand_boxes(a, -2, -1, batches, batches.a_strides, TILE_M)),
            _map(
                b,
                batches.b_offset,
                operand_boxes(b, -1, -2, batches, batches.b_strides, config.tile_n // config.cluster),
            ),
            _map(c, batches.first * M * N, Boxes(sizes=(N, M, count), strides=(N, M * N), box=(SLICE, 64, 1))),
        ]
        shared = [int(step != 0) for steps in (batches.a_strides, batches.b_strides) for step in reversed(steps)]
        problem = WgmmaProblem(M, N, K, batches.sizes[1], count, *shared)
        grid = (min(clusters, tiles) * config.cluster, 1, 1)
        launch(source, *maps, problem, beside.argument, grid=grid, threads=threads, device=a.device)
    return c


def is_best_for(a: Tensor, b: Tensor) -> bool:
    """Whether "auto" uses this kernel for a (M, K) @ b (K, N): a large product in fp16 or bf16 on Hopper.

    Not while Dynamo traces, which would compile for every size. Inductor fuses operations after PyTorch's own product.
    """
    if not a.is_cuda or a.dtype not in HALVES or torch.compiler.is_compiling():
        return False
    M, N = a.shape[-2], b.shape[-1]  # pragma: gpu
    if M * N < LEAST_RESULTS or a.shape[-1] * M * N < LEAST or not has_wgmma(a):
        return False
    return fills(M, N, a) and not why_not(a, b)


def has_wgmma(x: Tensor) -> bool:  # pragma: gpu
    """Whether this kernel runs on x's GPU: only Hopper has wgmma, not its successors."""
    return is_usable() and torch.cuda.get_device_capability(x.device) == (9, 0)


def fills(M: int, N: int, like: Tensor) -> bool:  # pragma: gpu
    """Whether tiles of M x N results keep most multiprocessors busy. cuBLAS has other tile sizes, too."""
    clusters = num_sms(like) // CONFIG.cluster
    tile = TILE_M * CONFIG.cluster, CONFIG.tile_n
    turns = -(-(-(-M // tile[0]) * -(-N // tile[1])) // clusters)
    return LEAST_FILLED * turns * clusters * tile[0] * tile[1] <= M * N


def product(a: Tensor, b: Tensor) -> Tensor:  # pragma: gpu
    """a (M, K) @ b (K, N) with this kernel if it is the fastest, else with PyTorch."""
    return matmul_wgmma(a, b) if is_best_for(a, b) else torch.mm(a, b)


def _map(x: Tensor, offset: int, boxes: Boxes) -> TensorMap:  # pragma: gpu
    size = x.element_size()
    strides_bytes = tuple(stride * size for stride in boxes.strides)
    return _made(x.data_ptr() + offset * size, x.dtype, boxes.sizes, strides_bytes, boxes.box)


# Cached: a map depends only on numbers, and the same tensors are used repeatedly.
_made = functools.lru_cache(maxsize=1024)(tensor_map)


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
