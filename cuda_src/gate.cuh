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

__device__ inline HeadGate head_gate(const float* A_log, int head, float lower_bound) {
    float half_slope = 0.5f * (A_log ? expf(A_log[head]) : 1.0f);
    // Inside these limits an infinite g stays infinite and a zero g stays zero: no NaN is made.
    if (half_slope < min_normal) half_slope = min_normal;
    if (half_slope > max_finite) half_slope = max_finite;
    return {half_slope, 0.5f * lower_bound * log2_e};
}

// dt_bias of a channel, finite or NaN: an infinite one would make NaN of the opposite infinite g.
__device__ inline float channel_bias(const float* dt_bias, i64 channel) {
    const float bias = dt_bias ? dt_bias[channel] : 0.0f;
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

// The A operands of a [16 x 16] lower triangle of ones, split along tokens into two [16 x 8] tf32
// halves whose columns are ordered 0 2 4 6 1 3 5 7: the order in which a lane that holds tokens
// (pair, pair + 1) offers them as B operand.
struct Triangle {
    u32 half[2][4];
};

__device__ inline Triangle triangle_of_ones(int lane) {
    const u32 one = __float_as_uint(1.0f);
    const int row = lane / 4, pair = 2 * (lane % 4);
    const u32 even = pair <= row ? one : 0, odd = pair + 1 <= row ? one : 0;
    return {{{even, one, odd, one}, {0, even, 0, odd}}};
}

// sum[16 tokens x 8 channels] = before + triangle half times two tokens' values per lane. Each
// value is split into two tf32 parts, 22 bits together, so the sum is float32 but for its last bit
// or two.
__device__ inline void add_running_sum(float (&sum)[4], const float (&before)[4],
                                       const u32 (&triangle)[4], float token0, float token1) {
    constexpr u32 tf32_bits = 0xffffe000u;
    const u32 high0 = __float_as_uint(token0) & tf32_bits;
    const u32 high1 = __float_as_uint(token1) & tf32_bits;
    mma_m16n8k8_tf32(sum, triangle, high0, high1, before);
    const float low0 = token0 - __uint_as_float(high0);
    const float low1 = token1 - __uint_as_float(high1);
    mma_m16n8k8_tf32(sum, triangle, __float_as_uint(low0), __float_as_uint(low1), sum);
}
