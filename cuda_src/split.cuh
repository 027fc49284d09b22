// Numbers as sums of two bf16, with 16 bits; and the product of a matrix of them with another.
#pragma once

#include "tile.cuh"

__device__ inline void split(float x, float y, u32& high, u32& low) {
    high = cvt_bf16x2(x, y);
    low = cvt_bf16x2(x - bf16_low(high), y - bf16_high(high));
}

// An A operand [16 x 16].
struct alignas(16) Split {
    u32 high[4], low[4];
};

// Of two accumulators side by side.
__device__ inline Split split_a(const float (&acc)[2][4]) {
    Split a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        split(acc[i / 2][i % 2 * 2], acc[i / 2][i % 2 * 2 + 1], a.high[i], a.low[i]);
    }
    return a;
}

// acc[16 x 8] += a[16 x 16] b[16 x 8], but for the product of what rounding left of both.
__device__ inline void mma_split(float (&acc)[4], const Split& a, const u32 (&high)[2],
                                 const u32 (&low)[2]) {
    mma_m16n8k16_bf16(acc, a.low, high[0], high[1]);
    mma_m16n8k16_bf16(acc, a.high, low[0], low[1]);
    mma_m16n8k16_bf16(acc, a.high, high[0], high[1]);
}
