// Sixteen results a thread, four by four: one wide read of a's tile, which is turned so that four rows lie side by side,
// and one of b's serve sixteen multiply-adds.

constexpr int TILE = 64, DEPTH = 16, THREADS = 256, GROUP = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_vectorised(
    const Element* __restrict__ a, const Element* __restrict__ b, Element* __restrict__ c, const Problem p) {
    __shared__ alignas(16) float a_tile[DEPTH][TILE + PAD];
    __shared__ alignas(16) float b_tile[DEPTH][TILE + PAD];
    const Tile tile = tile_at(blockIdx.x, ceil_div(p.M, TILE), ceil_div(p.N, TILE), GROUP);
    const int m0 = tile.m * TILE, n0 = tile.n * TILE;
    const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
    Fours<A_ALONG_K, A_WIDE, TILE, DEPTH, THREADS> a_fours(p.of_a(a), m0, p.M, p.K, p.a_m, p.a_k);
    Fours<B_ALONG_K, B_WIDE, TILE, DEPTH, THREADS> b_fours(p.of_b(b), n0, p.N, p.K, p.b_n, p.b_k);
    float sums[4][4] = {};
    for (int k0 = 0; k0 < p.K; k0 += DEPTH) {
        a_fours.fetch(p.a_m, p.a_k);
        b_fours.fetch(p.b_n, p.b_k);
        a_fours.put(a_tile);
        b_fours.put(b_tile);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const float4 x = four_of(&a_tile[k][m]), y = four_of(&b_tile[k][n]);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += xs[i] * ys[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (m0 + m + i < p.M) store_four(p.row_of_c(c, m0 + m + i), n0 + n, p.N, sums[i]);
}
