// Factor warps: raw q, k, g of a chunk -> the channel factors.
//
// With G the running sum of the gate over the chunk's tokens (base 2 throughout):
//   kq_in = [k e^G; q e^G] lift    k_inverse = k e^-G / lift    k_out = k e^(G_last - G)
//   decay = e^G_last
// q and k are as they came: their norms are numbers of a token, and so left to the solvers, who
// also see to the rare chunk in which q or k is so large or small, or anything not finite, that
// these products are wrong. |G| <= 16 * 5 * log2(e) = 115.4: e^G lift and its inverse are normal in
// float32 and bf16, and what of k e^G is too small to be so counts for nothing beside the k of its
// row. Each product is formed in float32 and rounded once.
#pragma once

#include "chunk.cuh"
#include "gate.cuh"
#include "work.cuh"

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

__device__ inline Gate warp_gate(const float* A_log, const float* dt_bias, float lower_bound,
                                 int head, int warp, int lane) {
    Gate gate;
#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int channel = tile_channel(warp, i / 2) + 8 * (i % 2) + lane / 4;
        gate.bias[i / 2][i % 2] =
            channel_bias(dt_bias, static_cast<i64>(head) * head_dim + channel);
    }
    gate.head = head_gate(A_log, head, lower_bound);
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
    for (int i = 0; i < 4 * warp_tiles; ++i) {
        const int channels = i % 2, tile = i / 2 % warp_tiles, half = i / 2 / warp_tiles;
        const float (&two)[2] = a[tile][2 * channels + half];
        float (&acc)[4] = sum[tile][channels];
        if (half == 0) {
            add_running_sum(acc, begin, gate.triangle.half[0], two[0], two[1]);
        } else {
            add_running_sum(acc, acc, gate.triangle.half[1], two[0], two[1]);
        }
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
                cvt_bf16x2(k0 * e0, k1 * e1), cvt_bf16x2(bf16_low(q) * e0, bf16_high(q) * e1),
                cvt_bf16x2(inverse0, inverse1), cvt_bf16x2(inverse0 * last0, inverse1 * last1)};
            put_factors(stage, core, half, four, lane);
        }
    }
}

// Fetches a factor warp's channels of q, k and g, chunk after chunk and item after item, and finds
// the items. A tile is 32 bytes wide: two lanes to a row.
struct Fetcher {
    Shared& smem;
    const Work& work;
    Scout scout;
    const u16 *q, *k, *g;
    States initial;
    u32 target;           // this lane's 16 bytes of q, of the warp's first tile, in slot 0
    i64 offset;           // of the same in the next chunk, in q, k and g
    int num_left;         // rows from this lane's to the item's last
    int num_chunks_left;  // of the item
    u32 num_items;
    int slot;

    __device__ static int row() { return threadIdx.x % 32 / 2; }
    __device__ static int column() {
        return tile_channel(threadIdx.x / 32, 0) + threadIdx.x % 2 * 8;
    }

    // The next chunk, if there is one. Rows past the item's end become zeros.
    __device__ void fetch() {
        if (num_chunks_left <= 0 && !next_item()) return;
        const u32 to = target + slot * sizeof(RawChunk);
        const u32 bytes = num_left > 0 ? 16 : 0;
        constexpr u32 tensor_bytes = sizeof(RawChunk::q);
        constexpr int tile_step = num_factor_warps * 16;  // channels from a tile to the next
        const u16 *from_q = q + offset, *from_k = k + offset, *from_g = g + offset;
#pragma unroll
        for (int tile = 0; tile < warp_tiles; ++tile) {
            const int step = tile * tile_step;
            cp_async_16(to + 2 * step, from_q + step, bytes);
            cp_async_16(to + 2 * step + tensor_bytes, from_k + step, bytes);
            cp_async_16(to + 2 * step + 2 * tensor_bytes, from_g + step, bytes);
        }
        cp_async_mbarrier_arrive_noinc(shared_address(&smem.raw_full[slot]));
        slot = slot + 1 == num_raw ? 0 : slot + 1;
        --num_chunks_left;
        num_left -= chunk;
        // A row that is not there is not pointed at either.
        if (num_left > 0) offset += chunk * static_cast<i64>(work.num_heads) * head_dim;
    }

    __device__ bool next_item() {
        // After the last one there is nothing to wait for.
        if (num_chunks_left < 0) return false;
        if (threadIdx.x < scout_threads) {
            const Item found = scout.find(work);
            wait_empty(smem.item_empty, num_items);
            if (threadIdx.x == 0) {
                smem.item[num_items % num_item_slots] = found;
                arrive(smem.item_full, num_items);
            }
        }
        wait_full(smem.item_full, num_items);
        const Item& item = smem.item[num_items % num_item_slots];
        ++num_items;
        num_chunks_left = item.num_chunks > 0 ? item.num_chunks : -1;
        num_left = item.num_tokens - row();
        const i64 first_row = item.num_tokens > 0 ? item.begin + (num_left > 0 ? row() : 0) : 0;
        offset = (first_row * work.num_heads + item.head) * head_dim + column();
        if (num_chunks_left > 0 && item.is_first && initial.kind != StateKind::None) {
            // Into L2, for the consumers to find when they get there.
            const char* rows = initial.row(item, work.num_heads, item.part * v_rows);
            constexpr int line = 128, threads = 32 * num_factor_warps;
            for (int at = threadIdx.x * line; at < v_rows * initial.row_bytes();
                 at += threads * line) {
                prefetch_global_l2(rows + at);
            }
        }
        return num_chunks_left > 0;
    }
};

// A factor warp's life: its tiles of channels of every chunk.
__device__ inline void run_factors(Shared& smem, const Work& work, const u16* q, const u16* k,
                                   const u16* g, const float* A_log, const float* dt_bias,
                                   float lower_bound, const States& initial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Fetcher fetcher = {smem, work,   {0, smem.left, k, g, A_log, dt_bias, lower_bound}, q, k,
                       g,    initial};
    fetcher.target = shared_address(&smem.raw[0].q[Fetcher::row()][Fetcher::column()]);

    u32 index = 0, num_fetched = 0;
    RawCursor cursor = {};
    Items items(smem);
    Gate gate;
    int chunk_of_item = 0, num_tokens = 0;
    for (;; ++index, ++chunk_of_item) {
        // Into the slot of the chunk num_stages before the last one, whose stage was free again.
        for (; num_fetched < index + raw_ahead; ++num_fetched) fetcher.fetch();
        if (index == 0 || chunk_of_item == items.num_chunks) {
            if (!items.next()) break;
            chunk_of_item = 0;
            num_tokens = items.item().num_tokens;
            gate = warp_gate(A_log, dt_bias, lower_bound, items.item().head, warp, lane);
        }
        wait_empty(smem.empty, index);
        wait(smem.raw_full[cursor.slot], cursor.parity);
        make_factors(smem.raw[cursor.slot], gate, tokens_in_chunk(num_tokens, chunk_of_item),
                     smem.stage[index % num_stages], warp, lane);
        publish();
        arrive(smem.factors_full, index);
        cursor.advance(1);
    }
}
