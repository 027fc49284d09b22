// The gate: log2 of a channel's decay at a token, and its running sum over a chunk.
//
//   a = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) * log2(e)
//   sigmoid(x) = 0.5 tanh(0.5 x) + 0.5
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

constexpr float log2_e = 1.4426950408889634f;

// What of the gate is one number per head.
struct HeadGate {
    float half_slope;  // exp(A_log) / 2
    float half_bound;  // lower_bound * log2(e) / 2
};

__device__ inline HeadGate head_gate(const float* A_log, int head, float lower_bound) {
    float half_slope = 0.5f * (A_log ? expf(A_log[head]) : 1.0f);
    // Inside these limits an infinite g stays infinite and a zero g stays zero: no NaN is made.
    if (half_slope < 1e-37f) half_slope = 1e-37f;
    if (half_slope > 1e37f) half_slope = 1e37f;
    return {half_slope, 0.5f * lower_bound * log2_e};
}

// log2 of the decay; half_shift = half_slope * dt_bias of the channel.
__device__ inline float log2_decay(float g, const HeadGate& gate, float half_shift) {
    const float t = tanh_approx(fmaf(g, gate.half_slope, half_shift));
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

// sum[16 tokens x 8 channels] += triangle half times two tokens' values per lane. Each value is
// split into two tf32 parts, 22 bits together, so the sum is float32 but for its last bit or two.
__device__ inline void add_running_sum(float (&sum)[4], const u32 (&triangle)[4], float token0,
                                       float token1) {
    constexpr u32 tf32_bits = 0xffffe000u;
    const u32 high0 = __float_as_uint(token0) & tf32_bits;
    const u32 high1 = __float_as_uint(token1) & tf32_bits;
    mma_m16n8k8_tf32(sum, triangle, high0, high1);
    const float low0 = token0 - __uint_as_float(high0);
    const float low1 = token1 - __uint_as_float(high1);
    mma_m16n8k8_tf32(sum, triangle, __float_as_uint(low0), __float_as_uint(low1));
}
