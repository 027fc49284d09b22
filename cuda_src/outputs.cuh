// Adds to the outputs of joined segments what comes of the state S where they begin,
//   O = O_local + scale Q_M S^T
// tile by tile of up to 96 tokens. Eight warps, 16 rows of S each, as an A operand.
#pragma once

#include "chain.cuh"
#include "rows.cuh"
#include "split.cuh"
#include "work.cuh"

constexpr int tile_chunks = 6, tile_rows = tile_chunks * chunk;

struct OutputsShared {
    alignas(16) u16 queries[2][tile_rows][raw_row];  // rounded, and what that left; as operands
    alignas(16) u16 outputs[tile_rows][raw_row];
};

// Chunks of Q_M, as operands. A warp's 16 columns of each.
__device__ inline void fetch_queries(OutputsShared& smem, const float* queries, i64 first_chunk,
                                     int num_chunks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* from = queries + (first_chunk * head_dim + 16 * warp) * chunk;
#pragma unroll 6
    for (int i = 0; i < num_chunks; ++i) {
        float x[2][4];
        load_queries(x, from + i * (head_dim * chunk));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const Rows rows = round_rows(x);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = chunk * i + 8 * half + lane / 4;
                u32* to = reinterpret_cast<u32*>(&smem.queries[part][row][16 * warp]) + lane % 4;
                to[0] = rows.token[half].x;
                to[4] = rows.token[half].y;
            }
            float high[2][4];
            unpack_rows(high, rows);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j / 4][j % 4] -= high[j / 4][j % 4];
        }
    }
}

// The tiles first, first + step, ... of all. ready: see kda_join.
__device__ inline void run_outputs(OutputsShared& smem, const Work& work, int join_every, u16* out,
                                   float scale, const u32* ready, u32 first, u32 step) {
    const int num_heads = work.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 token_stride = static_cast<i64>(num_heads) * head_dim;
    // Of the segments that one item goes through.
    const u32 num_tiles = (join_every * work.segment + tile_rows - 1) / tile_rows;
    const LaneSequence sequence = work.lane_sequence();
    Walk walk = {0, 0};
    for (u32 number = first;; number += step) {
        u32 rank = number / num_tiles;
        const u32 at =
            find_piece(work, walk, rank, [](Begin begin) { return begin == is_joined ? 1 : 0; });
        if (at == work.num_states()) return;
        const u32 slot = at / num_heads;
        const int head = static_cast<int>(at - slot * num_heads);
        const Segment segment = work.segment_of(slot, sequence);
        const i64 first_row = segment.index * work.segment + number % num_tiles * tile_rows;
        const Begin lane_begin = work.lane_begin(slot, head);
        const i64 next = work.next_begin(slot, segment, head, lane_begin).index;
        const i64 end = min(segment.length, next * work.segment);
        const int num_rows = static_cast<int>(min(end - first_row, i64{tile_rows}));
        if (num_rows <= 0) continue;

        // The tile before is in use no more.
        __syncthreads();
        u16* rows_out = out + (segment.begin + first_row) * token_stride + head * i64{head_dim};
        for (int piece = threadIdx.x; piece < num_rows * 16; piece += join_threads) {
            const int row = piece / 16, column = piece % 16 * 8;
            cp_async_16(shared_address(&smem.outputs[row][column]),
                        rows_out + row * token_stride + column, 16);
        }
        cp_async_commit();
        const int num_chunks = (num_rows + chunk - 1) / chunk;
        const i64 first_chunk = work.first_chunk(slot, head) + number % num_tiles * tile_chunks;
        fetch_queries(smem, work.queries, first_chunk, num_chunks);
        const u32 before = at - num_heads;
        if (threadIdx.x == 0) {
            while (ld_acquire(ready + before) < all_ready) {
            }
        }
        cp_async_wait_group<0>();
        __syncthreads();
        Split state[head_dim / 16];
        const Split* from = split_state(work, before, warp);
#pragma unroll
        for (int k16 = 0; k16 < head_dim / 16; ++k16) state[k16] = from[k16 * 32 + lane];

        const int column = 16 * warp + 4 * (lane % 4);
        for (int i = 0; i < num_chunks; ++i) {
            const int first_token = chunk * i;
            const u32 tile = shared_address(
                &smem.queries[0][first_token + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
            SplitSum sums[2];
#pragma unroll
            for (int k16 = 0; k16 < head_dim / 16; ++k16) {
                u32 high[4], low[4];
                ldmatrix_x4(high, tile + k16 * 32);
                ldmatrix_x4(low, tile + sizeof(smem.queries[0]) + k16 * 32);
                sums[0].add(state[k16], {{high[0], high[1]}, {low[0], low[1]}});
                sums[1].add(state[k16], {{high[2], high[3]}, {low[2], low[3]}});
            }
            const int token = first_token + lane / 4;
            Rows rows;
            rows.token[0] = *reinterpret_cast<const uint2*>(&smem.outputs[token][column]);
            rows.token[1] = *reinterpret_cast<const uint2*>(&smem.outputs[token + 8][column]);
            float o[2][4];
            unpack_rows(o, rows);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                o[j / 4][j % 4] = fmaf(scale, sums[j / 4].at(j % 4), o[j / 4][j % 4]);
            }
            store_rows(rows_out + token * token_stride + column, 8 * token_stride, num_rows - token,
                       round_rows(o));
        }
    }
}
