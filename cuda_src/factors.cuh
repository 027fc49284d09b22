// Factor warps: raw q, k, g of a chunk -> the channel factors.
//
// With G the running sum of the gate over the chunk's tokens (base 2 throughout):
//   kq_in = [k e^G; q e^G] lift    k_inverse = k e^-G / lift    k_out = k e^(G_last - G)
//   decay = e^G_last
// q and k are as they came: their norms are numbers of a token, and so left to the solvers, who
// also see to the rare chunk in which q or k is so large or small, or anything not finite, that
// these products are wrong. |G| <= 16 * 5 * log2(e) = 115.4: e^G lift and its inverse are normal in
// float32 and bf16, and what of k e^G is too small to be so counts for nothing beside the k of its
// row. Each product is formed in float32 and rounded once, but for k e^G, of a rounded e^G: half
// the instructions, and the errors that it makes are small beside those of k e^-G (emulated,
// out 3.96e-3 either way on rand, 4.25e-3 and 4.28e-3 on slow).
#pragma once

#include "chunk.cuh"
#include "gate.cuh"
#include "items.cuh"

constexpr int warp_tiles = head_dim / 16 / num_factor_warps;  // tiles of 16 channels a warp makes

__device__ inline int tile_channel(int warp, int tile) {
    return 16 * (warp + num_factor_warps * tile);
}

// What a factor warp needs to know of its head.
struct Gate {
    HeadGate head;
    float bias[warp_tiles][2];  // of the lane's channels
    Triangle triangle;
};

__device__ inline Gate warp_gate(const HeadInputs& inputs, float lower_bound, int warp, int lane) {
    Gate gate;
#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int channel = tile_channel(warp, i / 2) + 8 * (i % 2) + lane / 4;
        gate.bias[i / 2][i % 2] = channel_bias(inputs.bias[channel]);
    }
    gate.head = head_gate(inputs.A_log, lower_bound);
    gate.head.half_bound *= sum_scale;
    gate.triangle = triangle_of_ones(lane);
    return gate;
}

// Of eight tokens and eight channels the four factors: kq_in of k and of q, k_inverse, k_out.
__device__ inline void put_factors(Stage& stage, int core, int half, const u32 (&four)[4],
                                   int lane) {
    if constexpr (has_stmatrix) {
        // A row of matrix m from lane 8 m + row.
        const int m = lane / 8;
        const u32 tile = m == 0   ? kq_in_at
                         : m == 1 ? kq_in_at + 2 * core_bytes
                         : m == 2 ? k_inverse_at
                                  : k_out_at;
        const int core_step = m < 2 ? 4 * core_bytes : 2 * core_bytes;
        stmatrix_x4(
            shared_address(&stage) + tile + lane % 8 * 16 + core * core_step + half * core_bytes,
            four);
    } else {
        reinterpret_cast<u32*>(stage.kq_in.core[core][half])[lane] = four[0];
        reinterpret_cast<u32*>(stage.kq_in.core[core][2 + half])[lane] = four[1];
        reinterpret_cast<u32*>(stage.k_inverse.core[core][half])[lane] = four[2];
        reinterpret_cast<u32*>(stage.k_out.core[core][half])[lane] = four[3];
    }
}

// A warp's share of a chunk's factors: 16 tokens by its tiles of 16 channels, worked side by side
// so that one's latency hides the other's. Tokens from num_live on count for nothing: a = 0,
// k = q = 0, so they leave the state as it is.
__device__ inline void make_factors(const RawChunk& raw, const Gate& gate, int num_live,
                                    Stage& stage, int warp, int lane) {
    const int row = lane / 4, pair = 2 * (lane % 4);
    u32 frag_g[warp_tiles][4], frag_k[warp_tiles][4], frag_q[warp_tiles][4];
#pragma unroll
    for (int tile = 0; tile < warp_tiles; ++tile) {
        const u32 at = raw_lane_address(raw.q, lane) ^ raw_channels(tile_channel(warp, tile) / 16);
        ldmatrix_x4_trans(frag_g[tile], at + 2 * raw_tile);
        ldmatrix_x4(frag_k[tile], at + raw_tile);
        ldmatrix_x4(frag_q[tile], at);
    }

    // The gate, with lanes along channels, then its running sum, with lanes along tokens. Matrix m
    // of a fragment is of token half m % 2 and channel half m / 2.
    float a[warp_tiles][4][2];
#pragma unroll
    for (int i = 0; i < 4 * warp_tiles; ++i) {
        const int tile = i % warp_tiles, m = i / warp_tiles;
        const float bias = gate.bias[tile][m / 2];
        a[tile][m][0] = log2_decay(bf16_low(frag_g[tile][m]), bias, gate.head);
        a[tile][m][1] = log2_decay(bf16_high(frag_g[tile][m]), bias, gate.head);
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
    const float begin[4] = {lift_log2, lift_log2, lift_log2, lift_log2};
    float sum[warp_tiles][2][4];
#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int channels = i % 2, tile = i / 2;
        const float (*halves)[2] = &a[tile][2 * channels];
        mma_m16n8k16_f16(sum[tile][channels], gate.triangle.frag,
                         cvt_f16x2(halves[0][0], halves[0][1]),
                         cvt_f16x2(halves[1][0], halves[1][1]), begin);
    }

#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int tile = i / 2, channels = i % 2;
        const int core = tile_channel(warp, tile) / 8 + channels;
        const float (&log2_sum)[4] = sum[tile][channels];
        float decay[4], growth[4];  // e^G lift and its inverse
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            decay[j] = ex2_approx(log2_sum[j]);
            growth[j] = rcp_approx(decay[j]);
        }
        // Token 15 sits in the last four lanes.
        const float last0 = __shfl_sync(~0u, decay[2], 28 + lane % 4);
        const float last1 = __shfl_sync(~0u, decay[3], 28 + lane % 4);
        if (row == 7) {
            float4& both = stage.decay[core / 2][lane % 4];
            *reinterpret_cast<float2*>(channels ? &both.z : &both.x) =
                make_float2(last0 * (1.0f / lift), last1 * (1.0f / lift));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 k = frag_k[tile][2 * channels + half], q = frag_q[tile][2 * channels + half];
            const float e0 = decay[2 * half], e1 = decay[2 * half + 1];
            const float k0 = bf16_low(k), k1 = bf16_high(k);
            const float inverse0 = k0 * growth[2 * half], inverse1 = k1 * growth[2 * half + 1];
            const u32 four[4] = {
                mul_bf16x2(k, cvt_bf16x2(e0, e1)), cvt_bf16x2(bf16_low(q) * e0, bf16_high(q) * e1),
                cvt_bf16x2(inverse0, inverse1), cvt_bf16x2(inverse0 * last0, inverse1 * last1)};
            put_factors(stage, core, half, four, lane);
        }
    }
}

// A factor warp's life: its tiles of channels of every chunk.
__device__ inline void run_factors(Shared& smem, float lower_bound) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 index = 0;
    for (Items items(smem); items.next();) {
        const int num_tokens = items.item().num_tokens;
        Gate gate;
        for (int i = 0; i < items.num_chunks; ++i, ++index) {
            wait_empty(smem.empty, index);
            wait_full(smem.raw_full, index);
            if (i == 0) gate = warp_gate(items.head_inputs(), lower_bound, warp, lane);
            make_factors(smem.raw[index % num_raw], gate, tokens_in_chunk(num_tokens, i),
                         smem.stage[index % num_stages], warp, lane);
            arrive(smem.factors_full, index);
        }
    }
}
