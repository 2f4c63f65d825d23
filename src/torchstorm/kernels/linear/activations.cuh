// Activations and their gradients of fp32 numbers, as good as results in fp16 and bf16 need; the formulas are those of
// elementwise/operations_triton.py. ACTIVATION: 0 none, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu. NaN passes through.

__device__ __forceinline__ float power_of_e(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + power_of_e(-x)); }

// (1 + erf(x / sqrt 2)) / 2 and e^(-x^2 / 2): off by 8e-8 at most (Abramowitz and Stegun, 7.1.26).
__device__ __forceinline__ float gelu_share(float x, float& bell) {
    const float t = reciprocal(1.0f + 0.231641888f * fabsf(x));  // 0.3275911 / sqrt 2
    bell = power_of_e(-0.5f * x * x);
    float tail = 0.5307027145f * t - 0.7265760135f;
    tail = tail * t + 0.7107068705f;
    tail = tail * t - 0.142248368f;
    tail = (tail * t + 0.127414796f) * t * bell;
    return x < 0.0f ? tail : 1.0f - tail;
}

__device__ __forceinline__ float activation(float x) {
    if constexpr (ACTIVATION == 1) return x < 0.0f ? 0.0f : x;
    if constexpr (ACTIVATION == 2) {
        float bell;
        return x * gelu_share(x, bell);
    }
    if constexpr (ACTIVATION == 3) return x * sigmoid(1.5957691216057308f * x * (1.0f + 0.044715f * x * x));
    if constexpr (ACTIVATION == 4) return x * sigmoid(x);
    return x;
}

// dy act'(x), of x or, for ReLU, of y.
__device__ __forceinline__ float activation_gradient(float dy, float x) {
    if constexpr (ACTIVATION == 1) return x <= 0.0f ? 0.0f : dy;
    if constexpr (ACTIVATION == 2) {
        float bell;
        const float share = gelu_share(x, bell);
        return dy * (share + x * 0.3989422804014327f * bell);
    }
    if constexpr (ACTIVATION == 3) {
        const float near = x < -100.0f ? -100.0f : x > 100.0f ? 100.0f : x;  // where x^2 is far from overflow
        const float square = near * near;
        // s (1 - s) from e^-|2 u|: 1 - s of an s near 1 is all rounding, and is multiplied by up to x^3.
        const float small = power_of_e(-fabsf(1.5957691216057308f * near * (1.0f + 0.044715f * square)));
        const float large = reciprocal(1.0f + small);
        const float less = small * large;
        const float first = 1.5957691216057308f + 0.2140644488f * square;  // 3 * 0.044715 * 1.595...
        return dy * ((x < 0.0f ? less : large) + x * (less * large) * first);
    }
    if constexpr (ACTIVATION == 4) {
        const float s = sigmoid(x);
        return dy * s * (1.0f + x * (1.0f - s));
    }
    return dy;
}

struct Eight {
    float x[8];
};

__device__ __forceinline__ float2 floats_of(unsigned pair) {
    return {to_float(Element(pair & 0xFFFF)), to_float(Element(pair >> 16))};
}

__device__ __forceinline__ Eight floats_of(uint4 from) {
    const float2 a = floats_of(from.x), b = floats_of(from.y), c = floats_of(from.z), d = floats_of(from.w);
    return {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
}

__device__ __forceinline__ uint4 halves_of(const Eight& f) {
    return {pair_of(f.x[0], f.x[1]), pair_of(f.x[2], f.x[3]), pair_of(f.x[4], f.x[5]), pair_of(f.x[6], f.x[7])};
}
