// A block copies a tile of a and one of b to shared memory; each element read from memory then serves 32 results.

constexpr int TILE = 32;
constexpr int PITCH = TILE + 1;  // a column of the tile lies in 32 banks

extern "C" __global__ void __launch_bounds__(TILE * TILE)
matmul_tiled(const Element* __restrict__ a, const Element* __restrict__ b, Element* __restrict__ c, const Problem p) {
    __shared__ float a_tile[TILE][PITCH];  // [m][k]
    __shared__ float b_tile[TILE][PITCH];  // [k][n]
    const int tiles_n = ceil_div(p.N, TILE);
    const int m0 = blockIdx.x / tiles_n * TILE, n0 = blockIdx.x % tiles_n * TILE;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    // A warp's threads read along whichever dimension lies without gaps.
    const bool a_along_k = p.a_k <= p.a_m, b_along_n = p.b_n <= p.b_k;
    const int a_row = a_along_k ? y : x, a_col = a_along_k ? x : y;
    const int b_row = b_along_n ? y : x, b_col = b_along_n ? x : y;
    const Element* a_from = p.of_a(a) + (m0 + a_row) * p.a_m + a_col * p.a_k;
    const Element* b_from = p.of_b(b) + (n0 + b_col) * p.b_n + b_row * p.b_k;
    float sum = 0.0f;
    for (int k0 = 0; k0 < p.K; k0 += TILE) {
        a_tile[a_row][a_col] = m0 + a_row < p.M && k0 + a_col < p.K ? to_float(*a_from) : 0.0f;
        b_tile[b_row][b_col] = n0 + b_col < p.N && k0 + b_row < p.K ? to_float(*b_from) : 0.0f;
        a_from += TILE * p.a_k;
        b_from += TILE * p.b_k;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; ++k) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    if (m0 + y < p.M && n0 + x < p.N) p.row_of_c(c, m0 + y)[n0 + x] = from_float(sum);
}
