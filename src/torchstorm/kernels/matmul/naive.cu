// One thread, one result. A warp has 32 neighbours of a row, so that their reads of b lie side by side.

constexpr int ROWS = 8, COLS = 32;

extern "C" __global__ void __launch_bounds__(ROWS * COLS)
matmul_naive(const Element* __restrict__ a, const Element* __restrict__ b, Element* __restrict__ c, const Problem p) {
    const int tiles_n = ceil_div(p.N, COLS);
    const int m = blockIdx.x / tiles_n * ROWS + threadIdx.x / COLS;
    const int n = blockIdx.x % tiles_n * COLS + threadIdx.x % COLS;
    if (m >= p.M || n >= p.N) return;
    const Element* row = p.of_a(a) + m * p.a_m;
    const Element* column = p.of_b(b) + n * p.b_n;
    float sum = 0.0f;
    for (int k = 0; k < p.K; ++k) sum += to_float(row[k * p.a_k]) * to_float(column[k * p.b_k]);
    p.row_of_c(c, m)[n] = from_float(sum);
}
