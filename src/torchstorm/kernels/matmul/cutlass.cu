// CUTLASS, NVIDIA's library of templates: the kernel for Ampere's tensor cores, put together from parts by types alone.
// Its parameters are made here, by every thread, since its host code is not at hand.

#include <cuda/std/cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

constexpr int TILE_M = 128, TILE_N = 256, TILE_K = 64, WARP = 64, ALIGN = 8, GROUP = 16;
using cutlass::gemm::GemmCoord;
using cutlass::gemm::GemmShape;
#if ELEMENT == 1
using Half = cutlass::half_t;
#else
using Half = cutlass::bfloat16_t;
#endif
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using LayoutA = cutlass::platform::conditional<A_ALONG_K, Row, Column>::type;
using LayoutB = cutlass::platform::conditional<B_ALONG_K, Column, Row>::type;

// The order of tiles as elsewhere here. CUTLASS hands a number of our choosing from the one to the other.
struct Order {
    static int get_log_tile(GemmCoord tiles) { return tiles.n(); }
    static GemmCoord get_tile_offset(int tiles_n) {
        const Tile tile = tile_at(blockIdx.x, gridDim.x / tiles_n, tiles_n, GROUP);
        return {tile.m, tile.n, 0};
    }
};

using Kernel = typename cutlass::gemm::kernel::DefaultGemm<
    Half, LayoutA, ALIGN, Half, LayoutB, ALIGN, Half, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    GemmShape<TILE_M, TILE_N, TILE_K>, GemmShape<WARP, WARP, TILE_K>, GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Half, ALIGN, float, float>, Order, STAGES, false,
    cutlass::arch::OpMultiplyAdd>::GemmKernel;
static_assert(sizeof(Kernel::SharedStorage) <= SHARED_BYTES, "shared memory is what the launch asks for");

extern "C" __global__ void __launch_bounds__(Kernel::kThreadCount, 1)
matmul_cutlass(const Element* a, const Element* b, Element* c, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const GemmCoord tiles(ceil_div(p.M, TILE_M), ceil_div(p.N, TILE_N), 1);
    Half* from_a = reinterpret_cast<Half*>(const_cast<Element*>(p.of_a(a)));
    Half* from_b = reinterpret_cast<Half*>(const_cast<Element*>(p.of_b(b)));
    Half* to = reinterpret_cast<Half*>(p.row_of_c(c, 0));
    const Kernel::Params params(
        {p.M, p.N, p.K}, tiles, {from_a, LayoutA(A_ALONG_K ? p.a_m : p.a_k)},
        {from_b, LayoutB(B_ALONG_K ? p.b_n : p.b_k)}, {to, Row(p.N)}, {to, Row(p.N)}, {1.0f, 0.0f});
    Kernel()(params, *reinterpret_cast<Kernel::SharedStorage*>(shared));
}
