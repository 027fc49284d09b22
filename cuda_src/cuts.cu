// With what segments begin, for each and each head: a cut, where nothing is left of the state
// before, and how many of the last chunks make the state; a join; or the segment before goes on.
//
// Block: one segment's begin (slot) and one head; four warps, a chunk each.
// Grid: (head, slot), the head fastest.
// Shared memory: struct CutsShared, dynamic.
#include "chunk.cuh"
#include "gate.cuh"
#include "strides.cuh"
#include "work.cuh"

// A cut is taken where no more than 2^-60 is left of the state: of one as large as 1e6, 1e-12.
constexpr float log2_nothing = -60.0f;
constexpr int scout_warps = 4, scout_threads = 32 * scout_warps;
constexpr int scout_rounds = 2;  // of scout_warps chunks each
static_assert(scout_rounds * scout_warps == most_cut);
// Slots and heads, about as many as multiprocessors, whose first 32 rows are fetched early: 5 MB.
constexpr u32 early_slots = 160;

// The warp's sums of several numbers, side by side: one's latency hides the others'.
template <int size>
__device__ inline void warp_sums(float (&x)[size]) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        float other[size];
#pragma unroll
        for (int i = 0; i < size; ++i) other[i] = __shfl_xor_sync(~0u, x[i], lanes);
#pragma unroll
        for (int i = 0; i < size; ++i) x[i] += other[i];
    }
}

// Rows of a chunk as they come.
struct ScoutRows {
    alignas(16) u16 g[chunk][head_dim];
    u16 k[chunk][head_dim];
};

struct CutsShared {
    ScoutRows rows[scout_warps];
    float left[scout_warps];
};
static_assert(sizeof(CutsShared) == 32784, "cukda/plan.py launches with another size");

// What the scouts of a cut read: rows of g and k, from the one behind the cut, and the gate's
// inputs, all from the head's first channel on.
struct CutSource {
    const u16 *g, *k;
    i64 g_token_stride, k_token_stride;
    const float *A_log, *dt_bias;
    float lower_bound;
};

// Four neighbours.
__device__ inline void load_four(float (&x)[4], const u16* from) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    x[0] = bf16_low(pairs.x);
    x[1] = bf16_high(pairs.x);
    x[2] = bf16_low(pairs.y);
    x[3] = bf16_high(pairs.y);
}

// Eight neighbours to shared memory; they are there after cp_async_wait_all.
__device__ inline void copy_eight(u32 to, const u16* from) {
    if constexpr (is_aligned) {
        cp_async_16(to, from, 16);
    } else {
        u32 pairs[4];
        load_pairs(pairs, from);
        st_shared_v4(to, pairs);
    }
}

// A bound on what a chunk leaves of a state: log2 of the largest element after it where all were at
// most 1 before. A token takes s to s diag(e^a) (I - beta k k^T), so with b for |s|, and beta < 1,
//   b <- b diag(e^a);  b <- b + (b |k|^T) |k|
// bounds it, channel by channel. NaN where anything is not finite. By a warp; the chunk ends
// `before` rows ahead of the cut.
__device__ inline float log2_left_by_chunk(ScoutRows& rows, const CutSource& source, int before) {
    const int lane = threadIdx.x % 32;
    // All on their way from memory at once: it is what this waits for. Half a warp to a row.
    const int first = lane / 16 - before - chunk;
    const i64 from_g = first * source.g_token_stride + lane % 16 * 8;
    const i64 from_k = first * source.k_token_stride + lane % 16 * 8;
#pragma unroll(is_aligned ? chunk / 2 : 2)
    for (int row = 0; row < chunk; row += 2) {
        const u32 to_g = shared_address(&rows.g[row + lane / 16][lane % 16 * 8]);
        const u32 to_k = shared_address(&rows.k[row + lane / 16][lane % 16 * 8]);
        copy_eight(to_g, source.g + from_g + row * source.g_token_stride);
        copy_eight(to_k, source.k + from_k + row * source.k_token_stride);
    }
    constexpr int num_channels = 4;  // of a lane
    const int channel = num_channels * lane;
    const HeadGate gate = head_gate(source.A_log ? *source.A_log : 0.0f, source.lower_bound);
    float bias[num_channels], bound[num_channels];
#pragma unroll
    for (int c = 0; c < num_channels; ++c) {
        bias[c] = source.dt_bias ? channel_bias(source.dt_bias[channel + c]) : 0.0f;
        bound[c] = 1.0f;
    }
    cp_async_wait_all();
    __syncwarp();
    // Two tokens: |k|, and e^a.
    float k0[num_channels], k1[num_channels], decay0[num_channels], decay1[num_channels];
    const auto load_pair = [&](int t) {
        float g0[num_channels], g1[num_channels];
        load_four(g0, &rows.g[t][channel]);
        load_four(g1, &rows.g[t + 1][channel]);
        load_four(k0, &rows.k[t][channel]);
        load_four(k1, &rows.k[t + 1][channel]);
#pragma unroll
        for (int c = 0; c < num_channels; ++c) {
            k0[c] = fabsf(k0[c]);
            k1[c] = fabsf(k1[c]);
            decay0[c] = ex2_approx(log2_decay(g0[c], bias[c], gate));
            decay1[c] = ex2_approx(log2_decay(g1[c], bias[c], gate));
        }
    };
    load_pair(0);
    // Two tokens to an exchange of sums between the lanes, and little code: with all tokens
    // unrolled it drove that of the other kernels out of the instruction cache.
#pragma unroll 1
    for (int t = 0; t < chunk; t += 2) {
        // b |k_0|; b |k_1| as if token 0 added nothing; what there is of |k_0| along |k_1| by
        // then; and the squares.
        float sums[5] = {};
        float carried[num_channels], along[num_channels];  // |k_0| e^a_1; |k_1|
#pragma unroll
        for (int c = 0; c < num_channels; ++c) {
            bound[c] *= decay0[c];
            sums[0] = fmaf(bound[c], k0[c], sums[0]);
            bound[c] *= decay1[c];
            sums[1] = fmaf(bound[c], k1[c], sums[1]);
            carried[c] = k0[c] * decay1[c];
            along[c] = k1[c];
            sums[2] = fmaf(carried[c], k1[c], sums[2]);
            sums[3] = fmaf(k0[c], k0[c], sums[3]);
            sums[4] = fmaf(k1[c], k1[c], sums[4]);
        }
        // While the sums are under way.
        load_pair((t + 2) % chunk);
        warp_sums(sums);
        // Where squares overflow there is no telling.
        const float nan = __int_as_float(0x7fffffff);
        const float part0 = sums[3] < 1e37f ? sums[0] * rcp_approx(sums[3] + 1e-6f) : nan;
        const float sum1 = fmaf(part0, sums[2], sums[1]);
        const float part1 = sums[4] < 1e37f ? sum1 * rcp_approx(sums[4] + 1e-6f) : nan;
#pragma unroll
        for (int c = 0; c < num_channels; ++c) {
            bound[c] = fmaf(part1, along[c], fmaf(part0, carried[c], bound[c]));
        }
    }
    // Before the rows of the next round.
    __syncwarp();
    // A NaN is in all lanes, by the sums.
    float largest = fmaxf(fmaxf(bound[0], bound[1]), fmaxf(bound[2], bound[3]));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    return lg2_approx(largest);
}

// How many chunks before a cut make the state there, or 0 where they leave too much of the one
// before them. cut: rows of the sequence before it. By a whole block.
__device__ inline int look_for_cut(CutsShared& smem, const CutSource& source, int cut) {
    // Shuffled, so that the compiler knows it for one number of the warp.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    float log2_left = 0.0f;  // what is left by each chunk multiplies
    int num_chunks = 0;
#pragma unroll 1
    for (int round = 0; round < scout_rounds && num_chunks == 0; ++round) {
        const int before = chunk * (round * scout_warps + warp);
        const float here =
            before + chunk <= cut ? log2_left_by_chunk(smem.rows[warp], source, before) : 0.0f;
        if (threadIdx.x % 32 == 0) smem.left[warp] = here;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < scout_warps; ++i) {
            log2_left += smem.left[i];
            if (num_chunks == 0 && log2_left < log2_nothing) {
                num_chunks = round * scout_warps + i + 1;
            }
        }
        __syncthreads();
        // Give up on what is not on its way; NaN is not.
        if (!(log2_left < log2_nothing * (round + 1) / scout_rounds)) break;
    }
    return num_chunks;
}

// q, k, v, g: bf16 [B, T, H, 128]; A_log: fp32 [H] or null; dt_bias: fp32 [H, 128] or null;
// cu_seqlens to num_slots, begins and counts: see struct Work. Where a sequence is not cut it is
// joined, from segment first_joined on, at every join_every-th (0: nowhere). Where arrays have
// strides: strides.cuh. Writes begins [num_slots, H], and zeros to counts and, if it is there, to
// ready [num_slots, H].
extern "C" __global__ void __launch_bounds__(scout_threads, 4)
    kda_cuts(const u16* q, const u16* k, const u16* v, const u16* g, const float* A_log,
             const float* dt_bias, float lower_bound, const void* cu_seqlens, int cu_seqlens_bytes,
             int num_sequences, u32 num_tokens, int num_heads, int segment, int first_extra,
             u32 num_slots, int first_joined, int join_every, Begin* begins, Counts* counts,
             u32* ready STRIDES_PARAMETER) {
    extern __shared__ __align__(16) unsigned char storage[];
    CutsShared& smem = *reinterpret_cast<CutsShared*>(storage);
    const Work work = {STRIDES_ADDRESS, cu_seqlens, cu_seqlens_bytes, num_sequences, num_tokens,
                       num_heads,       segment,    first_extra,      num_slots,     begins};
    const u32 slot = blockIdx.x / num_heads;
    const int head = static_cast<int>(blockIdx.x - slot * num_heads);
    if (blockIdx.x == 0 && threadIdx.x == 0) *counts = {};
    if (ready && threadIdx.x == 0) ready[blockIdx.x] = 0;
    const Segment mine = work.segment_of(slot, work.lane_sequence());
    const bool is_there = mine.index >= 0 && mine.index < mine.num_segments;
    const int cut = work.num_rows_before(mine.index);  // rows of the sequence before it
    const i64 column = static_cast<i64>(head) * head_dim;
    const i64 token_stride = static_cast<i64>(num_heads) * head_dim;
    const i64 offset = (mine.begin + cut) * token_stride + column;
    // A channel of this head, in the row that is so many behind the cut.
    const auto place_in = [&](const u16* base, TokenStrides Strides::* strides_of, int row,
                              int channel) {
        if constexpr (is_strided) {
            const TokenStrides& of = work.strides->*strides_of;
            const u32 first = work.first_row(mine) + cut;
            return base + of.offset(work.batch_of(mine.sequence), first + row, head) + channel;
        } else {
            return base + (offset + row * token_stride + channel);
        }
    };

    Begin begin = is_there ? is_first : goes_on;
    if (is_there && cut > 0) {
        CutSource source = {place_in(g, &Strides::g, 0, 0),
                            place_in(k, &Strides::k, 0, 0),
                            token_stride,
                            token_stride,
                            A_log ? A_log + head : nullptr,
                            dt_bias ? dt_bias + column : nullptr,
                            lower_bound};
        if constexpr (is_strided) {
            source.g_token_stride = work.strides->g.token;
            source.k_token_stride = work.strides->k.token;
            source.A_log = A_log ? A_log + head * work.strides->A_log : nullptr;
            source.dt_bias = dt_bias ? dt_bias + head * work.strides->dt_bias : nullptr;
        }
        const int num_chunks = look_for_cut(smem, source, cut);
        const int after = mine.index - first_joined;
        const bool may_join = join_every > 0 && after >= 0 && after % join_every == 0;
        begin = num_chunks > 0 ? static_cast<Begin>(num_chunks) : may_join ? is_joined : goes_on;
    }
    if (threadIdx.x == 0) begins[blockIdx.x] = begin;
    // The first rows of what kda_fwd takes first, into L2, while memory has nothing to do: its
    // blocks all begin at once, with eight chunks each.
    const int row = threadIdx.x / 4;
    if (is_there && blockIdx.x < early_slots && cut + row < mine.length) {
        const int at = threadIdx.x % 2 * (head_dim / 2);
        const bool other = threadIdx.x / 2 % 2;
        prefetch_place(other ? place_in(g, &Strides::g, row, at)
                             : place_in(q, &Strides::q, row, at));
        prefetch_place(other ? place_in(v, &Strides::v, row, at)
                             : place_in(k, &Strides::k, row, at));
    }
}
