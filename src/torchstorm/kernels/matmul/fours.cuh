// Tiles of an operand brought to shared memory four elements at a time, as fp32 and with k as the slow dimension,
// whichever way they lie in memory. MN stands for M in a and for N in b.

constexpr int PAD = 4;  // keeps rows of shared memory aligned to 16 bytes, and a turned four out of each other's banks

struct alignas(4 * sizeof(Element)) Four {
    Element x[4];
};

// ALONG_K: fours lie along k. WIDE: a four is one read, which it is where strides, sizes and the address are multiples.
template <bool ALONG_K, bool WIDE, int SIZE, int DEPTH, int THREADS>
struct Fours {
    static constexpr int COUNT = SIZE * DEPTH / 4 / THREADS;
    static constexpr int ROW = ALONG_K ? DEPTH / 4 : SIZE / 4;  // fours of a row, whatever the rows are
    static_assert(COUNT * 4 * THREADS == SIZE * DEPTH, "every thread brings the same number of fours");
    static_assert(THREADS % ROW == 0, "a thread's fours lie in one column");
    static constexpr int APART = THREADS / ROW;  // rows between a thread's fours

    Four held[COUNT];
    const Element* next;  // this thread's first element of the next tile
    int mn, k;            // of the same, in the tile
    int left_mn, left_k;  // up to the matrix's end

    __device__ __forceinline__ Fours(
        const Element* from, int mn0, int end_mn, int end_k, long long stride_mn, long long stride_k) {
        const int row = threadIdx.x / ROW, column = threadIdx.x % ROW * 4;
        mn = ALONG_K ? row : column, k = ALONG_K ? column : row;
        next = from + (mn0 + mn) * stride_mn + k * stride_k;
        left_mn = end_mn - mn0 - mn, left_k = end_k - k;
    }

    __device__ __forceinline__ void fetch(long long stride_mn, long long stride_k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int on_mn = ALONG_K ? i * APART : 0, on_k = ALONG_K ? 0 : i * APART;
            const Element* from = next + on_mn * stride_mn + on_k * stride_k;
            if constexpr (WIDE) {
                held[i] = Four{};
                if (on_mn < left_mn && on_k < left_k) held[i] = *reinterpret_cast<const Four*>(from);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const bool inside = on_mn + (ALONG_K ? 0 : j) < left_mn && on_k + (ALONG_K ? j : 0) < left_k;
                    held[i].x[j] = inside ? from[j * (ALONG_K ? stride_k : stride_mn)] : Element(0);
                }
            }
        }
        next += DEPTH * stride_k;
        left_k -= DEPTH;
    }

    __device__ __forceinline__ void put(float (*tile)[SIZE + PAD]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int mn = this->mn + (ALONG_K ? i * APART : 0), k = this->k + (ALONG_K ? 0 : i * APART);
            float4 four = make_float4(
                to_float(held[i].x[0]), to_float(held[i].x[1]), to_float(held[i].x[2]), to_float(held[i].x[3]));
            if constexpr (ALONG_K) {
                tile[k][mn] = four.x;
                tile[k + 1][mn] = four.y;
                tile[k + 2][mn] = four.z;
                tile[k + 3][mn] = four.w;
            } else {
                *reinterpret_cast<float4*>(&tile[k][mn]) = four;
            }
        }
    }
};

__device__ __forceinline__ float4 four_of(const float* from) { return *reinterpret_cast<const float4*>(from); }

// Four results of a row; at once where rows are whole fours.
__device__ __forceinline__ void store_four(Element* c_row, int n, int N, const float* results) {
    if (N % 4 == 0) {
        Four four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.x[j] = from_float(results[j]);
        if (n < N) *reinterpret_cast<Four*>(c_row + n) = four;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (n + j < N) c_row[n + j] = from_float(results[j]);
    }
}
