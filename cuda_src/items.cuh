// What a block works on, item after item: segments of a sequence from one begin to the next, of one
// head, and of it a part of the state's rows.
#pragma once

#include "chunk.cuh"
#include "work.cuh"

// What an item is, by numbers: of a begin (work.cuh) one of its parts, v_rows of a state each; of a
// joined one the parts behind num_parts are those of the transfer.
struct Piece {
    u32 begin, part;
};
constexpr u32 num_parts = head_dim / v_rows;

// The block's next piece of work, from a round, or a walk, on; one of begin num_states when there
// are no more. With segments, round is the number of one that has been taken, or none_taken. By a
// whole warp.
constexpr u32 none_taken = ~0u;
__device__ inline Piece next_piece(const Work& work, u32& round, Walk& walk) {
    if (work.segment) {
        // Which segments are work is not known before: whoever has time takes the next.
        u32 rank = round;
        if (rank == none_taken) {
            if (mov_tid_x() % 32 == 0) rank = atomicAdd(&work.counts->items, 1);
            rank = __shfl_sync(~0u, rank, 0);
        }
        round = none_taken;
        const u32 begin = find_piece(work, walk, rank, num_parts, num_parts);
        return {begin, rank};
    }
    // To and fro: who had the longest of one round has the shortest of the next.
    const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const u32 all = round * gridDim.x + place;
    ++round;
    return {min(all / num_parts, work.num_states()), all % num_parts};
}

// The block's next item; num_chunks is 0 when there are no more. By a whole warp.
__device__ inline Item find_item(const Work& work, const LaneSequence (&sequences)[32], u32& round,
                                 Walk& walk) {
    const Piece piece = next_piece(work, round, walk);
    if (piece.begin == work.num_states()) return {};

    // Read anew, as in next_piece: a register that a solver would keep from chunk to chunk.
    const int lane = mov_tid_x() % 32;
    const u32 slot = piece.begin / work.num_heads;
    const int head = static_cast<int>(piece.begin - slot * work.num_heads);
    const Begin lane_begin = work.segment ? work.lane_begin(slot, head) : is_first;
    const Segment segment = work.segment_of(slot, sequences[lane]);
    const Begin begin = static_cast<Begin>(__shfl_sync(~0u, lane_begin, 0));
    const NextBegin next = work.next_begin(slot, segment, head, lane_begin);
    const bool is_last = next.index == segment.num_segments;
    const u32 last_slot = slot + next.index - segment.index - 1;
    const bool is_transfer = piece.part >= num_parts;
    // To the next segment, or to a final state that chain.cuh works out.
    const bool is_joined_on = (is_last ? begin : next.begin) == is_joined;
    const int warm_up = begin <= most_cut ? chunk * begin : 0;
    const int first = work.num_rows_before(segment.index);
    const int last = work.num_rows_before(next, segment);
    Item item;
    item.head = head;
    item.part = static_cast<int>(piece.part % num_parts);
    item.from = is_transfer          ? StateOf::Identity
                : begin == is_joined ? StateOf::Zero
                : begin == is_first  ? StateOf::Caller
                                     : StateOf::Nobody;
    item.from_matrix = is_strided ? segment.sequence : segment.sequence * work.num_heads + head;
    item.to = is_transfer    ? StateOf::Transfer
              : is_joined_on ? StateOf::Local
              : is_last      ? StateOf::Caller
                             : StateOf::Nobody;
    item.to_matrix =
        item.to == StateOf::Caller ? item.from_matrix : last_slot * work.num_heads + head;
    item.begin = work.first_row(segment) + first - warm_up;
    item.num_tokens = last - first + warm_up;
    // One without tokens has a chunk too, in which nothing happens.
    item.num_chunks = max(1, (item.num_tokens + chunk - 1) / chunk);
    item.num_written = begin == is_joined ? 0 : item.num_chunks - warm_up / chunk;
    const u32 first_partial = work.first_partial(slot, head, is_transfer);
    item.partials_end = begin == is_joined ? first_partial + item.num_chunks : 0;
    return item;
}

// The items of a block, as each kind of warp meets them: for (Items items(smem); items.next();)
struct Items {
    Shared& smem;
    u32 count = 0;
    // Of the item. Shuffled, so that the compiler knows it for one number of the warp, and with it
    // all that is counted up to it: descriptors and addresses stay out of the vector registers.
    int num_chunks = 0;

    __device__ explicit Items(Shared& shared) : smem(shared) {}

    // To the next item, once the first solver has found it; false when there is none.
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
