// Consumers: 16 rows of the state, [16 (v) x 128 (k)], in one warp's float32 registers.
//
//   [KS | QS] = S [k e^G; q e^G]^T
//   W = diag(beta) (V - KS)      U = W inverse^T      O = diag(o_scale) (QS + U P^T)
//   S = S diag(e^G_last) + U^T k_out
// all with v as rows, so S, W and U are A operands as they come out of the product before.
//
// Fragment row r (0-7) of half h (r, or r + 8) is v = 4 (r / 2) + 2 h + r % 2. Transposed, a lane
// then holds four neighbouring v of one token: eight bytes, and four lanes a full 32-byte sector.
#pragma once

#include "chunk.cuh"

constexpr int k_tiles = head_dim / 8;

enum class StateKind { None = 0, BF16 = 1, FP32 = 2 };

// Offset of this lane's first element of tile 0 in the warp's [16, 128] rows, and to its other
// half.
__device__ inline int state_lane_offset(int lane) {
    const int row = lane / 4;
    return (4 * (row / 2) + row % 2) * head_dim + 2 * (lane % 4);
}
constexpr int state_half_offset = 2 * head_dim;

__device__ inline void load_state(float (&state)[k_tiles][4], const void* rows, StateKind kind,
                                  int lane) {
    const int offset = state_lane_offset(lane);
#pragma unroll
    for (int tile = 0; tile < k_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = offset + half * state_half_offset + 8 * tile;
            float2 s = make_float2(0.0f, 0.0f);
            if (kind == StateKind::FP32) {
                s = *reinterpret_cast<const float2*>(static_cast<const float*>(rows) + at);
            } else if (kind == StateKind::BF16) {
                const u32 packed =
                    *reinterpret_cast<const u32*>(static_cast<const u16*>(rows) + at);
                s = make_float2(bf16_low(packed), bf16_high(packed));
            }
            state[tile][2 * half] = s.x;
            state[tile][2 * half + 1] = s.y;
        }
    }
}

__device__ inline void store_state(const float (&state)[k_tiles][4], void* rows, StateKind kind,
                                   int lane) {
    const int offset = state_lane_offset(lane);
#pragma unroll
    for (int tile = 0; tile < k_tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = offset + half * state_half_offset + 8 * tile;
            const float x = state[tile][2 * half], y = state[tile][2 * half + 1];
            if (kind == StateKind::FP32) {
                *reinterpret_cast<float2*>(static_cast<float*>(rows) + at) = make_float2(x, y);
            } else if (kind == StateKind::BF16) {
                *reinterpret_cast<u32*>(static_cast<u16*>(rows) + at) = cvt_bf16x2(x, y);
            }
        }
    }
}

// A chunk of V or O as a lane holds it: tokens lane / 4 and lane / 4 + 8, four v each.
struct Rows {
    uint2 token[2];
};

// half_stride: elements from a token to the one eight later.
__device__ inline void load_rows(Rows& rows, const u16* v, i64 half_stride, int num_tokens,
                                 int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.token[half] = make_uint2(0, 0);
        if (lane / 4 + 8 * half < num_tokens) {
            rows.token[half] = *reinterpret_cast<const uint2*>(v + half * half_stride);
        }
    }
}

__device__ inline void store_rows(u16* out, i64 half_stride, int num_tokens, const Rows& rows,
                                  int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (lane / 4 + 8 * half < num_tokens) {
            *reinterpret_cast<uint2*>(out + half * half_stride) = rows.token[half];
        }
    }
}

// For each of the lane's two rows of v, the chunk's first token at which x is not finite as bf16,
// or 16.
__device__ inline void first_bad_tokens(int (&first)[2], const float (&x)[2][4], int lane) {
    constexpr float rounds_to_infinity = 0x1.ffp127f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int token = chunk;
#pragma unroll
        for (int i = 3; i >= 0; --i) {
            if (!(fabsf(x[i / 2][2 * half + i % 2]) < rounds_to_infinity)) {
                token = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
            }
        }
        token = min(token, __shfl_xor_sync(~0u, token, 1));
        first[half] = min(token, __shfl_xor_sync(~0u, token, 2));
    }
}

// x = 0 from the first bad token on.
__device__ inline void clear_from(float (&x)[2][4], const int (&first_bad)[2], int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (token >= first_bad[i % 4 / 2]) x[i / 4][i % 4] = 0.0f;
    }
}

// One chunk. Returns O; NaN from the first token on that is not finite, and in the state. Calls
// load_next() once v is in use no more, to put the next chunk's rows there.
template <typename LoadNext>
__device__ inline Rows step(float (&state)[k_tiles][4], const Stage& stage, const Rows& v,
                            int num_tokens, int lane, const LoadNext& load_next) {
    constexpr int kq_k_stride = 4 * core_bytes;
    const float nan = __int_as_float(0x7fffffff);
    const int pair = 2 * (lane % 4);

    float kq[4][4] = {};  // KS of tokens 0-7, 8-15, QS of tokens 0-7, 8-15
    const u32 kq_address =
        shared_address(stage.kq_in.core) + b_lane_offset<core_bytes, kq_k_stride>(lane);
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        u32 a[4];
        pack_a(a, state[2 * k16], state[2 * k16 + 1]);
        rs_gemm<Major::K, core_bytes>(kq, a, kq_address + k16 * 2 * kq_k_stride);
    }

    float w[2][4];
    float sum = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 beta = *reinterpret_cast<const float2*>(&stage.beta[8 * half + pair]);
        const u32 v_low = movmatrix_trans(v.token[half].x);
        const u32 v_high = movmatrix_trans(v.token[half].y);
        w[half][0] = beta.x * (bf16_low(v_low) - kq[half][0]);
        w[half][1] = beta.y * (bf16_high(v_low) - kq[half][1]);
        w[half][2] = beta.x * (bf16_low(v_high) - kq[half][2]);
        w[half][3] = beta.y * (bf16_high(v_high) - kq[half][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += fabsf(w[half][i]);
    }

    load_next();

    // A product over tokens would carry one token's NaN to all of them. The rare chunk that has one
    // is worked as if it ended before it. Rare is also a chunk whose U could overflow: the
    // inverse's entries are below 2^14.
    const int num_finite = stage.num_finite;
    const bool rare = __any_sync(~0u, !(sum < 0x1p100f)) || num_finite < num_tokens;
    int first_bad[2] = {chunk, chunk};
    if (rare) {
        first_bad_tokens(first_bad, w, lane);
        if (num_finite < num_tokens) {
            first_bad[0] = min(first_bad[0], num_finite);
            first_bad[1] = min(first_bad[1], num_finite);
        }
        clear_from(w, first_bad, lane);
    }

    u32 frag_w[4], frag_u[4];
    pack_a(frag_w, w[0], w[1]);
    float u[2][4] = {};
    const int square_offset = b_lane_offset<2 * core_bytes, core_bytes>(lane);
    rs_gemm<Major::K, 2 * core_bytes>(u, frag_w,
                                      shared_address(stage.inverse.core) + square_offset);
    if (rare) {
        int first_overflow[2];
        first_bad_tokens(first_overflow, u, lane);
        first_bad[0] = min(first_bad[0], first_overflow[0]);
        first_bad[1] = min(first_bad[1], first_overflow[1]);
        clear_from(u, first_bad, lane);
    }
    pack_a(frag_u, u[0], u[1]);

#pragma unroll
    for (int tile = 0; tile < k_tiles; ++tile) {
        const float2 decay = *reinterpret_cast<const float2*>(&stage.decay[8 * tile + pair]);
        state[tile][0] *= decay.x;
        state[tile][1] *= decay.y;
        state[tile][2] *= decay.x;
        state[tile][3] *= decay.y;
    }
    rs_gemm<Major::N, 2 * core_bytes>(
        state, frag_u,
        shared_address(stage.k_out.core) + b_lane_offset<2 * core_bytes, core_bytes>(lane));

    float o[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i / 4][i % 4] = kq[2 + i / 4][i % 4];
    rs_gemm<Major::K, 2 * core_bytes>(o, frag_u, shared_address(stage.p.core) + square_offset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 scale = *reinterpret_cast<const float2*>(&stage.o_scale[8 * half + pair]);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[half][i] *= i % 2 ? scale.y : scale.x;
    }

    if (rare) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = 8 * (i / 4) + pair + i % 2;
            if (token >= first_bad[i % 4 / 2]) o[i / 4][i % 4] = nan;
        }
#pragma unroll
        for (int i = 0; i < 4 * k_tiles; ++i) {
            if (first_bad[i % 4 / 2] < chunk) state[i / 4][i % 4] = nan;
        }
    }

    Rows out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        out.token[half].x = movmatrix_trans(cvt_bf16x2(o[half][0], o[half][1]));
        out.token[half].y = movmatrix_trans(cvt_bf16x2(o[half][2], o[half][3]));
    }
    return out;
}

// A consumer's life: its 16 rows of the state, through all chunks.
__device__ inline void run_recurrence(Shared& smem, const u16* v, u16* out,
                                      const void* initial_state, StateKind initial_kind,
                                      void* final_state, StateKind final_kind, int num_heads) {
    const int warp = threadIdx.x / 32 - num_factor_warps - num_solvers, lane = threadIdx.x % 32;
    const Item& item = smem.item;
    const i64 half_stride = static_cast<i64>(num_heads) * head_dim * (chunk / 2);
    // Of this lane's rows in v and out.
    i64 offset = (item.begin * num_heads + item.head) * head_dim + lane / 4 * (half_stride / 8) +
                 item.part * v_rows + 16 * warp + 4 * (lane % 4);

    // Worked out anew from shared memory and tid for each use: as registers through the loop, these
    // addresses would spill.
    const auto state_rows = [&](const void* base, StateKind kind) {
        const int first_row =
            smem.item.part * v_rows + 16 * (mov_tid_x() / 32 - num_factor_warps - num_solvers);
        const i64 matrix = smem.item.sequence * num_heads + smem.item.head;
        const i64 element = (matrix * head_dim + first_row) * head_dim;
        return static_cast<const char*>(base) + element * (kind == StateKind::FP32 ? 4 : 2);
    };
    float state[k_tiles][4];
    load_state(state, state_rows(initial_state, initial_kind), initial_kind, lane);

    Rows rows;
    const auto load_v = [&](int index) {
        load_rows(rows, v + offset, half_stride, tokens_in_chunk(item.num_tokens, index), lane);
    };
    load_v(0);
    for (int index = 0; index * chunk < item.num_tokens; ++index) {
        const int num_tokens = tokens_in_chunk(item.num_tokens, index);
        wait_full(smem.full, index);
        const auto load_next = [&] {
            offset += 2 * half_stride;
            load_v(index + 1);
        };
        const Rows o =
            step(state, smem.stage[index % num_stages], rows, num_tokens, lane, load_next);
        arrive(smem.empty, index);
        store_rows(out + offset - 2 * half_stride, half_stride, num_tokens, o, lane);
    }
    store_state(state, const_cast<char*>(state_rows(final_state, final_kind)), final_kind,
                mov_tid_x() % 32);
}
