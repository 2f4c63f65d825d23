"""Every CUDA source of matmul, compiled for sm_80 and sm_90a without a GPU: no warnings, no spills, enough blocks fit.

A kernel that spills, or whose wgmma instructions the compiler puts one after the other, is slow without being wrong, so
nothing else would notice.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core")
from torchstorm import nvrtc
from torchstorm.errors import KernelError
from torchstorm.kernels.linear import wgmma as beside_layers
from torchstorm.kernels.matmul import headers
from torchstorm.kernels.matmul.batches import batches_of
from torchstorm.kernels.matmul.launch_cuda import KERNELS, Problem, layout_of, whole_chunks
from torchstorm.kernels.matmul.wgmma import Config, WgmmaProblem, along_k_of, operand_boxes, why_not
from torchstorm.nvrtc import Source, compile_source

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10}
# Threads that a multiprocessor must have room for, in registers: blocks of so many threads.
BLOCKS = {"naive": 8, "tiled": 2, "vectorised": 3, "coarsened": 2, "tensor-cores": 2}
REGISTERS_OF_ALL = 65536
LAYOUTS = {
    "wide": {"A_ALONG_K": 1, "A_WIDE": 1, "B_ALONG_K": 0, "B_WIDE": 1},
    "wide, both transposed": {"A_ALONG_K": 0, "A_WIDE": 1, "B_ALONG_K": 1, "B_WIDE": 1},
    "any strides": {"A_ALONG_K": 1, "A_WIDE": 0, "B_ALONG_K": 0, "B_WIDE": 0},
}


def check(source: Source, arch: str) -> tuple[int, int]:
    """Compiles; returns registers a thread and bytes that are spilled."""
    log = compile_source(source, arch).log
    print(log)
    assert not [line for line in log.splitlines() if re.search("warning|performance|ignored", line, re.IGNORECASE)], log
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    assert source.shared_bytes <= SHARED_BYTES[arch]
    return int(registers[1]), int(spilled[1])


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if not kernel.uses_cutlass])
def test_kernels_compile_without_warnings_and_fit(name: str, arch: str) -> None:
    kernel = KERNELS[name]
    half = torch.bfloat16 if arch == "sm_90a" else torch.float16
    cases = [(torch.float32, layout) for layout in LAYOUTS] + [(half, "wide"), (half, "any strides")]
    for dtype, layout in cases if kernel.reads != "any" else [(torch.float32, ""), (half, "")]:
        registers, spilled = check(kernel.source(dtype, tuple(LAYOUTS.get(layout, {}).items())), arch)
        # A block whose elements are read one by one is not held to as much.
        assert spilled <= (16 if layout == "any strides" else 0), (dtype, layout)
        blocks = 1 if name == "tensor-cores" and dtype == torch.float32 else BLOCKS[name]
        assert -(-registers // 8) * 8 * kernel.threads * blocks <= REGISTERS_OF_ALL, (dtype, layout, registers)


@pytest.mark.parametrize(
    ("a_along_k", "b_along_k", "dtype", "config"),
    [
        (True, False, torch.bfloat16, Config()),
        (True, True, torch.float16, Config()),
        (False, True, torch.bfloat16, Config(cluster=1)),
        (False, False, torch.bfloat16, Config(tile_n=128, stages=5)),
        (True, True, torch.float16, Config(cluster=4)),
    ],
)
def test_wgmma_compiles_without_warnings_or_spills(
    a_along_k: bool, b_along_k: bool, dtype: torch.dtype, config: Config
) -> None:
    # 168 is what three warpgroups have at the start; then the two that multiply take 232 of it each.
    assert check(config.source(dtype, a_along_k, b_along_k), "sm_90a") == (168, 0)


@pytest.mark.parametrize(
    ("kind", "dtype", "activation"),
    [("follow", torch.bfloat16, name) for name in beside_layers.ACTIVATIONS] + [("lead", torch.float16, "gelu")],
)
def test_what_idle_warps_do_for_a_layer_compiles_without_spills(kind: str, dtype: torch.dtype, activation: str) -> None:
    argument = beside_layers.Following() if kind == "follow" else beside_layers.Leading()
    source = Config().source(dtype, True, kind == "follow", beside_layers.beside(kind, activation, argument))
    # They have 72 registers then, and those that multiply 216.
    assert check(source, "sm_90a") == (168, 0)


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_cutlass_compiles(arch: str) -> None:
    layouts = tuple(LAYOUTS["wide" if arch == "sm_80" else "wide, both transposed"].items())
    registers, spilled = check(KERNELS["cutlass"].source(torch.bfloat16, layouts), arch)
    assert spilled == 0
    assert registers * KERNELS["cutlass"].threads <= REGISTERS_OF_ALL


def test_headers_that_are_missing_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "find_spec", lambda name: None)
    with pytest.raises(
        KernelError, match=r"nvidia-cutlass, nvidia-cuda-runtime, .* pip install 'torchstorm\[cutlass\]'"
    ):
        headers.cutlass_includes.__wrapped__()


def test_cutlass_is_given_whole_chunks() -> None:
    def half(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    assert whole_chunks(half(100, 64), half(64, 72))
    assert whole_chunks(half(64, 104).mT, half(72, 64).mT)
    assert not whole_chunks(half(100, 64), half(64, 76))
    assert not whole_chunks(half(100, 64)[:, :60], half(60, 72))
    assert not whole_chunks(half(64, 100).mT, half(64, 72))


def test_the_hot_loop_of_wgmma_is_wgmma(tmp_path: Path) -> None:
    """The instruction is there once for each 16 of k, with the copy engine's and no fragment loads around it."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    cubin = compile_source(Config().source(torch.bfloat16, True, False), "sm_90a").cubin
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    path = tmp_path / "wgmma.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    assert text.count("HGMMA.64x256x16") == 4
    assert "UTMALDG.4D.MULTICAST" in text
    assert "UTMASTG.3D" in text
    assert "LDSM" not in text


def test_arguments_have_the_layout_that_the_sources_declare() -> None:
    """Five 32-bit numbers, padding, eight 64-bit ones; nine 32-bit ones; pointers; and a tensor map's 128 bytes."""
    assert (ctypes.sizeof(beside_layers.Following), ctypes.sizeof(beside_layers.Leading)) == (24, 48)
    assert (ctypes.sizeof(Problem), Problem.a_m.offset, Problem.b_outer.offset) == (88, 24, 80)
    assert ctypes.sizeof(WgmmaProblem) == 36
    assert ctypes.sizeof(nvrtc.TensorMap) == nvrtc.TENSOR_MAP_BYTES == 128


def test_the_drivers_numbers_are_those_of_its_header() -> None:
    from cuda.bindings import driver

    dtypes = driver.CUtensorMapDataType
    assert {
        torch.float16: dtypes.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: dtypes.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        torch.bfloat16: dtypes.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    } == nvrtc.TENSOR_MAP_DTYPES
    assert driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B == nvrtc.SWIZZLE_128B
    assert driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B == nvrtc._L2_PROMOTION_256B
    attributes = driver.CUfunction_attribute
    assert attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == nvrtc._SHARED_BYTES_ATTRIBUTE


@pytest.mark.parametrize(
    ("x", "reads", "found"),
    [
        (torch.zeros(64, 48), "fours", (True, True)),
        (torch.zeros(48, 64).mT, "fours", (False, True)),
        (torch.zeros(64, 50)[:, :48], "fours", (True, False)),  # rows 50 apart
        (torch.zeros(64, 50), "fours", (True, False)),  # rows of 50
        (torch.zeros(64, 52)[:, 2:50], "fours", (True, False)),  # begins at the second
        (torch.zeros(1, 48).expand(64, 48), "fours", (True, True)),
        (torch.zeros(64, 1).expand(64, 48), "fours", (False, True)),
        (torch.zeros(64, 96)[:, ::2], "fours", (True, False)),
        (torch.zeros(3, 64, 48), "fours", (True, True)),
        (torch.zeros(64, 1), "chunks", (False, True)),
        (torch.zeros(64, 56, dtype=torch.bfloat16)[:, :50], "chunks", (True, True)),
        (torch.zeros(64, 50, dtype=torch.bfloat16), "chunks", (True, False)),
        (torch.zeros(2 * 64 * 56 + 4, dtype=torch.bfloat16)[4:].view(2, 64, 56), "chunks", (True, False)),
    ],
)
def test_operands_are_read_along_what_has_no_gaps_and_wide_where_that_is_aligned(
    x: torch.Tensor, reads: str, found: tuple[bool, bool]
) -> None:
    assert layout_of(x, -2, -1, reads) == found


def test_the_copy_engine_is_given_what_it_can_take() -> None:
    half = torch.bfloat16
    a, b = torch.zeros(2, 3, 100, 64, dtype=half), torch.zeros(3, 72, 64, dtype=half).mT.expand(2, 3, 64, 72)
    assert why_not(a, b) == ""
    assert (along_k_of(a, -2, -1), along_k_of(b, -1, -2)) == (True, True)
    (batches,) = batches_of(a, b)
    boxes = operand_boxes(a, -2, -1, batches, batches.a_strides, 128)
    assert (boxes.sizes, boxes.strides, boxes.box) == ((64, 100, 3, 2), (64, 6400, 19200), (64, 128, 1, 1))
    boxes = operand_boxes(b, -1, -2, batches, batches.b_strides, 128)
    assert (boxes.sizes, boxes.strides, boxes.box) == ((64, 72, 3, 1), (64, 4608, 64), (64, 128, 1, 1))
    one = torch.zeros(8, 1, dtype=half)  # one of k: either dimension will do
    (batches,) = batches_of(one.mT, one)
    assert operand_boxes(one, -1, -2, batches, (0, 0), 128).strides[0] % 8 == 0


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (torch.zeros(64, 64), torch.zeros(64, 65), "rows of 65 results are not a multiple of 8"),
        (torch.zeros(64, 65), torch.zeros(65, 64), r"a has strides \(65, 1\)"),
        (torch.zeros(64, 64), torch.zeros(64, 128)[:, ::2], r"b has strides \(128, 2\)"),
        (torch.zeros(1, 64).expand(64, 64), torch.zeros(64, 64), r"a has strides \(0, 1\)"),
        (torch.zeros(4 * 64 * 64 + 12).as_strided((4, 64, 64), (4097, 64, 1)), torch.zeros(4, 64, 64),
         "those of batches"),
        (torch.zeros(64 * 64 + 1)[1:].view(64, 64), torch.zeros(64, 64), "a starts 2 bytes after"),
    ],
)  # fmt: skip
def test_what_the_copy_engine_cannot_take_is_reported(a: torch.Tensor, b: torch.Tensor, reason: str) -> None:
    half = [torch.zeros(x.untyped_storage().nbytes() // 4, dtype=torch.bfloat16) for x in (a, b)]
    a, b = (y.as_strided(x.shape, x.stride(), x.storage_offset()) for x, y in zip((a, b), half, strict=True))
    assert re.search(reason, why_not(a, b)), why_not(a, b)
