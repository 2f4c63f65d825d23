// Beside y = act(x W^T + b) as a product: bias and ReLU on the sums' way out. Any other activation is left to the idle
// warps, which read z a tile after it was stored, while the next tile is multiplied; it is in the L2 cache still.

struct Beside {
    const Element* bias;  // or null
    const Element* z;     // (M, N), what the product stores
    Element* y;           // (M, N), z's own place where that is not kept
    static constexpr bool HAS_ROW = true, FOLLOWS = ACTIVATION > 1, LEADS = false;
    static constexpr int REGISTERS = FOLLOWS ? 72 : 40;

    __device__ __forceinline__ void await(int, int, int) const {}
    __device__ __forceinline__ void lead(int, int) const {}

    // The bias of two columns; N is even.
    __device__ __forceinline__ unsigned row_pair(int column, int N) const {
        return bias && column < N ? __ldg(reinterpret_cast<const unsigned*>(bias + column)) : 0;
    }

    // Sums of two rows: columns c and c + 1 of the first and of the second, then c + 8 and c + 9. `row`: where c's is.
    __device__ __forceinline__ void finish(float* sums, unsigned row) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 add = floats_of(pair_at(row + i * 16));
            sums[i * 4] += add.x, sums[i * 4 + 1] += add.y;
            sums[i * 4 + 2] += add.x, sums[i * 4 + 3] += add.y;
        }
        if constexpr (ACTIVATION == 1)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] = activation(sums[i]);
    }

    // Of 64 rows and 256 columns, three warps: four rows of one at a time, 16 bytes of each a thread.
    __device__ __forceinline__ void follow(int first, int first_column, int M, int N) const {
        static_assert(TILE_N == 256, "a warp's 16 bytes a thread are a tile's row");
        const int column = first_column + threadIdx.x % 32 * 8;
        if (column >= N) return;
        for (int row = first + (threadIdx.x / 32 - 1) * 4; row < min(first + 64, M); row += 12) {
            const long long at = (long long)row * N + column;
            uint4 held[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (row + i < M) held[i] = __ldcg(reinterpret_cast<const uint4*>(z + at + (long long)i * N));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (row + i >= M) continue;
                Eight f = floats_of(held[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) f.x[j] = activation(f.x[j]);
                *reinterpret_cast<uint4*>(y + at + (long long)i * N) = halves_of(f);
            }
        }
    }
};
