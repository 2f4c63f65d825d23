"""How rows are divided into tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchstorm.kernels.rows import tile_of


@given(st.integers(1, 1 << 20), st.sampled_from([1024, 2048]), st.sampled_from([4096, 8192]))
def test_tiles_are_filled_but_for_an_eighth_unless_they_are_the_least(N: int, least: int, most: int) -> None:
    block = tile_of(N, least=least, most=most)
    assert block & (block - 1) == 0
    assert block <= most
    assert block <= least or -N % block <= N // 8
    bigger = 2 * block
    assert bigger > most or block >= N or -N % bigger > N // 8, "the largest such"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_tiles_have_work_for_each_of_their_threads(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from torchstorm.kernels.norms import launch_triton as norms
    from torchstorm.kernels.softmax import launch_triton as softmax

    for N in (1, 7, 64, 1000, 1024, 2048, 3072, 4096, 5000, 5001, 5120, 8192, 12288, 16384, 65536 // dtype.itemsize):
        x = torch.empty(1, N, dtype=dtype, device="meta")
        tiles = {
            "softmax": softmax.forward_tile("fused", x),
            "layer_norm": norms.forward_tile("fused", x, centred=True),
            "rms_norm": norms.forward_tile("fused", x, centred=False),
        }
        for op, tile in tiles.items():
            assert 1 <= tile.num_warps <= 32, (op, N)
            least = 8 if op == "softmax" else 16  # bytes of a tile for a thread
            assert tile.num_warps == 1 or tile.block * dtype.itemsize >= 32 * tile.num_warps * least, (op, N, tile)
