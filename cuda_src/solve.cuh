// Solvers: inspect a chunk's tokens (tokens.cuh), then make its two [16 x 16] matrices.
//
//   A_ij = sum_c (k e^G)_i (k e^-G)_j,  i > j        inverse = (I + diag(beta) A)^-1
//   P_ij = sum_c (q e^G)_i (k e^-G)_j,  i >= j
// Entries above the diagonal may be huge, inf or NaN: they are selected away, never multiplied.
#pragma once

#include "chunk.cuh"
#include "tokens.cuh"

// scores[16 x 16] = rows of kq_in (token_group 0: k, 2: q) times k_inverse^T, by one warp.
__device__ inline void make_scores(float (&scores)[2][4], const Factor<4>& kq_in, int token_group,
                                   const Factor<2>& k_inverse, int lane) {
    constexpr int a_k_stride = 4 * core_bytes, b_k_stride = 2 * core_bytes;
    // The four matrices of an A operand: token groups 0, 1 of channels 0-7, then of channels 8-15.
    const u32 a_address = shared_address(kq_in.core[0][token_group]) + (lane / 8 % 2) * core_bytes +
                          (lane / 16) * a_k_stride + (lane % 8) * 16;
    const u32 b_address =
        shared_address(k_inverse.core) + b_lane_offset<core_bytes, b_k_stride>(lane);
    float odd[2][4] = {};  // even and odd steps apart: half the chain of latencies
#pragma unroll 4
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        u32 a[4];
        ldmatrix_x4(a, a_address + k16 * 2 * a_k_stride);
        rs_gemm<Major::K, core_bytes>(k16 % 2 ? odd : scores, a, b_address + k16 * 2 * b_k_stride);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] += odd[i / 4][i % 4];
}

__device__ inline void solve_p(Stage& stage, int lane) {
    float scores[2][4] = {};
    make_scores(scores, stage.kq_in, 2, stage.k_inverse, lane);
    const int row = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int i_group = m / 2, j_group = m % 2;
        const int i = 8 * i_group + row, j = 8 * j_group + pair;
        const float* p = &scores[j_group][2 * i_group];
        put_core(stage.p.core[i_group][j_group], i >= j ? p[0] : 0.0f, i >= j + 1 ? p[1] : 0.0f,
                 lane);
    }
}

// Forward substitution in float32, a lane to a column: x_i = [i = j] - sum_{m < i} lower_im x_m.
// A series in powers of `lower` cancels on nearly equal keys, to nothing in 16 bits; this does not.
__device__ inline void solve_inverse(Stage& stage, const Tokens& tokens, float (&lower)[chunk][20],
                                     int lane) {
    float scores[2][4] = {};
    make_scores(scores, stage.kq_in, 0, stage.k_inverse, lane);
    const int row = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int i = 8 * (m / 2) + row, j = 8 * (m % 2) + pair;
        const float* a = &scores[m % 2][m / 2 * 2];
        const float beta = tokens.beta[i];
        *reinterpret_cast<float2*>(&lower[i][j]) =
            make_float2(i > j ? beta * a[0] : 0.0f, i > j + 1 ? beta * a[1] : 0.0f);
    }
    __syncwarp();

    const int column = lane % 16;
    float x[chunk];
#pragma unroll
    for (int i = 0; i < chunk; ++i) {
        float4 sums = make_float4(i == column ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4*>(&lower[i][m]);
            sums.x = fmaf(-l.x, x[m], sums.x);
            if (m + 1 < i) sums.y = fmaf(-l.y, x[m + 1], sums.y);
            if (m + 2 < i) sums.z = fmaf(-l.z, x[m + 2], sums.z);
            if (m + 3 < i) sums.w = fmaf(-l.w, x[m + 3], sums.w);
        }
        x[i] = (sums.x + sums.y) + (sums.z + sums.w);
    }
    // Both halves of the warp hold all columns; each stores eight rows.
    const int i_group = lane / 16;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const float value = i_group ? x[8 + r] : x[r];
        stage.inverse.core[i_group][column / 8][8 * r + column % 8] =
            static_cast<u16>(cvt_bf16x2(value, 0.0f));
    }
}

// A solver's life: every num_solvers-th chunk, whose tokens it inspects that many chunks ahead.
__device__ inline void run_solver(Shared& smem, const u16* beta, int num_heads) {
    const int solver = threadIdx.x / 32 - num_factor_warps, lane = threadIdx.x % 32;
    const int num_tokens = smem.item.num_tokens;
    const int num_chunks = (num_tokens + chunk - 1) / chunk;
    beta += smem.item.begin * num_heads + smem.item.head;

    const auto load_beta = [&](int index) {
        const bool live = lane < tokens_in_chunk(num_tokens, index);
        return live ? beta[static_cast<i64>(index * chunk + lane) * num_heads] : u16{0};
    };
    const auto inspect = [&](int index, u16 beta_logit) {
        if (index >= num_chunks) return;
        RawChunk& raw = smem.raw[index % num_raw];
        Tokens& tokens = smem.tokens[index % num_tokens_slots];
        wait_full(smem.raw_full, index);
        const int finite_k = inspect_k_beta(raw, tokens, beta_logit, lane);
        const int finite_g = inspect_q_g(raw, tokens, lane);
        if (lane == 0) tokens.num_finite = min(finite_k, finite_g);
        arrive(smem.tokens_full, index);
    };
    inspect(solver, load_beta(solver));
    for (int index = solver; index < num_chunks; index += num_solvers) {
        Stage& stage = smem.stage[index % num_stages];
        const u16 beta_logit = load_beta(index + num_solvers);
        wait_full(smem.factors_full, index);
        solve_inverse(stage, smem.tokens[index % num_tokens_slots], smem.lower[solver], lane);
        solve_p(stage, lane);
        arrive(smem.full, index);
        arrive(smem.empty, index);
        inspect(index + num_solvers, beta_logit);
    }
}
