// Factor warps: raw q, k, g of a chunk, and its tokens' scalars -> the channel factors.
//
// With G the running sum of the gate over the chunk's tokens (base 2 throughout):
//   kq_in = [k e^G; q e^G]    k_inverse = k e^-G    k_out = k e^(G_last - G)    decay = e^G_last
// where k is normalised, and q but for its scale (tokens.cuh). |G| <= 16 * 5 * log2(e) = 115.4: e^G
// and e^-G are normal in float32 and bf16, and what of k e^G is too small to be so counts for
// nothing beside the k of its row. Each product is formed in float32 and rounded once.
#pragma once

#include "chunk.cuh"
#include "gate.cuh"

constexpr int warp_tiles = head_dim / 16 / group_warps;  // tiles of 16 channels a warp makes

__device__ inline int tile_channel(int warp, int tile) { return 16 * (warp + group_warps * tile); }

// The warp's share of a chunk's factors: 16 tokens by two tiles of 16 channels, worked side by side
// so that one's latency hides the other's. Tokens from num_live on are padding (or past a token
// that is not finite): a = 0, k = q = 0, so they leave the state as it is.
__device__ inline void make_factors(const RawChunk& raw, const Tokens& tokens, int warp,
                                    const HeadGate& gate, const float (&bias)[warp_tiles][2],
                                    const Triangle& triangle, int num_live, Stage& stage,
                                    int lane) {
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
        a[tile][m][0] = log2_decay(bf16_low(frag_g[tile][m]), bias[tile][m / 2], gate);
        a[tile][m][1] = log2_decay(bf16_high(frag_g[tile][m]), bias[tile][m / 2], gate);
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
            put_core(stage.k_inverse.core[core][half], inverse0, inverse1, lane);
            put_core(stage.k_out.core[core][half], inverse0 * last0, inverse1 * last1, lane);
        }
    }
}

// Where a factor lane reads q, k and g: its 16 bytes of a token, of the warp's first tile.
struct RawSource {
    const u16 *q, *k, *g;
    i64 token_stride;
};

// Asks for a factor warp's channels of a chunk that begins at token `begin`; rows past the end
// become zeros. A tile is 32 bytes wide: two lanes to a row.
__device__ inline void fetch(RawChunk& raw, const RawSource& source, int begin, int num_tokens,
                             int warp, int lane) {
    const int row = lane / 2, column = tile_channel(warp, 0) + lane % 2 * 8;
    const bool live = begin + row < num_tokens;
    const i64 offset = live ? (begin + row) * source.token_stride : 0;
    const u32 bytes = live ? 16 : 0;
    const u32 target = shared_address(&raw.q[row][column]);
    constexpr u32 tensor_bytes = sizeof(raw.q);
    constexpr int tile_step = group_warps * 16;  // channels from a warp's tile to its next
#pragma unroll
    for (int tile = 0; tile < warp_tiles; ++tile) {
        const i64 at = offset + tile * tile_step;
        const u32 to = target + tile * tile_step * 2;
        cp_async_16(to, source.q + at, bytes);
        cp_async_16(to + tensor_bytes, source.k + at, bytes);
        cp_async_16(to + 2 * tensor_bytes, source.g + at, bytes);
    }
}

// A factor warp's life: every num_groups-th chunk, its tiles of channels.
__device__ inline void run_factors(Shared& smem, const u16* q, const u16* k, const u16* g,
                                   const float* A_log, const float* dt_bias, float lower_bound,
                                   float scale, int num_heads) {
    const int group = threadIdx.x / 32 / group_warps, warp = threadIdx.x / 32 % group_warps;
    const int lane = threadIdx.x % 32;
    const int num_tokens = smem.item.num_tokens, head = smem.item.head;
    const int num_chunks = (num_tokens + chunk - 1) / chunk;
    const i64 lane_offset =
        (smem.item.begin * num_heads + head) * head_dim + tile_channel(warp, 0) + lane % 2 * 8;
    const RawSource source = {q + lane_offset, k + lane_offset, g + lane_offset,
                              static_cast<i64>(num_heads) * head_dim};

    const auto fetch_chunk = [&](int index) {
        if (index >= num_chunks) return;
        fetch(smem.raw[index % num_raw], source, index * chunk, num_tokens, warp, lane);
        cp_async_mbarrier_arrive_noinc(shared_address(&smem.raw_full[index % num_raw]));
    };
    for (int index = group; index < num_raw; index += num_groups) fetch_chunk(index);

    const HeadGate gate = head_gate(A_log, head, lower_bound);
    const Triangle triangle = triangle_of_ones(lane);
    float bias[warp_tiles][2];  // of the lane's channels
#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int channel = tile_channel(warp, i / 2) + 8 * (i % 2) + lane / 4;
        bias[i / 2][i % 2] = channel_bias(dt_bias, static_cast<i64>(head) * head_dim + channel);
    }

    for (int index = group; index < num_chunks; index += num_groups) {
        const Tokens& tokens = smem.tokens[index % num_tokens_slots];
        Stage& stage = smem.stage[index % num_stages];
        wait_full(smem.raw_full, index);
        wait_full(smem.tokens_full, index);
        wait_empty(smem.empty, index);
        const int num_live = min(tokens.num_finite, tokens_in_chunk(num_tokens, index));
        make_factors(smem.raw[index % num_raw], tokens, warp, gate, bias, triangle, num_live, stage,
                     lane);
        if (warp == 0 && lane < chunk) {
            stage.beta[lane] = tokens.beta[lane];
            stage.o_scale[lane] = scale * tokens.q_scale[lane];
            if (lane == 0) stage.num_finite = tokens.num_finite;
        }
        arrive(smem.factors_full, index);
        arrive(smem.full, index);
        __syncwarp();  // every lane has read the raw chunk
        fetch_chunk(index + num_raw);
    }
}
