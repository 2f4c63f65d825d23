// Tensor cores as Hopper has them. One warpgroup's first thread asks the copy engine (TMA) for tiles, STAGES ahead; two
// others multiply straight from shared memory (wgmma), 64 x TILE_N results each, in 232 registers a thread, or 216 where
// idle warps need more. Blocks stay and take tile after tile; while results go out, the next tile's operands come in.
// Two blocks of a cluster have the same columns: each fetches half of b's tile and the copy engine writes it to both.
//
// The warps that neither ask nor multiply may do something else meanwhile, as Beside says: work on tiles that are done
// (FOLLOWS), or on rows of a that are not needed yet (LEADS). alone.cuh has the Beside of a product and nothing more.
//
// Operands come in boxes whose rows are 128 bytes, chunks of 16 bytes exchanged with the row's number by the copy engine
// as wgmma expects it (128-byte swizzle): rows of the operand where k lies without gaps, rows of k otherwise.
// Descriptors: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout".

constexpr int TILE_M = 128, TILE_K = 64, SLICE = 64;  // SLICE: elements of 128 bytes
constexpr int CONSUMERS = 2, WARPGROUP = 128;
constexpr int SLICE_BYTES = SLICE * TILE_K * 2;  // 64 x 64 elements, whichever way they lie
constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUT_BYTES = 64 * SLICE * 2;  // of a warpgroup: 64 rows, 64 columns, on their way out; two of them
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES + CONSUMERS * 2 * OUT_BYTES;
constexpr int TOLD_AT = BARRIERS_AT + 2 * STAGES * 8;  // how many tiles each consumer has stored
constexpr int ROW_AT = TOLD_AT + CONSUMERS * 4;  // a number for each of a tile's columns, for each consumer
static_assert(SHARED_BYTES >= 1024 + ROW_AT + CONSUMERS * TILE_N * 2, "room to align, tiles, results, barriers, ...");
static_assert(TILE_N % (SLICE * CLUSTER) == 0, "b's tile is divided by the cluster");

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

struct WgmmaProblem {
    int M, N, K;
    int num_inner, num_batches;
    int a_inner, a_outer, b_inner, b_outer;  // 1 where an operand has the batch dimension, 0 where one serves all
};

// The box at (x, y) of a batch; its bytes count at the barrier. `blocks`: bits of those of the cluster that get it.
template <bool TO_ALL>
__device__ __forceinline__ void fetch_box(
    unsigned to, const TensorMap* map, unsigned barrier, int x, int y, int inner, int outer) {
    if constexpr (TO_ALL)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(inner), "r"(outer), "h"((unsigned short)((1 << CLUSTER) - 1))
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
            "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(inner), "r"(outer)
            : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, unsigned from, int x, int y, int batch) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(batch)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Eight rows are 1024 bytes, also from one eight of k to the next where k is the row (the stride); the next 64 of MN are
// then a slice away (the leading dimension, which means nothing where k lies without gaps).
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
    return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(SLICE_BYTES >> 4) << 16 |
           (unsigned long long)(1024 >> 4) << 32 | 1ULL << 62;
}

// Of a descriptor, from 16 of k to the next: 32 bytes within a row, or 16 rows.
template <bool ALONG_K>
constexpr int STEP = (ALONG_K ? 32 : 16 * 128) >> 4;

#if ELEMENT == 1
#define TYPES "f32.f16.f16 "
#else
#define TYPES "f32.bf16.bf16 "
#endif
#define F4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)

// sums (64 x TILE_N) = a b, or += where `add`, for 16 of k, by a whole warpgroup; the result is there after wait().
__device__ __forceinline__ void multiply(
    float (&sums)[TILE_N / 2], unsigned long long a, unsigned long long b, int add) {
#if TILE_N == 256
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16." TYPES
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, %131, %132;\n}"
        : F64(0), F64(64)
        : "l"(a), "l"(b), "r"(add), "n"(!A_ALONG_K), "n"(!B_ALONG_K));
#else
    static_assert(TILE_N == 128, "the instruction is written out for 128 and 256 columns");
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." TYPES
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %67, %68;\n}"
        : F64(0)
        : "l"(a), "l"(b), "r"(add), "n"(!A_ALONG_K), "n"(!B_ALONG_K));
#endif
}

// Until at most LEFT batches of multiplications are under way; the sums may be read only after it.
template <int LEFT>
__device__ __forceinline__ void wait(float (&sums)[TILE_N / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    if constexpr (LEFT == 0) {
#pragma unroll
        for (int i = 0; i < TILE_N / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    }
}

// Where this cluster's next tile is: its first row and column, and the batch.
struct Place {
    int m, n, inner, outer, batch;

    __device__ __forceinline__ Place(int index, int rank, const WgmmaProblem& p) {
        const int tiles_m = ceil_div(p.M, TILE_M * CLUSTER), tiles_n = ceil_div(p.N, TILE_N);
        batch = index / (tiles_m * tiles_n);
        const Tile tile = tile_at(index % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP / CLUSTER);
        m = (tile.m * CLUSTER + rank) * TILE_M, n = tile.n * TILE_N;
        inner = batch % p.num_inner, outer = batch / p.num_inner;
    }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
matmul_wgmma(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const WgmmaProblem p, const Beside beside) {
    extern __shared__ unsigned char shared[];
    // The swizzle counts rows from addresses that are multiples of 1024; blocks of a cluster lie the same.
    const unsigned base = (place_of(shared) + 1023) & ~1023u;
    const unsigned out = base + STAGES * STAGE_BYTES;
    const unsigned full = base + BARRIERS_AT, empty = full + STAGES * 8, told = base + TOLD_AT;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int num_tiles = ceil_div(p.M, TILE_M * CLUSTER) * ceil_div(p.N, TILE_N) * p.num_batches;
    const int steps = ceil_div(p.K, TILE_K);
    const int group = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, CLUSTER * CONSUMERS * WARPGROUP / 32);
        }
        barriers_begin();
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) tell(told + consumer * 4, 0);
    }
    cluster_sync();

    int stage = 0;
    unsigned parity = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Beside::REGISTERS));
        if (threadIdx.x == 0) {
            for (int index = blockIdx.x / CLUSTER; index < num_tiles; index += gridDim.x / CLUSTER) {
                const Place at(index, rank, p);
                const int a_inner = at.inner * p.a_inner, a_outer = at.outer * p.a_outer;
                const int b_inner = at.inner * p.b_inner, b_outer = at.outer * p.b_outer;
                if constexpr (Beside::LEADS) beside.await(at.m, p.M, p.K);
                for (int step = 0; step < steps; ++step) {
                    const unsigned a_tile = base + stage * STAGE_BYTES, b_tile = a_tile + A_BYTES;
                    const unsigned barrier = full + stage * 8;
                    const int k = step * TILE_K;
                    barrier_wait(empty + stage * 8, parity ^ 1);
                    barrier_expect(barrier, STAGE_BYTES);
                    if constexpr (A_ALONG_K)
                        fetch_box<false>(a_tile, &a_map, barrier, k, at.m, a_inner, a_outer);
                    else
#pragma unroll
                        for (int i = 0; i < TILE_M / SLICE; ++i)
                            fetch_box<false>(a_tile + i * SLICE_BYTES, &a_map, barrier, at.m + i * SLICE, k, a_inner,
                                             a_outer);
                    // This block's part of b's tile, in slices of 64 columns.
                    constexpr int PART = TILE_N / SLICE / CLUSTER;
                    const int first = rank * PART;
                    if constexpr (B_ALONG_K)
                        fetch_box<(CLUSTER > 1)>(b_tile + first * SLICE_BYTES, &b_map, barrier, k,
                                                 at.n + first * SLICE, b_inner, b_outer);
                    else
#pragma unroll
                        for (int i = 0; i < PART; ++i)
                            fetch_box<(CLUSTER > 1)>(b_tile + (first + i) * SLICE_BYTES, &b_map, barrier,
                                                     at.n + (first + i) * SLICE, k, b_inner, b_outer);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        } else if (threadIdx.x >= 32) {
            if constexpr (Beside::LEADS) beside.lead(p.M, p.K);
            if constexpr (Beside::FOLLOWS) {
                unsigned count = 0;
                for (int index = blockIdx.x / CLUSTER; index < num_tiles; index += gridDim.x / CLUSTER) {
                    const Place at(index, rank, p);
                    ++count;
                    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                        await_told(told + consumer * 4, count);
                        beside.follow(at.m + consumer * 64, at.n, p.M, p.N);
                    }
                }
            }
        }
    } else {
        // What all have at the start is 168; the idle warps may have more than the copying thread needs.
        constexpr int REGISTERS = (168 * (CONSUMERS + 1) - Beside::REGISTERS) / CONSUMERS / 8 * 8;
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int consumer = group - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
        const unsigned own_out = out + consumer * 2 * OUT_BYTES, own_row = base + ROW_AT + consumer * TILE_N * 2;
        // In a pair of 8 x 16 results, whose row of 16 bytes this thread's address names for stmatrix.
        const int row = thread / 32 * 16 + lane % 16, chunk = lane / 16;
        // One thread of every warp tells every block of the cluster that the warp has done with a stage.
        auto leave = [&](int which) {
            if (lane < CLUSTER) barrier_arrive(empty + which * 8, lane);
        };
        // What was stored of so many tiles is in memory; the first thread is the one that stores.
        auto store_ends = [&](unsigned tiles) {
            if (thread == 0) {
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                tell(told + consumer * 4, tiles);
            }
            __syncwarp();
        };
        const int told_at_step = min(6, steps - 1);  // by when stores have long ended
        unsigned tiles = 0;
        int half = 0;
        float sums[TILE_N / 2];
        for (int index = blockIdx.x / CLUSTER; index < num_tiles; index += gridDim.x / CLUSTER) {
            const Place at(index, rank, p);
            int before = 0;
            // Two columns a thread, on their way while the tile is multiplied.
            const unsigned row_pair = beside.row_pair(at.n + thread * 2, p.N);
            for (int step = 0; step < steps; ++step) {
                barrier_wait(full + stage * 8, parity);
                const unsigned a_tile = base + stage * STAGE_BYTES;
                const unsigned long long a = descriptor(a_tile + consumer * SLICE_BYTES);
                const unsigned long long b = descriptor(a_tile + A_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < TILE_K / 16; ++i)
                    multiply(sums, a + i * STEP<A_ALONG_K>, b + i * STEP<B_ALONG_K>, step > 0 || i > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                // The step before has been read once only this one's multiplications are under way.
                wait<1>(sums);
                if (step > 0) leave(before);
                before = stage;
                if constexpr (Beside::FOLLOWS)
                    if (step == told_at_step && tiles > 0) store_ends(tiles);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            wait<0>(sums);
            leave(before);
            if constexpr (Beside::HAS_ROW) {
                if (thread * 2 < TILE_N) place_pair(own_row + thread * 4, row_pair);
                asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(WARPGROUP) : "memory");
            }

#pragma unroll
            for (int slice = 0; slice < TILE_N / SLICE; ++slice) {
                if (at.n + slice * SLICE < p.N) {
                    const unsigned to = own_out + half * OUT_BYTES;
#pragma unroll
                    for (int i = 0; i < SLICE / 16; ++i)
                        beside.finish(&sums[slice * SLICE / 2 + i * 8],
                                      own_row + (slice * SLICE + i * 16 + lane % 4 * 2) * 2);
                    // Of the two stores before, the elder has left its half.
                    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
                    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(WARPGROUP) : "memory");
#pragma unroll
                    for (int i = 0; i < SLICE / 16; ++i) {
                        const float* from = &sums[slice * SLICE / 2 + i * 8];
                        const unsigned address = to + row * 128 + (((i * 2 + chunk) ^ (row & 7)) << 4);
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                                     "r"(pair_of(from[0], from[1])), "r"(pair_of(from[2], from[3])),
                                     "r"(pair_of(from[4], from[5])), "r"(pair_of(from[6], from[7]))
                                     : "memory");
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(WARPGROUP) : "memory");
                    if (thread == 0)
                        store_box(&c_map, to, at.n + slice * SLICE, at.m + consumer * 64, at.batch);
                    half ^= 1;
                }
            }
            ++tiles;
        }
        if constexpr (Beside::FOLLOWS) store_ends(tiles);
        // Shared memory must last until the copy engine has read it.
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    // And as long as the other block may write here, or arrive at barriers.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
