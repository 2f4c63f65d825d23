// Beside dx = dz W as a product: the idle warps make dz = dy act'(kept) for rows that are multiplied later, and its sums
// over every 128 rows. Bands of 128 rows, taken in order by whoever is free, so that no block needs any other to be
// there; the thread that asks for a band's tiles waits until all of it is written.

struct Beside {
    const Element* dy;
    const Element* kept;  // z, or y for ReLU
    Element* dz;          // all (M, K): the product's sums run over the layer's outputs
    float* sums;          // (M / 128, K), or null
    unsigned* counts;     // parts that are taken; then for each band how many are done
    int num_done;         // bands that were made before
    static constexpr bool HAS_ROW = false, FOLLOWS = false, LEADS = true;
    static constexpr int REGISTERS = 72, BAND = 128, WIDTH = 256;

    __device__ __forceinline__ unsigned row_pair(int, int) const { return 0; }
    __device__ __forceinline__ void finish(float*, unsigned) const {}
    __device__ __forceinline__ void follow(int, int, int, int) const {}

    __device__ __forceinline__ void await(int first, int M, int K) const {
        const int band = first / BAND;
        if (band < num_done || first >= M) return;
        const unsigned parts = ceil_div(K, WIDTH);
        for (;;) {
            unsigned found;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counts + 1 + band) : "memory");
            if (found >= parts) break;
            __nanosleep(200);
        }
        asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine is to see it, too
    }

    // Two rows at a time, and the next two on their way.
    struct Rows {
        uint4 dy[2], kept[2];
    };

    __device__ __forceinline__ void fetch(Rows& to, long long at, int rows, int K) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i >= rows) continue;
            to.dy[i] = __ldcs(reinterpret_cast<const uint4*>(dy + at + (long long)i * K));
            to.kept[i] = __ldcs(reinterpret_cast<const uint4*>(kept + at + (long long)i * K));
        }
    }

    __device__ __forceinline__ void lead(int M, int K) const {
        const int parts = ceil_div(K, WIDTH), lane = threadIdx.x % 32;
        const int all = (ceil_div(M, BAND) - num_done) * parts;
        for (;;) {
            int part = 0;
            if (lane == 0) part = atomicAdd(counts, 1u);
            part = __shfl_sync(0xFFFFFFFF, part, 0);
            if (part >= all) return;
            const int band = num_done + part / parts, column = part % parts * WIDTH + lane * 8;
            const int rows = min(M - band * BAND, BAND);
            if (column < K) {
                long long at = (long long)band * BAND * K + column;
                Eight total = {};
                Rows now;
                fetch(now, at, rows, K);
                for (int row = 0; row < rows; row += 2) {
                    Rows next;
                    fetch(next, at + 2LL * K, rows - row - 2, K);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (row + i >= rows) continue;
                        Eight f = floats_of(now.dy[i]);
                        const Eight x = floats_of(now.kept[i]);
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                            f.x[j] = activation_gradient(f.x[j], x.x[j]);
                            total.x[j] += f.x[j];
                        }
                        *reinterpret_cast<uint4*>(dz + at + (long long)i * K) = halves_of(f);
                    }
                    now = next;
                    at += 2LL * K;
                }
                if (sums) {
                    float4* to = reinterpret_cast<float4*>(sums + (long long)band * K + column);
                    to[0] = make_float4(total.x[0], total.x[1], total.x[2], total.x[3]);
                    to[1] = make_float4(total.x[4], total.x[5], total.x[6], total.x[7]);
                }
                // Each thread's numbers, for the copy engines of all blocks; then the count.
                asm volatile("fence.proxy.async;" ::: "memory");
                __threadfence();
            }
            __syncwarp();
            if (lane == 0)
                asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counts + 1 + band) : "memory");
        }
    }
};
