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

constexpr int head_dim = 128;  // K = V
constexpr int core_bytes = 128;
constexpr bool use_wgmma = WGMMA;

template <bool condition, typename Then, typename Else>
struct Select {
    using type = Then;
};
template <typename Then, typename Else>
struct Select<false, Then, Else> {
    using type = Else;
};

__device__ inline float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
__device__ inline float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
__device__ inline float f16_low(u32 packed) { return cvt_f32_f16(static_cast<u16>(packed)); }
__device__ inline float f16_high(u32 packed) { return cvt_f32_f16(static_cast<u16>(packed >> 16)); }

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

// A B operand in shared memory: core matrices that are n_stride bytes apart along n, k_stride along
// k. For mma.sync `at` is where this lane points ldmatrix.x4 so that it returns n-tiles 0 and 1.
template <Major major, int n_stride, int k_stride>
struct WarpB {
    u32 at;

    __device__ WarpB(u32 tile, int lane) : at(tile) {
        // Matrices that follow each other: the compiler does not see that it is this.
        constexpr bool in_a_row = n_stride == 2 * core_bytes && k_stride == core_bytes;
        at += in_a_row ? lane * 16 : lane / 16 * n_stride + lane / 8 % 2 * k_stride + lane % 8 * 16;
    }
    __device__ WarpB(u32 base, u32 offset, int lane) : WarpB(base + offset, lane) {}
    __device__ void advance(int bytes) { at += bytes; }
};

// acc[16 x 8n] += a[16 x 16] b[16 x 8n] by a warp, A in registers.
template <Major major, int n_stride, int k_stride, int n_tiles>
__device__ inline void rs_gemm(float (&acc)[n_tiles][4], const u32 (&a)[4],
                               const WarpB<major, n_stride, k_stride>& b_tile) {
    static_assert(n_tiles % 2 == 0, "ldmatrix.x4 loads two n-tiles");
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
        u32 b[4];
        if constexpr (major == Major::K) {
            ldmatrix_x4(b, b_tile.at + n * n_stride);
        } else {
            ldmatrix_x4_trans(b, b_tile.at + n * n_stride);
        }
        mma_m16n8k16_bf16(acc[n], a, b[0], b[1]);
        mma_m16n8k16_bf16(acc[n + 1], a, b[2], b[3]);
    }
}

// The same operand for wgmma: `at` is the lower word of its descriptor; the upper is a constant.
template <Major major, int n_stride, int k_stride>
struct GroupB {
    u32 at;

    // base: a multiple of 16. Sums, where the offset and the stride are constants: two operands
    // from one base are a sum apart then.
    __device__ GroupB(u32 base, u32 offset, int)
        : at((base >> 4) + (offset >> 4) + (static_cast<u32>(k_stride >> 4) << 16)) {}
    __device__ void advance(int bytes) { at += bytes >> 4; }
    // wgmma's: start, and the stride along k, in units of 16 bytes; above them the stride along n.
    __device__ u64 descriptor() const { return static_cast<u64>(n_stride >> 4) << 32 | at; }
};

// acc[64 x 8n] += a[64 x 16] b[16 x 8n] by four warps that own 16 rows each, in the layout of the
// warp's product. Asynchronous: between gemm_begin and gemm_wait acc and a are not to be touched.
template <Major major, int n_stride, int k_stride, int n_tiles>
__device__ inline void rs_gemm(float (&acc)[n_tiles][4], const u32 (&a)[4],
                               const GroupB<major, n_stride, k_stride>& b_tile) {
    wgmma_m64k16_bf16<major == Major::N>(acc, a, b_tile.descriptor());
}

// The same of d = a b, for two tiles of columns.
template <Major major, int n_stride, int k_stride>
__device__ inline void rs_gemm_first(float (&d)[2][4], const u32 (&a)[4],
                                     const GroupB<major, n_stride, k_stride>& b_tile) {
    wgmma_m64k16_bf16_first<major == Major::N>(d, a, b_tile.descriptor());
}

// acc += a b with tf32, eight of k.
template <int n_stride, int k_stride>
__device__ inline void tf32_gemm(float (&acc)[4][4], const u32 (&a)[4],
                                 const GroupB<Major::K, n_stride, k_stride>& b_tile) {
    wgmma_m64k8_tf32(acc, a, b_tile.descriptor());
}

// Which of the two the consumers use.
template <Major major, int n_stride, int k_stride>
using ConsumerB = typename Select<use_wgmma, GroupB<major, n_stride, k_stride>,
                                  WarpB<major, n_stride, k_stride>>::type;

__device__ inline void gemm_begin() {
    if constexpr (use_wgmma) wgmma_fence();
}

__device__ inline void gemm_commit() {
    if constexpr (use_wgmma) wgmma_commit_group();
}

template <int pending>
__device__ inline void gemm_wait() {
    if constexpr (use_wgmma) wgmma_wait_group<pending>();
}

// A place in the program that these values do not cross. Behind a gemm_wait, for the accumulators
// that it is about, which the compiler does not know of; before one, for work that hides it.
template <int n_tiles>
__device__ inline void hold(float (&acc)[n_tiles][4]) {
    if constexpr (use_wgmma) {
#pragma unroll
        for (int i = 0; i < 4 * n_tiles; ++i) keep_in_order(acc[i / 4][i % 4]);
    }
}
