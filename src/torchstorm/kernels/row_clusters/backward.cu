// Softmax (OP 0), log-softmax (1), LayerNorm (2) and RMSNorm (3) backward, from dy and x, or y of a softmax.
//
// Pairs: of norms the sums of g x^ and, of LayerNorm, of g; of softmax that of dy y, of log-softmax that of dy. dw and db
// (SUM_W, SUM_B) are summed up over the rows of the cluster by the thread that has the column: one row of partial sums a
// cluster, which another kernel adds up.

constexpr float LOG2_E = 1.4426950408889634f;

struct Backward {
    Shared& shared;
    const Rows& rows;
    const Slice& slice;
    const uint4* w_N;
    const float* mean_M;
    const float* rstd_M;
    float share;  // 1 / N
    Vector w;
    float sums_w[SUM_W ? CHUNKS : 1][WIDTH], sums_b[SUM_B ? CHUNKS : 1][WIDTH];
    float2 before, now, next;  // mean and rstd of three rows

    __device__ __forceinline__ float2 statistics(int step) const {
        if (OP < 2 || step >= slice.steps) return make_float2(0.0f, 0.0f);
        return make_float2(OP == 2 ? mean_M[slice.row(step)] : 0.0f, rstd_M[slice.row(step)]);
    }

    __device__ __forceinline__ void start() {
        share = 1.0f / rows.N;
        if constexpr (OP >= 2) w.load(w_N, ONES, slice);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
#pragma unroll
            for (int i = 0; i < (SUM_W ? CHUNKS : 1); ++i) sums_w[i][j] = 0.0f;
#pragma unroll
            for (int i = 0; i < (SUM_B ? CHUNKS : 1); ++i) sums_b[i][j] = 0.0f;
        }
        next = statistics(0);
    }

    __device__ __forceinline__ void turn(int step) { before = now, now = next, next = statistics(step + 1); }

    // dy and x of the i-th chunk; of a norm g = w dy too, and x^ in place of x.
    __device__ __forceinline__ void get(int stage, int i, float2 of, float* dy, float* x, float* g) const {
        unpack<ELEMENT>(shared.ring[stage][0][slice.place(i)], dy);
        unpack<ELEMENT>(shared.ring[stage][1][slice.place(i)], x);
        if constexpr (OP >= 2) {
            w.get(i, g);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                g[j] *= dy[j];
                x[j] = (OP == 2 ? x[j] - of.x : x[j]) * of.y;
            }
        }
    }

    __device__ __forceinline__ float2 sums(int stage) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float dy[WIDTH], x[WIDTH], g[WIDTH];
                get(stage, i, now, dy, x, g);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (OP == 0) first += dy[j] * x[j];
                    if constexpr (OP == 1) first += dy[j];
                    if constexpr (OP >= 2) first += g[j] * x[j];
                    if constexpr (OP == 2) second += g[j];
                    if constexpr (SUM_W) sums_w[i][j] += dy[j] * x[j];
                    if constexpr (SUM_B) sums_b[i][j] += dy[j];
                }
            }
        return make_float2(warp_sum(first), OP == 2 ? warp_sum(second) : 0.0f);
    }

    __device__ __forceinline__ void finish(int stage, int step, const float2* pairs) {
        float first = 0.0f, second = 0.0f;
        each_pair(pairs, [&](float2 pair, int) { first += pair.x, second += pair.y; });
        first = warp_sum(first);
        if constexpr (OP == 2) second = warp_sum(second) * share;
        if constexpr (OP >= 2) first *= share;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float dy[WIDTH], x[WIDTH], g[WIDTH];
                get(stage, i, before, dy, x, g);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (OP == 0) dy[j] = x[j] * (dy[j] - first);
                    if constexpr (OP == 1) dy[j] = dy[j] - power_of_2(x[j] * LOG2_E) * first;
                    if constexpr (OP >= 2) dy[j] = before.y * (g[j] - x[j] * first - second);
                }
                store_once(slice.output(rows, step, i), pack<ELEMENT>(dy));
            }
    }

    // (clusters, N)
    __device__ __forceinline__ void write_sums(float* parts, const float (*sums)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i))
#pragma unroll
                for (int j = 0; j < WIDTH; j += 4) {
                    const long long at = (long long)slice.cluster * rows.N + (slice.first + slice.place(i)) * WIDTH + j;
                    *(float4*)(parts + at) = make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
                }
    }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS + 32, PER_SM)
rows_backward(
    const Rows rows, const uint4* w, const float* mean_M, const float* rstd_M, float* parts_w, float* parts_b) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Slice slice(rows);
    Backward job{shared, rows, slice, w, mean_M, rstd_M};
    walk(job, shared, rows, slice);
    if (threadIdx.x < THREADS) {
        if constexpr (SUM_W) job.write_sums(parts_w, job.sums_w);
        if constexpr (SUM_B) job.write_sums(parts_b, job.sums_b);
    }
}
