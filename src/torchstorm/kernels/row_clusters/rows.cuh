// How a cluster of blocks goes over rows, whatever it computes of them. Each block has a slice of the columns, each thread
// always the same ones; where rows are so long that all have as many (FULL), there is nothing to ask. One warp's first lane fetches slices of coming rows into a ring in shared memory, STAGES of them;
// the others sum up a row, send their warp's pair of sums to every block of the cluster, and then, while those are on
// their way, finish the row before: all pairs are there, the row is still in the ring.
//
// Sums have room for SLOTS rows. A pair of row r + 4 is sent after its sender has had all pairs of row r + 2; those were
// sent after every warp had read all pairs of row r. So nobody has to say that a slot is free, and no barrier can be a
// phase ahead of one that still waits. Every warp adds up all pairs in the same order, so all have the same bits.

constexpr int THREADS = WARPS * 32;  // that compute
constexpr int SLICE_CHUNKS = THREADS * CHUNKS;  // of 16 bytes, at most
constexpr int SLOTS = 4;
constexpr int PAIRS = CLUSTER * WARPS;
constexpr int WIDTH = NUMBERS<ELEMENT>;

struct Shared {
    uint4 ring[STAGES][INPUTS][SLICE_CHUNKS];
    uint4 heads[STAGES];  // the first chunk of the row, where HAS_HEAD
    float2 pairs[SLOTS][PAIRS];
    unsigned long long full[STAGES], empty[STAGES], exchanged[SLOTS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as the launch has it");

struct Rows {
    const unsigned char* inputs[2];  // (M, N), columns without gaps
    long long row_bytes[2];
    unsigned char* output;  // (M, N), without gaps
    int M, N;
    int each;  // rows of a cluster, one after the other; 0 where clusters stay, and take every num_clusters-th
};

struct Slice {
    int rank, cluster;
    int begin, stride;  // of this cluster's rows
    int first, chunks;  // of a row, in 16 bytes
    int steps;          // rows that this cluster has

    __device__ __forceinline__ Slice(const Rows& rows) {
        rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
        begin = rows.each ? cluster * rows.each : cluster, stride = rows.each ? 1 : gridDim.x / CLUSTER;
        steps = (rows.M - begin - 1) / stride + 1;
        if (rows.each) steps = min(steps, rows.each);
        first = rank * per_block(rows.N), chunks = chunks_of(rank, rows.N);
    }
    static __device__ __forceinline__ int per_block(int N) { return (N / WIDTH + CLUSTER - 1) / CLUSTER; }
    static __device__ __forceinline__ int chunks_of(int rank, int N) {
        return max(0, min(per_block(N), N / WIDTH - rank * per_block(N)));
    }
    // How many numbers of a row `threads` threads of a block have, from one on.
    static __device__ __forceinline__ int count(int rank, int thread, int threads, int N) {
        if (FULL) return CHUNKS * threads * WIDTH;
        int chunks = 0;
        for (int i = 0; i < CHUNKS; ++i) chunks += max(0, min(threads, chunks_of(rank, N) - i * THREADS - thread));
        return chunks * WIDTH;
    }
    __device__ __forceinline__ long long row(int step) const { return begin + (long long)step * stride; }
    // Where this thread's i-th chunk is in the slice, and whether there is one.
    __device__ __forceinline__ int place(int i) const { return i * THREADS + threadIdx.x; }
    __device__ __forceinline__ bool has(int i) const { return FULL || place(i) < chunks; }
    __device__ __forceinline__ uint4* output(const Rows& rows, int step, int i) const {
        return (uint4*)rows.output + row(step) * (rows.N / WIDTH) + first + place(i);
    }
};

template <int FORMAT>
__device__ __forceinline__ void unpack(uint4 chunk, float* x) {
    const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (FORMAT == 0)
            x[i] = __uint_as_float(words[i]);
        else
            unpack_pair<FORMAT>(words[i], x[2 * i], x[2 * i + 1]);
    }
}

template <int FORMAT>
__device__ __forceinline__ uint4 pack(const float* x) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (FORMAT == 0)
            words[i] = __float_as_uint(x[i]);
        else
            words[i] = pack_pair<FORMAT>(x[2 * i], x[2 * i + 1]);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// A pair of every warp of the cluster, divided among this warp's lanes: `of(pair, number of the pair)` of each.
template <class Function>
__device__ __forceinline__ void each_pair(const float2* pairs, Function of) {
#pragma unroll
    for (int i = 0; i < (PAIRS + 31) / 32; ++i) {
        const int number = i * 32 + threadIdx.x % 32;
        if (PAIRS % 32 == 0 || number < PAIRS) of(pairs[number], i);
    }
}

// A vector over the columns of this thread, as it lies in memory: PARAM is its format. Where there is none, `instead`.
struct Vector {
    static constexpr int PER_CHUNK = WIDTH / NUMBERS<PARAM>;
    uint4 held[CHUNKS][PER_CHUNK];

    __device__ __forceinline__ void load(const uint4* vector, unsigned instead, const Slice& slice) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < PER_CHUNK; ++j) {
                held[i][j] = make_uint4(instead, instead, instead, instead);
                if (vector && slice.has(i)) held[i][j] = vector[(slice.first + slice.place(i)) * PER_CHUNK + j];
            }
    }
    __device__ __forceinline__ void get(int i, float* x) const {
#pragma unroll
        for (int j = 0; j < PER_CHUNK; ++j) unpack<PARAM>(held[i][j], x + j * NUMBERS<PARAM>);
    }
};
constexpr unsigned ONES = PARAM == 0 ? 0x3f800000u : PARAM == 1 ? 0x3c003c00u : 0x3f803f80u;

// `job.start()` comes first; `job.turn(step)` before everything of a step; `job.sums(stage)` gives its warp's pair, the same in every
// lane; `job.finish(stage, step, pairs)` writes a row of which all pairs are there, a turn after its sums.
template <class Job>
__device__ __forceinline__ void walk(Job& job, Shared& shared, const Rows& rows, const Slice& slice) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(place_of(&shared.full[stage]), 1);
            barrier_init(place_of(&shared.empty[stage]), WARPS);
        }
        for (int slot = 0; slot < SLOTS; ++slot)
            barrier_init(place_of(&shared.exchanged[slot]), CLUSTER == 1 ? WARPS : 1);
        barriers_begin();
    }
    cluster_sync();

    int stage = 0;
    unsigned parity = 0;
    if (warp == WARPS) {
        if (lane == 0) {
            for (int step = 0; step < slice.steps; ++step) {
                unsigned long long* full = &shared.full[stage];
                barrier_wait(place_of(&shared.empty[stage]), parity ^ 1);
                barrier_expect(place_of(full), (INPUTS * slice.chunks + HAS_HEAD) * 16);
#pragma unroll
                for (int i = 0; i < INPUTS; ++i) {
                    const unsigned char* row = rows.inputs[i] + slice.row(step) * rows.row_bytes[i];
                    fetch(shared.ring[stage][i], row + slice.first * 16, slice.chunks * 16, full);
                    if (HAS_HEAD && i == 0) fetch(&shared.heads[stage], row, 16, full);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
    } else {
        job.start();  // while the first rows are on their way
        int before = 0;
        for (int step = 0; step <= slice.steps; ++step) {
            job.turn(step);
            if (step < slice.steps) {
                barrier_wait(place_of(&shared.full[stage]), parity);
                const float2 pair = job.sums(stage);
                const int slot = step % SLOTS;
                unsigned long long* exchanged = &shared.exchanged[slot];
                float2* to = &shared.pairs[slot][slice.rank * WARPS + warp];
                if constexpr (CLUSTER == 1) {
                    if (lane == 0) *to = pair, barrier_arrive(place_of(exchanged));
                } else {
                    if (threadIdx.x == 0) barrier_expect(place_of(exchanged), PAIRS * 8);
                    if (lane < CLUSTER) send(to, exchanged, lane, pair);
                }
            }
            if (step > 0) {
                const int slot = (step - 1) % SLOTS;
                barrier_wait(place_of(&shared.exchanged[slot]), (step - 1) / SLOTS & 1);
                job.finish(before, step - 1, shared.pairs[slot]);
                __syncwarp();
                if (lane == 0) barrier_arrive(place_of(&shared.empty[before]));
            }
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
    cluster_sync();  // no block ends while another may still send to it
}
