// The gate: log2 of a channel's decay at a token, and its running sum over a chunk.
//
//   a = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) * log2(e)
//   sigmoid(x) = 0.5 tanh(0.5 x) + 0.5
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

constexpr float log2_e = 1.4426950408889634f;
constexpr float max_finite = 3.402823466e38f, min_normal = 1.175494351e-38f;

// What of the gate is one number per head.
struct HeadGate {
    float half_slope;  // exp(A_log) / 2
    float half_bound;  // lower_bound * log2(e) / 2
};

__device__ inline HeadGate head_gate(float A_log, float lower_bound) {
    float half_slope = 0.5f * expf(A_log);
    // Inside these limits an infinite g stays infinite and a zero g stays zero: no NaN is made.
    if (half_slope < min_normal) half_slope = min_normal;
    if (half_slope > max_finite) half_slope = max_finite;
    return {half_slope, 0.5f * lower_bound * log2_e};
}

// dt_bias of a channel, finite or NaN: an infinite one would make NaN of the opposite infinite g.
__device__ inline float channel_bias(float bias) {
    if (bias > max_finite) return max_finite;
    if (bias < -max_finite) return -max_finite;
    return bias;
}

// log2 of the decay. The sum comes first, as in the formula: at A_log = 10, a product each for g
// and bias would miss the sigmoid by 2e-3 where they cancel.
__device__ inline float log2_decay(float g, float bias, const HeadGate& gate) {
    const float t = tanh_approx((g + bias) * gate.half_slope);
    return fmaf(t, gate.half_bound, gate.half_bound);
}

// The running sum over a chunk's tokens is a product with a lower triangle of ones. Decays go in as
// float16, 2^12 times as large (the triangle holds 2^-12): at most 29,548 in size, and rounded by
// 2^-11 of themselves at most, down to 2^-26. That is too little to count beside the bf16 factors:
// emulated, it takes the error of out from 3.94e-3 to 3.96e-3 (rand), and slow gates see nothing.
constexpr float sum_scale = 0x1p12f;

// The A operand of the triangle [16 x 16].
struct Triangle {
    u32 frag[4];
};

__device__ inline Triangle triangle_of_ones(int lane) {
    constexpr u32 low = 0x0c00, high = low << 16;  // 2^-12
    const int row = lane / 4, pair = 2 * (lane % 4);
    const u32 diagonal = (pair <= row ? low : 0) | (pair + 1 <= row ? high : 0);
    // Through a shuffle, or the compiler makes the constants anew for each product: 12 instructions
    // a chunk.
    return {{diagonal, __shfl_sync(~0u, high | low, lane), __shfl_sync(~0u, 0u, lane),
             __shfl_sync(~0u, diagonal, lane)}};
}
