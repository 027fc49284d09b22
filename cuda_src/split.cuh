// Numbers as sums of two bf16, with 16 bits, as operands of products that join.cu makes.
//
// In such a product k = 2 c + i of 16 is row or column 4 c + i of a state, and k = 8 + 2 c + i is
// 4 c + 2 + i (i = 0, 1; c < 4): so are the rows of struct Rows, and M's rows stay where they are.
// The columns of two tiles side by side likewise: a lane's accumulators are four neighbours.
#pragma once

#include "chunk.cuh"
#include "tile.cuh"

__device__ inline void split(float x, float y, u32& high, u32& low) {
    high = cvt_bf16x2(x, y);
    low = cvt_bf16x2(x - bf16_low(high), y - bf16_high(high));
}

// An A operand [16 x 16].
struct alignas(16) Split {
    u32 high[4], low[4];
};

// A B operand [16 x 8].
struct alignas(16) SplitB {
    u32 high[2], low[2];
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

// A sum of products, each of three bf16 ones: low times low, 2^-16 of it, is left out. The low ones
// have accumulators of their own, so that only two of the three wait for each other.
struct SplitSum {
    float high[4] = {}, low[4] = {};

    __device__ void add(const Split& a, const SplitB& b) {
        mma_m16n8k16_bf16(high, a.high, b.high[0], b.high[1]);
        mma_m16n8k16_bf16(low, a.low, b.high[0], b.high[1]);
        mma_m16n8k16_bf16(low, a.high, b.low[0], b.low[1]);
    }
    __device__ float at(int i) const { return high[i] + low[i]; }
};

// Where a transfer's B operands [16 x 8] are: [8 (16 rows)][8 (16 columns)][2][32 lanes].
__device__ inline SplitB* transfer_operands(float* transfers, i64 matrix, int k16) {
    return reinterpret_cast<SplitB*>(transfers + matrix * head_dim * head_dim) +
           k16 * (head_dim / 8) * 32;
}

// A warp's 16 rows of one, as struct Rows has them, and all columns.
__device__ inline void store_transfer(const float (&rows)[head_dim / 8][4], SplitB* to, int lane) {
    // Of 16 columns this lane's is 8 (tile % 2) + lane / 4.
    const int column = lane / 4, n = column / 4 * 2 + column % 2;
    to += column / 2 % 2 * 32 + 4 * n + lane % 4;
#pragma unroll
    for (int tile = 0; tile < head_dim / 8; ++tile) {
        SplitB b;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 high, low;
            split(rows[tile][2 * half], rows[tile][2 * half + 1], high, low);
            b.high[half] = movmatrix_trans(high);
            b.low[half] = movmatrix_trans(low);
        }
        to[tile / 2 * 2 * 32 + tile % 2 * 16] = b;
    }
}
