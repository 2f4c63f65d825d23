// What kernels for Hopper ask of it: barriers in shared memory, for copies that arrive there and for other blocks of a
// cluster. Barriers are named by their address in shared memory. CLUSTER is the number of blocks of a cluster.

__device__ __forceinline__ unsigned place_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread has begun known to other blocks and to the copy engine.
__device__ __forceinline__ void barriers_begin() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Arrives, and has the barrier wait for so many bytes, too.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of a block of the cluster.
__device__ __forceinline__ void barrier_arrive(unsigned barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A launch without clusters knows no instructions for them.
__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A count in shared memory, for other threads of the block, with all that was done before it.
__device__ __forceinline__ void tell(unsigned count, unsigned number) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(count), "r"(number) : "memory");
}

__device__ __forceinline__ void await_told(unsigned count, unsigned number) {
    for (;;) {
        unsigned found;
        asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(found) : "r"(count) : "memory");
        if (found >= number) return;
        __nanosleep(100);
    }
}

// Four bytes of shared memory.
__device__ __forceinline__ void place_pair(unsigned at, unsigned pair) {
    asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
}

__device__ __forceinline__ unsigned pair_at(unsigned at) {
    unsigned pair;
    asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(pair) : "r"(at) : "memory");
    return pair;
}
