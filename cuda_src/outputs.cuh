// Adds to the outputs of joined segments what comes of the state S where they begin,
//   O = scale (O_local + Q_M S^T)
// tile by tile of up to 96 tokens. Eight warps, 16 rows of S each. Products of tf32: 11 bits, three
// more than O, which is bf16, keeps.
#pragma once

#include "chain.cuh"
#include "rows.cuh"
#include "work.cuh"

constexpr int tile_chunks = 6, tile_rows = tile_chunks * chunk;

// Where Q_M of a token and column is: in rows of tokens for mma.sync, in core matrices of 8 tokens
// x 4 columns for wgmma. Padded, so that eight rows that are read, or written, are in eight bank
// groups.
constexpr int query_token = use_wgmma ? 4 : head_dim + 4;      // from a token to the next
constexpr int query_four = use_wgmma ? 4 * tile_rows + 4 : 4;  // from four columns to four
constexpr int query_size = use_wgmma ? head_dim / 4 * query_four : tile_rows * query_token;
// Chunks whose products are made side by side.
constexpr int group_chunks = use_wgmma ? 2 : 1;
static_assert(tile_chunks % group_chunks == 0);

struct OutputsShared {
    alignas(128) float queries[query_size];
};

// Q_M of some chunks, as B operands: of 16 columns 4 c + i is at place 4 i + c, the order of
// state_operands. partials: the warp's 16 columns of the first chunk. group: chunks that are on
// their way at once.
template <int group>
__device__ inline void fetch_queries(OutputsShared& smem, const float* partials, int num_chunks) {
    // Read anew, here and below: what hangs on it would be kept through all tiles, and spill.
    const int lane = mov_tid_x() % 32, warp = group_thread() / 32, row = lane / 4;
    static_assert(tile_chunks % group == 0);
#pragma unroll 1
    for (int first = 0; first < num_chunks; first += group) {
        float x[group][2][4];
#pragma unroll
        for (int i = 0; i < group; ++i) {
            // The last again, where there are fewer, to a place that is not read.
            load_partial(x[i], partials + min(first + i, num_chunks - 1) * (head_dim * chunk));
        }
#pragma unroll
        for (int i = 0; i < group * 8; ++i) {
            const int j = i % 8;
            const int token = chunk * (first + i / 8) + 8 * (j / 4) + 2 * (lane % 4) + j % 2;
            const int four = 4 * warp + j % 4 / 2 * 2 + row % 2;
            smem.queries[token * query_token + four * query_four + row / 2] =
                cvt_tf32(x[i / 8][j / 4][j % 4]);
        }
    }
}

// Begins Q_M S^T of a group of chunks of the tile, from `index` on, and the warp's rows of the
// state.
template <int num_tiles>
__device__ inline void begin_products(float (&o)[num_tiles][4], const OutputsShared& smem,
                                      const u32 (&state)[head_dim / 8][4], int index) {
    const float* first = &smem.queries[chunk * index * query_token];
    if constexpr (use_wgmma) {
        constexpr int bytes = sizeof(float);
        GroupB<Major::K, core_bytes, query_four * bytes> queries(shared_address(first), 0, 0);
        gemm_begin();
#pragma unroll
        for (int k8 = 0; k8 < head_dim / 8; ++k8) {
            tf32_gemm(o, state[k8], queries);
            queries.advance(2 * query_four * bytes);
        }
        gemm_commit();
    } else {
        const int lane = threadIdx.x % 32;
        const int row = lane / 16 * 8 + lane % 8;
        const u32 address = shared_address(first + row * query_token + lane / 8 % 2 * 4);
#pragma unroll
        for (int k8 = 0; k8 < head_dim / 8; ++k8) {
            u32 b[4];
            // 32-bit elements read as pairs of 16: a lane gets one of each matrix.
            ldmatrix_x4(b, address + k8 * 32);
            mma_m16n8k8_tf32(o[0], state[k8], b[0], b[1]);
            mma_m16n8k8_tf32(o[1], state[k8], b[2], b[3]);
        }
    }
}

// Run number of all, of run_tiles tiles of an item, which has item_runs of them; false if there are
// not so many. Its place is found, and S loaded, once for all its tiles. The sizes come from the
// host, or they would take registers. walk: how far the runs before have come. num_items: see
// wait_for_items; 0 from the first wait on. By a group.
__device__ inline bool run_outputs(OutputsShared& smem, const Work& work,
                                   const LaneSequence (&sequences)[32], Walk& walk, u32 number,
                                   u32& num_items, u32 run_tiles, u32 item_runs, u16* out,
                                   float scale) {
    const int num_heads = work.num_heads, lane = group_thread() % 32, warp = group_thread() / 32;
    const i64 contiguous_stride = static_cast<i64>(num_heads) * head_dim;
    const auto token_stride = [&] {
        return is_strided ? token_step(work.strides->out) : contiguous_stride;
    };
    u32 rank = number / item_runs;
    Walk here = walk;
    const u32 at = find_piece(work, here, rank, 0, 1);
    group_sync();
    if (group_thread() == 0) walk = here;
    if (at == work.num_states()) return false;
    const u32 slot = at / num_heads;
    const int head = static_cast<int>(at - slot * num_heads);
    const Segment segment = work.segment_of(slot, sequences[lane]);
    const Begin lane_begin = work.lane_begin(slot, head);
    const NextBegin next = work.next_begin(slot, segment, head, lane_begin);
    const int item_row = work.num_rows_before(segment.index);  // of the sequence
    const int item_rows = work.num_rows_before(next, segment) - item_row;
    const u32 first_row = work.first_row(segment) + item_row;  // of out
    // With strides: the item's first row of this head.
    u16* item_out = out;
    if constexpr (is_strided) {
        item_out += work.strides->out.offset(work.batch_of(segment.sequence), first_row, head);
        forget(item_out);  // or what it is worked out from would be kept too
    }

    const auto rows_from = [&](u32 tile) {
        return min(tile_rows, item_rows - static_cast<int>(tile * tile_rows));
    };
    const auto partials = [&](u32 tile, bool is_transfer) {
        const i64 at = work.first_partial(slot, head, is_transfer) + tile * tile_chunks;
        return work.partials + (at * head_dim + group_thread() / 32 * 16) * chunk;
    };
    float local[group_chunks][2][4];
    const auto load_local = [&](u32 tile, int first) {
#pragma unroll
        for (int i = 0; i < group_chunks; ++i) {
            if (rows_from(tile) > (first + i) * chunk) {
                load_partial(local[i], partials(tile, false) + (first + i) * (head_dim * chunk));
            }
        }
    };
    u32 tile = number % item_runs * run_tiles;
    const u32 end_tile = tile + run_tiles;
    if (rows_from(tile) <= 0) return true;
    wait_for_items(*work.counts, num_items);
    num_items = 0;
    const auto num_chunks = [&] { return (rows_from(tile) + chunk - 1) / chunk; };
    // All that can be there before S is.
    fetch_queries<tile_chunks>(smem, partials(tile, true), num_chunks());
    publish();
    load_local(tile, 0);
    const u32 before = at - num_heads;
    if (group_thread() == 0) {
        while (ld_acquire(work.ready + before) < num_chain_parts) nanosleep(100);
    }
    group_sync();
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
        const u32 thread = group_thread();
        u16* rows_out;
        if constexpr (is_strided) {
            rows_out = item_out + (tile * tile_rows + thread % 32 / 4) * token_stride() +
                       (thread / 32 * 16 + 4 * (thread % 4));
        } else {
            rows_out = out + (first_row + tile * tile_rows + thread % 32 / 4) * token_stride() +
                       (head * head_dim + thread / 32 * 16 + 4 * (thread % 4));
        }
#pragma unroll 1
        for (int i = 0; i * chunk < rows_from(tile); i += group_chunks) {
            float o[2 * group_chunks][4] = {};
            begin_products(o, smem, state, i);
            gemm_wait<0>();
            hold(o);
            Rows rows[group_chunks];
#pragma unroll
            for (int j = 0; j < group_chunks; ++j) {
                float sum[2][4];
#pragma unroll
                for (int m = 0; m < 8; ++m) {
                    sum[m / 4][m % 4] = scale * (local[j][m / 4][m % 4] + o[2 * j + m / 4][m % 4]);
                }
                rows[j] = round_rows(sum);
            }
            load_local(tile, i + group_chunks);
            const int num_left =
                rows_from(tile) - i * chunk - static_cast<int>(mov_tid_x() % 32 / 4);
#pragma unroll
            for (int j = 0; j < group_chunks; ++j) {
                store_rows(rows_out + (i + j) * chunk * token_stride(), 8 * token_stride(),
                           num_left - j * chunk, transposed(rows[j]));
            }
        }
        if (++tile == end_tile || rows_from(tile) <= 0) break;
        group_sync();
        fetch_queries<2>(smem, partials(tile, true), num_chunks());
        publish();
        load_local(tile, 0);
        group_sync();
    }
    return true;
}
