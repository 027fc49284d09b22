// What of a chunk is one number per token: the norms of q and k, beta, and where the finite tokens
// end. One warp to a chunk.
#pragma once

#include "chunk.cuh"

// Two tokens' numbers on a lane of the diagonal (lane % 4 == lane / 8): tokens lane / 4 and
// lane / 4 + 8. Other lanes hold something else.
__device__ inline bool on_diagonal(int lane) { return lane % 4 == lane / 8; }
__device__ inline int diagonal_lane(int token) { return 4 * (token % 8) + token % 8 / 2; }

// From the diagonal to every lane: the number of token lane % 16.
__device__ inline float from_diagonal(float2 numbers, int lane) {
    const int source = diagonal_lane(lane % 16);
    const float low = __shfl_sync(~0u, numbers.x, source);
    const float high = __shfl_sync(~0u, numbers.y, source);
    return lane % 16 < 8 ? low : high;
}

// Sums of squares of the tokens' rows of raw tiles that follow each other, exact products
// accumulated in float32: the diagonals of x x^T. Tiles side by side, so that one's latency hides
// another's. lane_address: raw_lane_address of the first.
template <int num_tiles>
__device__ inline void sums_of_squares(float2 (&sums)[num_tiles], u32 lane_address, int lane) {
    float low[num_tiles][4] = {}, high[num_tiles][4] = {};
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
#pragma unroll
        for (int tile = 0; tile < num_tiles; ++tile) {
            u32 a[4];
            ldmatrix_x4(a, (lane_address ^ raw_channels(k16)) + tile * raw_tile);
            // Eight channels each, whose operands are registers as they were loaded.
            mma_m16n8k8_bf16(low[tile], a[0], a[1], a[0]);
            mma_m16n8k8_bf16(high[tile], a[0], a[1], a[1]);
            mma_m16n8k8_bf16(low[tile], a[2], a[3], a[2]);
            mma_m16n8k8_bf16(high[tile], a[2], a[3], a[3]);
        }
    }
    const bool odd = lane / 4 % 2;
#pragma unroll
    for (int tile = 0; tile < num_tiles; ++tile) {
        sums[tile] = {odd ? low[tile][1] : low[tile][0], odd ? high[tile][3] : high[tile][2]};
    }
}

// Up to the highest sum of squares the factors and their products are finite, whatever the gate and
// with a state of up to 2^100. From the lowest on q e^G lift keeps what counts, and a norm of k is
// no number so large that U times it overflows.
constexpr float highest_sum = 0x1p24f, lowest_q_sum = 0x1p-24f, lowest_k_sum = 0x1p-100f;

// False for NaN.
__device__ inline bool is_ordinary(float sum, float lowest) {
    return sum >= lowest && sum < highest_sum;
}

// Whether all rows are ordinary, or zero. A sum of zero alone does not say that a row is.
__device__ inline bool all_ordinary(const u16 (&x)[chunk][head_dim], float2 sums, float lowest,
                                    int lane) {
    const bool high = sums.x < highest_sum && sums.y < highest_sum;
    if (!__all_sync(~0u, !on_diagonal(lane) || high)) return false;
    const bool low_x = on_diagonal(lane) && !(sums.x >= lowest);
    const bool low_y = on_diagonal(lane) && !(sums.y >= lowest);
    const u32 low = __ballot_sync(~0u, low_x), low_8 = __ballot_sync(~0u, low_y);
    if ((low | low_8) == 0) return true;
    const int row = lane / 2;
    u32 bits = 0;
    if ((row < 8 ? low : low_8) >> diagonal_lane(row) & 1) {
        const u32* pairs = reinterpret_cast<const u32*>(&x[row][lane % 2 * 64]);
#pragma unroll 4
        for (int i = 0; i < 32; ++i) bits |= pairs[i] & 0x7fff7fffu;
    }
    return __all_sync(~0u, bits == 0);
}

__device__ inline float norm(float sum_of_squares, float epsilon) {
    return rsqrtf(sum_of_squares + epsilon);
}

// A scale whose product with a norm of q may be subnormal, and what then helps: rows of q as short
// as lowest_q_sum lets them be.
constexpr int tiny_log2 = -12;
__device__ inline bool is_tiny(float scale) { return scale != 0.0f && fabsf(scale) < 0x1p-40f; }

// For rows of any finite size: brings those that are not ordinary to a largest element in [1, 2)
// times 2^log2 by a power of two, in place, or nearer to it by 2^70, and returns the norms of the
// rows as they are then: 0 for rows that hold anything not finite.
__device__ inline float2 rescale(u16 (&x)[chunk][head_dim], float2 sums, float lowest, int log2,
                                 int lane) {
    const u32 low = __ballot_sync(~0u, is_ordinary(sums.x, lowest));
    const u32 high = __ballot_sync(~0u, is_ordinary(sums.y, lowest));
    const int row = lane / 2;
    const bool ordinary = (row < 8 ? low : high) >> diagonal_lane(row) & 1;

    // A lane to half a row.
    u32* pairs = reinterpret_cast<u32*>(&x[row][lane % 2 * 64]);
    u32 largest = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
        largest = max(largest, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    const int exponent = max(1, static_cast<int>(largest >> 7));  // of the largest, biased by 127
    const float power =
        __int_as_float((ordinary ? 127 : min(max(1, 254 - exponent + log2), 127 + 70)) << 23);
    if (!ordinary) {
#pragma unroll 4
        for (int i = 0; i < 32; ++i) {
            pairs[i] = cvt_bf16x2(bf16_low(pairs[i]) * power, bf16_high(pairs[i]) * power);
        }
    }
    __syncwarp();

    float2 sums_scaled[1];
    sums_of_squares(sums_scaled, raw_lane_address(x, lane), lane);
    const float2 scaled = sums_scaled[0];
    const float power_low = __shfl_sync(~0u, power, 2 * (lane / 4));
    const float power_high = __shfl_sync(~0u, power, 2 * (lane / 4 + 8));
    // Not finite stays infinite or NaN; the norm of either is set to 0.
    const float norm_low = norm(scaled.x, 1e-6f * power_low * power_low);
    const float norm_high = norm(scaled.y, 1e-6f * power_high * power_high);
    return {scaled.x <= max_finite ? norm_low : 0.0f, scaled.y <= max_finite ? norm_high : 0.0f};
}

// The first of the chunk's tokens that has a NaN in x, or 16.
__device__ inline int first_nan_token(const u16 (&x)[chunk][head_dim], int lane) {
    const u32* pairs = reinterpret_cast<const u32*>(&x[lane / 2][lane % 2 * 64]);
    bool nan = false;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
        const float low = bf16_low(pairs[i]), high = bf16_high(pairs[i]);
        nan |= low != low || high != high;
    }
    const u32 ballot = __ballot_sync(~0u, nan);
    return ballot ? (__ffs(ballot) - 1) / 2 : chunk;
}
