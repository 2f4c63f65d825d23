"""Launches of the kernels that split rows over clusters of blocks: sources, grids, and shared memory.

Rows are loaded by bulk copies, which need whole, aligned 16 bytes. `rows.holds` checks their length; unaligned rows are
copied first.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchstorm.kernels.hopper import HOPPER
from torchstorm.nvrtc import Source, is_usable, launch, num_clusters

OPS = {"softmax": 0, "log_softmax": 1, "layer_norm": 2, "rms_norm": 3}
"""The macro OP by operation."""

_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FOLDER = Path(__file__).parent
_CHUNK_BYTES = 16
_SLOTS = 4
_SM_SHARED_BYTES = 228 << 10
_RESERVED_BYTES = 1 << 10  # shared memory per block that CUDA reserves
_MOST_STAGES = 8
_MOST_BLOCKS = 8  # largest cluster size that every GPU supports


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning parameters.

    Attributes:
        cluster: blocks per row: 1, 2, 4 or 8.
        warps: computing warps per block; one more loads.
        chunks: chunks of 16 bytes of a row per thread.
        stages: rows in a block's ring buffer.
        per_sm: blocks per SM.
        rows: rows per cluster; 0 for persistent clusters, which share all rows.
    """

    cluster: int
    warps: int
    chunks: int
    stages: int
    per_sm: int
    rows: int = 0

    def shared_bytes(self, num_inputs: int) -> int:
        """Shared memory per block: `Shared` of rows.cuh."""
        ring = self.stages * num_inputs * self.warps * 32 * self.chunks * _CHUNK_BYTES
        pairs = _SLOTS * self.cluster * self.warps * 8
        return ring + self.stages * _CHUNK_BYTES + pairs + (2 * self.stages + _SLOTS) * 8

    @property
    def row_bytes(self) -> int:
        """Largest supported row."""
        return self.cluster * self.warps * 32 * self.chunks * _CHUNK_BYTES

    def threads(self) -> int:
        """Threads per block."""
        return (self.warps + 1) * 32


class Rows(ctypes.Structure):
    """`Rows` of rows.cuh."""

    _fields_ = (
        ("inputs", ctypes.c_void_p * 2),
        ("row_bytes", ctypes.c_longlong * 2),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("M", "N", "each")),
    )


def has_clusters(x: Tensor) -> bool:
    """Whether x's device supports these kernels."""
    if not x.is_cuda or not is_usable():
        return False
    return (9, 0) <= torch.cuda.get_device_capability(x.device) < (12, 0)  # pragma: gpu


def config_for(op: str, N: int, dtype: torch.dtype, *, backward: bool) -> Config:
    """The fastest configuration on an H200, by row length.

    In backward, clusters are persistent, since dw is summed over their rows. In forward, single blocks are not: SMs
    have different memory latencies, and faster ones then process more rows. Larger clusters start too slowly for that,
    except for softmax, which loads no weights.
    """
    row_bytes = N * dtype.itemsize
    alone = row_bytes <= 32 << 10
    if backward and op == "rms_norm":
        slice_bytes, warps, per_sm, rows = (4 << 10, 4, 2, 0) if alone else (16 << 10, 16, 1, 0)
    elif backward:
        slice_bytes, warps, per_sm, rows = 16 << 10, 8, 1, 0
    elif op in ("softmax", "log_softmax"):
        slice_bytes, warps, per_sm, rows = 32 << 10, 8, 3, 1 if alone else 2
    elif alone:
        slice_bytes, warps, per_sm, rows = 32 << 10, 8, 1, 4
    elif op == "layer_norm":
        slice_bytes, warps, per_sm, rows = 16 << 10, 8, 1, 0
    else:
        slice_bytes, warps, per_sm, rows = 32 << 10, 16, 1, 0
    cluster = next((size for size in (1, 2, 4) if size * slice_bytes >= row_bytes), _MOST_BLOCKS)
    own = -(-row_bytes // (cluster * _CHUNK_BYTES))
    return deepened(cluster, warps, -(-own // (warps * 32)), per_sm, 2 if backward else 1, rows)


def deepened(cluster: int, warps: int, chunks: int, per_sm: int, num_inputs: int, rows: int = 0) -> Config:
    """A configuration with as many stages as fit, at most the number of rows."""
    most = min(_MOST_STAGES, rows or _MOST_STAGES)
    configs = [
        Config(cluster=cluster, warps=warps, chunks=chunks, stages=stages, per_sm=per_sm, rows=rows)
        for stages in range(most, 0, -1)
    ]
    return next(
        config
        for config in configs
        if (config.shared_bytes(num_inputs) + _RESERVED_BYTES) * config.per_sm <= _SM_SHARED_BYTES
    )


def source(
    op: str,
    N: int,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    config: Config,
    sums: tuple[bool, bool] | None = None,
) -> Source:
    """The source with its macros, for rows of N. With `sums` (which of dw and db are required) it is backward."""
    num_inputs = 1 if sums is None else 2
    shared_bytes = config.shared_bytes(num_inputs)
    kernel = "forward" if sums is None else "backward"
    return Source(
        kernel=f"rows_{kernel}",
        files=(HOPPER, *(_FOLDER / file for file in ("instructions.cuh", "rows.cuh", f"{kernel}.cu"))),
        defines=(
            *(("OP", OPS[op]), ("ELEMENT", _FORMATS[dtype]), ("PARAM", _FORMATS[param_dtype])),
            *(("CLUSTER", config.cluster), ("WARPS", config.warps), ("CHUNKS", config.chunks)),
            *(("STAGES", config.stages), ("PER_SM", config.per_sm), ("SHARED_BYTES", shared_bytes)),
            ("FULL", int(N * dtype.itemsize == config.row_bytes)),
            *(("INPUTS", num_inputs), ("HAS_HEAD", int(op == "layer_norm" and sums is None))),
            *(() if sums is None else (("SUM_W", int(sums[0])), ("SUM_B", int(sums[1])))),
        ),
        shared_bytes=shared_bytes,
    )


def forward(  # pragma: gpu
    op: str,
    x_MN: Tensor,
    y: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    eps: float = 0.0,
    config: Config | None = None,
) -> None:
    """Writes y (M, N), for norms also mean and rstd (M,). `rows.holds` must be True for "cluster"."""
    config = config or config_for(op, x_MN.shape[1], x_MN.dtype, backward=False)
    weight, bias = aligned_vector(weight), aligned_vector(bias)
    rows, kept = _rows((x_MN,), y, config)
    code = source(op, x_MN.shape[1], x_MN.dtype, _param_dtype(x_MN, weight, bias), config)
    pointers = [_pointer(t) for t in (weight, bias, mean, rstd)]
    grid = (_num_clusters(code, config, x_MN) * config.cluster, 1, 1)
    launch(code, rows, *pointers, ctypes.c_float(eps), grid=grid, threads=config.threads(), device=x_MN.device)
    del kept  # a copy may be freed now, since the allocator follows stream order


def backward(  # pragma: gpu
    op: str,
    dy_MN: Tensor,
    x_MN: Tensor,
    dx: Tensor,
    *,
    weight: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    sums: tuple[bool, bool] = (False, False),
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes dx (M, N). Returns partial sums of dw and db (clusters, N) in fp32; None if not required."""
    config = config or config_for(op, x_MN.shape[1], x_MN.dtype, backward=True)
    weight = aligned_vector(weight)
    rows, kept = _rows((dy_MN, x_MN), dx, config)
    code = source(op, x_MN.shape[1], x_MN.dtype, _param_dtype(x_MN, weight, None), config, sums)
    count = _num_clusters(code, config, x_MN)
    parts_w, parts_b = (
        x_MN.new_empty((count, x_MN.shape[1]), dtype=torch.float32) if wanted else None for wanted in sums
    )
    pointers = [_pointer(t) for t in (weight, mean, rstd, parts_w, parts_b)]
    grid = (count * config.cluster, 1, 1)
    launch(code, rows, *pointers, grid=grid, threads=config.threads(), device=x_MN.device)
    del kept
    return parts_w, parts_b


def aligned_rows(x_MN: Tensor) -> Tensor:
    """x with rows aligned to 16 bytes; copied if necessary."""
    begins = x_MN.data_ptr() % _CHUNK_BYTES == 0
    spaced = x_MN.shape[0] == 1 or x_MN.stride(0) * x_MN.element_size() % _CHUNK_BYTES == 0
    return x_MN if begins and spaced else x_MN.clone(memory_format=torch.contiguous_format)


def aligned_vector(p: Tensor | None) -> Tensor | None:
    """p contiguous and aligned to 16 bytes; copied if necessary."""
    if p is None:
        return None
    p = p.contiguous()
    return p if p.data_ptr() % _CHUNK_BYTES == 0 else p.clone()


def _rows(inputs: tuple[Tensor, ...], output: Tensor, config: Config) -> tuple[Rows, list[Tensor]]:  # pragma: gpu
    kept = [aligned_rows(x_MN) for x_MN in inputs]
    rows = Rows(output=output.data_ptr(), M=kept[0].shape[0], N=kept[0].shape[1], each=config.rows)
    for i, x_MN in enumerate(kept):
        rows.inputs[i] = x_MN.data_ptr()
        rows.row_bytes[i] = x_MN.stride(0) * x_MN.element_size()
    return rows, kept


def _num_clusters(code: Source, config: Config, x_MN: Tensor) -> int:  # pragma: gpu
    """Number of clusters: as many as run at once, at most one per row; if not persistent, one per `rows` rows."""
    if config.rows:
        return -(-x_MN.shape[0] // config.rows)
    most = num_clusters(code, cluster=config.cluster, threads=config.threads(), device=x_MN.device)
    return min(x_MN.shape[0], most)


def _param_dtype(x_MN: Tensor, *params: Tensor | None) -> torch.dtype:
    return next((p.dtype for p in params if p is not None), x_MN.dtype)


def _pointer(t: Tensor | None) -> ctypes.c_void_p:  # pragma: gpu
    return ctypes.c_void_p(None if t is None else t.data_ptr())
