// Softmax (OP 0), log-softmax (1), LayerNorm (2) and RMSNorm (3) forward.
//
// Pairs: of softmax the warp's maximum and its sum of e^(x - maximum); of LayerNorm the sum of x - x_0 and the sum of
// squares of what is left of that without the warp's mean, put together by Chan et al. 1983; of RMSNorm the sum of squares.
// x_0, the row's first number, makes means exact where numbers are alike but far from 0.

constexpr float LOWEST = -3.4028234663852886e38f;  // not -inf, of which -inf - -inf would make NaN
constexpr float LOG2_E = 1.4426950408889634f;

struct Forward {
    Shared& shared;
    const Rows& rows;
    const Slice& slice;
    float* mean_M;
    float* rstd_M;
    float eps;
    Vector w, b;
    float own_scale;                                              // 1 / numbers of this warp
    float counts[(PAIRS + 31) / 32], scales[(PAIRS + 31) / 32];  // of the pairs that this lane reads, and 1 / those

    __device__ __forceinline__ void turn(int) {}

    // The i-th chunk of this thread, less x_0 of a LayerNorm.
    __device__ __forceinline__ void get(int stage, int i, float x_0, float* x) const {
        unpack<ELEMENT>(shared.ring[stage][0][slice.place(i)], x);
        if constexpr (OP == 2)
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) x[j] -= x_0;
    }
    __device__ __forceinline__ float first(int stage) const {
        if constexpr (OP != 2) return 0.0f;
        float x[WIDTH];
        unpack<ELEMENT>(shared.heads[stage], x);
        return x[0];
    }

    __device__ __forceinline__ float2 sums(int stage) const {
        const float x_0 = first(stage);
        float top = LOWEST, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH];
                get(stage, i, x_0, x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (OP < 2) top = fmaxf(top, x[j]);
                    if constexpr (OP == 2) sum += x[j];
                    if constexpr (OP == 3) sum += x[j] * x[j];
                }
            }
        if constexpr (OP == 3) return make_float2(warp_sum(sum), 0.0f);
        if constexpr (OP == 2) sum = warp_sum(sum);
        if constexpr (OP < 2) top = warp_max(top);
        const float mean = sum * own_scale;
        float second = 0.0f;
        forget();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH];
                get(stage, i, x_0, x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j)
                    second += OP == 2 ? (x[j] - mean) * (x[j] - mean) : power_of_2((x[j] - top) * LOG2_E);
            }
        return make_float2(OP == 2 ? sum : top, warp_sum(second));
    }

    __device__ __forceinline__ void finish(int stage, int step, const float2* pairs) {
        float top = LOWEST, sum = 0.0f, second = 0.0f;
        each_pair(pairs, [&](float2 pair, int) { OP < 2 ? top = fmaxf(top, pair.x) : sum += pair.x; });
        if constexpr (OP < 2)
            top = warp_max(top);
        else
            sum = warp_sum(sum);
        const float mean = OP == 2 ? sum / rows.N : 0.0f;
        each_pair(pairs, [&](float2 pair, int i) {
            if constexpr (OP < 2) second += pair.y * power_of_2((pair.x - top) * LOG2_E);
            if constexpr (OP == 2) {
                const float off = pair.x * scales[i] - mean;
                second += pair.y + off * off * counts[i];
            }
        });
        if constexpr (OP != 3) second = warp_sum(second);
        const float rstd = OP >= 2 ? rsqrtf((OP == 2 ? second : sum) / rows.N + eps) : 0.0f;
        const float scale = OP == 0 ? 1.0f / second : 0.0f, log_sum = OP == 1 ? logf(second) : 0.0f;
        const float x_0 = first(stage);
        if (OP >= 2 && slice.rank == 0 && threadIdx.x == 0) {
            rstd_M[slice.row(step)] = rstd;
            if (OP == 2) mean_M[slice.row(step)] = x_0 + mean;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH], weight[WIDTH], bias[WIDTH];
                get(stage, i, x_0, x);
                if constexpr (OP >= 2) w.get(i, weight);
                if constexpr (OP == 2) b.get(i, bias);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (OP == 0) x[j] = power_of_2((x[j] - top) * LOG2_E) * scale;
                    if constexpr (OP == 1) x[j] = x[j] - top - log_sum;
                    if constexpr (OP == 2) x[j] = (x[j] - mean) * rstd * weight[j] + bias[j];
                    if constexpr (OP == 3) x[j] = x[j] * rstd * weight[j];
                }
                store_once(slice.output(rows, step, i), pack<ELEMENT>(x));
            }
    }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS + 32, PER_SM)
rows_forward(const Rows rows, const uint4* w, const uint4* b, float* mean_M, float* rstd_M, float eps) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Slice slice(rows);
    Forward job{shared, rows, slice, mean_M, rstd_M, eps};
    if constexpr (OP >= 2) job.w.load(w, ONES, slice);
    if constexpr (OP == 2) {
        job.b.load(b, 0, slice);
        job.own_scale = 1.0f / max(1, Slice::count(slice.rank, threadIdx.x / 32, rows.N));
#pragma unroll
        for (int i = 0; i < (PAIRS + 31) / 32; ++i) {
            const int number = i * 32 + threadIdx.x % 32;
            const int count = number < PAIRS ? Slice::count(number / WARPS, number % WARPS, rows.N) : 0;
            job.counts[i] = count, job.scales[i] = 1.0f / max(1, count);
        }
    }
    walk(job, shared, rows, slice);
}
