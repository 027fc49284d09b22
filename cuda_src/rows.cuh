// A warp's 16 rows of a state, and what belongs to them of V and O, which are [tokens x v] in
// memory and, as products with the state, [v x tokens] in registers.
//
// Fragment row r (0-7) of half h (r, or r + 8) is v = 4 (r / 2) + 2 h + r % 2. Transposed, a lane
// then holds four neighbouring v of one token: eight bytes, and four lanes a full 32-byte sector.
#pragma once

#include "chunk.cuh"

// This lane's first row of the warp's 16, as the offset of its elements; its other one is two on.
__device__ inline RowOffset state_row_offset(int lane, RowOffset row_stride = head_dim) {
    const int row = lane / 4;
    return (4 * (row / 2) + row % 2) * row_stride;
}
constexpr int state_half_offset = 2 * head_dim;

// A chunk of V or O as a lane holds it: tokens lane / 4 and lane / 4 + 8, four v each.
struct Rows {
    uint2 token[2];
};

// half_stride: elements from a token to the one eight later. num_left: rows there are from the
// lane's first on.
__device__ inline Rows load_rows(const u16* v, i64 half_stride, int num_left) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u16* four = v + half * half_stride;
        if constexpr (is_aligned) {
            rows.token[half] = ld_global_v2(four, num_left > 8 * half);
        } else {
            const bool is_there = num_left > 8 * half;
            rows.token[half] = {ld_global_pair(four, is_there), ld_global_pair(four + 2, is_there)};
        }
    }
    return rows;
}

__device__ inline void store_rows(u16* out, i64 half_stride, int num_left, const Rows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (num_left > 8 * half) {
            u16* four = out + half * half_stride;
            if constexpr (is_aligned) {
                st_global_v2(four, rows.token[half]);
            } else {
                store_pairs(four, {rows.token[half].x, rows.token[half].y});
            }
        }
    }
}

// What is so many bytes from some rows.
__device__ inline u16* beside(const u16* rows, i64 bytes) {
    return reinterpret_cast<u16*>(reinterpret_cast<i64>(rows) + bytes);
}

// From the one to the other.
__device__ inline Rows transposed(const Rows& rows) {
    Rows other;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        other.token[half].x = movmatrix_trans(rows.token[half].x);
        other.token[half].y = movmatrix_trans(rows.token[half].y);
    }
    return other;
}

// Transposed rows as they come out of, and go into, a product: [16 (v) x 8 (tokens)], twice.
__device__ inline void unpack_rows(float (&x)[2][4], const Rows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        x[half][0] = bf16_low(rows.token[half].x);
        x[half][1] = bf16_high(rows.token[half].x);
        x[half][2] = bf16_low(rows.token[half].y);
        x[half][3] = bf16_high(rows.token[half].y);
    }
}

__device__ inline Rows round_rows(const float (&o)[2][4]) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.token[half].x = cvt_bf16x2(o[half][0], o[half][1]);
        rows.token[half].y = cvt_bf16x2(o[half][2], o[half][3]);
    }
    return rows;
}

// What a product puts out for a chunk, [16 x tokens], to and from memory as it is in registers: 32
// bytes a lane.
__device__ inline void store_partial(float* partials, const float (&x)[2][4]) {
    float4* to = reinterpret_cast<float4*>(partials) + mov_tid_x() % 32 * 2;
    to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    to[1] = make_float4(x[1][0], x[1][1], x[1][2], x[1][3]);
}

__device__ inline void load_partial(float (&x)[2][4], const float* partials) {
    const float4* from = reinterpret_cast<const float4*>(partials) + mov_tid_x() % 32 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 four = from[half];
        x[half][0] = four.x;
        x[half][1] = four.y;
        x[half][2] = four.z;
        x[half][3] = four.w;
    }
}
