// Producers, first half: raw q, k, g of a chunk -> per-token scalars and the channel factors.
//
// With G the running sum of the gate over the chunk's tokens (base 2 throughout):
//   kq_in = [k e^G; q e^G]    k_inverse = k e^-G    k_out = k e^(G_last - G)    decay = e^G_last
// where k and q are normalised. |G| <= 16 * 5 * log2(e) = 115.4, so every factor is a normal
// float32 and bf16. Each product is formed in float32 and rounded once.
#pragma once

#include "chunk.cuh"
#include "gate.cuh"

// Where this lane points ldmatrix.x4 in a padded raw tile: rows of (tokens 0-7, tokens 8-15) of
// channels 0-7, then of channels 8-15.
__device__ inline u32 raw_lane_address(const u16 (&tile)[chunk][raw_row], int lane) {
    return shared_address(&tile[lane % 16][lane / 16 * 8]);
}

// Sum of squares per token, exact products accumulated in float32: the diagonal of x x^T. The lane
// that holds the diagonal (lane % 4 == lane / 8) returns tokens lane / 4 and lane / 4 + 8.
__device__ inline float2 sums_of_squares(const u16 (&x)[chunk][raw_row], int lane) {
    const u32 address = raw_lane_address(x, lane);
    float low[2][4] = {}, high[2][4] = {};  // even and odd steps: half the chain of latencies
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        u32 a[4];
        ldmatrix_x4(a, address + k16 * 32);
        mma_m16n8k16_bf16(low[k16 % 2], a, a[0], a[2]);
        mma_m16n8k16_bf16(high[k16 % 2], a, a[1], a[3]);
    }
    const bool odd = lane / 4 % 2;
    return {odd ? low[0][1] + low[1][1] : low[0][0] + low[1][0],
            odd ? high[0][3] + high[1][3] : high[0][2] + high[1][2]};
}

// The index of the first set lane, or `none`.
__device__ inline int first_lane(u32 ballot, int none) { return ballot ? __ffs(ballot) - 1 : none; }

// sums_of_squares for any finite x. Rows whose sum overflows float32 (elements beyond 1.6e18) are
// scaled by 2^-70 in place, which their normalisation takes out again.
__device__ inline float2 safe_sums_of_squares(u16 (&x)[chunk][raw_row], int lane) {
    const float infinity = __int_as_float(0x7f800000);
    const float2 sums = sums_of_squares(x, lane);
    const bool diagonal = lane % 4 == lane / 8;
    const u32 low = __ballot_sync(~0u, diagonal && sums.x == infinity);
    const u32 high = __ballot_sync(~0u, diagonal && sums.y == infinity);
    if ((low | high) == 0) return sums;

    const int row = lane / 2, diagonal_lane = 4 * (row % 8) + row % 8 / 2;
    if ((row < 8 ? low : high) >> diagonal_lane & 1) {
        u32* pairs = reinterpret_cast<u32*>(&x[row][lane % 2 * 64]);
        constexpr float shrink = 0x1p-70f;
        for (int i = 0; i < 32; ++i) {
            pairs[i] = cvt_bf16x2(bf16_low(pairs[i]) * shrink, bf16_high(pairs[i]) * shrink);
        }
    }
    __syncwarp();
    return sums_of_squares(x, lane);
}

// The first of the chunk's tokens that has a NaN in g, or 16. A lane reads half a row.
__device__ inline int first_nan_token(const u16 (&g)[chunk][raw_row], int lane) {
    const int half = lane % 2;
    u32 smallest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // The two halves take their pieces in different order, to stay off each other's banks.
        const uint4 x =
            *reinterpret_cast<const uint4*>(&g[lane / 2][half * 64 + (i ^ 4 * half) * 8]);
        smallest = min_nan_bf16x2(
            smallest, min_nan_bf16x2(min_nan_bf16x2(x.x, x.y), min_nan_bf16x2(x.z, x.w)));
    }
    const float low = bf16_low(smallest), high = bf16_high(smallest);
    return first_lane(__ballot_sync(~0u, low != low || high != high), 32) / 2;
}

// q is made a vector of unit length, so that q e^G stays in range however small q is; what 1e-6
// does to its length is applied to the output.
__device__ inline void put_q_norm(Tokens& tokens, int token, float sum) {
    // Below this sum, lost to underflow sooner or later, 1e-6 is all there is under the root.
    const bool tiny = sum < 0x1p-66f;
    const float norm = tiny ? 0x1p70f : rsqrtf(sum);
    tokens.q_norm[token] = norm;
    tokens.q_scale[token] = tiny ? 1e3f * 0x1p-70f : sum * norm * rsqrtf(sum + 1e-6f);
}

// q's norms and the check of g: one warp.
__device__ inline void inspect_q_g(RawChunk& raw, Tokens& tokens, int lane) {
    const float2 sums = safe_sums_of_squares(raw.q, lane);
    if (lane % 4 == lane / 8) {
        put_q_norm(tokens, lane / 4, sums.x);
        put_q_norm(tokens, lane / 4 + 8, sums.y);
    }
    const int num_finite = first_nan_token(raw.g, lane);
    if (lane == 0) tokens.num_finite_g = num_finite;
}

// k's norms and beta: one warp. beta_logit (bf16) is that of token `lane`, for lanes below 16; it
// comes unconverted, since converting it would wait for its load.
__device__ inline void inspect_k_beta(RawChunk& raw, Tokens& tokens, u16 beta_logit, int lane) {
    const float2 sums = safe_sums_of_squares(raw.k, lane);
    const float infinity = __int_as_float(0x7f800000);
    const bool diagonal = lane % 4 == lane / 8;
    const bool good_low = sums.x < infinity, good_high = sums.y < infinity;
    if (diagonal) {
        // Zero where k is not finite: such a row is cleared, and zero times NaN would not be.
        tokens.k_norm[lane / 4] = good_low ? rsqrtf(sums.x + 1e-6f) : 0.0f;
        tokens.k_norm[lane / 4 + 8] = good_high ? rsqrtf(sums.y + 1e-6f) : 0.0f;
    }
    const float beta = fmaf(0.5f, tanh_approx(0.5f * bf16_low(beta_logit)), 0.5f);
    const bool beta_is_nan = lane < chunk && beta != beta;
    if (lane < chunk) tokens.beta[lane] = beta_is_nan ? 0.0f : beta;

    const u32 bad_low = __ballot_sync(~0u, diagonal && !good_low);
    const u32 bad_high = __ballot_sync(~0u, diagonal && !good_high);
    const u32 bad_beta = __ballot_sync(~0u, beta_is_nan);
    const int finite_k = bad_low ? first_lane(bad_low, 0) / 4 : 8 + first_lane(bad_high, 32) / 4;
    if (lane == 0) tokens.num_finite_k = min(finite_k, first_lane(bad_beta, chunk));
}

constexpr int warp_tiles = head_dim / 16 / group_warps;  // tiles of 16 channels a warp makes

__device__ inline int tile_channel(int warp, int tile) { return 16 * (warp + group_warps * tile); }

// The warp's share of a chunk's factors: 16 tokens by two tiles of 16 channels, worked side by side
// so that one's latency hides the other's. Tokens from num_live on are padding (or past a token
// that is not finite): a = 0, k = q = 0, so they leave the state as it is.
__device__ inline void make_factors(const RawChunk& raw, const Tokens& tokens, int warp,
                                    const HeadGate& gate, const float (&half_shift)[warp_tiles][2],
                                    const Triangle& triangle, int num_live, Stage& stage,
                                    Factor<2>& k_inverse, int lane) {
    const int row = lane / 4, pair = 2 * (lane % 4);
    float k_norm[2], q_norm[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        k_norm[half] = tokens.k_norm[8 * half + row];
        q_norm[half] = tokens.q_norm[8 * half + row];
    }
    u32 frag_g[warp_tiles][4], frag_k[warp_tiles][4], frag_q[warp_tiles][4];
#pragma unroll
    for (int tile = 0; tile < warp_tiles; ++tile) {
        const int offset = tile_channel(warp, tile) * 2;
        ldmatrix_x4_trans(frag_g[tile], raw_lane_address(raw.g, lane) + offset);
        ldmatrix_x4(frag_k[tile], raw_lane_address(raw.k, lane) + offset);
        ldmatrix_x4(frag_q[tile], raw_lane_address(raw.q, lane) + offset);
    }

    // The gate, with lanes along channels, then its running sum, with lanes along tokens. Matrix m
    // of a fragment is of token half m % 2 and channel half m / 2.
    float a[warp_tiles][4][2];
#pragma unroll
    for (int i = 0; i < 4 * warp_tiles; ++i) {
        const int tile = i % warp_tiles, m = i / warp_tiles;
        a[tile][m][0] = log2_decay(bf16_low(frag_g[tile][m]), gate, half_shift[tile][m / 2]);
        a[tile][m][1] = log2_decay(bf16_high(frag_g[tile][m]), gate, half_shift[tile][m / 2]);
    }
    if (num_live < chunk) {
#pragma unroll
        for (int i = 0; i < 4 * warp_tiles; ++i) {
            const int tile = i % warp_tiles, m = i / warp_tiles, half = m % 2;
            if (8 * half + pair >= num_live) a[tile][m][0] = 0.0f;
            if (8 * half + pair + 1 >= num_live) a[tile][m][1] = 0.0f;
            if (8 * half + row >= num_live) frag_k[tile][m] = frag_q[tile][m] = 0;
        }
    }
    float sum[warp_tiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < 4 * warp_tiles; ++i) {
        const int channels = i % 2, tile = i / 2 % warp_tiles, half = i / 2 / warp_tiles;
        const float (&two)[2] = a[tile][2 * channels + half];
        add_running_sum(sum[tile][channels], triangle.half[half], two[0], two[1]);
    }

#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int tile = i / 2, channels = i % 2;
        const int channel = tile_channel(warp, tile) + 8 * channels;
        const float (&log2_sum)[4] = sum[tile][channels];
        float decay[4], growth[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            decay[j] = ex2_approx(log2_sum[j]);
            growth[j] = rcp_approx(decay[j]);
        }
        // Token 15 sits in the last four lanes.
        const float last0 = __shfl_sync(~0u, decay[2], 28 + lane % 4);
        const float last1 = __shfl_sync(~0u, decay[3], 28 + lane % 4);
        if (row == 7) {
            *reinterpret_cast<float2*>(&stage.decay[channel + pair]) = make_float2(last0, last1);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 k = frag_k[tile][2 * channels + half], q = frag_q[tile][2 * channels + half];
            const float e0 = decay[2 * half], e1 = decay[2 * half + 1];
            const float k0 = bf16_low(k) * k_norm[half], k1 = bf16_high(k) * k_norm[half];
            const float q0 = bf16_low(q) * q_norm[half], q1 = bf16_high(q) * q_norm[half];
            const float inverse0 = k0 * growth[2 * half], inverse1 = k1 * growth[2 * half + 1];
            const int core = channel / 8;
            put_core(stage.kq_in.core[core][half], k0 * e0, k1 * e1, lane);
            put_core(stage.kq_in.core[core][2 + half], q0 * e0, q1 * e1, lane);
            put_core(k_inverse.core[core][half], inverse0, inverse1, lane);
            put_core(stage.k_out.core[core][half], inverse0 * last0, inverse1 * last1, lane);
        }
    }
}
