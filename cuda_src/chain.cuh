// The chain of a sequence's joined segments: the state S where each begins,
//   S <- S M + S_local
// by 16 rows of S, which are rows of their own throughout. Eight warps, 16 columns each. M comes in
// slices of 32 rows, three ahead of the one in use.
#pragma once

#include "split.cuh"
#include "work.cuh"

constexpr int join_threads = 256, join_warps = join_threads / 32;
constexpr int chain_rows = 16, num_chain_parts = head_dim / chain_rows;
static_assert(join_warps * 16 == head_dim, "a warp makes the operand of 16 columns");

constexpr int slice_rows = 32, num_slices = head_dim / slice_rows, num_slice_slots = 4;
// Padded so that the rows that a warp reads at once start on different banks.
constexpr int slice_row = head_dim + 4;

struct ChainShared {
    alignas(16) float slice[num_slice_slots][slice_rows][slice_row];
    Split state[2][head_dim / 16][32];  // S as an A operand; the one in use, and the next
};

// What begins where, of 32 segments and the end of the sequence, a bit each. An item goes from one
// begin to the next.
struct ChainWindow {
    u32 begins;
    u32 known;  // joined to an item that makes the state itself
    u32 steps;  // to an item that is joined too; or the end, of such an item, for the final state
};

// last_begin: of the sequence's begins before the window, the last; it becomes that of those up to
// the window's end. By a whole warp.
__device__ inline ChainWindow chain_window(const Work& work, const Slots& slots, int first,
                                           int head, bool has_final, Begin& last_begin) {
    const int lane = threadIdx.x % 32, index = first + lane;
    Begin mine = goes_on;
    if (index < slots.count) mine = work.begins[(slots.first + index) * work.num_heads + head];
    ChainWindow window;
    window.begins = __ballot_sync(~0u, mine != goes_on);
    const u32 joined = __ballot_sync(~0u, mine == is_joined);
    const u32 before = window.begins & ((1u << lane) - 1);
    const bool is_chained = before ? joined >> (31 - __clz(before)) & 1 : last_begin == is_joined;
    window.known = __ballot_sync(~0u, mine == is_joined && !is_chained);
    const bool is_end = index == slots.count && has_final;
    window.steps = __ballot_sync(~0u, is_chained && (mine == is_joined || is_end));
    if (window.begins) last_begin = __shfl_sync(~0u, mine, 31 - __clz(window.begins));
    return window;
}

// number: (16 rows of 128, head, sequence), the rows fastest. ready: see kda_join.
__device__ inline void run_chain(ChainShared& smem, const Work& work, const States& final,
                                 u32* ready, u32 number) {
    const int num_heads = work.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = number % num_chain_parts * chain_rows;
    const int head = static_cast<int>(number / num_chain_parts % num_heads);
    const i64 sequence = number / num_chain_parts / num_heads;
    const Slots slots = work.slots_of(sequence, work.lane_sequence());
    // This lane's accumulators in a state: two neighbours each, of rows r and r + 8, of columns c
    // and c + 8.
    const int row = first_row + lane / 4, column = 16 * warp + 2 * (lane % 4);
    const auto pair_at = [&](int i) { return (row + 8 * (i % 2)) * head_dim + column + i / 2 * 8; };
    // The matrix that the item before a begin left.
    const auto matrix_before = [&](int index) {
        return (slots.first + index - 1) * num_heads + head;
    };
    const auto load_local = [&](float (&acc)[2][4], int index) {
        const float* local = work.locals + matrix_before(index) * head_dim * head_dim;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(local + pair_at(i));
            acc[i / 2][i % 2 * 2] = pair.x;
            acc[i / 2][i % 2 * 2 + 1] = pair.y;
        }
    };

    int buffer = 0, in_buffer = -1;  // the begin whose state that is
    int last_index = -1;             // of the begins before the window
    Begin last_begin = goes_on;
    for (int first = 0; first <= slots.count; first += 32) {
        const ChainWindow window =
            chain_window(work, slots, first, head, final.kind != StateKind::None, last_begin);
        if (warp == 0 && window.known >> lane & 1) {
            red_release_add(ready + matrix_before(first + lane), 1);
        }
        u32 to_fetch = window.steps, num_fetched = 0, num_used = 0;
        const auto fetch = [&] {
            if (to_fetch) {
                const i64 matrix = matrix_before(first + __ffs(to_fetch) - 1);
                const float* m = work.transfers + matrix * head_dim * head_dim +
                                 num_fetched % num_slices * slice_rows * head_dim;
                for (int at = threadIdx.x; at < slice_rows * head_dim / 4; at += join_threads) {
                    float* to = smem.slice[num_fetched % num_slice_slots][at / 32];
                    cp_async_16(shared_address(to + at % 32 * 4), m + at * 4, 16);
                }
                if (++num_fetched % num_slices == 0) to_fetch &= to_fetch - 1;
            }
            cp_async_commit();
        };
        for (int i = 0; i < num_slice_slots - 1; ++i) fetch();

        for (u32 todo = window.steps; todo; todo &= todo - 1) {
            const int bit = __ffs(todo) - 1, index = first + bit;
            const u32 before = window.begins & ((1u << bit) - 1);
            const int from = before ? first + 31 - __clz(before) : last_index;
            float acc[2][4];
            if (from != in_buffer) {
                load_local(acc, from);
                smem.state[buffer][warp][lane] = split_a(acc);
            }
            load_local(acc, index);
#pragma unroll 1
            for (int slice = 0; slice < num_slices; ++slice, ++num_used) {
                cp_async_wait_group<num_slice_slots - 2>();
                // All have the slice, and the state; and are done with the slot to fetch into.
                __syncthreads();
                fetch();
                const auto& m = smem.slice[num_used % num_slice_slots];
#pragma unroll
                for (int k16 = 0; k16 < slice_rows / 16; ++k16) {
                    const Split s = smem.state[buffer][slice * (slice_rows / 16) + k16][lane];
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        const int k = 16 * k16 + 2 * (lane % 4),
                                  n = 16 * warp + 8 * tile + lane / 4;
                        u32 high[2], low[2];
                        split(m[k][n], m[k + 1][n], high[0], low[0]);
                        split(m[k + 8][n], m[k + 9][n], high[1], low[1]);
                        mma_split(acc[tile], s, high, low);
                    }
                }
            }
            buffer ^= 1;
            smem.state[buffer][warp][lane] = split_a(acc);
            in_buffer = index;
            const bool is_end = index == slots.count;
            const States to = is_end ? final : States{work.locals, StateKind::FP32};
            const i64 matrix = is_end ? sequence * num_heads + head : matrix_before(index);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = acc[i / 2][i % 2 * 2], y = acc[i / 2][i % 2 * 2 + 1];
                char* at = to.row(matrix, 0) + pair_at(i) * (to.row_bytes() / head_dim);
                if (to.kind == StateKind::FP32) {
                    *reinterpret_cast<float2*>(at) = make_float2(x, y);
                } else {
                    *reinterpret_cast<u32*>(at) = cvt_bf16x2(x, y);
                }
            }
            if (!is_end) {
                __syncthreads();
                if (threadIdx.x == 0) red_release_add(ready + matrix_before(index), 1);
            }
        }
        if (window.begins) last_index = first + 31 - __clz(window.begins);
        cp_async_wait_group<0>();
        __syncthreads();
    }
}
