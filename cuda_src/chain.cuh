// The chain of a sequence's joined segments: the state S where each begins,
//   S <- S M + S_local
// by 16 rows of S, which are rows of their own throughout. Eight warps, 16 columns each, which come
// to each of them as S's operand (split.cuh).
#pragma once

#include "rows.cuh"
#include "split.cuh"
#include "work.cuh"

constexpr int join_warps = 8, join_threads = 32 * join_warps;
constexpr u32 num_chain_parts = head_dim / 16;
// What `ready` of a state comes to: each warp of each part has written its own of it.
constexpr u32 all_ready = num_chain_parts * join_warps;
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
    Split state[2][join_warps][32];  // the one in use, and the next
    Place place[3];                  // of this step, the next one, and the one after
    Search search;
};

// The next place: where a joined segment begins, or the end, if the final state is wanted and the
// last item is joined. By a whole warp.
__device__ inline Place next_place(Search& search, const Work& work, const Slots& slots, int head,
                                   bool has_final) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    Search now = search;
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
    __syncwarp();
    if (lane == 0) search = now;
    return place;
}

// four: where this lane's first four are in a matrix.
__device__ inline void store_four(const States& states, i64 matrix, const float (&state)[2][4],
                                  int four) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float x[4] = {state[0][2 * half], state[0][2 * half + 1], state[1][2 * half],
                            state[1][2 * half + 1]};
        char* to = states.row(matrix, 0) +
                   (four + half * state_half_offset) * (states.row_bytes() / head_dim);
        if (states.kind == StateKind::FP32) {
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(cvt_bf16x2(x[0], x[1]), cvt_bf16x2(x[2], x[3]));
        }
    }
}

// The state S where a joined segment begins, 16 rows of it, in place of the local state before:
// tf32 A operands [16 (8 columns)][32 lanes][4]. Even ones have columns 4 c, then 4 c + 1, of 16 (c
// < 4), odd ones 4 c + 2, then 4 c + 3.
__device__ inline u32* state_operands(const Work& work, i64 matrix, int part) {
    return reinterpret_cast<u32*>(work.locals + (matrix * head_dim + 16 * part) * head_dim);
}

// number: (16 rows of 128, head, sequence), the rows fastest. ready: see kda_join.
__device__ inline void run_chain(ChainShared& smem, const Work& work,
                                 const LaneSequence (&sequences)[32], const States& final,
                                 u32* ready, u32 number) {
    const int num_heads = work.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = number % num_chain_parts;
    const int head = static_cast<int>(number / num_chain_parts % num_heads);
    const i64 sequence = number / num_chain_parts / num_heads;
    const Slots slots = work.slots_of(sequence, sequences[lane]);
    // Of the segment before.
    const u32 first_matrix = static_cast<u32>(slots.first) * num_heads + head;
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
    SplitB m[join_warps][2];
    // The first warp looks for places, two steps ahead.
    const auto look = [&](u32 step) {
        if (warp > 0) return;
        const Place place =
            next_place(smem.search, work, slots, head, final.kind != StateKind::None);
        if (lane == 0) smem.place[step % 3] = place;
    };
    if (threadIdx.x == 0) smem.search = {-32, 0, 0, goes_on};
    look(0);
    look(1);
    __syncthreads();
    if (smem.place[0].index > slots.count) return;
    load_local(smem.place[0].index);
    // Every warp has its local state, before any puts operands in that place.
    __syncthreads();
    int to_release = 0;  // no join is there
    const auto release = [&] {
        __syncwarp();
        if (lane == 0 && to_release) red_release_add(ready + matrix_before(to_release), 1);
        to_release = 0;
    };
    for (u32 step = 0;; ++step) {
        const Place here = smem.place[step % 3];
        if (here.index > slots.count) break;
        // Before the next loads are under way: a release waits for all loads of its warp, and takes
        // 0.7 of the 2 us of a step (H200).
        release();
        look(step + 2);
        const int next = smem.place[(step + 1) % 3].index;
        // Of any segment, if there is no next one.
        const SplitB* next_m =
            transfer_operands(work.transfers, matrix_before(min(next, slots.count)), 0) +
            warp * 2 * 32 + lane;
        // A step ahead.
        const auto load_next_m = [&](int k16) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const uint4 b = ld_global_v4(next_m + (2 * join_warps * k16 + tile) * 32);
                m[k16][tile] = {{b.x, b.y}, {b.z, b.w}};
            }
        };
        SplitSum sums[2];
        if (here.is_chained) {
#pragma unroll
            for (int k16 = 0; k16 < join_warps; ++k16) {
                const Split s = smem.state[step % 2][k16][lane];
                sums[0].add(s, m[k16][0]);
                sums[1].add(s, m[k16][1]);
                load_next_m(k16);
            }
        } else {
            // The first of a chain follows no state.
#pragma unroll
            for (int k16 = 0; k16 < join_warps; ++k16) load_next_m(k16);
        }
        float state[2][4];  // columns (0, 1) of the four, then (2, 3)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float four_local[4] = {local[half].x, local[half].y, local[half].z,
                                         local[half].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                state[i / 2][2 * half + i % 2] = four_local[i] + sums[i / 2].at(2 * half + i % 2);
            }
        }
        if (here.index == slots.count) {
            store_four(final, sequence * num_heads + head, state, four);
            break;
        }
        smem.state[(step + 1) % 2][warp][lane] = split_a(state);
        u32* to =
            state_operands(work, matrix_before(here.index), part) + (2 * warp * 32 + lane) * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<float4*>(to + i * 32 * 4) =
                make_float4(cvt_tf32(state[i][0]), cvt_tf32(state[i][2]), cvt_tf32(state[i][1]),
                            cvt_tf32(state[i][3]));
        }
        to_release = here.index;
        if (next <= slots.count) load_local(next);
        __syncthreads();
    }
    release();
}
