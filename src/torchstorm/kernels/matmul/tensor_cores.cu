// Tensor cores as Ampere has them: mma.sync takes fragments from registers, ldmatrix brings them there from shared
// memory, and cp.async fills shared memory several tiles ahead. fp16 and bf16, or fp32 rounded to tf32; sums in fp32.
//
// A tile has rows of 16-byte chunks: rows of the operand where k lies without gaps, rows of k otherwise. Chunks of a row
// are exchanged by an exclusive or with the row's number, so that the eight rows of a fragment lie in different banks.

constexpr int TILE = 128, THREADS = 256, GROUP = 16;
constexpr int DEPTH = 64 / sizeof(Element);         // of k
constexpr int CHUNK = 16 / sizeof(Element);         // elements of a chunk
constexpr int STEP = sizeof(Element) == 2 ? 16 : 8;  // k of one mma
constexpr int TILE_BYTES = TILE * DEPTH * sizeof(Element);
constexpr int WARP_M = 64, WARP_N = 32;  // results of a warp; two by four warps
constexpr int MMAS_M = WARP_M / 16, MMAS_N = WARP_N / 8;

// Byte offset of a chunk in a tile.
template <bool ALONG_K>
__device__ __forceinline__ unsigned offset_of(int row, int chunk) {
    constexpr int CHUNKS = (ALONG_K ? DEPTH : TILE) / CHUNK;
    if constexpr (!ALONG_K && sizeof(Element) == 4)
        chunk ^= (row & 3) << 1;  // read number by number: four rows at eight columns
    else if constexpr (CHUNKS == 4)
        chunk ^= (row >> 1) & 3;  // two rows fill all banks
    else
        chunk ^= row & 7;
    return (row * CHUNKS + chunk) * 16;
}

// Copies an operand's tiles, step after step, to shared memory; zeros outside of the matrix. WIDE: every chunk is aligned
// to 16 bytes, and cp.async brings it while the tensor cores work; otherwise its elements are read one by one.
template <bool ALONG_K, bool WIDE>
struct Copy {
    static constexpr int ROW = (ALONG_K ? DEPTH : TILE) / CHUNK;  // chunks of a row
    static constexpr int APART = THREADS / ROW;                   // rows between a thread's chunks; a multiple of 8
    const Element* next;                                          // this thread's first element of the next tile
    int left_mn, left_k;                                          // from there to the matrix's end
    unsigned to;                                                  // offset of its chunk in the tile

    __device__ __forceinline__ Copy(
        const Element* from, int mn0, int end_mn, int end_k, long long stride_mn, long long stride_k) {
        const int row = threadIdx.x / ROW, chunk = threadIdx.x % ROW;
        const int mn = ALONG_K ? row : chunk * CHUNK, k = ALONG_K ? chunk * CHUNK : row;
        next = from + (mn0 + mn) * stride_mn + k * stride_k;
        left_mn = end_mn - mn0 - mn, left_k = end_k - k;
        to = offset_of<ALONG_K>(row, chunk);
    }

    __device__ __forceinline__ void start(unsigned tile, long long stride_mn, long long stride_k) {
#pragma unroll
        for (int i = 0; i < TILE * DEPTH / CHUNK / THREADS; ++i) {
            const int on_mn = ALONG_K ? i * APART : 0, on_k = ALONG_K ? 0 : i * APART;
            const Element* from = next + on_mn * stride_mn + on_k * stride_k;
            const unsigned place = tile + to + i * APART * ROW * 16;
            const bool inside = on_mn < left_mn && on_k < left_k;
            if constexpr (WIDE) {
                const int bytes = inside ? min(ALONG_K ? left_k : left_mn, CHUNK) * (int)sizeof(Element) : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place),
                             "l"(inside ? from : next), "r"(bytes)
                             : "memory");
            } else {
                union {
                    Element x[CHUNK];
                    uint4 all;
                } held;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    const bool in = inside && j < (ALONG_K ? left_k : left_mn);
                    held.x[j] = in ? from[j * (ALONG_K ? stride_k : stride_mn)] : Element(0);
                }
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(held.all.x),
                             "r"(held.all.y), "r"(held.all.z), "r"(held.all.w)
                             : "memory");
            }
        }
        next += DEPTH * stride_k;
        left_k -= DEPTH;
    }
};

// Two by two matrices of 8 rows of 16 bytes. LOW_MN: the second one is the next eight of MN, and the third the next of k,
// as a fragment of a wants it; otherwise the other way round, as two fragments of b do.
template <bool ALONG_K, bool LOW_MN>
__device__ __forceinline__ void read_fragment(unsigned tile, int mn, int k, unsigned (&to)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (ALONG_K || sizeof(Element) == 2) {
        const int second = lane / 8 % 2, third = lane / 16;
        const int step_mn = LOW_MN ? second : third, step_k = LOW_MN ? third : second;
        const int row = ALONG_K ? mn + step_mn * 8 + lane % 8 : k + step_k * 8 + lane % 8;
        const int chunk = ALONG_K ? k / CHUNK + step_k : mn / CHUNK + step_mn;
        const unsigned from = tile + offset_of<ALONG_K>(row, chunk);
        if constexpr (ALONG_K)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(from)
                         : "memory");
        else
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                         : "r"(from)
                         : "memory");
    } else {  // ldmatrix turns pairs of bytes only, so tf32 is read number by number
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int step_mn = LOW_MN ? i % 2 : i / 2, step_k = LOW_MN ? i / 2 : i % 2;
            const int column = mn + step_mn * 8 + lane / 4, row = k + step_k * 4 + lane % 4;
            const unsigned from = tile + offset_of<false>(row, column / CHUNK) + column % CHUNK * 4;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[i]) : "r"(from) : "memory");
        }
    }
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(to[i]) : "f"(__uint_as_float(to[i])));
    }
}

__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if ELEMENT == 0
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#elif ELEMENT == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct alignas(2 * sizeof(Element)) Two {
    Element x[2];
};

extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT == 0 ? 1 : 2)
matmul_tensor_cores(
    const Element* __restrict__ a, const Element* __restrict__ b, Element* __restrict__ c, const Problem p) {
    extern __shared__ __align__(128) unsigned char shared[];  // STAGES times a tile of a and one of b
    const unsigned stages = (unsigned)__cvta_generic_to_shared(shared);
    const Tile tile = tile_at(blockIdx.x, ceil_div(p.M, TILE), ceil_div(p.N, TILE), GROUP);
    const int m0 = tile.m * TILE, n0 = tile.n * TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int m = warp / 4 * WARP_M, n = warp % 4 * WARP_N;
    const int steps = ceil_div(p.K, DEPTH);
    Copy<A_ALONG_K, A_WIDE> a_copy(p.of_a(a), m0, p.M, p.K, p.a_m, p.a_k);
    Copy<B_ALONG_K, B_WIDE> b_copy(p.of_b(b), n0, p.N, p.K, p.b_n, p.b_k);
    float sums[MMAS_M][MMAS_N][4] = {};

    // A group of copies for every step, empty past the last one, so that waiting counts the same all along.
    int slot_to = 0, slot = 0;
    auto start = [&](int step) {
        if (step < steps) {
            a_copy.start(stages + slot_to * 2 * TILE_BYTES, p.a_m, p.a_k);
            b_copy.start(stages + slot_to * 2 * TILE_BYTES + TILE_BYTES, p.b_n, p.b_k);
            slot_to = slot_to + 1 == STAGES ? 0 : slot_to + 1;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int step = 0; step < STAGES - 1; ++step) start(step);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();  // this step's tiles are there for all, and all have left those of the step before
        start(step + STAGES - 1);
        const unsigned a_tile = stages + slot * 2 * TILE_BYTES, b_tile = a_tile + TILE_BYTES;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
        for (int k = 0; k < DEPTH; k += STEP) {
            unsigned x[MMAS_M][4], y[MMAS_N / 2][4];
#pragma unroll
            for (int i = 0; i < MMAS_M; ++i) read_fragment<A_ALONG_K, true>(a_tile, m + i * 16, k, x[i]);
#pragma unroll
            for (int j = 0; j < MMAS_N / 2; ++j) read_fragment<B_ALONG_K, false>(b_tile, n + j * 16, k, y[j]);
#pragma unroll
            for (int i = 0; i < MMAS_M; ++i)
#pragma unroll
                for (int j = 0; j < MMAS_N; ++j)
                    multiply(sums[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");

#pragma unroll
    for (int i = 0; i < MMAS_M * 2; ++i) {
        const int row = m0 + m + i * 8 + lane / 4;
        if (row >= p.M) continue;
        Element* c_row = p.row_of_c(c, row);
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) {
            const int col = n0 + n + j * 8 + lane % 4 * 2;
            const Two two = {from_float(sums[i / 2][j][i % 2 * 2]), from_float(sums[i / 2][j][i % 2 * 2 + 1])};
            if (p.N % 2 == 0) {
                if (col < p.N) *reinterpret_cast<Two*>(c_row + col) = two;
            } else {
                if (col < p.N) c_row[col] = two.x[0];
                if (col + 1 < p.N) c_row[col + 1] = two.x[1];
            }
        }
    }
}
