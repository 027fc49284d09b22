// Adds to the outputs of joined segments what comes of the state S where they begin,
//   O = O_local + scale Q_M S^T
// tile by tile of up to 128 tokens. Eight warps, 16 rows of S each, as an A operand.
#pragma once

#include "chain.cuh"
#include "rows.cuh"
#include "split.cuh"
#include "work.cuh"

constexpr int tile_rows = 128;

struct OutputsShared {
    alignas(16) u16 queries[2][tile_rows][raw_row];  // rounded, and what that left
};

// This warp's 16 rows of a matrix of float32 [128 x 128].
__device__ inline void load_split(Split (&s)[head_dim / 16], const float* matrix) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* row = matrix + 16 * warp * head_dim + state_row_offset(lane) + 2 * (lane % 4);
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(row + i % 2 * state_half_offset +
                                                                 16 * k16 + i / 2 * 8);
            split(pair.x, pair.y, s[k16].high[i], s[k16].low[i]);
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
        const i64 end = min(segment.length, work.next_begin(slot, segment, head) * work.segment);
        const int num_rows = static_cast<int>(min(end - first_row, i64{tile_rows}));
        if (num_rows <= 0) continue;

        const i64 offset = (segment.begin + first_row) * token_stride + head * i64{head_dim};
        // The tile before is in use no more.
        __syncthreads();
        for (int piece = threadIdx.x; piece < num_rows * 16; piece += join_threads) {
            const int row = piece / 16, column = piece % 16 * 8;
            const u16* from = work.queries + offset + row * token_stride + column;
            cp_async_16(shared_address(&smem.queries[0][row][column]), from, 16);
            cp_async_16(shared_address(&smem.queries[1][row][column]),
                        from + work.num_rows() * token_stride, 16);
        }
        cp_async_commit();
        const u32 before = at - num_heads;
        while (ld_acquire(ready + before) < num_chain_parts) {
        }
        Split state[head_dim / 16];
        load_split(state, work.locals + static_cast<i64>(before) * head_dim * head_dim);
        cp_async_wait_group<0>();
        __syncthreads();

        u16* row = out + offset + lane / 4 * token_stride + 16 * warp + 4 * (lane % 4);
        u32 tile = shared_address(&smem.queries[0][lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
        int num_left = num_rows - lane / 4;
        for (int chunks = (num_rows + chunk - 1) / chunk; chunks > 0; --chunks) {
            Rows rows;
            load_rows(rows, row, 8 * token_stride, num_left);
            float o[2][4] = {};
#pragma unroll
            for (int k16 = 0; k16 < head_dim / 16; ++k16) {
                u32 high[4], low[4];
                ldmatrix_x4(high, tile + k16 * 32);
                ldmatrix_x4(low, tile + sizeof(smem.queries[0]) + k16 * 32);
                mma_split(o[0], state[k16], {high[0], high[1]}, {low[0], low[1]});
                mma_split(o[1], state[k16], {high[2], high[3]}, {low[2], low[3]});
            }
            float local[2][4];
            unpack_rows(local, rows);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                o[i / 4][i % 4] = fmaf(scale, o[i / 4][i % 4], local[i / 4][i % 4]);
            }
            store_rows(row, 8 * token_stride, num_left, round_rows(o));
            row += chunk * token_stride;
            tile += chunk * sizeof(smem.queries[0][0]);
            num_left -= chunk;
        }
    }
}
