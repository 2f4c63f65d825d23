// Softmax (OP 0), log-softmax (1), LayerNorm (2) and RMSNorm (3) forward.
//
// Pairs: of softmax the warp's maximum and its sum of e^(x - maximum); of RMSNorm the sum of squares; of LayerNorm mean
// and sum of squares of what is left without it. Those come from one pass: a thread takes one of its numbers off all, and
// sums up what is left and its squares. As that number is one of them, the squares are at most as many times too large
// as there are numbers, 64 at most, so that little cancels. Threads' means and squares, then warps', are put together
// likewise (Chan et al. 1983), as distances from the first. Means are distances from one number of the row: exact
// where all numbers are alike, however far from 0. It, and each thread's, is the middle one of the first three, so that
// it is not the one number that is far from all others.

constexpr float LOWEST = -3.4028234663852886e38f;  // not -inf, of which -inf - -inf would make NaN
constexpr float LOG2_E = 1.4426950408889634f;

// So many numbers, and 1 / so many.
struct Count {
    float number, share;
    __device__ __forceinline__ void set(int count) { number = count, share = 1.0f / max(1, count); }
};

struct Moments {
    float mean, squares;  // of what is left without the mean
};

// The middle one of the first three.
__device__ __forceinline__ float middle(const float (&x)[WIDTH]) {
    return fmaxf(fminf(x[0], x[1]), fminf(fmaxf(x[0], x[1]), x[2]));
}

// From sums over `all` numbers of their distance from `from`, and of its square.
__device__ __forceinline__ Moments moments_of(float from, float sum, float squares, float share) {
    return {from + sum * share, squares - sum * sum * share};
}

struct Forward {
    Shared& shared;
    const Rows& rows;
    const Slice& slice;
    const uint4* w_N;
    const uint4* b_N;
    float* mean_M;
    float* rstd_M;
    float eps;
    Vector w, b;
    float share;                      // 1 / N
    Count own, warp;                  // numbers that this thread and its warp have
    Count others[(PAIRS + 31) / 32];  // and the warps whose pairs this lane reads

    __device__ __forceinline__ void start() {
        share = 1.0f / rows.N;
        if constexpr (OP >= 2) w.load(w_N, ONES, slice);
        if constexpr (OP == 2) {
            b.load(b_N, 0, slice);
            own.set(Slice::count(slice.rank, threadIdx.x, 1, rows.N));
            warp.set(Slice::count(slice.rank, threadIdx.x / 32 * 32, 32, rows.N));
#pragma unroll
            for (int i = 0; i < (PAIRS + 31) / 32; ++i) {
                const int number = i * 32 + threadIdx.x % 32;
                others[i].set(number < PAIRS ? Slice::count(number / WARPS, number % WARPS * 32, 32, rows.N) : 0);
            }
        }
    }

    __device__ __forceinline__ void turn(int) {}

    __device__ __forceinline__ void get(int stage, int i, float* x) const {
        unpack<ELEMENT>(shared.ring[stage][0][slice.place(i)], x);
    }
    // A number of the row that others are likely to be near.
    __device__ __forceinline__ float near(int stage) const {
        float x[WIDTH];
        unpack<ELEMENT>(shared.heads[stage], x);
        return middle(x);
    }

    __device__ __forceinline__ float largest(int stage) const {
        float top = LOWEST;
        unsigned tops = ELEMENT == 1 ? 0xfc00fc00u : 0xff80ff80u;  // -inf
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                const uint4 chunk = shared.ring[stage][0][slice.place(i)];
                if constexpr (ELEMENT == 0) {
                    float x[WIDTH];
                    unpack<ELEMENT>(chunk, x);
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) top = fmaxf(top, x[j]);
                } else {
                    tops = larger_pair<ELEMENT>(tops, larger_pair<ELEMENT>(chunk.x, chunk.y));
                    tops = larger_pair<ELEMENT>(tops, larger_pair<ELEMENT>(chunk.z, chunk.w));
                }
            }
        if constexpr (ELEMENT != 0) {
            float low, high;
            unpack_pair<ELEMENT>(tops, low, high);
            top = fmaxf(top, fmaxf(low, high));
        }
        return warp_max(top);
    }

    __device__ __forceinline__ float2 sums(int stage) const {
        if constexpr (OP == 2) return moments(stage);
        const float top = OP < 2 ? largest(stage) : 0.0f;
        float sums[2] = {};
        forget();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH];
                get(stage, i, x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j)
                    sums[j % 2] += OP == 3 ? x[j] * x[j] : power_of_2((x[j] - top) * LOG2_E);
            }
        const float sum = warp_sum(sums[0] + sums[1]);
        return OP == 3 ? make_float2(sum, 0.0f) : make_float2(top, sum);
    }

    __device__ __forceinline__ float2 moments(int stage) const {
        float sums[2] = {}, squares[2] = {}, from = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH];
                get(stage, i, x);
                if (i == 0) from = middle(x);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const float left = x[j] - from;
                    sums[j % 2] += left;
                    squares[j % 2] += left * left;
                }
            }
        const Moments thread =
            moments_of(from - near(stage), sums[0] + sums[1], squares[0] + squares[1], own.share);
        const float first = __shfl_sync(0xffffffffu, thread.mean, 0), off = thread.mean - first;
        const Moments all = moments_of(
            first, warp_sum(off * own.number), warp_sum(thread.squares + off * off * own.number), warp.share);
        return make_float2(all.mean, all.squares);
    }

    __device__ __forceinline__ void finish(int stage, int step, const float2* pairs) {
        float2 found;  // maximum and sum, sum of squares, or mean and variance
        if constexpr (OP < 2) {
            float top = LOWEST, sum = 0.0f;
            each_pair(pairs, [&](float2 pair, int) { top = fmaxf(top, pair.x); });
            top = warp_max(top);
            each_pair(pairs, [&](float2 pair, int) { sum += pair.y * power_of_2((pair.x - top) * LOG2_E); });
            found = make_float2(top, warp_sum(sum));
        } else if constexpr (OP == 2) {
            const float first = pairs[0].x;
            float sum = 0.0f, squares = 0.0f;
            each_pair(pairs, [&](float2 pair, int i) {
                const float off = pair.x - first;
                sum += off * others[i].number;
                squares += pair.y + off * off * others[i].number;
            });
            const Moments all = moments_of(first, warp_sum(sum), warp_sum(squares), share);
            found = make_float2(all.mean, all.squares < 0.0f ? 0.0f : all.squares * share);
        } else {
            float sum = 0.0f;
            each_pair(pairs, [&](float2 pair, int) { sum += pair.x; });
            found = make_float2(0.0f, warp_sum(sum) * share);
        }
        const float scale = OP == 0 ? reciprocal(found.y) : OP == 1 ? logf(found.y) : rsqrtf(found.y + eps);
        // Taken off in two steps where numbers are as exact as the mean.
        const float close = OP == 2 ? near(stage) : 0.0f;
        const float first = OP == 2 && ELEMENT == 0 ? close : 0.0f;
        const float rest = OP == 2 && ELEMENT != 0 ? close + found.x : found.x;
        if (OP >= 2 && slice.rank == 0 && threadIdx.x == 0) {
            rstd_M[slice.row(step)] = scale;
            if (OP == 2) mean_M[slice.row(step)] = close + found.x;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (slice.has(i)) {
                float x[WIDTH], weight[WIDTH], bias[WIDTH];
                get(stage, i, x);
                if constexpr (OP >= 2) w.get(i, weight);
                if constexpr (OP == 2) b.get(i, bias);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    if constexpr (OP == 0) x[j] = power_of_2((x[j] - found.x) * LOG2_E) * scale;
                    if constexpr (OP == 1) x[j] = x[j] - found.x - scale;
                    if constexpr (OP == 2 && ELEMENT == 0) x[j] -= first;
                    if constexpr (OP == 2) x[j] = (x[j] - rest) * scale * weight[j] + bias[j];
                    if constexpr (OP == 3) x[j] = x[j] * scale * weight[j];
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
    Forward job{shared, rows, slice, w, b, mean_M, rstd_M, eps};
    walk(job, shared, rows, slice);
}
