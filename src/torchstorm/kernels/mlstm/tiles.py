"""Which tiles, warps and pipeline stages each Triton kernel of the mLSTM runs with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's launch.

    Attributes:
        block_k, block_v: tile sizes along d_qk and d_v; powers of two from 16.
        rows: tokens of a chunk that a program of outputs, q_gradients or k_v_gradients has; 0 for all.
        num_warps, num_stages: as Triton means them.
    """

    block_k: int
    block_v: int
    rows: int = 0
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """All launches for one head size and dtype.

    Attributes:
        group: tokens from one state kept for the backward pass to the next; whole chunks.
        chunk, chunk_backward: tokens from one stored state to the next, powers of two. The backward pass computes its
            own states, so that its chunk need not be the forward pass's.
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


def group_tokens(d_qk: int, d_v: int) -> int:
    """Tokens from one state kept for the backward pass to the next: some 5 % of the inputs' bytes in bf16."""
    return 1024 if d_qk * d_v <= 128 * 256 else 4096


def pick(d_qk: int, d_v: int, dtype: torch.dtype, chunk: int | None) -> Tiles:
    """The launches for a head of these sizes.

    chunk: what the caller named: taken down to a power of two from 16 to 256, and for fp32 and fp16 to what fits.
    """
    if chunk is not None:
        chunk = min(256, max(16, 1 << (chunk.bit_length() - 1)))
    group = group_tokens(d_qk, d_v)
    k, v = _block(d_qk), _block(d_v)
    if dtype == torch.bfloat16:
        own = chunk or (64 if max(k, v) < 64 else 128)
        wide = v > 64
        back = min(own, 128 if wide else 64)
        walk = Tile(block_k=min(k, 64), block_v=min(v, 128), num_warps=8 if wide else 4, num_stages=3 if wide else 2)
        return Tiles(
            group=group,
            chunk=own,
            chunk_backward=back,
            states=replace(walk, block_v=min(v, 64), num_warps=8) if own == 256 else walk,
            states_backward=walk,
            state_gradients=walk,
            outputs=replace(walk, rows=min(own, 64), num_warps=8 if own >= 64 else 4, num_stages=2),
            q_gradients=Tile(block_k=min(k, 128), block_v=min(v, 64), rows=min(back, 64), num_warps=8),
            k_v_gradients=Tile(block_k=min(k, 64), block_v=min(v, 64), rows=min(back, 64), num_warps=8),
        )
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


def _block(size: int) -> int:
    """The smallest power of two from 16 that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())
