// What there is to do: sequences, and the segments that they may be cut into.
//
// A sequence may be cut into segments that run side by side, where the tokens before the cut leave
// nothing of an earlier state: then the scan of those alone, from a state of zero, makes the same
// state as the scan of all of them. Where more is left, the segment before goes on, or they are
// joined: with S the state where a segment begins, it ends with S M + S_local and puts out
// scale (O_local + Q_M S^T). Here S_local and O_local are what the scan makes of a state of zero, M
// and Q_M what it makes of the identity with v = 0, both with scale = 1. Both are items
// (items.cuh), which put their outputs aside, and join.cu adds up what they leave.
#pragma once

#include "chunk.cuh"

// With what a segment begins, for each slot and head (cuts.cu).
using Begin = unsigned char;
constexpr Begin goes_on = 0;     // the segment before goes on; or there is no segment in this slot
constexpr Begin most_cut = 8;    // up to here a cut: so many chunks before it make its state
constexpr Begin is_first = 254;  // of its sequence
constexpr Begin is_joined = 255;

// What blocks count, or tell each other, of a launch with segments; zeros before.
struct Counts {
    u32 items;        // that the blocks of kda_fwd have taken after their first
    u32 join_blocks;  // blocks of kda_join that have begun
    u32 any_joined;   // whether any segment is joined
};
static_assert(sizeof(Counts) == 12, "tests/test_launch.py holds cukda/plan.py to this size");

// One segment of a sequence: of rows begin to begin + length, which is in num_segments of them. An
// index that is not one of them says that there is none.
struct Segment {
    i64 sequence, begin, length, index;
    int num_segments;
};

// Where the next item of a sequence and head begins: with which of its segments, and how.
struct NextBegin {
    i64 index;
    Begin begin;
};

// Where a sequence's segments are among the slots.
struct Slots {
    i64 first;
    int count;
};

// The arguments that say what there is to do.
struct Work {
    const void* cu_seqlens;  // int32 or int64 [N + 1], or null: N = B sequences of T tokens
    int cu_seqlens_bytes;
    int num_sequences;
    i64 num_tokens;  // T
    int num_heads;
    int segment;  // tokens from one place where a sequence may be cut to the next; 0: there is none
    u32 num_slots;        // one for each segment that there may be
    const Begin* begins;  // [num_slots, H]; null without segments
    // Where segments may be joined: fp32 [num_slots, H, 128 (v), 128 (k)] each, an item's in the
    // last of its slots. A local one is in the order of its rows, until chain.cuh puts the operands
    // of the next segment's S in its place; a transfer is operands (split.cuh) from the first.
    float *locals, *transfers;
    // O_local, then Q_M, of joined tokens: fp32 [2, H, num_slots, segment / 16, 8 (16 rows of v),
    // 32 lanes, 8] (rows.cuh). An item's chunks lie one after the other, through all of its slots.
    float* partials;
    Counts* counts;  // null without segments

    __device__ u32 num_states() const { return num_slots * num_heads; }
    // Where an item's chunks begin in partials.
    __device__ i64 first_partial(u32 slot, int head, bool is_transfer) const {
        const i64 place = (is_transfer ? num_heads : 0) + head;
        return (place * num_slots + slot) * (segment / chunk);
    }

    // Where sequence n begins, among B * T rows. cu_seqlens may hold anything: it is clamped to the
    // rows there are.
    __device__ i64 bound(i64 n) const {
        if (!cu_seqlens) return n * num_tokens;
        const i64 row = cu_seqlens_bytes == 8 ? static_cast<const i64*>(cu_seqlens)[n]
                                              : static_cast<const int*>(cu_seqlens)[n];
        return row < 0 ? 0 : row > num_tokens ? num_tokens : row;
    }

    __device__ int num_segments(i64 length) const {
        if (!segment || length <= segment) return 1;
        return static_cast<int>((length + segment - 1) / segment);
    }

    // Packed sequences that a warp has lanes for are in the order of their lengths.
    __device__ bool by_length() const { return cu_seqlens && num_sequences <= 32; }

    // Sequence `lane`, for segment_of. The longest come first, so that what is left for the end is
    // short. By a whole warp.
    __device__ LaneSequence lane_sequence() const {
        LaneSequence mine = {};
        if (!by_length()) return mine;
        const int lane = threadIdx.x % 32;
        mine.begin = bound(min(lane, num_sequences - 1));
        mine.length = -1;
        if (lane < num_sequences) mine.length = max(0ll, bound(lane + 1) - mine.begin);
        const int count = num_segments(mine.length);
        for (int other = 0; other < num_sequences; ++other) {
            const int length = __shfl_sync(~0u, mine.length, other);
            const int other_count = __shfl_sync(~0u, count, other);
            const bool before = length > mine.length || (length == mine.length && other < lane);
            if (before) mine.first_slot += other_count;
        }
        // Bounds that overlap may have more segments than there are slots.
        mine.first_slot = min(mine.first_slot, num_slots);
        if (lane < num_sequences) mine.num_segments = min(count, num_slots - mine.first_slot);
        return mine;
    }

    // The segment in a slot. By a whole warp.
    __device__ Segment segment_of(u32 slot, const LaneSequence& mine) const {
        if (by_length()) {
            const bool is_mine =
                mine.first_slot <= slot && slot < mine.first_slot + mine.num_segments;
            const u32 ballot = __ballot_sync(~0u, is_mine);
            const int owner = ballot ? __ffs(ballot) - 1 : 0;
            return {owner, __shfl_sync(~0u, mine.begin, owner),
                    __shfl_sync(~0u, mine.length, owner),
                    ballot ? static_cast<i64>(slot - __shfl_sync(~0u, mine.first_slot, owner)) : -1,
                    __shfl_sync(~0u, mine.num_segments, owner)};
        }
        Segment found = {};
        if (cu_seqlens) {
            found.sequence = sequence_in_order(slot);
            found.index = slot - first_slot(found.sequence);
        } else {
            const u32 each = num_segments(num_tokens);
            found.sequence = slot / each;
            found.index = slot % each;
        }
        found.begin = bound(found.sequence);
        found.length = max(0ll, bound(found.sequence + 1) - found.begin);
        found.num_segments = num_segments(found.length);
        return found;
    }

    // The slot of sequence n's first segment: a sequence of any length has slots enough before the
    // next one's, for ceil(length / segment) <= floor(end / segment) - floor(begin / segment) + 1.
    __device__ i64 first_slot(i64 n) const { return segment ? bound(n) / segment + n : n; }

    // Of sequence n's segments: the first one's slot, and how many there are. By a whole warp.
    __device__ Slots slots_of(i64 n, const LaneSequence& mine) const {
        if (by_length()) {
            return {__shfl_sync(~0u, mine.first_slot, static_cast<int>(n)),
                    __shfl_sync(~0u, mine.num_segments, static_cast<int>(n))};
        }
        const int count = num_segments(max(0ll, bound(n + 1) - bound(n)));
        return {cu_seqlens ? first_slot(n) : n * count, count};
    }

    // A head's begin in this slot and the next, a lane each. By a whole warp.
    __device__ Begin lane_begin(i64 slot, int head) const {
        slot += mov_tid_x() % 32;
        return slot < num_slots ? begins[slot * num_heads + head] : goes_on;
    }

    // The first segment after the one in a slot with which an item begins, and how; if there is
    // none, the sequence's end. mine: what lane_begin says of the slot. By a whole warp.
    __device__ NextBegin next_begin(i64 slot, const Segment& segment, int head, Begin mine) const {
        const int lane = mov_tid_x() % 32;
        for (i64 index = segment.index;;) {
            const bool is_after = index + lane > segment.index;
            const bool is_there = index + lane < segment.num_segments;
            const u32 ballot = __ballot_sync(~0u, is_after && is_there && mine != goes_on);
            if (ballot) {
                const int owner = __ffs(ballot) - 1;
                return {index + owner, static_cast<Begin>(__shfl_sync(~0u, mine, owner))};
            }
            index += 32;
            if (index >= segment.num_segments) return {segment.num_segments, goes_on};
            mine = lane_begin(slot + index - segment.index, head);
        }
    }

    // The last sequence whose first slot is not behind this one. By a whole warp.
    __device__ i64 sequence_in_order(u32 slot) const {
        const int lane = threadIdx.x % 32;
        i64 first = 0, count = num_sequences;
        while (count > 1) {
            const i64 step = (count + 31) / 32, n = first + lane * step;
            const bool before = lane * step < count && first_slot(n) <= slot;
            const u32 ballot = __ballot_sync(~0u, before);
            const i64 steps = ballot ? 31 - __clz(ballot) : 0;
            first += steps * step;
            count = min(step, count - steps * step);
        }
        return first;
    }
};

// Pieces of work are numbered through begins [num_slots, H], of(begin) pieces to each. Where piece
// number `rank` is, which becomes its number there; num_states when there are fewer. The ranks of a
// walk grow, for it goes on from where the last one was. By a whole warp.
template <typename Of>
__device__ inline u32 find_piece(const Work& work, Walk& walk, u32& rank, const Of& of) {
    const u32 lane = mov_tid_x() % 32, num_states = work.num_states();
    for (; walk.window < num_states; walk.window += 128) {
        u32 pieces[4], sum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 at = walk.window + 4 * lane + i;
            pieces[i] = at < num_states ? of(work.begins[at]) : 0;
            sum += pieces[i];
        }
        u32 up_to = sum;  // of the lanes before, and of this one
#pragma unroll
        for (u32 lanes = 1; lanes < 32; lanes *= 2) {
            const u32 other = __shfl_sync(~0u, up_to, (lane - lanes) % 32);
            if (lane >= lanes) up_to += other;
        }
        const u32 ballot = __ballot_sync(~0u, walk.before + up_to > rank);
        if (ballot) {
            const int owner = __ffs(ballot) - 1;
            u32 at = walk.window + 4 * owner;
            rank -= walk.before + __shfl_sync(~0u, up_to - sum, owner);
            bool found = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 here = __shfl_sync(~0u, pieces[i], owner);
                found = found || rank < here;
                if (!found) {
                    rank -= here;
                    ++at;
                }
            }
            return at;
        }
        walk.before += __shfl_sync(~0u, up_to, 31);
    }
    return num_states;
}
