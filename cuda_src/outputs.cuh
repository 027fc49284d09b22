// Adds to the outputs of joined segments what comes of the state S where they begin,
//   O = scale (O_local + Q_M S^T)
// tile by tile of up to 96 tokens. Eight warps, 16 rows of S each. Products of tf32: 11 bits, three
// more than O, which is bf16, keeps.
#pragma once

#include "chain.cuh"
#include "rows.cuh"
#include "work.cuh"

constexpr int tile_chunks = 6, tile_rows = tile_chunks * chunk;

// Padded so that the eight rows that ldmatrix reads start on eight bank groups.
constexpr int query_row = head_dim + 4;

struct OutputsShared {
    alignas(16) float queries[tile_rows][query_row];
};

// Q_M of some chunks, as B operands [tokens][columns]: of 16 columns 4 c + i is at place 4 i + c,
// the order of state_operands. partials: the warp's 16 columns of the first chunk.
__device__ inline void fetch_queries(OutputsShared& smem, const float* partials, int num_chunks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
#pragma unroll 3
    for (int i = 0; i < num_chunks; ++i) {
        float x[2][4];
        load_partial(x, partials + i * (head_dim * chunk));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int token = chunk * i + 8 * (j / 4) + 2 * (lane % 4) + j % 2;
            const int place = 4 * (j % 4 / 2 * 2 + row % 2) + row / 2;
            smem.queries[token][16 * warp + place] = cvt_tf32(x[j / 4][j % 4]);
        }
    }
}

// o = scale (o + Q_M S^T), of a chunk of the tile and the warp's rows of the state.
__device__ inline void add_chunk(float (&o)[2][4], const OutputsShared& smem,
                                 const u32 (&state)[head_dim / 8][4], int index, float scale) {
    const int lane = threadIdx.x % 32;
    const int row = chunk * index + lane / 16 * 8 + lane % 8;
    const u32 address = shared_address(&smem.queries[row][lane / 8 % 2 * 4]);
#pragma unroll
    for (int k8 = 0; k8 < head_dim / 8; ++k8) {
        u32 b[4];
        // 32-bit elements read as pairs of 16: a lane gets one of each matrix.
        ldmatrix_x4(b, address + k8 * 32);
        mma_m16n8k8_tf32(o[0], state[k8], b[0], b[1]);
        mma_m16n8k8_tf32(o[1], state[k8], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i / 4][i % 4] *= scale;
}

// Runs of tiles: number first, first + step, ... of all. A block takes runs of neighbours, so that
// it finds its place, and loads S, once for all of them: item_runs in an item, of run_tiles each.
// Both come from the host, or they would take registers. ready: see kda_join.
__device__ inline void run_outputs(OutputsShared& smem, const Work& work,
                                   const LaneSequence (&sequences)[32], u32 run_tiles,
                                   u32 item_runs, u16* out, float scale, const u32* ready,
                                   u32 first, u32 step) {
    const int num_heads = work.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 token_stride = static_cast<i64>(num_heads) * head_dim;
    Walk walk = {0, 0};
    for (u32 number = first;; number += step) {
        u32 rank = number / item_runs;
        const u32 at =
            find_piece(work, walk, rank, [](Begin begin) { return begin == is_joined ? 1 : 0; });
        if (at == work.num_states()) return;
        const u32 slot = at / num_heads;
        const int head = static_cast<int>(at - slot * num_heads);
        const Segment segment = work.segment_of(slot, sequences[lane]);
        const Begin lane_begin = work.lane_begin(slot, head);
        const i64 next = work.next_begin(slot, segment, head, lane_begin).index;
        const i64 item_row = segment.index * work.segment;  // of the sequence
        const int item_rows = static_cast<int>(min(segment.length, next * work.segment) - item_row);
        u16* item_out = out + (segment.begin + item_row) * token_stride + head * i64{head_dim};

        const auto rows_from = [&](u32 tile) {
            return min(tile_rows, item_rows - static_cast<int>(tile * tile_rows));
        };
        const auto partials = [&](u32 tile, bool is_transfer) {
            const i64 at = work.first_partial(slot, head, is_transfer) + tile * tile_chunks;
            return work.partials + (at * head_dim + 16 * warp) * chunk;
        };
        float local[2][4];  // O_local of the next chunk
        const auto load_local = [&](u32 tile, int index) {
            load_partial(local, partials(tile, false) + index * (head_dim * chunk));
        };
        const auto fetch = [&](u32 tile) {
            // The tile before is in use no more.
            __syncthreads();
            fetch_queries(smem, partials(tile, true), (rows_from(tile) + chunk - 1) / chunk);
            load_local(tile, 0);
        };
        u32 tile = number % item_runs * run_tiles;
        const u32 end_tile = tile + run_tiles;
        if (rows_from(tile) <= 0) continue;
        fetch(tile);
        const u32 before = at - num_heads;
        if (threadIdx.x == 0) {
            while (ld_acquire(ready + before) < all_ready) nanosleep(100);
        }
        __syncthreads();
        u32 state[head_dim / 8][4];
        const u32* operands = state_operands(work, before, warp) + lane * 4;
#pragma unroll
        for (int k8 = 0; k8 < head_dim / 8; ++k8) {
            const uint4 a = ld_global_v4(operands + k8 * 32 * 4);
            state[k8][0] = a.x;
            state[k8][1] = a.y;
            state[k8][2] = a.z;
            state[k8][3] = a.w;
        }
        for (;;) {
            u16* rows_out = item_out + (tile * tile_rows + lane / 4) * token_stride + 16 * warp +
                            4 * (lane % 4);
            for (int i = 0; i * chunk < rows_from(tile); ++i) {
                float o[2][4];
#pragma unroll
                for (int j = 0; j < 8; ++j) o[j / 4][j % 4] = local[j / 4][j % 4];
                if ((i + 1) * chunk < rows_from(tile)) load_local(tile, i + 1);
                add_chunk(o, smem, state, i, scale);
                store_rows(rows_out + i * chunk * token_stride, 8 * token_stride,
                           rows_from(tile) - chunk * i - lane / 4, transposed(round_rows(o)));
            }
            if (++tile == end_tile || rows_from(tile) <= 0) break;
            fetch(tile);
            __syncthreads();
        }
    }
}
