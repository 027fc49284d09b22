// Solvers: a chunk's numbers per token (tokens.cuh), and its two [16 x 16] matrices.
//
//   A_ij = k_norm_i k_norm_j sum_c (k e^G)_i (k e^-G)_j,     i > j
//   P_ij = lift k_norm_j beta_j sum_c (q e^G)_i (k e^-G)_j,  i >= j
//   inverse = (I + A diag(beta))^-1
// Entries above the diagonal may be huge, inf or NaN: they are selected away, never multiplied.
#pragma once

#include "chunk.cuh"
#include "factors.cuh"
#include "fetch.cuh"
#include "items.cuh"
#include "tokens.cuh"

// a[16 x 16] = (k e^G)(k e^-G)^T and p[16 x 16] = (q e^G)(k e^-G)^T, by one warp.
__device__ inline void make_scores(float (&a)[2][4], float (&p)[2][4], const Stage& stage,
                                   int lane) {
    constexpr int kq_stride = 4 * core_bytes, inverse_stride = 2 * core_bytes;
    // The four matrices of an A operand: token groups 0, 1 of channels 0-7, then of channels 8-15.
    const u32 kq = shared_address(stage.kq_in.core) + (lane / 8 % 2) * core_bytes +
                   (lane / 16) * kq_stride + (lane % 8) * 16;
    const WarpB<Major::K, core_bytes, inverse_stride> inverse(shared_address(stage.k_inverse.core),
                                                              lane);
#pragma unroll 4
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        u32 frag_k[4], frag_q[4], b[4];
        ldmatrix_x4(frag_k, kq + k16 * 2 * kq_stride);
        ldmatrix_x4(frag_q, kq + k16 * 2 * kq_stride + 2 * core_bytes);
        ldmatrix_x4(b, inverse.at + k16 * 2 * inverse_stride);
        mma_m16n8k16_bf16(a[0], frag_k, b[0], b[1]);
        mma_m16n8k16_bf16(a[1], frag_k, b[2], b[3]);
        mma_m16n8k16_bf16(p[0], frag_q, b[0], b[1]);
        mma_m16n8k16_bf16(p[1], frag_q, b[2], b[3]);
    }
}

// What this lane's scores are normalised by: of tokens i, rows, and j, pairs of columns. All loaded
// at once; where they were wanted, behind stores, each load was waited for.
struct ScoreNorms {
    float k[2];
    float2 beta[2];
};

__device__ inline ScoreNorms score_norms(const Stage& stage, int lane) {
    ScoreNorms norms;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        const int i = 8 * group + lane / 4, j = 8 * group + 2 * (lane % 4);
        const float2 beta = *reinterpret_cast<const float2*>(&stage.beta_norm[j]);
        norms.k[group] = stage.k_norm[i];
        norms.beta[group] = make_float2(beta.x * lift, beta.y * lift);
    }
    return norms;
}

// P, of the scores of q.
__device__ inline void put_p(const float (&scores)[2][4], const ScoreNorms& norms, Stage& stage,
                             int lane) {
    const int row = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int i_group = m / 2, j_group = m % 2;
        const int i = 8 * i_group + row, j = 8 * j_group + pair;
        const float* p = &scores[j_group][2 * i_group];
        const float2 beta = norms.beta[j_group];
        put_core(stage.p.core[i_group][j_group], i >= j ? p[0] * beta.x : 0.0f,
                 i >= j + 1 ? p[1] * beta.y : 0.0f, lane);
    }
}

// Forward substitution in float32, a lane to a column: x_i = [i = j] - sum_{m < i} lower_im x_m.
// A series in powers of `lower` cancels on nearly equal keys, to nothing in 16 bits; this does not.
__device__ inline void solve_inverse(const float (&scores)[2][4], const ScoreNorms& norms,
                                     Stage& stage, SolverScratch& scratch, int lane) {
    const int row = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int i = 8 * (m / 2) + row, j = 8 * (m % 2) + pair;
        const float* a = &scores[m % 2][m / 2 * 2];
        const float norm = norms.k[m / 2];
        const float2 beta = norms.beta[m % 2];
        *reinterpret_cast<float2*>(&scratch.lower[i][j]) = make_float2(
            i > j ? norm * beta.x * a[0] : 0.0f, i > j + 1 ? norm * beta.y * a[1] : 0.0f);
    }
    __syncwarp();

    const int column = lane % 16;
    float x[chunk];
#pragma unroll
    for (int i = 0; i < chunk; ++i) {
        float4 sums = make_float4(i == column ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4*>(&scratch.lower[i][m]);
            sums.x = fmaf(-l.x, x[m], sums.x);
            if (m + 1 < i) sums.y = fmaf(-l.y, x[m + 1], sums.y);
            if (m + 2 < i) sums.z = fmaf(-l.z, x[m + 2], sums.z);
            if (m + 3 < i) sums.w = fmaf(-l.w, x[m + 3], sums.w);
        }
        x[i] = (sums.x + sums.y) + (sums.z + sums.w);
    }
    // Both halves of the warp hold all columns; each stores eight rows of them.
    const int i_group = lane / 16;
    u32 rows[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        rows[r] =
            i_group ? cvt_bf16x2(x[8 + 2 * r], x[9 + 2 * r]) : cvt_bf16x2(x[2 * r], x[2 * r + 1]);
    }
    *reinterpret_cast<uint4*>(&stage.inverse.core[i_group][column / 8][column % 8 * 8]) =
        make_uint4(rows[0], rows[1], rows[2], rows[3]);
}

// What a chunk needs that is not ordinary: rows rescaled, and factors as if it ended before its
// first token that is not finite. Returns the tokens before that one; changes the norms.
__device__ inline int make_again(RawChunk& raw, Stage& stage, float2& k_norm, float2& q_norm,
                                 float2 k_sums, float2 q_sums, float beta, float scale,
                                 int num_live, const HeadInputs& inputs, float lower_bound) {
    // Read anew, or what only this needs would be worked out in the solver's loop.
    const int lane = mov_tid_x() % 32;
    k_norm = rescale(raw.k, k_sums, lowest_k_sum, 0, lane);
    // No row of q is ordinary then: all are brought down, and so their norms up.
    q_norm = is_tiny(scale) ? rescale(raw.q, q_sums, highest_sum, tiny_log2, lane)
                            : rescale(raw.q, q_sums, lowest_q_sum, 0, lane);
    const bool bad = !(from_diagonal(k_norm, lane) > 0.0f) || beta != beta;
    const u32 ballot = __ballot_sync(~0u, bad && lane < chunk);
    const int num_finite = min(ballot ? __ffs(ballot) - 1 : chunk, first_nan_token(raw.g, lane));
    for (int warp = 0; warp < num_factor_warps; ++warp) {
        const Gate gate = warp_gate(inputs, lower_bound, warp, lane);
        make_factors(raw, gate, min(num_live, num_finite), stage, warp, lane);
    }
    __syncwarp();
    return num_finite;
}

// One chunk of one head.
__device__ inline void solve(Shared& smem, u32 index, int num_live, float beta_logit, float scale,
                             const HeadInputs& inputs, float lower_bound) {
    // Read anew: what hangs on it alone would be kept in registers from chunk to chunk, and spill.
    const int lane = mov_tid_x() % 32;
    RawChunk& raw = smem.raw[index % num_raw];
    Stage& stage = smem.stage[index % num_stages];
    SolverScratch& scratch = smem.scratch[index % num_solvers];
    wait_full(smem.raw_full, index);
    float2 sums[2];
    sums_of_squares(sums, raw_lane_address(raw.q, lane), lane);
    const float2 q_sums = sums[0], k_sums = sums[1];
    const bool ordinary = !is_tiny(scale) && all_ordinary(raw.k, k_sums, lowest_k_sum, lane) &&
                          all_ordinary(raw.q, q_sums, lowest_q_sum, lane);
    // A sum of zero is that of a row of zeros, or make_again is to come.
    float2 k_norm = {k_sums.x > 0.0f ? norm(k_sums.x, 1e-6f) : 0.0f,
                     k_sums.y > 0.0f ? norm(k_sums.y, 1e-6f) : 0.0f};
    float2 q_norm = {norm(q_sums.x, 1e-6f), norm(q_sums.y, 1e-6f)};
    const float beta = fmaf(0.5f, tanh_approx(0.5f * beta_logit), 0.5f);

    wait_full(smem.factors_full, index);
    // A NaN in g is one in its channel's G_last.
    const float4 decay = stage.decay[lane / 4][lane % 4];
    const bool finite = decay.x + decay.y + decay.z + decay.w < 1e3f && beta == beta;
    int num_finite = chunk;
    if (!ordinary || !__all_sync(~0u, finite)) {
        num_finite = make_again(raw, stage, k_norm, q_norm, k_sums, q_sums, beta, scale, num_live,
                                inputs, lower_bound);
    }
    const float k_norm_t = from_diagonal(k_norm, lane), q_norm_t = from_diagonal(q_norm, lane);
    if (lane < chunk) {
        const float nan = __int_as_float(0x7fffffff);
        const float k_norm_or_nan = lane < num_finite ? k_norm_t : nan;
        stage.k_norm[lane] = k_norm_or_nan * (1.0f / lift);
        stage.beta_norm[lane] = beta * k_norm_or_nan;
        stage.q_norm[lane] = scale * (q_norm_t * (1.0f / lift));
    }
    __syncwarp();
    float a[2][4] = {}, p[2][4] = {};
    make_scores(a, p, stage, lane);
    const ScoreNorms norms = score_norms(stage, lane);
    put_p(p, norms, stage, lane);
    solve_inverse(a, norms, stage, scratch, lane);
    publish();
    arrive(smem.full, index);
}

// What solvers begin with. By the first one, and before barriers are there: the number of the first
// item takes as long to come.
__device__ inline void prepare_solvers(Shared& smem, const Work& work) {
    const int lane = threadIdx.x % 32;
    if (work.segment) work.prefetch_begins();
    smem.sequences[lane] = work.lane_sequence();
    if (lane < num_solvers) {
        u32 round = 0;
        if (work.segment) round = lane == 0 ? atomicAdd(&work.counts->items, 1) : none_taken;
        smem.scratch[lane].fetch = {0, lane, 0, 0, 0, round, {}};
    }
}

// Beta of an item's first token.
__device__ inline const u16* first_beta(const Item& item, const Work& work, const u16* beta) {
    if constexpr (is_strided) {
        const u32 batch = work.batch_of(item.from_matrix);
        return beta + work.strides->beta.offset(batch, item.begin, item.head);
    } else {
        return beta + static_cast<i64>(item.begin) * work.num_heads + item.head;
    }
}

// A solver's life: every num_solvers-th of the block's chunks.
__device__ inline void run_solver(Shared& smem, const Work& work, const Inputs& inputs, float scale,
                                  float lower_bound) {
    const int solver = threadIdx.x / 32 - num_factor_warps, lane = threadIdx.x % 32;
    const Fetcher fetcher = {smem, work, inputs};
    for (int slot = solver; slot < num_raw; slot += num_solvers) fetcher.fetch(slot);

    u32 index = solver;      // of its next chunk, among the block's
    int chunk_idx = solver;  // of the solver's next chunk, in the item
    for (Items items(smem); items.next(); chunk_idx -= items.num_chunks) {
        const int num_tokens = items.item().num_tokens;
        const u16* beta = first_beta(items.item(), work, inputs.beta);
        const auto load_beta = [&](int of_chunk) {
            const int token = of_chunk * chunk + lane % chunk;
            const i64 token_stride = is_strided ? work.strides->beta.token : work.num_heads;
            return token < num_tokens ? beta[token * token_stride] : u16{0};
        };
        float beta_logit = bf16_low(load_beta(chunk_idx));
        for (; chunk_idx < items.num_chunks; chunk_idx += num_solvers) {
            const u16 next_logit = load_beta(chunk_idx + num_solvers);
            // What goes to partials is scaled by outputs.cuh.
            const float item_scale = items.item().partials_end > 0 ? 1.0f : scale;
            solve(smem, index, tokens_in_chunk(num_tokens, chunk_idx), beta_logit, item_scale,
                  items.head_inputs(), lower_bound);
            // Not before, which would wait for its load, nor later, for all of the fetch.
            beta_logit = bf16_low(next_logit);
            keep_in_order(beta_logit);
            fetcher.fetch(index % num_raw);
            index += num_solvers;
        }
    }
}
