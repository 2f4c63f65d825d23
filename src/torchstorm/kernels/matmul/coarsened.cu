// Sixty-four results a thread, eight by eight, in registers. Two buffers of tiles: while one is multiplied, the next one
// is on its way from memory, and within a tile the next k's numbers come from shared memory while this k's are used.

constexpr int TILE = 128, DEPTH = STEP_K, THREADS = 256, GROUP = 8;

// Eight numbers of a tile's row that a thread multiplies: two fours, HALF apart, so that a warp's reads meet no bank twice.
template <int HALF>
__device__ __forceinline__ void read_eight(const float* from, float (&to)[8]) {
    const float4 low = four_of(from), high = four_of(from + HALF);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_coarsened(
    const Element* __restrict__ a, const Element* __restrict__ b, Element* __restrict__ c, const Problem p) {
    __shared__ alignas(16) float a_tiles[2][DEPTH][TILE + PAD];
    __shared__ alignas(16) float b_tiles[2][DEPTH][TILE + PAD];
    const Tile tile = tile_at(blockIdx.x, ceil_div(p.M, TILE), ceil_div(p.N, TILE), GROUP);
    const int m0 = tile.m * TILE, n0 = tile.n * TILE;
    // Four by two warps, each with 32 x 64 results; four by eight threads in each.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int m = warp / 2 * 32 + lane / 8 * 4, n = warp % 2 * 64 + lane % 8 * 4;
    Fours<A_ALONG_K, A_WIDE, TILE, DEPTH, THREADS> a_fours(p.of_a(a), m0, p.M, p.K, p.a_m, p.a_k);
    Fours<B_ALONG_K, B_WIDE, TILE, DEPTH, THREADS> b_fours(p.of_b(b), n0, p.N, p.K, p.b_n, p.b_k);
    float sums[8][8] = {};
    a_fours.fetch(p.a_m, p.a_k);
    b_fours.fetch(p.b_n, p.b_k);
    a_fours.put(a_tiles[0]);
    b_fours.put(b_tiles[0]);
    __syncthreads();
    int now = 0;
    for (int k0 = 0; k0 < p.K; k0 += DEPTH) {
        const bool more = k0 + DEPTH < p.K;
        float x[2][8], y[2][8];
        read_eight<16>(&a_tiles[now][0][m], x[0]);
        read_eight<32>(&b_tiles[now][0][n], y[0]);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            // Among the products, where the compiler makes them predicates and mixes them in; before and after the
            // loop they were branches, and cost a tenth of the speed.
            if (more && k == 0) {
                a_fours.fetch(p.a_m, p.a_k);
                b_fours.fetch(p.b_n, p.b_k);
            }
            if (k + 1 < DEPTH) {
                read_eight<16>(&a_tiles[now][k + 1][m], x[(k + 1) % 2]);
                read_eight<32>(&b_tiles[now][k + 1][n], y[(k + 1) % 2]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] += x[k % 2][i] * y[k % 2][j];
            if (more && k == DEPTH - 1) {
                // This buffer was last read before the barrier that ended the step before.
                a_fours.put(a_tiles[now ^ 1]);
                b_fours.put(b_tiles[now ^ 1]);
            }
        }
        now ^= 1;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = m0 + m + i % 4 + i / 4 * 16;
        if (row < p.M) {
            store_four(p.row_of_c(c, row), n0 + n, p.N, &sums[i][0]);
            store_four(p.row_of_c(c, row), n0 + n + 32, p.N, &sums[i][4]);
        }
    }
}
