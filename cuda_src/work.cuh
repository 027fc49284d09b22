// What there is to do: sequences, and the segments that they may be cut into.
//
// A sequence may be cut into segments that run side by side, where the tokens before the cut leave
// nothing of an earlier state: then the scan of those alone, from a state of zero, makes the same
// state as the scan of all of them. Where more is left, the segment before goes on, or they are
// joined: with S the state where a segment begins, it ends with S M + S_local and puts out
// scale (O_local + Q_M S^T). Here S_local and O_local are what the scan makes of a state of zero, M
// and Q_M what it makes of the identity with v = 0, both with scale = 1. Both are items
// (items.cuh), which put their outputs aside, and join.cuh adds up what they leave.
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
    u32 items;       // that blocks have taken
    u32 items_done;  // of blocks that have done all of theirs
    u32 chains;      // that groups have taken (join.cuh)
    u32 runs;        // of tiles, likewise
};
static_assert(sizeof(Counts) == 16, "tests/test_launch.py holds cukda/plan.py to this size");

// One segment of a sequence: of rows begin to begin + length, which is in num_segments of them. An
// index that is not one of them says that there is none.
struct Segment {
    u32 sequence, begin;
    int length, index, num_segments;
};

// Where the next item of a sequence and head begins: with which of its segments, and how.
struct NextBegin {
    int index;
    Begin begin;
};

// Where a sequence's segments are among the slots.
struct Slots {
    u32 first;
    int count;
};

// The arguments that say what there is to do. Rows, slots and states are counted in 32 bits, which
// kda.py sees to: what 64 take is more code, and short calls wait for their code (docs/log.md).
struct Work {
    const Strides* strides;  // of the caller's arrays; null where they are contiguous
    const void* cu_seqlens;  // int32 or int64 [N + 1], or null: N = B sequences of T tokens
    int cu_seqlens_bytes;
    int num_sequences;
    u32 num_tokens;  // T
    int num_heads;
    int segment;  // tokens from one place where a sequence may be cut to the next; 0: there is none
    int first_extra;      // tokens by which a sequence's first segment is longer: it has no warm-up
    u32 num_slots;        // one for each segment that there may be
    const Begin* begins;  // [num_slots, H]; null without segments
    // Where segments may be joined: fp32 [num_slots, H, 128 (v), 128 (k)] each, an item's in the
    // last of its slots. A local one is in the order of its rows, until chain.cuh puts the operands
    // of the next segment's S in its place; a transfer is operands (transfer.cuh) from the first.
    float *locals, *transfers;
    // O_local, then Q_M, of joined tokens: fp32 [2, H, num_slots, ceil(segment / 16), 8 (16 rows of
    // v), 32 lanes, 8] (rows.cuh). An item's chunks lie one after the other, from its first slot
    // on.
    float* partials;
    Counts* counts;  // null without segments
    // [num_slots, H]: how many parts of the S that follows a slot are there, zeros before
    // (chain.cuh); null where nothing may be joined.
    u32* ready;

    __device__ u32 num_states() const { return num_slots * num_heads; }

    // Where the chunks of an item that begins in a slot begin in partials.
    __device__ u32 first_partial(u32 slot, int head, bool is_transfer) const {
        const u32 place = (is_transfer ? num_heads : 0) + head;
        return (place * num_slots + slot) * ((segment + chunk - 1) / chunk);
    }

    // Where sequence n begins, among B * T rows. cu_seqlens may hold anything: it is clamped to the
    // rows there are.
    __device__ u32 bound(u32 n) const {
        if (!cu_seqlens) return n * num_tokens;
        const bool wide = cu_seqlens_bytes == 8;
        const u32* at = static_cast<const u32*>(cu_seqlens) + (wide ? 2 * static_cast<i64>(n) : n);
        const u32 low = at[0];
        const int high = wide ? at[1] : static_cast<int>(low) >> 31;
        return high ? (high < 0 ? 0 : num_tokens) : min(low, num_tokens);
    }

    // Where a sequence's rows begin as items count them: through B * T, or with strides from the
    // first one of its batch.
    __device__ u32 first_row(const Segment& of) const {
        return is_strided && !cu_seqlens ? 0 : of.begin;
    }

    // With strides: which of the batch a sequence is in.
    __device__ u32 batch_of(u32 sequence) const { return cu_seqlens ? 0 : sequence; }

    __device__ int num_segments(int length) const {
        const int others = length - first_extra;
        return segment && others > segment ? (static_cast<u32>(others) + segment - 1) / segment : 1;
    }

    // Rows of a sequence before its segment `index`: whole chunks, so that they are those that a
    // scan of all has, with the same roundings.
    __device__ u32 num_rows_before(int index) const {
        return index ? (static_cast<u32>(index) * segment + first_extra) / chunk * chunk : 0;
    }

    // ... before the next item, or to the end of one that has none behind it. Bounds that overlap
    // may leave a sequence fewer slots than it has segments.
    __device__ int num_rows_before(const NextBegin& next, const Segment& any) const {
        if (next.index < any.num_segments) return num_rows_before(next.index);
        const u32 rows = static_cast<u32>(next.index) * segment + first_extra;
        return segment ? min(static_cast<u32>(any.length), rows) : any.length;
    }

    // Packed sequences are in the order of their lengths, if a warp has lanes for all of
    // cu_seqlens.
    __device__ bool by_length() const { return cu_seqlens && num_sequences < 32; }

    // Sequence `lane`, for segment_of. The longest come first, so that what is left for the end is
    // short. By a whole warp.
    __device__ LaneSequence lane_sequence() const {
        LaneSequence mine = {};
        if (!by_length()) return mine;
        const int lane = threadIdx.x % 32;
        mine.begin = bound(min(lane, num_sequences));
        const u32 end = __shfl_down_sync(~0u, mine.begin, 1);
        mine.length = lane < num_sequences ? max(0, static_cast<int>(end - mine.begin)) : -1;
        const int count = num_segments(mine.length);
#pragma unroll 1
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
            const int index = slot - __shfl_sync(~0u, mine.first_slot, owner);
            return {static_cast<u32>(owner), __shfl_sync(~0u, mine.begin, owner),
                    __shfl_sync(~0u, mine.length, owner), ballot ? index : -1,
                    __shfl_sync(~0u, mine.num_segments, owner)};
        }
        Segment found;
        const u32 each = num_segments(num_tokens);
        found.sequence = !segment ? slot : cu_seqlens ? sequence_in_order(slot) : slot / each;
        const Slots slots = slots_in_order(found.sequence, found.begin, found.length);
        found.index = slot - slots.first;
        found.num_segments = slots.count;
        return found;
    }

    // Of sequence n's segments: the first one's slot, and how many there are. By a whole warp.
    __device__ Slots slots_of(u32 n, const LaneSequence& mine) const {
        if (by_length()) {
            const int owner = n;
            return {__shfl_sync(~0u, mine.first_slot, owner),
                    __shfl_sync(~0u, mine.num_segments, owner)};
        }
        u32 begin;
        int length;
        return slots_in_order(n, begin, length);
    }

    // The same where sequences are in their own order, and where sequence n is. One of any length
    // has slots enough before the next one's, for ceil(length / segment) <= floor(end / segment) -
    // floor(begin / segment) + 1.
    __device__ Slots slots_in_order(u32 n, u32& begin, int& length) const {
        // A lane each, so that there is one copy of bound().
        const u32 lane_bound = bound(n + mov_tid_x() % 2);
        begin = __shfl_sync(~0u, lane_bound, 0);
        length = max(0, static_cast<int>(__shfl_sync(~0u, lane_bound, 1) - begin));
        const int count = num_segments(length);
        return {!segment ? n : cu_seqlens ? begin / segment + n : n * count, count};
    }

    // Brings the first begins, up to 4096, to where they are soon looked at again and again.
    __device__ void prefetch_begins() const {
        const u32 at = threadIdx.x % 32 * 128;
        if (at < num_states()) prefetch_global_l1(begins + at);
    }

    // A head's begin in this slot and the next, a lane each. By a whole warp.
    __device__ Begin lane_begin(u32 slot, int head) const {
        slot += mov_tid_x() % 32;
        return slot < num_slots ? begins[slot * num_heads + head] : goes_on;
    }

    // The first segment after the one in a slot with which an item begins, and how; if there is
    // none, the sequence's end. mine: what lane_begin says of the slot. By a whole warp.
    __device__ NextBegin next_begin(u32 slot, const Segment& segment, int head, Begin mine) const {
        const int lane = mov_tid_x() % 32;
        for (int index = segment.index;;) {
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
    __device__ u32 sequence_in_order(u32 slot) const {
        const int lane = threadIdx.x % 32;
        u32 first = 0, count = num_sequences;
        while (count > 1) {
            const u32 step = (count + 31) / 32, n = first + lane * step;
            // bound(n) / segment + n <= slot, without the division.
            const bool before = lane * step < count && n <= slot &&
                                bound(n) < static_cast<u64>(slot - n + 1) * segment;
            const u32 ballot = __ballot_sync(~0u, before);
            const u32 steps = ballot ? 31 - __clz(ballot) : 0;
            first += steps * step;
            count = min(step, count - steps * step);
        }
        return first;
    }
};

// Whether a byte of x is not zero: its highest bit, and no other.
__device__ inline u32 nonzero_bytes(u32 x) {
    return (x | ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu)) & 0x80808080u;
}

// Pieces of work are numbered through begins [num_slots, H]: `each` to each begin but goes_on, and
// `joined` more to is_joined. Where piece number `rank` is, which becomes its number there;
// num_states when there are fewer. The ranks of a walk grow, for it goes on from where the last one
// was. By a whole warp.
__device__ inline u32 find_piece(const Work& work, Walk& walk, u32& rank, u32 each, u32 joined) {
    const u32 lane = mov_tid_x() % 32, num_states = work.num_states();
    for (; walk.window < num_states; walk.window += 128) {
        // Four begins a lane. They start at a multiple of four, and memory goes on behind the last.
        u32 at = walk.window + 4 * lane;
        u32 begins = 0;
        if (at < num_states) {
            begins = *reinterpret_cast<const u32*>(work.begins + at);
            if (num_states - at < 4) begins &= (1u << 8 * (num_states - at)) - 1;
        }
        const u32 num_joined = 4 - __popc(nonzero_bytes(~begins));
        const u32 sum = each * __popc(nonzero_bytes(begins)) + joined * num_joined;
        u32 up_to = sum;  // of the lanes before, and of this one
#pragma unroll
        for (u32 lanes = 1; lanes < 32; lanes *= 2) {
            const u32 other = __shfl_up_sync(~0u, up_to, lanes);
            if (lane >= lanes) up_to += other;
        }
        const u32 ballot = __ballot_sync(~0u, walk.before + up_to > rank);
        if (ballot) {
            const int owner = __ffs(ballot) - 1;
            at = walk.window + 4 * owner;
            rank -= walk.before + __shfl_sync(~0u, up_to - sum, owner);
            begins = __shfl_sync(~0u, begins, owner);
#pragma unroll 1
            for (;; ++at, begins >>= 8) {
                const u32 begin = begins % 256;
                const u32 here = (begin != goes_on ? each : 0) + (begin == is_joined ? joined : 0);
                if (rank < here) return at;
                rank -= here;
            }
        }
        walk.before += __shfl_sync(~0u, up_to, 31);
        walk.any_joined |= __any_sync(~0u, num_joined > 0);
    }
    return num_states;
}
