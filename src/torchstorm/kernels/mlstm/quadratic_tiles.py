"""Tiles, warps and pipeline stages of the quadratic Triton kernels of the mLSTM."""

from __future__ import annotations

import torch

from torchstorm.kernels.mlstm.tiles import Tile, Tiles, tile_size


def pick_quadratic(d_qk: int, d_v: int, dtype: torch.dtype, *, tensor_cores: bool) -> Tiles:
    """Launch parameters for a head of these sizes. `chunk` and `chunk_backward` are the tokens per block.

    In `outputs` and `q_gradients` a program keeps the wider side in registers, and the other one is the step of its
    inner products. In `k_v_gradients` both are kept, and each tile's program recomputes the products.
    """
    k, v = tile_size(d_qk), tile_size(d_v)
    if tensor_cores and dtype == torch.bfloat16:
        return _tiles(
            block=64,
            states=Tile(block_k=min(k, 64), block_v=min(v, 128), num_warps=4, num_stages=2),
            outputs=Tile(block_k=min(k, 64), block_v=min(v, 256), num_warps=4 if v <= 128 else 8, num_stages=2),
            q_gradients=Tile(block_k=min(k, 256), block_v=min(v, 64), num_warps=4 if k <= 64 else 8, num_stages=2),
            k_v_gradients=Tile(block_k=min(k, 64), block_v=min(v, 128), num_warps=8, num_stages=2),
        )
    # On CUDA cores, also used for fp16's weights, a tile's operands are in registers.
    small_tile = Tile(block_k=min(k, 32), block_v=min(v, 32), num_warps=4, num_stages=1)
    return _tiles(
        block=32,
        states=small_tile,
        outputs=Tile(block_k=min(k, 32), block_v=min(v, 128), num_warps=4, num_stages=1),
        q_gradients=Tile(block_k=min(k, 64), block_v=min(v, 32), num_warps=4, num_stages=1),
        k_v_gradients=Tile(
            block_k=min(k, 64), block_v=min(v, 64), num_warps=8, num_stages=2 if dtype == torch.float32 else 1
        ),
    )


def _tiles(*, block: int, states: Tile, outputs: Tile, q_gradients: Tile, k_v_gradients: Tile) -> Tiles:
    return Tiles(
        group=block,
        chunk=block,
        chunk_backward=block,
        states=states,
        outputs=outputs,
        states_backward=states,
        state_gradients=states,
        q_gradients=q_gradients,
        k_v_gradients=k_v_gradients,
    )
