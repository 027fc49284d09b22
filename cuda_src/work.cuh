// What a block works on, item after item: one segment of a sequence, of one head, and of it a part
// of the state's rows.
//
// A sequence may be cut into segments that run side by side, where the tokens before the cut leave
// nothing of an earlier state: then the scan of those alone, from a state of zero, makes the same
// state as the scan of all of them. Where more is left, the segment before goes on, or they are
// joined.
#pragma once

#include "chunk.cuh"
#include "gate.cuh"

// What a launch is for.
//   Whole: all of it, in one pass; where there is no cut the segment before goes on.
//   Ends, then Forward: segments side by side also where there is no cut. With S the state where
//     a segment begins, it ends with S M + S_local: M is what the scan makes of the identity with
//     v = 0, and S_local what it makes of zero. Ends works out both, chain.cu joins them, Forward
//     runs on segments as if they were sequences.
enum class Pass { Whole = 0, Ends = 1, Forward = 2 };

// One segment of a sequence: of rows begin to begin + length, which is in num_segments of them. An
// index that is not one of them says that there is none.
struct Segment {
    i64 sequence, begin, length, index;
    int num_segments;
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
    u32 num_slots;  // one for each segment that there may be
    // [num_slots, H] (cuts.cu): chunks before a segment that make its state; 0: it is not cut
    // there.
    const unsigned char* cuts;
    // Of the two-pass way: fp32 [num_slots, H, 128 (v), 128 (k)] each. After chain.cu a local is
    // the state where the next segment begins.
    float *locals, *transfers;
    // Of the cut launches, how many items their blocks have taken: [2], the second of Forward.
    u32* taken;
    Pass pass;

    __device__ int memory(i64 slot, int head) const {
        return chunk * cuts[slot * num_heads + head];
    }

    // Parts of V; of Ends those of S_local, then those of M.
    __device__ u32 num_parts() const { return head_dim / v_rows * (pass == Pass::Ends ? 2 : 1); }
    __device__ u32 num_items() const { return num_slots * num_heads * num_parts(); }

    // The next of the block's numbers, if there is one. By a whole warp.
    __device__ bool next_number(u32& number, u32& round) const {
        if (segment) {
            // Which segments are work is not known before: whoever has time takes the next.
            if (threadIdx.x % 32 == 0) number = atomicAdd(taken + (pass == Pass::Forward), 1);
            number = __shfl_sync(~0u, number, 0);
            return number < num_items();
        }
        // To and fro: who had the longest of one round has the shortest of the next.
        const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        number = round * gridDim.x + place;
        ++round;
        return number < num_items();
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

    // The first segment, from `index` on, that begins with a cut. By a whole warp.
    __device__ i64 next_cut(u32 slot, const Segment& segment, i64 index, int head) const {
        const int lane = threadIdx.x % 32;
        for (; index < segment.num_segments; index += 32) {
            const bool is_cut = index + lane < segment.num_segments &&
                                memory(slot + (index - segment.index) + lane, head) > 0;
            const u32 ballot = __ballot_sync(~0u, is_cut);
            if (ballot) return index + __ffs(ballot) - 1;
        }
        return segment.num_segments;
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

// The block's next item, from a round on, which becomes the one after. num_chunks is 0 when there
// are no more. By a whole warp.
__device__ inline Item find_item(const Work& work, const LaneSequence (&sequences)[32],
                                 u32& round) {
    for (u32 number; work.next_number(number, round);) {
        const int lane = threadIdx.x % 32;
        const u32 slot = number / work.num_parts() / work.num_heads;
        const u32 part = number % work.num_parts();
        const int head = static_cast<int>(number / work.num_parts() - slot * work.num_heads);
        const Segment segment = work.segment_of(slot, sequences[lane]);
        if (segment.index < 0 || segment.index >= segment.num_segments) continue;

        // Of this segment and the next ones, a lane each.
        const bool may_be_cut =
            segment.index + lane > 0 && segment.index + lane < segment.num_segments;
        const int lane_warm_up = may_be_cut ? work.memory(slot + lane, head) : 0;
        const bool is_first = segment.index == 0;
        const int warm_up = __shfl_sync(~0u, lane_warm_up, 0);
        const bool is_joined = !is_first && warm_up == 0;  // to the segment before
        const bool is_transfer = part >= head_dim / v_rows;
        i64 end = segment.index + 1;  // the segment it goes on to
        if (work.pass == Pass::Whole) {
            if (is_joined) continue;
            const u32 cuts = __ballot_sync(~0u, lane > 0 && lane_warm_up > 0);
            end = cuts ? segment.index + __ffs(cuts) - 1
                       : work.next_cut(slot, segment, segment.index + 32, head);
        } else if (work.pass == Pass::Ends) {
            // Wanted where the next segment is joined to this one.
            if (end >= segment.num_segments || __shfl_sync(~0u, lane_warm_up, 1)) continue;
            if (is_transfer && !is_joined) continue;
        }
        const i64 first = segment.index * work.segment;
        const i64 last = end < segment.num_segments ? end * work.segment : segment.length;
        const i64 callers = segment.sequence * work.num_heads + head;
        const i64 own = static_cast<i64>(slot) * work.num_heads + head;
        Item item;
        item.head = head;
        item.part = static_cast<int>(part % (head_dim / v_rows));
        item.from = is_transfer                               ? StateOf::Identity
                    : is_first                                ? StateOf::Caller
                    : is_joined && work.pass == Pass::Forward ? StateOf::Local
                                                              : StateOf::Nobody;
        item.from_matrix = item.from == StateOf::Local ? own - work.num_heads : callers;
        item.to = is_transfer               ? StateOf::Transfer
                  : work.pass == Pass::Ends ? StateOf::Local
                  : last == segment.length  ? StateOf::Caller
                                            : StateOf::Nobody;
        item.to_matrix = work.pass == Pass::Ends ? own : callers;
        item.begin = segment.begin + first - warm_up;
        item.num_tokens = static_cast<int>(last - first) + warm_up;
        // One without tokens has a chunk too, in which nothing happens.
        item.num_chunks = max(1, (item.num_tokens + chunk - 1) / chunk);
        item.num_loud = work.pass == Pass::Ends ? 0 : item.num_chunks - warm_up / chunk;
        return item;
    }
    return {};
}

// The items of a block, as each kind of warp meets them: for (Items items(smem); items.next();)
struct Items {
    Shared& smem;
    u32 count = 0;
    // Of the item. Shuffled, so that the compiler knows it for one number of the warp, and with it
    // all that is counted up to it: descriptors and addresses stay out of the vector registers.
    int num_chunks = 0;

    __device__ explicit Items(Shared& shared) : smem(shared) {}

    // To the next item, once its scouts have found it; false when there is none.
    __device__ bool next() {
        if (count > 0) arrive(smem.item_empty, count - 1);
        wait_full(smem.item_full, count);
        ++count;
        num_chunks = __shfl_sync(~0u, item().num_chunks, 0);
        return num_chunks > 0;
    }

    // Until next().
    __device__ const Item& item() const { return smem.item[(count - 1) % num_item_slots]; }
    __device__ const HeadInputs& head_inputs() const {
        return smem.head_inputs[(count - 1) % num_item_slots];
    }
};
