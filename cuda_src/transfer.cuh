// M of a joined segment on its way to chain.cuh: float16, a row of it times a power of two, so that
// its largest element is in [1, 2). As operands of tf32 products, which hold what float16 does.
//
// In such a product of 8 rows of M, k = c (< 4) is row 4 c of 16 and k = 4 + c row 4 c + 1, or rows
// 4 c + 2 and 4 c + 3: so are the rows of struct Rows, and M's rows stay where they are. The
// columns of two tiles side by side likewise, n = 2 c + i being column 4 c + i, or 4 c + 2 + i: a
// lane's accumulators are four neighbours.
#pragma once

#include "chunk.cuh"

// Where a transfer's B operands are: [8 (16 rows)][8 (16 columns)][32 lanes]. Rows 4 c, 4 c + 1 of
// a lane's column of the first tile, then rows 4 c + 2, 4 c + 3, and the same of the second tile.
__device__ inline uint4* transfer_operands(float* transfers, i64 matrix) {
    return reinterpret_cast<uint4*>(transfers + matrix * head_dim * head_dim);
}

// Behind them, the power of two by which each row is to be multiplied.
__device__ inline float* transfer_scales(float* transfers, i64 matrix) {
    return transfers + (matrix * head_dim + head_dim / 2) * head_dim;
}

// 16 rows of one, from 16 * part on, as a warp has them (struct Rows), and all columns.
__device__ inline void store_transfer(const float (&rows)[head_dim / 8][4], float* transfers,
                                      i64 matrix, int part, int lane) {
    float to_unit[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = 0x1p-126f;  // passes by NaN
#pragma unroll
        for (int i = 0; i < head_dim / 4; ++i) {
            largest = fmaxf(largest, fabsf(rows[i / 2][2 * half + i % 2]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const u32 power = __float_as_uint(largest) & 0x7f800000u;
        to_unit[half] = __uint_as_float(0x7f000000u - power);  // its inverse
        if (lane % 4 == 0) {
            const int row = 16 * part + lane / 8 * 4 + lane / 4 % 2 + 2 * half;
            transfer_scales(transfers, matrix)[row] = __uint_as_float(power);
        }
    }
    // Of 16 columns this lane's is 8 (tile % 2) + lane / 4.
    const int column = lane / 4, n = column / 4 * 2 + column % 2;
    uint4* const to = transfer_operands(transfers, matrix) + part * (head_dim / 16) * 32;
#pragma unroll
    for (int tile = 0; tile < head_dim / 8; ++tile) {
        u32 words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* x = &rows[tile][2 * half];
            words[half] = movmatrix_trans(cvt_f16x2(x[0] * to_unit[half], x[1] * to_unit[half]));
        }
        const int lane_to = 4 * n + lane % 4 + tile % 2 * 16;
        reinterpret_cast<uint2*>(to + tile / 2 * 32 + lane_to)[column / 2 % 2] =
            make_uint2(words[0], words[1]);
    }
}
