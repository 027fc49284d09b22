// What a block works on, item after item: one segment of a sequence, of one head, and of it a part
// of the state's rows.
//
// A sequence may be cut into segments that run side by side, where the tokens before the cut leave
// nothing of an earlier state: then the scan of those alone, from a state of zero, makes the same
// state as the scan of all of them. Where more is left, the segment before goes on.
#pragma once

#include "chunk.cuh"
#include "gate.cuh"

// A sequence and one of its segments.
struct Segment {
    i64 sequence, index;
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

    __device__ u32 num_items() const { return num_slots * num_heads * (head_dim / v_rows); }

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

    // The segment in a slot; of more than a warp's lanes of sequences, and of slots that are left
    // over, it may be one that its sequence does not have. By a whole warp.
    __device__ Segment segment_of(u32 slot) const {
        if (!cu_seqlens) {
            const u32 each = num_segments(num_tokens);
            return {slot / each, slot % each};
        }
        return num_sequences <= 32 ? segment_by_length(slot) : segment_in_order(slot);
    }

    // The longest sequences come first, so that what is left for the end is short.
    __device__ Segment segment_by_length(u32 slot) const {
        const int lane = threadIdx.x % 32;
        const int n = min(lane, num_sequences - 1);
        const i64 begin = bound(n);
        const int length =
            lane < num_sequences ? static_cast<int>(max(0ll, bound(n + 1) - begin)) : -1;
        const int count = num_segments(length);
        u32 first = 0;  // slot of this lane's sequence
        for (int other = 0; other < num_sequences; ++other) {
            const int other_length = __shfl_sync(~0u, length, other);
            const int other_count = __shfl_sync(~0u, count, other);
            const bool before = other_length > length || (other_length == length && other < lane);
            if (before) first += other_count;
        }
        const bool mine = lane < num_sequences && first <= slot && slot < first + count;
        const u32 ballot = __ballot_sync(~0u, mine);
        const int owner = ballot ? __ffs(ballot) - 1 : 0;
        return {owner, ballot ? static_cast<i64>(slot - __shfl_sync(~0u, first, owner)) : -1};
    }

    // The slot of sequence n's first segment: a sequence of any length has slots enough before the
    // next one's, for ceil(length / segment) <= floor(end / segment) - floor(begin / segment) + 1.
    __device__ i64 first_slot(i64 n) const { return segment ? bound(n) / segment + n : n; }

    // The last sequence whose first slot is not behind this one.
    __device__ Segment segment_in_order(u32 slot) const {
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
        return {first, slot - first_slot(first)};
    }
};

// A cut is taken where no more than 2^-60 is left of the state: of one as large as 1e6, 1e-12.
constexpr float log2_nothing = -60.0f;
constexpr int scout_warps = 4, scout_threads = 32 * scout_warps;
constexpr int scout_rounds = 2;  // of scout_warps chunks each

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

// What the scouts of a cut read: the lane's four channels of g and k, at the cut.
struct CutSource {
    const u16 *g, *k;
    i64 token_stride;
    float bias[4];
    HeadGate gate;
};

// A bound on what a chunk leaves of a state: log2 of the largest element after it where all were at
// most 1 before. A token takes s to s diag(e^a) (I - beta k k^T), so with b for |s|, and beta < 1,
//   b <- b diag(e^a);  b <- b + (b |k|^T) |k|
// bounds it, channel by channel. NaN where anything is not finite. By a warp; the chunk ends
// `before` rows ahead of the cut.
__device__ inline float log2_left_by_chunk(const CutSource& source, int before) {
    float bound[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    i64 at = -(before + chunk) * source.token_stride;
    constexpr int at_once = 4;  // tokens on their way from memory
#pragma unroll 1
    for (int begin = 0; begin < chunk; begin += at_once) {
        uint2 g[at_once], k[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            g[i] = *reinterpret_cast<const uint2*>(source.g + at);
            k[i] = *reinterpret_cast<const uint2*>(source.k + at);
            at += source.token_stride;
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const float g4[4] = {bf16_low(g[i].x), bf16_high(g[i].x), bf16_low(g[i].y),
                                 bf16_high(g[i].y)};
            const float k4[4] = {fabsf(bf16_low(k[i].x)), fabsf(bf16_high(k[i].x)),
                                 fabsf(bf16_low(k[i].y)), fabsf(bf16_high(k[i].y))};
            float squares = 0.0f, along = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                bound[c] *= ex2_approx(log2_decay(g4[c], source.bias[c], source.gate));
                squares = fmaf(k4[c], k4[c], squares);
                along = fmaf(bound[c], k4[c], along);
            }
            squares = warp_sum(squares);
            // Not where squares overflow: then there is no telling.
            const float nan = __int_as_float(0x7fffffff);
            along = squares < 1e37f ? warp_sum(along) / (squares + 1e-6f) : nan;
#pragma unroll
            for (int c = 0; c < 4; ++c) bound[c] = fmaf(along, k4[c], bound[c]);
        }
    }
    // A NaN is in all lanes, by the sums.
    float largest = fmaxf(fmaxf(bound[0], bound[1]), fmaxf(bound[2], bound[3]));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    return lg2_approx(largest);
}

// The tokens before a cut after which nothing is left of the state: a multiple of the chunk, or 0
// when they are too many. By scout_threads threads. num_rows: those of the sequence before the cut.
__device__ inline int memory(const CutSource& source, i64 num_rows, float (&left)[scout_warps]) {
    const int warp = threadIdx.x / 32;
    float log2_left = 0.0f;
#pragma unroll 1
    for (int round = 0; round < scout_rounds; ++round) {
        // A warp to a chunk; what holds for each holds for the product.
        const int before = chunk * (round * scout_warps + warp);
        const bool exists = before + chunk <= num_rows;
        const float log2_left_here = exists ? log2_left_by_chunk(source, before) : 0.0f;
        if (threadIdx.x % 32 == 0) left[warp] = log2_left_here;
        barrier_sync(scout_threads);
        int tokens = 0;
#pragma unroll
        for (int i = 0; i < scout_warps; ++i) {
            log2_left += left[i];
            if (tokens == 0 && log2_left < log2_nothing) {
                tokens = chunk * (round * scout_warps + i + 1);
            }
        }
        barrier_sync(scout_threads);
        if (tokens > 0) return tokens;
        // Give up on what is not on its way; NaN is not.
        if (!(log2_left < log2_nothing * (round + 1) / scout_rounds)) return 0;
    }
    return 0;
}

// Finds the block's items, one after the other.
struct Scout {
    u32 round;
    float (&left)[scout_warps];
    const u16 *k, *g;
    const float *A_log, *dt_bias;
    float lower_bound;

    // Brings what the first round reads of a cut into L2.
    __device__ void prefetch(const Work& work, int head, i64 begin, i64 cut) {
        const int before = threadIdx.x / 2 + 1;  // a thread to half a row
        if (before > cut) return;
        const i64 at = ((begin + cut - before) * work.num_heads + head) * head_dim +
                       threadIdx.x % 2 * (head_dim / 2);
        prefetch_global_l2(g + at);
        prefetch_global_l2(k + at);
    }

    // By scout_threads threads. num_chunks is 0 when there are no more.
    __device__ Item find(const Work& work) {
        while (round * gridDim.x < work.num_items()) {
            // To and fro: who had the longest of one round has the shortest of the next.
            const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
            const u32 number = round * gridDim.x + place;
            ++round;
            if (number >= work.num_items()) continue;
            constexpr int num_parts = head_dim / v_rows;
            Item item;
            const u32 slot = number / num_parts / work.num_heads;
            item.part = static_cast<int>(number % num_parts);
            item.head = static_cast<int>(number / num_parts - slot * work.num_heads);
            const Segment segment = work.segment_of(slot);
            item.sequence = segment.sequence;
            const i64 begin = work.bound(segment.sequence);
            const i64 length = max(0ll, work.bound(segment.sequence + 1) - begin);
            if (segment.index < 0 || segment.index >= work.num_segments(length)) continue;

            i64 first = segment.index * work.segment, last = length;
            int warm_up = 0;
            if (work.segment && work.segment < length) {
                i64 cut = first > 0 ? first : work.segment;
                prefetch(work, item.head, begin, cut);
                prefetch(work, item.head, begin, min(cut + work.segment, length));
                const int channel = threadIdx.x % 32 * 4;
                const i64 token_stride = static_cast<i64>(work.num_heads) * head_dim;
                const i64 column = static_cast<i64>(item.head) * head_dim + channel;
                CutSource source = {
                    g, k, token_stride, {}, head_gate(A_log, item.head, lower_bound)};
                for (int c = 0; c < 4; ++c) source.bias[c] = channel_bias(dt_bias, column + c);
                const auto memory_at = [&](i64 row) {
                    const i64 at = (begin + row) * token_stride + column;
                    source.g = g + at;
                    source.k = k + at;
                    return memory(source, row, left);
                };
                bool is_needed = true;
                for (; cut < length; cut += work.segment) {
                    const int tokens = memory_at(cut);
                    if (cut > first && tokens == 0) continue;
                    if (cut > first) break;
                    is_needed = tokens > 0;
                    if (!is_needed) break;
                    warm_up = tokens;
                }
                if (!is_needed) continue;
                last = min(cut, length);
            }
            item.is_first = first == 0;
            item.is_last = last == length;
            item.begin = begin + first - warm_up;
            item.num_tokens = static_cast<int>(last - first) + warm_up;
            item.num_warm_up = warm_up / chunk;
            // One without tokens has a chunk too, in which nothing happens.
            item.num_chunks = max(1, (item.num_tokens + chunk - 1) / chunk);
            return item;
        }
        return {};
    }
};

// The items of a block, as each kind of warp meets them: for (Items items(smem); items.next();)
struct Items {
    Shared& smem;
    u32 count = 0;
    // Of the item. Shuffled, so that the compiler knows it for one number of the warp, and with it
    // all that is counted up to it: descriptors and addresses stay out of the vector registers.
    int num_chunks;

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
};
