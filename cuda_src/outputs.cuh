// Adds to the outputs of joined segments what comes of the state S where they begin,
//   O = scale (O_local + Q_M S^T)
// tile by tile of up to 96 tokens. Eight warps, 16 rows of S each. Products of float16: 11 bits,
// three more than O, which is bf16, keeps. So that nothing leaves its range, each row of S is
// brought to [2^14, 2^15) by a power of two; and Q_M, whose rows are no longer than 1, for M takes
// no vector to a longer one, by 2^12.
#pragma once

#include "chain.cuh"
#include "rows.cuh"
#include "work.cuh"

constexpr int tile_chunks = 6, tile_rows = tile_chunks * chunk;
constexpr int queries_log2 = 12;
// O_local of so many chunks is on its way, in registers.
constexpr int num_locals = 3;
static_assert(tile_chunks % num_locals == 0);

// Padded so that the eight rows that ldmatrix reads start on eight bank groups.
constexpr int query_row = tile_rows + 8;

struct OutputsShared {
    alignas(16) u16 queries[head_dim][query_row];  // Q_M^T as float16: [columns of M][tokens]
};

// Q_M of some chunks. Its columns are in the order of fragments' rows, and so of state_operands.
// partials: the warp's 16 columns of the first chunk.
__device__ inline void fetch_queries(OutputsShared& smem, const float* partials, int num_chunks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr float lift = 1 << queries_log2;
#pragma unroll 6
    for (int i = 0; i < num_chunks; ++i) {
        float x[2][4];
        load_partial(x, partials + i * (head_dim * chunk));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 16 * warp + lane / 4 + 8 * (j % 2);
            const int token = chunk * i + 8 * (j / 2) + 2 * (lane % 4);
            *reinterpret_cast<u32*>(&smem.queries[row][token]) =
                cvt_f16x2(x[j / 2][2 * (j % 2)] * lift, x[j / 2][2 * (j % 2) + 1] * lift);
        }
    }
}

// A warp's 16 rows of S as float16 A operands, and what undoes their scaling, for a lane's two
// rows.
struct ScaledState {
    u32 frag[head_dim / 16][4];
    float unscale[2];
};

__device__ inline ScaledState load_scaled(const float4* operands) {
    const int lane = threadIdx.x % 32;
    uint4 rows[head_dim / 16][2];
    ScaledState scaled;
#pragma unroll
    for (int i = 0; i < head_dim / 8; ++i)
        rows[i / 2][i % 2] = ld_global_v4(operands + i * 32 + lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // As integers magnitudes are in the same order, NaN above all.
        u32 largest = 0;
#pragma unroll
        for (int k16 = 0; k16 < head_dim / 16; ++k16) {
            const uint4& four = rows[k16][half];
            largest = max(max(largest, max(four.x & 0x7fffffffu, four.y & 0x7fffffffu)),
                          max(four.z & 0x7fffffffu, four.w & 0x7fffffffu));
        }
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        // 2^14 over that of the largest, but no more than 2^100, whose inverse is normal.
        const int log2 = min(100, 14 + 127 - static_cast<int>(largest >> 23));
        const float power = __int_as_float((127 + log2) << 23);
        scaled.unscale[half] = __int_as_float((127 - log2 - queries_log2) << 23);
#pragma unroll
        for (int k16 = 0; k16 < head_dim / 16; ++k16) {
            const uint4& four = rows[k16][half];
            scaled.frag[k16][half] =
                cvt_f16x2(__uint_as_float(four.x) * power, __uint_as_float(four.y) * power);
            scaled.frag[k16][2 + half] =
                cvt_f16x2(__uint_as_float(four.z) * power, __uint_as_float(four.w) * power);
        }
    }
    return scaled;
}

// scale (O_local + Q_M S^T), of a chunk of the tile and the warp's rows of the state.
__device__ inline Rows make_output(const float (&local)[2][4], const OutputsShared& smem,
                                   const ScaledState& state, int index, float scale) {
    const int lane = threadIdx.x % 32;
    const u32 address = shared_address(&smem.queries[lane % 16][chunk * index + lane / 16 * 8]);
    float o[2][4] = {};
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        u32 b[4];
        ldmatrix_x4_trans(b, address + k16 * 16 * query_row * sizeof(u16));
        mma_m16n8k16_f16(o[0], state.frag[k16], b[0], b[1], o[0]);
        mma_m16n8k16_f16(o[1], state.frag[k16], b[2], b[3], o[1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float& x = o[i / 4][i % 4];
        x = scale * fmaf(x, state.unscale[i % 4 / 2], local[i / 4][i % 4]);
    }
    return transposed(round_rows(o));
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
        // The run's first row, in the item and in the sequence, and how many there are.
        const int first_row = static_cast<int>(number % item_runs * run_tiles) * tile_rows;
        const i64 row = segment.index * work.segment + first_row;
        const int num_rows = static_cast<int>(
            min(i64{run_tiles} * tile_rows, min(segment.length, next * work.segment) - row));
        if (num_rows <= 0) continue;
        u16* rows_out = out + (segment.begin + row + lane / 4) * token_stride +
                        head * i64{head_dim} + 16 * warp + 4 * (lane % 4);
        const auto partials = [&](bool is_transfer) {
            const i64 rows = work.first_partial(slot, head, is_transfer) * chunk + first_row;
            return work.partials + rows * head_dim + 16 * warp * chunk;
        };
        const float* locals = partials(false);
        float local[num_locals][2][4];
        const auto load_local = [&](int of, int index) {
            if (index * chunk < num_rows) {
                load_partial(local[of], locals + index * (head_dim * chunk));
            }
        };
#pragma unroll
        for (int of = 0; of < num_locals; ++of) load_local(of, of);

        const auto num_chunks = [&](int tile_row) {
            return (min(tile_rows, num_rows - tile_row) + chunk - 1) / chunk;
        };
        // The run before is in use no more.
        __syncthreads();
        fetch_queries(smem, partials(true), num_chunks(0));
        const u32 before = at - num_heads;
        if (threadIdx.x == 0) {
            while (ld_acquire(ready + before) < all_ready) nanosleep(100);
        }
        __syncthreads();
        const ScaledState state = load_scaled(state_operands(work, before, warp));
        for (int tile_row = 0;;) {
            for (int i = 0; i < num_chunks(tile_row); i += num_locals) {
#pragma unroll
                for (int of = 0; of < num_locals; ++of) {
                    if (i + of == num_chunks(tile_row)) break;
                    const int index = tile_row / chunk + i + of;
                    const Rows rows = make_output(local[of], smem, state, i + of, scale);
                    load_local(of, index + num_locals);
                    store_rows(rows_out, 8 * token_stride, num_rows - index * chunk - lane / 4,
                               rows);
                    rows_out += chunk * token_stride;
                }
            }
            tile_row += tile_rows;
            if (tile_row >= num_rows) break;
            __syncthreads();
            fetch_queries(smem, partials(true) + tile_row * head_dim, num_chunks(tile_row));
            __syncthreads();
        }
    }
}
