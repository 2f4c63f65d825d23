"""Rows spread over clusters of blocks: what is compiled for sm_90a without a GPU, how rows are divided, refusals."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

pytest.importorskip("cuda.core")
from torchstorm import nvrtc
from torchstorm.errors import ConfigError
from torchstorm.kernels.row_clusters.launch_cuda import (
    OPS,
    Config,
    Rows,
    aligned_rows,
    aligned_vector,
    config_for,
    has_clusters,
    source,
)
from torchstorm.kernels.rows import check_columns, holds
from torchstorm.nvrtc import compile_source

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SM_SHARED_BYTES, RESERVED_BYTES, MOST_SHARED_BYTES = 228 << 10, 1 << 10, 227 << 10
# Bytes that spill, where rows of 256 KB leave weights or sums of dw and db for 64 columns to each thread.
SPILLED = {("layer_norm", 131072, False): 8, ("layer_norm", 131072, True): 432, ("rms_norm", 131072, True): 32}


def _sums(op: str) -> tuple[bool, bool]:
    return op.endswith("norm"), op == "layer_norm"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_without_warnings_and_do_not_spill(op: str, backward: bool) -> None:
    cases = [(65536, BF16, BF16), (65536, FP32, FP32), (16384, BF16, BF16), (1000, FP16, FP32)]
    if op.endswith("norm"):
        cases += [(32768, BF16, FP32), (131072, BF16, BF16)]
    for N, dtype, param_dtype in cases:
        config = config_for(op, N, dtype, backward=backward)
        log = compile_source(source(op, N, dtype, param_dtype, config, _sums(op) if backward else None), "sm_90a").log
        print(config, log)
        assert not re.search("warning|performance|ignored", log, re.IGNORECASE), log
        registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
        assert registers is not None, log
        assert spilled is not None, log
        assert int(spilled[1]) <= SPILLED.get((op, N, backward), 0), (N, dtype, param_dtype)
        # Registers come in eights, for warps, of which each quarter of an SM has a quarter, rounded up.
        warps = -(-config.threads() // 32 * config.per_sm // 4)
        assert -(-int(registers[1]) // 8) * 8 * 32 * warps <= 16384, (N, dtype, param_dtype)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", OPS)
def test_every_row_that_is_held_has_room(op: str, dtype: torch.dtype, backward: bool) -> None:
    num_inputs = 1 + backward
    lengths = [8, 40, 1000, 4096, 5000, 8192, 8200, 12288, 16384, 20000, 32768, 32776, 50000, 65536, 100000, 131072]
    for N in lengths:
        if not holds("cluster", N, dtype):
            continue
        config, row_chunks = config_for(op, N, dtype, backward=backward), N * dtype.itemsize // 16
        assert config.row_bytes >= 16 * row_chunks
        assert row_chunks - (config.cluster - 1) * -(-row_chunks // config.cluster) > 0, "a block without columns"
        assert config.stages >= min(3, config.rows or 3), (
            "a row that is summed up, one that is finished, one that comes"
        )
        assert config.shared_bytes(num_inputs) <= MOST_SHARED_BYTES
        assert (config.shared_bytes(num_inputs) + RESERVED_BYTES) * config.per_sm <= SM_SHARED_BYTES
        full = ("FULL", 1) in source(op, N, dtype, dtype, config, _sums(op) if backward else None).defines
        assert full == (config.row_bytes == N * dtype.itemsize)


def test_rows_that_cannot_be_copied_whole_or_are_too_long_are_reported() -> None:
    assert holds("cluster", 1000, BF16)
    assert holds("cluster", 131072, FP16)
    assert not holds("cluster", 131072, FP32)
    with pytest.raises(ConfigError, match=r"whole 16 bytes, and these have 333 numbers of torch.float32: use variant="):
        check_columns("cluster", torch.zeros(2, 333))
    with pytest.raises(ConfigError, match=r"rows of up to 65536 numbers of torch.float32, and these have 65540"):
        check_columns("cluster", torch.zeros(2, 65540))
    assert not has_clusters(torch.zeros(2, 8))


def test_masks_are_reported() -> None:
    pytest.importorskip("triton")
    from torchstorm.kernels.softmax import launch_triton

    x, mask = torch.zeros(2, 8), torch.ones(8, dtype=torch.bool)
    with pytest.raises(ConfigError, match="variant='cluster' takes no mask: use variant='online', or 'auto'"):
        launch_triton.forward(x, mask, False, "cluster")
    with pytest.raises(ConfigError, match="takes no mask"):
        launch_triton.backward(x, x, mask, True, "cluster")


@pytest.mark.parametrize("there", [True, False])
def test_auto_takes_clusters_for_long_rows_where_there_are_some(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from torchstorm.kernels.norms import launch_triton as norms
    from torchstorm.kernels.row_clusters import launch_cuda
    from torchstorm.kernels.softmax import launch_triton as softmax

    monkeypatch.setattr(launch_cuda, "has_clusters", lambda x: there)
    mask = torch.ones(1, dtype=torch.bool)

    def rows(N: int) -> torch.Tensor:
        return torch.empty(2, N, dtype=BF16, device="meta")

    def cluster(otherwise: str) -> str:
        return "cluster" if there else otherwise

    assert softmax.fastest(rows(32768), None) == softmax.fastest(rows(32768), mask) == "fused"
    assert softmax.fastest(rows(65536), None) == cluster("online")
    assert softmax.fastest(rows(65536), mask) == softmax.fastest(rows(65537), None) == "online"
    for centred in (True, False):
        assert norms.fastest(rows(32768), centred=centred, backward=False) == "fused"
        assert norms.fastest(rows(65536), centred=centred, backward=False) == cluster("online")
    assert norms.fastest(rows(4096), centred=True, backward=True) == "persistent"
    assert norms.fastest(rows(8192), centred=False, backward=True) == cluster("persistent")
    assert norms.fastest(rows(32768), centred=True, backward=True) == cluster("fused")
    assert norms.fastest(rows(65536), centred=True, backward=True) == cluster("naive")


def test_rows_and_vectors_that_begin_elsewhere_are_copied() -> None:
    x = torch.randn(6, 24)
    for view in (x[:, 2:10], x.as_strided((5, 8), (26, 1)), x.as_strided((1, 8), (26, 1), 3)):
        copied = aligned_rows(view)
        assert torch.equal(copied, view)
        assert copied.data_ptr() % 16 == 0
        assert copied.stride() == (8, 1)
    for view in (x, x[:, 4:12], x[::2], x.as_strided((1, 8), (26, 1))):
        assert aligned_rows(view) is view
    assert aligned_vector(None) is None
    assert aligned_vector(x[0]) is not None
    for vector in (x[0, 1:9], x[:, 0]):
        made = aligned_vector(vector)
        assert made is not None
        assert torch.equal(made, vector)
        assert made.data_ptr() % 16 == 0


def test_structures_have_the_layout_that_the_sources_and_the_driver_declare() -> None:
    assert (ctypes.sizeof(Rows), Rows.output.offset, Rows.M.offset) == (56, 32, 40)
    assert (ctypes.sizeof(nvrtc._Attribute), nvrtc._Attribute.value.offset) == (72, 8)
    config = nvrtc._LaunchConfig
    assert (config.stream.offset, config.attributes.offset, config.num_attributes.offset) == (32, 40, 48)
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert attribute == nvrtc._CLUSTER_ATTRIBUTE


def test_shared_memory_is_what_the_source_lays_out() -> None:
    """The source asserts it; a launch that has another number does not compile."""
    config = Config(cluster=2, warps=4, chunks=1, stages=3, per_sm=1)
    assert config.shared_bytes(2) == 3 * 2 * 4 * 32 * 16 + 3 * 16 + 4 * 2 * 4 * 8 + (2 * 3 + 4) * 8
