// What of a chunk is one number per token: norms, beta, and where the finite tokens end. One warp
// to a chunk.
#pragma once

#include "chunk.cuh"

// Sum of squares per token, exact products accumulated in float32: the diagonal of x x^T. The lane
// that holds the diagonal (lane % 4 == lane / 8) returns tokens lane / 4 and lane / 4 + 8.
__device__ inline float2 sums_of_squares(const u16 (&x)[chunk][raw_row], int lane) {
    const u32 address = raw_lane_address(x, lane);
    float low[2][4] = {}, high[2][4] = {};  // even and odd steps: half the chain of latencies
#pragma unroll 4
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
    const float2 shrunk = sums_of_squares(x, lane);
    // Beside such a sum 1e-6 is nothing; beside the shrunk one it would be something.
    return {sums.x == infinity ? shrunk.x - 1e-6f : shrunk.x,
            sums.y == infinity ? shrunk.y - 1e-6f : shrunk.y};
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

// q is made a vector of length 2^12, whatever its own, so that q e^G keeps elements of 2^-22 of
// that length even after 16 tokens at the bound (2^-115.4); the output gets the true length back.
__device__ inline void put_q_norm(Tokens& tokens, int token, float sum) {
    constexpr float length = 0x1p12f;
    // Below this sum squares are lost to underflow, and 1e-6 is all there is under the root.
    const bool tiny = sum < 0x1p-100f;
    const float norm = tiny ? 0x1p70f : rsqrtf(sum);
    tokens.q_norm[token] = tiny ? norm : norm * length;
    tokens.q_scale[token] = tiny ? 1e3f / norm : sum * norm * rsqrtf(sum + 1e-6f) / length;
}

// q's norms. Returns the tokens before the first NaN in g.
__device__ inline int inspect_q_g(RawChunk& raw, Tokens& tokens, int lane) {
    const float2 sums = safe_sums_of_squares(raw.q, lane);
    if (lane % 4 == lane / 8) {
        put_q_norm(tokens, lane / 4, sums.x);
        put_q_norm(tokens, lane / 4 + 8, sums.y);
    }
    return first_nan_token(raw.g, lane);
}

// k's norms and beta. Returns the tokens before the first that is not finite. beta_logit (bf16) is
// that of token `lane`, for lanes below 16; it comes unconverted, since converting it would wait
// for its load.
__device__ inline int inspect_k_beta(RawChunk& raw, Tokens& tokens, u16 beta_logit, int lane) {
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
    return min(finite_k, first_lane(bad_beta, chunk));
}
