// What all sources here share: elements, and the problem. ELEMENT is 0 for fp32, 1 for fp16, 2 for bf16.
// NVRTC has no cuda_fp16.h, so conversions are written out.

#if ELEMENT == 0
using Element = float;
__device__ __forceinline__ float to_float(Element x) { return x; }
__device__ __forceinline__ Element from_float(float x) { return x; }
#elif ELEMENT == 1
using Element = unsigned short;
__device__ __forceinline__ float to_float(Element x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ Element from_float(float x) {
    Element y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#else
using Element = unsigned short;
__device__ __forceinline__ float to_float(Element x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ Element from_float(float x) {
    unsigned pair;  // sm_80 converts two at a time: the second operand becomes the lower half
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    return (Element)pair;
}
#endif

#if ELEMENT
// Two numbers that lie one after the other, rounded.
__device__ __forceinline__ unsigned pair_of(float low, float high) {
    unsigned pair;
#if ELEMENT == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
#endif

// c = a @ b for each pair of matrices. Strides in elements; 0 where one matrix serves many. c has no gaps.
struct Problem {
    int M, N, K;
    int num_inner, first_batch;  // a batch is (outer, inner), and the inner index runs fastest; one for every blockIdx.y
    long long a_m, a_k, a_inner, a_outer;
    long long b_k, b_n, b_inner, b_outer;

    __device__ __forceinline__ int batch() const { return first_batch + blockIdx.y; }
    __device__ __forceinline__ const Element* of_a(const Element* a) const {
        return a + batch() / num_inner * a_outer + batch() % num_inner * a_inner;
    }
    __device__ __forceinline__ const Element* of_b(const Element* b) const {
        return b + batch() / num_inner * b_outer + batch() % num_inner * b_inner;
    }
    __device__ __forceinline__ Element* row_of_c(Element* c, int m) const {
        return c + ((long long)batch() * M + m) * N;
    }
};

__device__ __forceinline__ int ceil_div(int x, int y) { return (x + y - 1) / y; }

// Tiles run down `group` rows before they step to the next column: blocks that run at the same time then share rows of
// a and columns of b, which the L2 cache holds.
struct Tile {
    int m, n;
};

__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n, int group) {
    const int in_group = group * tiles_n;
    const int first = index / in_group * group;
    const int height = min(tiles_m - first, group);
    const int rest = index % in_group;
    return {first + rest % height, rest / height};
}
