"""The variants of the matrix product, from three loops to PyTorch's library, the baseline for all."""

from __future__ import annotations

from torchstorm import nvrtc
from torchstorm.kernels.dtypes import HALVES, UP_TO_FP32
from torchstorm.kernels.matmul.headers import CUTLASS_NEEDS
from torchstorm.kernels.variants import Ladder, Variant

MATMUL: Ladder = (
    Variant(
        name="naive",
        lesson="The definition: three loops, i, j and k, compiled, on one thread.",
        costs="2 M N K operations, one at a time; each element of b is read M times, each from another cache line.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="naive",
        lesson="One thread per result: M N threads hide the memory latency, but each reads a row and a column.",
        costs="2 M N K operations and 2 M N K reads, most of them from caches.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="blocked",
        lesson="Blocks of b that stay in the cache, copied to contiguous memory: a row of results is incremented by "
        "four elements of a times four rows of b, with vector instructions over columns.",
        costs="2 M N K operations on one thread; each result is read and written K / 4 times in the L1 cache.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="parallel",
        lesson="Sixteen elements of a stay in registers, and four rows of results are updated once per four k; "
        "blocks of results on all cores.",
        costs="2 M N K operations on torch.get_num_threads() threads; K / 4 reads of each result, a copy of blocks of "
        "a and b for each thread, and float32 copies of half-precision inputs.",
        devices=("cpu",),
        needs=("numba",),
    ),
    Variant(
        name="tiled",
        lesson="The threads of a block share their reads: each value in shared memory is used for 32 results.",
        costs="2 M N K / 32 reads from memory; two reads from shared memory per multiply-add are the bottleneck.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="vectorised",
        lesson="Reads of 16 bytes; with a's tile transposed, two reads serve sixteen multiply-adds.",
        costs="2 M N K / 64 reads from memory, 1/8 read from shared memory per multiply-add.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="coarsened",
        lesson="More work per thread: 64 results in a thread's registers, four reads of 16 bytes for 64 "
        "multiply-adds; and two buffers, so that the next tile is loaded while the current one is multiplied.",
        costs="2 M N K / 128 reads from memory, 128 registers per thread, 17 KiB of shared memory per block; rounds up "
        "to 128 x 128 results.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="tensor-cores",
        lesson="A warp multiplies 16 x 8 x 16 at once (mma.sync); ldmatrix loads fragments from rows whose chunks are "
        "permuted to avoid bank conflicts, and cp.async loads four tiles ahead without registers.",
        costs="fp16 and bf16 with sums in fp32; float32 as tf32, with 10 bits of fraction, if "
        "torch.set_float32_matmul_precision allows it. 64 KiB of shared memory per block.",
        dtypes=UP_TO_FP32,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="cutlass",
        lesson="The same with a template library: a kernel is a type, and its tiles, stages and epilogue are "
        "template parameters; 64 x 64 results per warp and tiles of 128 x 256, as recommended by NVIDIA.",
        costs="Seconds to compile at first use, 144 KiB of shared memory per block; needs strides and sizes of whole "
        "16 bytes, otherwise tensor-cores runs.",
        dtypes=HALVES,
        needs=(*nvrtc.NEEDS, *CUTLASS_NEEDS),
    ),
    Variant(
        name="wgmma",
        lesson="Four warps multiply 64 x 256 x 16 directly from shared memory, asynchronously (wgmma); one thread "
        "requests tiles from the copy engine (TMA), two blocks share b's tiles; each block processes several tiles.",
        costs="One block with 226 KiB of shared memory per multiprocessor; needs strides of whole 16 bytes, otherwise "
        "tensor-cores runs. Rounds up to 256 x 256 results.",
        dtypes=HALVES,
        capability=(9, 0),
        only_there=True,
        needs=nvrtc.NEEDS,
    ),
    Variant(
        name="torch",
        lesson="PyTorch's library: MKL or OpenBLAS.",
        costs="2 M N K operations near the processor's peak.",
        devices=("cpu",),
    ),
    Variant(
        name="cublas",
        lesson="PyTorch's library: cuBLAS, with many kernels and a heuristic that chooses one for the shape.",
        costs="2 M N K operations near the GPU's peak, for all dtypes.",
    ),
)
"""All variants in historical order. A name that occurs twice has one entry per device type."""
