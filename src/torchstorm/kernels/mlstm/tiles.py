"""Tiles, warps and pipeline stages of the Triton kernels of the mLSTM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Launch parameters of one kernel.

    Attributes:
        block_k, block_v: tile sizes along d_qk and d_v; powers of two from 16.
        rows: tokens of a chunk per program of outputs, q_gradients or k_v_gradients; 0 for all.
        num_warps, num_stages: Triton's launch options.
        most_registers: maximum registers per thread; fewer let more programs run at once. 0 for no limit.
    """

    block_k: int
    block_v: int
    rows: int = 0
    num_warps: int = 4
    num_stages: int = 2
    most_registers: int = 0

    @property
    def options(self) -> dict[str, int | None]:
        """The launch options as a dictionary."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.most_registers or None}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch parameters of all kernels for one head size and dtype.

    Attributes:
        group: tokens between two states saved for backward; a multiple of the chunk.
        chunk, chunk_backward: tokens between two states within a pass, powers of two. Backward recomputes states, so
            its chunk can differ from forward's.
    """

    group: int
    chunk: int
    chunk_backward: int
    states: Tile
    outputs: Tile
    states_backward: Tile
    state_gradients: Tile
    q_gradients: Tile
    k_v_gradients: Tile


_ENOUGH_PROGRAMS = 96  # programs of the states' kernel that fill a large GPU


def group_tokens(d_qk: int, d_v: int) -> int:
    """Tokens between two states saved for backward: their size is about 5 % of the inputs' in bf16."""
    return 1024 if d_qk * d_v <= 128 * 256 else 4096


def pick(d_qk: int, d_v: int, dtype: torch.dtype, chunk: int | None, num_walks: int) -> Tiles:
    """Launch parameters for a head of these sizes.

    chunk: the caller's choice; rounded down to a power of two from 16 to 256, and for fp32 and fp16 to what fits.
    num_walks: number of sequences times heads. It selects one of two sets of tiles.
    """
    if chunk is not None:
        chunk = min(256, max(16, 1 << (chunk.bit_length() - 1)))
    group = group_tokens(d_qk, d_v)
    k, v = tile_size(d_qk), tile_size(d_v)
    if dtype == torch.bfloat16:
        # Tiles narrower than 64 are read past their end on Hopper, by Triton 3.6.
        k, v = max(k, 64), max(v, 64)
        if chunk is None and _is_hopper() and (v > 64 or k <= 128):
            return _tuned(k, v, group, num_walks)
        return _of_chunk(k, v, group, chunk or 128)
    # fp16 keeps states and weights in fp32, and fp32 multiplies without tensor cores: small tiles.
    own = min(chunk or 64, 64 if dtype == torch.float16 else 32)
    small = Tile(block_k=min(k, 32), block_v=min(v, 32), num_warps=4, num_stages=1)
    return Tiles(
        group=group,
        chunk=own,
        chunk_backward=min(own, 32),
        states=small,
        states_backward=small,
        state_gradients=small,
        outputs=Tile(block_k=min(k, 32), block_v=min(v, 64), rows=min(own, 64), num_warps=4, num_stages=1),
        q_gradients=small,
        k_v_gradients=small,
    )


def _is_hopper() -> bool:
    """Whether kernels are compiled for sm_90. True in Triton's interpreter, so that it uses an H200's tiles."""
    return bool(triton.knobs.runtime.interpret or triton.runtime.driver.active.get_current_target().arch == 90)


def _tuned(k: int, v: int, group: int, num_walks: int) -> Tiles:
    """The fastest tiles on an H200 among those that hardly spill registers."""
    if max(k, v) == 64:
        tile = Tile(block_k=64, block_v=64, num_stages=3)
        # Three programs per multiprocessor, since a single one mostly waits for memory.
        rows = replace(tile, rows=64, most_registers=168)
        return Tiles(
            group=group,
            chunk=64,
            chunk_backward=64,
            states=replace(tile, most_registers=168),
            outputs=rows,
            states_backward=replace(tile, most_registers=128),
            state_gradients=replace(tile, num_stages=2),
            q_gradients=rows,
            k_v_gradients=replace(rows, num_stages=2),
        )
    # The states' kernel has one program per tile: with few sequences and heads, large tiles leave the GPU mostly idle.
    walk = Tile(block_k=k if k <= 128 else 64, block_v=min(v, 256), num_warps=8)
    long = k > 128
    back = walk
    if num_walks * (k // walk.block_k) * (v // walk.block_v) < _ENOUGH_PROGRAMS:
        walk = back = Tile(block_k=64, block_v=min(v, 128))
        if long:
            back = replace(walk, num_warps=8, num_stages=3)
    rows = Tile(block_k=min(k, 128), block_v=64, rows=64)
    return Tiles(
        group=group,
        chunk=128,
        chunk_backward=128 if long else 64,
        states=walk,
        # With 4 warps and more than two iterations along d_qk, Triton 3.6's results differ from run to run.
        outputs=Tile(block_k=64, block_v=min(v, 128), rows=64, num_warps=8 if long else 4, num_stages=3),
        states_backward=walk,
        state_gradients=back,
        q_gradients=Tile(block_k=256, block_v=64, rows=64, num_warps=8) if long else rows,
        k_v_gradients=Tile(block_k=128, block_v=128 if v > 128 else 64, rows=64, num_warps=8) if long else rows,
    )


def _of_chunk(k: int, v: int, group: int, chunk: int) -> Tiles:
    """Tiles without register spills: for a chunk size of the caller, other GPUs, and keys much wider than values."""
    wide = v > 64
    back = min(chunk, 128 if wide else 64)
    walk = Tile(block_k=64, block_v=min(v, 128), num_warps=8 if wide else 4, num_stages=3 if wide else 2)
    return Tiles(
        group=group,
        chunk=chunk,
        chunk_backward=back,
        states=replace(walk, block_v=64, num_warps=8) if chunk == 256 else walk,
        states_backward=walk,
        state_gradients=walk,
        outputs=replace(walk, rows=min(chunk, 64), num_warps=8 if chunk >= 64 else 4, num_stages=2),
        q_gradients=Tile(block_k=min(k, 128), block_v=64, rows=min(back, 64), num_warps=8),
        k_v_gradients=Tile(block_k=64, block_v=64, rows=min(back, 64), num_warps=8),
    )


def tile_size(size: int) -> int:
    """The smallest power of two from 16 that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())
