"""The ladder of matrix products, from three loops to the library that all others are measured against."""

from __future__ import annotations

from torchstorm.kernels import nvrtc
from torchstorm.kernels.dtypes import HALVES, UP_TO_FP32
from torchstorm.kernels.matmul.headers import CUTLASS_NEEDS
from torchstorm.kernels.variants import Ladder, Variant

MATMUL: Ladder = (
    Variant(
        name="naive",
        taught="The definition: three loops, i, j and k, compiled, on one thread.",
        costs="2 M N K operations, one at a time; every number of b is fetched M times, each from another cache line.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="naive",
        taught="One thread, one result: M N threads hide how long memory takes, but each fetches a row and a column.",
        costs="2 M N K operations and 2 M N K reads, of which caches serve most.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="blocked",
        taught="Blocks of b that stay in the cache, copied so that they lie without gaps: a row of results grows by "
        "four numbers of a times four rows of b, which processors do many columns at a time.",
        costs="2 M N K operations on one thread; each result is read and written K / 4 times, in the nearest cache.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="parallel",
        taught="Sixteen numbers of a stay in registers while four rows of results pass by once for every four k; "
        "blocks of results on all cores.",
        costs="2 M N K operations on torch.get_num_threads() threads; K / 4 reads of each result, a copy of blocks of "
        "a and b for each thread, and float32 copies of half-precision inputs.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="tiled",
        taught="A block's threads share what they read: a tile in shared memory serves 32 results for each read.",
        costs="2 M N K / 32 reads from memory; two from shared memory for every multiply-add, which limit it.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="vectorised",
        taught="Reads of 16 bytes; with a's tile turned, two of them bring what sixteen multiply-adds need.",
        costs="2 M N K / 64 reads from memory, an eighth of a read from shared memory for each multiply-add.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="coarsened",
        taught="More work for fewer threads: 64 results in a thread's registers, four reads of 16 bytes for 64 "
        "multiply-adds; and two buffers, so that memory's answer arrives while the tile before is multiplied.",
        costs="2 M N K / 128 reads from memory, 128 registers a thread, 17 KiB of shared memory a block; rounds up to "
        "128 x 128 results.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="tensor-cores",
        taught="A warp multiplies 16 x 8 x 16 at once (mma.sync); fragments come by ldmatrix from rows whose chunks "
        "are exchanged so that no bank is met twice, and cp.async fills four tiles ahead past the registers.",
        costs="fp16 and bf16 with sums in fp32; float32 as tf32, 10 bits of fraction, where "
        "torch.set_float32_matmul_precision allows it. 64 KiB of shared memory a block.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="cutlass",
        taught="The same from a library of templates: a kernel is a type, and its tiles, stages and epilogue are "
        "parameters of it; 64 x 64 results a warp and tiles of 128 x 256, as NVIDIA found best.",
        costs="Seconds to compile at first use, 144 KiB of shared memory a block; strides and sizes of whole 16 bytes, "
        "or else it runs as tensor-cores.",
        dtypes=HALVES,
        needs=(*nvrtc.NEEDS, *CUTLASS_NEEDS),
    ),
    Variant(
        name="wgmma",
        taught="Four warps multiply 64 x 256 x 16 straight from shared memory, without waiting (wgmma); one thread "
        "asks the copy engine for tiles (TMA), two blocks share b's; blocks stay and take tile after tile.",
        costs="One block with 226 KiB of shared memory on each multiprocessor; strides of whole 16 bytes, or else "
        "it runs as tensor-cores. Rounds up to 256 x 256 results.",
        dtypes=HALVES,
        capability=(9, 0),
        only_there=True,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="torch",
        taught="What PyTorch calls: MKL or OpenBLAS, decades of blocking by hand.",
        costs="2 M N K operations near the processor's peak.",
        devices=("cpu",),
    ),
    Variant(
        name="cublas",
        taught="What PyTorch calls: cuBLAS, a kernel for every shape, chosen by heuristics.",
        costs="2 M N K operations near the GPU's peak, for all dtypes.",
    ),
)
"""All variants in order of history; a name that is there twice means the device's own."""
