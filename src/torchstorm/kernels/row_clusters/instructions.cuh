// Bulk copies to shared memory, pairs sent to other blocks of a cluster, and numbers in 16 bytes. FORMAT is 0 for fp32, 1
// for fp16, 2 for bf16. NVRTC has no cuda_fp16.h.

// Copies whole 16 bytes to shared memory; they count at the barrier.
__device__ __forceinline__ void fetch(void* to, const void* from, int bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     place_of(to)),
                 "l"(from), "r"(bytes), "r"(place_of(barrier))
                 : "memory");
}

// Writes to the same place in a block of the cluster; the 8 bytes count at the same barrier there.
__device__ __forceinline__ void send(float2* to, unsigned long long* barrier, int rank, float2 pair) {
    asm volatile(
        "{\n.reg .b32 to, barrier;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [barrier];\n}" ::"r"(
            place_of(to)),
        "r"(place_of(barrier)), "r"(rank), "f"(pair.x), "f"(pair.y)
        : "memory");
}

// What was read from memory before is read again: shared memory is nearer than registers that spill.
__device__ __forceinline__ void forget() { asm volatile("" ::: "memory"); }

// What is written once should not push out of L2 what is read twice.
__device__ __forceinline__ void store_once(uint4* to, uint4 chunk) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z),
                 "r"(chunk.w)
                 : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of two pairs of halves; numbers rather than NaN.
template <int FORMAT>
__device__ __forceinline__ unsigned larger_pair(unsigned x, unsigned y) {
    unsigned larger;
    if constexpr (FORMAT == 1)
        asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
}

template <int FORMAT>
constexpr int NUMBERS = FORMAT == 0 ? 4 : 8;  // in 16 bytes

template <int FORMAT>
__device__ __forceinline__ void unpack_pair(unsigned pair, float& low, float& high) {
    if constexpr (FORMAT == 1) {
        asm("{\n.reg .b16 low, high;\n"
            "mov.b32 {low, high}, %2;\n"
            "cvt.f32.f16 %0, low;\n"
            "cvt.f32.f16 %1, high;\n}"
            : "=f"(low), "=f"(high)
            : "r"(pair));
    } else {
        low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
    }
}

template <int FORMAT>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    unsigned pair;
    if constexpr (FORMAT == 1)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
