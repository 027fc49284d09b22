// The tile vocabulary: fragments in registers, core matrices in shared memory, and the one product
// that all of the kernel's matrix work goes through.
//
// A fragment is a matrix spread over a warp the way mma.m16n8k16 wants it. With row = lane / 4 and
// pair = 2 (lane % 4) a lane holds, in this order,
//   of an accumulator [16 x 8], as float[4]:
//     (row, pair), (row, pair + 1), (row + 8, pair), (row + 8, pair + 1);
//   of an A operand [16 x 16], as u32[4], the bf16 pairs that begin at
//     (row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8).
// So two neighbouring accumulators, rounded and packed, are an A operand: no data moves.
//
// A core matrix is 8 x 8 bf16 in 128 contiguous bytes, row by row. One 32-bit register per lane
// stored at 4 * lane is a core matrix, without bank conflicts; ldmatrix reads it back, plain or
// transposed, without bank conflicts; and wgmma takes it as an operand without swizzle.
#pragma once

#include "ptx.cuh"

constexpr int core_bytes = 128;

__device__ inline float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
__device__ inline float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Two accumulators side by side, [16 x 16], rounded to an A operand.
__device__ inline void pack_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = cvt_bf16x2(left[0], left[1]);
    a[1] = cvt_bf16x2(left[2], left[3]);
    a[2] = cvt_bf16x2(right[0], right[1]);
    a[3] = cvt_bf16x2(right[2], right[3]);
}

// Two neighbouring elements per lane into a core matrix.
__device__ inline void put_core(u16 (&core)[64], float x0, float x1, int lane) {
    reinterpret_cast<u32*>(core)[lane] = cvt_bf16x2(x0, x1);
}

// How a B operand [16 (k) x 8n] lies in core matrices: rows of n (k contiguous) or rows of k.
enum class Major { K, N };

// Where this lane points ldmatrix.x4 so that it returns two B operands, n-tiles 0 and 1.
template <int n_stride, int k_stride>
__device__ inline u32 b_lane_offset(int lane) {
    return (lane / 16) * n_stride + (lane / 8 % 2) * k_stride + (lane % 8) * 16;
}

// acc[16 x 8n] += a[16 x 16] b[16 x 8n]: A in registers, B in shared memory as core matrices that
// are n_stride bytes apart along n. b_address = tile address + b_lane_offset. The only matrix
// product with a register operand: a wgmma form would replace this body alone.
template <Major major, int n_stride, int n_tiles>
__device__ inline void rs_gemm(float (&acc)[n_tiles][4], const u32 (&a)[4], u32 b_address) {
    static_assert(n_tiles % 2 == 0, "ldmatrix.x4 loads two n-tiles");
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
        u32 b[4];
        if constexpr (major == Major::K) {
            ldmatrix_x4(b, b_address + n * n_stride);
        } else {
            ldmatrix_x4_trans(b, b_address + n * n_stride);
        }
        mma_m16n8k16_bf16(acc[n], a, b[0], b[1]);
        mma_m16n8k16_bf16(acc[n + 1], a, b[2], b[3]);
    }
}
