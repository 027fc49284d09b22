// The chain of a sequence's joined segments: the state S where each begins,
//   S <- S M + S_local
// by 16 rows of S, which are rows of their own throughout. Eight warps, 16 columns each, which come
// to each of them as S's operand. Products of tf32, as those of outputs.
#pragma once

#include "rows.cuh"
#include "transfer.cuh"
#include "work.cuh"

// A group of a block's warps, which works by itself.
constexpr int join_warps = 8, join_threads = 32 * join_warps;
constexpr int num_groups = num_threads / join_threads;
__device__ inline u32 group_thread() { return mov_tid_x() % join_threads; }
__device__ inline void group_sync() { bar_sync(1 + mov_tid_x() / join_threads, join_threads); }

constexpr u32 num_chain_parts = head_dim / 16;
static_assert(join_warps * 16 == head_dim, "a warp has 16 columns");

// Where a state is known or wanted: the number of the segment that it begins, or of all of them for
// the final state; more when there is no such place. is_chained: the item before is joined, and so
// comes from another state.
struct Place {
    int index;
    bool is_chained;
};

// How far a search for places is, and the places left in the window of 32 segments, a bit each.
struct Search {
    int window;
    u32 joined, chained;
    Begin last_begin;  // before the window's end
};

struct ChainShared {
    // The one in use, and the next: as state_operands, but columns times the powers of two of M's
    // rows.
    float4 state[2][head_dim / 8][32];
};

// Waits until all items are done. num_items: how many there are; or 0, if it is known that they are
// done. By a group.
__device__ inline void wait_for_items(const Counts& counts, u32 num_items) {
    if (group_thread() == 0 && num_items > 0) {
        while (ld_acquire(&counts.items_done) < num_items) nanosleep(50);
    }
    group_sync();
}

// The next place: where a joined segment begins, or the end, if the final state is wanted and the
// last item is joined. By a whole warp, and each of a group for itself.
__device__ inline Place next_place(Search& now, const Work& work, const Slots& slots, int head,
                                   bool has_final) {
    const int lane = mov_tid_x() % 32;
    while (!(now.joined | now.chained) && now.window <= slots.count) {
        now.window += 32;
        const int index = now.window + lane;
        Begin mine = goes_on;
        if (index < slots.count) mine = work.begins[(slots.first + index) * work.num_heads + head];
        const u32 begins = __ballot_sync(~0u, mine != goes_on);
        now.joined = __ballot_sync(~0u, mine == is_joined);
        const u32 before = begins & ((1u << lane) - 1);
        const bool after_joined =
            before ? now.joined >> (31 - __clz(before)) & 1 : now.last_begin == is_joined;
        const bool is_end = index == slots.count && has_final;
        now.chained = __ballot_sync(~0u, after_joined && (mine == is_joined || is_end));
        if (begins) now.last_begin = static_cast<Begin>(__shfl_sync(~0u, mine, 31 - __clz(begins)));
    }
    const u32 left = now.joined | now.chained;
    const int bit = left ? __ffs(left) - 1 : 31;
    const Place place = {now.window + bit, (now.chained >> bit & 1) != 0};
    now.joined &= ~(1u << bit);
    now.chained &= ~(1u << bit);
    return place;
}

// four: this lane's first four, as an offset in a contiguous matrix; with strides their row and
// column are taken from it.
__device__ inline void store_four(const States& states, u32 sequence, int head, int num_heads,
                                  const float (&state)[2][4], int four) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float x[4] = {state[0][2 * half], state[0][2 * half + 1], state[1][2 * half],
                            state[1][2 * half + 1]};
        char* to;
        if constexpr (is_strided) {
            const int row = four / head_dim + 2 * half;
            to =
                states.row(sequence, head, row) + four % head_dim * (states.row_bytes() / head_dim);
        } else {
            to = states.row(sequence * num_heads + head, head, 0) +
                 (four + half * state_half_offset) * (states.row_bytes() / head_dim);
        }
        if (states.kind == StateKind::FP32) {
            if constexpr (is_aligned) {
                *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(to)[i] = x[i];
            }
        } else {
            const u32 pairs[2] = {cvt_bf16x2(x[0], x[1]), cvt_bf16x2(x[2], x[3])};
            if constexpr (is_aligned) {
                *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
            } else {
                store_pairs(reinterpret_cast<u16*>(to), pairs);
            }
        }
    }
}

// The state S where a joined segment begins, 16 rows of it, in place of the local state before:
// tf32 A operands [16 (8 columns)][32 lanes][4]. Even ones have columns 4 c, then 4 c + 1, of 16 (c
// < 4), odd ones 4 c + 2, then 4 c + 3.
__device__ inline u32* state_operands(const Work& work, i64 matrix, int part) {
    return reinterpret_cast<u32*>(work.locals + (matrix * head_dim + 16 * part) * head_dim);
}

// number: (16 rows of 128, head, sequence), the rows fastest. num_items: see wait_for_items. By a
// group.
__device__ inline void run_chain(ChainShared& smem, const Work& work,
                                 const LaneSequence (&sequences)[32], const States& final,
                                 u32 number, u32 num_items) {
    const int num_heads = work.num_heads, lane = group_thread() % 32, warp = group_thread() / 32;
    const int part = number % num_chain_parts;
    const int head = static_cast<int>(number / num_chain_parts % num_heads);
    const u32 sequence = number / num_chain_parts / num_heads;
    const Slots slots = work.slots_of(sequence, sequences[lane]);
    // Of the segment before.
    const u32 first_matrix = slots.first * num_heads + head;
    const auto matrix_before = [&](int index) { return first_matrix + (index - 1) * num_heads; };
    // Where this lane has four neighbours, in its first row; its other is two rows on.
    const int four = 16 * part * head_dim + state_row_offset(lane) + 16 * warp + 4 * (lane % 4);
    float4 local[2];
    const auto load_local = [&](int index) {
        const float* from =
            work.locals + static_cast<i64>(matrix_before(index)) * head_dim * head_dim + four;
        local[0] = *reinterpret_cast<const float4*>(from);
        local[1] = *reinterpret_cast<const float4*>(from + state_half_offset);
    };
    Search search = {-32, 0, 0, goes_on};
    const auto next_of = [&] {
        return next_place(search, work, slots, head, final.kind != StateKind::None);
    };
    Place here = next_of();
    if (here.index > slots.count) return;
    wait_for_items(*work.counts, num_items);
    load_local(here.index);
    // Every warp has its local state, before any puts operands in that place.
    group_sync();
    uint4 m[join_warps];
    for (int step = 0;; ++step) {
        const Place next = next_of();
        // Of any segment, if there is no next one.
        const u32 next_matrix = matrix_before(min(next.index, slots.count));
        const uint4* next_m = transfer_operands(work.transfers, next_matrix) + warp * 32 + lane;
        const uint4 next_scales =
            ld_global_v4(transfer_scales(work.transfers, next_matrix) + 16 * warp + 4 * (lane % 4));
        float sums[2][2][4] = {};  // of even and odd operands, two tiles of columns
#pragma unroll
        for (int k8 = 0; k8 < head_dim / 8; ++k8) {
            // The first of a chain follows no state.
            if (here.is_chained) {
                const float4 s = smem.state[step % 2][k8][lane];
                const u32 a[4] = {__float_as_uint(s.x), __float_as_uint(s.y), __float_as_uint(s.z),
                                  __float_as_uint(s.w)};
                const uint4 b = m[k8 / 2];
                const u32 pairs[2] = {k8 % 2 ? b.y : b.x, k8 % 2 ? b.w : b.z};
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    mma_m16n8k8_tf32(sums[k8 % 2][tile], a, __float_as_uint(f16_low(pairs[tile])),
                                     __float_as_uint(f16_high(pairs[tile])));
                }
            }
            // A step ahead, in the place of what has been used.
            if (k8 % 2) m[k8 / 2] = ld_global_v4(next_m + join_warps * (k8 / 2) * 32);
        }
        float state[2][4];  // columns (0, 1) of the four, then (2, 3)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float four_local[4] = {local[half].x, local[half].y, local[half].z,
                                         local[half].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 2 * half + i % 2;
                state[i / 2][at] = four_local[i] + (sums[0][i / 2][at] + sums[1][i / 2][at]);
            }
        }
        if (here.index == slots.count) {
            store_four(final, sequence, head, num_heads, state, four);
            break;
        }
        u32* to =
            state_operands(work, matrix_before(here.index), part) + (2 * warp * 32 + lane) * 4;
        const float scales[4] = {__uint_as_float(next_scales.x), __uint_as_float(next_scales.y),
                                 __uint_as_float(next_scales.z), __uint_as_float(next_scales.w)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 a = make_float4(cvt_tf32(state[i][0]), cvt_tf32(state[i][2]),
                                         cvt_tf32(state[i][1]), cvt_tf32(state[i][3]));
            *reinterpret_cast<float4*>(to + i * 32 * 4) = a;
            smem.state[(step + 1) % 2][2 * warp + i][lane] =
                make_float4(a.x * scales[2 * i], a.y * scales[2 * i], a.z * scales[2 * i + 1],
                            a.w * scales[2 * i + 1]);
        }
        if (next.index <= slots.count) load_local(next.index);
        group_sync();
        // By one warp for all, and each time by another: it waits until the stores are done.
        if (warp == step % join_warps && lane == 0) {
            red_release_add(work.ready + matrix_before(here.index), 1);
        }
        if (next.index > slots.count) break;
        here = next;
    }
}
