// The chain of a sequence's joined segments: the state S where each begins,
//   S <- S M + S_local
// by 16 rows of S, which are rows of their own throughout. Eight warps, 16 columns each, which come
// to each of them as S's operand (split.cuh).
#pragma once

#include "rows.cuh"
#include "split.cuh"
#include "work.cuh"

constexpr int join_threads = 256, join_warps = join_threads / 32;
constexpr int num_chain_parts = head_dim / 16;
static_assert(join_warps * 16 == head_dim, "a warp has 16 columns");
// What `ready` of a state has come to when all of its warps have written theirs.
constexpr u32 all_ready = num_chain_parts * join_warps;

struct ChainShared {
    Split state[2][join_warps][32];  // the one in use, and the next
};

// Where a sequence's joined segments begin, one after the other. By a whole warp.
struct ChainPlaces {
    const Work& work;
    const Slots& slots;
    int head;
    bool has_final;
    int first = -32;              // of the window of 32 segments
    u32 joined = 0, chained = 0;  // places left in it, a bit each
    Begin last_begin = goes_on;   // before the window's end

    // The next one's segment: the number of segments for the end, where the final state is wanted
    // and the last item is joined; more when there is no next one. is_chained: whether the item
    // before is joined too.
    __device__ int next(bool& is_chained) {
        while (!(joined | chained)) {
            first += 32;
            if (first > slots.count) return first;
            look();
        }
        const int bit = __ffs(joined | chained) - 1;
        is_chained = chained >> bit & 1;
        joined &= ~(1u << bit);
        chained &= ~(1u << bit);
        return first + bit;
    }

    __device__ void look() {
        const int lane = threadIdx.x % 32, index = first + lane;
        Begin mine = goes_on;
        if (index < slots.count) mine = work.begins[(slots.first + index) * work.num_heads + head];
        const u32 begins = __ballot_sync(~0u, mine != goes_on);
        joined = __ballot_sync(~0u, mine == is_joined);
        const u32 before = begins & ((1u << lane) - 1);
        const bool after_joined =
            before ? joined >> (31 - __clz(before)) & 1 : last_begin == is_joined;
        const bool is_end = index == slots.count && has_final;
        chained = __ballot_sync(~0u, after_joined && (mine == is_joined || is_end));
        if (begins) last_begin = static_cast<Begin>(__shfl_sync(~0u, mine, 31 - __clz(begins)));
    }
};

// four: where this lane's first four are in a matrix.
__device__ inline void store_final(const States& final, i64 matrix, const float (&state)[2][4],
                                   int four) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float x[4] = {state[0][2 * half], state[0][2 * half + 1], state[1][2 * half],
                            state[1][2 * half + 1]};
        char* to = final.row(matrix, 0) +
                   (four + half * state_half_offset) * (final.row_bytes() / head_dim);
        if (final.kind == StateKind::FP32) {
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(cvt_bf16x2(x[0], x[1]), cvt_bf16x2(x[2], x[3]));
        }
    }
}

// The state where a joined segment begins, in place of the local state of the one before: operands
// of 16 rows and 16 columns, [8][8][32 lanes].
__device__ inline Split* split_state(const Work& work, i64 matrix, int part) {
    return reinterpret_cast<Split*>(work.locals + matrix * head_dim * head_dim) +
           part * join_warps * 32;
}

// number: (16 rows of 128, head, sequence), the rows fastest. ready: see kda_join.
__device__ inline void run_chain(ChainShared& smem, const Work& work, const States& final,
                                 u32* ready, u32 number) {
    const int num_heads = work.num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = number % num_chain_parts;
    const int head = static_cast<int>(number / num_chain_parts % num_heads);
    const i64 sequence = number / num_chain_parts / num_heads;
    const Slots slots = work.slots_of(sequence, work.lane_sequence());
    // Of the segment before.
    const auto matrix_of = [&](int index) { return (slots.first + index - 1) * num_heads + head; };
    // Where this lane has four neighbours, in its first row; its other is two rows on.
    const int four = 16 * part * head_dim + state_row_offset(lane) + 16 * warp + 4 * (lane % 4);
    float4 local[2];
    const auto load_local = [&](int index) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            local[half] = *reinterpret_cast<const float4*>(work.locals +
                                                           matrix_of(index) * head_dim * head_dim +
                                                           four + half * state_half_offset);
        }
    };
    SplitB m[join_warps][2];
    const auto load_m = [&](int index, int k16) {
        const SplitB* from = split_transfer(work.transfers, matrix_of(index), k16) + warp * 2 * 32;
        m[k16][0] = from[lane];
        m[k16][1] = from[32 + lane];
    };

    ChainPlaces places = {work, slots, head, final.kind != StateKind::None};
    bool is_chained = false;
    int index = places.next(is_chained);
    if (index > slots.count) return;
    load_local(index);
    __syncthreads();
    u32* to_release = nullptr;
    for (int buffer = 0; index <= slots.count; buffer ^= 1) {
        bool next_chained = false;
        const int next = places.next(next_chained);
        SplitSum sums[2];
#pragma unroll
        for (int k16 = 0; k16 < join_warps; ++k16) {
            if (is_chained) {
                const Split s = smem.state[buffer][k16][lane];
                sums[0].add(s, m[k16][0]);
                sums[1].add(s, m[k16][1]);
            }
            // A step ahead.
            if (next_chained) load_m(next, k16);
        }
        float state[2][4];  // columns (0, 1) of the four, then (2, 3)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state[0][2 * half] = local[half].x + sums[0].at(2 * half);
            state[0][2 * half + 1] = local[half].y + sums[0].at(2 * half + 1);
            state[1][2 * half] = local[half].z + sums[1].at(2 * half);
            state[1][2 * half + 1] = local[half].w + sums[1].at(2 * half + 1);
        }
        // Behind work for which its stores have had the time.
        if (to_release) {
            __syncwarp();
            if (lane == 0) red_release_add(to_release, 1);
        }
        if (index == slots.count) {
            store_final(final, sequence * num_heads + head, state, four);
            return;
        }
        const Split s = split_a(state);
        smem.state[buffer ^ 1][warp][lane] = s;
        if (next <= slots.count) load_local(next);
        // All have the state; and have loaded the local one, whose place it takes.
        __syncthreads();
        split_state(work, matrix_of(index), part)[warp * 32 + lane] = s;
        to_release = ready + matrix_of(index);
        index = next;
        is_chained = next_chained;
    }
    __syncwarp();
    if (lane == 0) red_release_add(to_release, 1);
}
