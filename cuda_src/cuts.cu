// With what segments begin, for each and each head: a cut, where nothing is left of the state
// before, and how many of the last chunks make the state; a join; or the segment before goes on.
//
// Block: one segment's begin (slot) and one head; four warps, a chunk each.
// Grid: (head, slot), the head fastest.
#include "chunk.cuh"
#include "gate.cuh"
#include "work.cuh"

// A cut is taken where no more than 2^-60 is left of the state: of one as large as 1e6, 1e-12.
constexpr float log2_nothing = -60.0f;
constexpr int scout_warps = 4, scout_threads = 32 * scout_warps;
constexpr int scout_rounds = 2;  // of scout_warps chunks each
static_assert(scout_rounds * scout_warps == most_cut);

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

// What the scouts of a cut read: the lane's four channels of g and k, at the cut.
struct CutSource {
    const u16 *g, *k;
    i64 token_stride;
    float A_log, bias[4], lower_bound;
};

// A bound on what a chunk leaves of a state: log2 of the largest element after it where all were at
// most 1 before. A token takes s to s diag(e^a) (I - beta k k^T), so with b for |s|, and beta < 1,
//   b <- b diag(e^a);  b <- b + (b |k|^T) |k|
// bounds it, channel by channel. NaN where anything is not finite. By a warp; the chunk ends
// `before` rows ahead of the cut.
__device__ inline float log2_left_by_chunk(const CutSource& source, int before) {
    constexpr int num_channels = 4;  // of a lane
    float bound[num_channels] = {1.0f, 1.0f, 1.0f, 1.0f};
    const i64 at = -(before + chunk) * source.token_stride;
    // All on their way from memory at once: it is what this waits for.
    uint2 g[chunk], k[chunk];
#pragma unroll
    for (int t = 0; t < chunk; ++t) {
        g[t] = *reinterpret_cast<const uint2*>(source.g + at + t * source.token_stride);
        k[t] = *reinterpret_cast<const uint2*>(source.k + at + t * source.token_stride);
    }
    // Not before, or the loads of g and k would wait for those of the gate.
    float A_log = source.A_log, bias[num_channels];
    keep_in_order(A_log);
    const HeadGate gate = head_gate(A_log, source.lower_bound);
#pragma unroll
    for (int c = 0; c < num_channels; ++c) {
        bias[c] = source.bias[c];
        keep_in_order(bias[c]);
        bias[c] = channel_bias(bias[c]);
    }
    // Two tokens to an exchange of sums between the lanes.
#pragma unroll
    for (int t = 0; t < chunk; t += 2) {
        const float g0[4] = {bf16_low(g[t].x), bf16_high(g[t].x), bf16_low(g[t].y),
                             bf16_high(g[t].y)};
        const float g1[4] = {bf16_low(g[t + 1].x), bf16_high(g[t + 1].x), bf16_low(g[t + 1].y),
                             bf16_high(g[t + 1].y)};
        const float k0[4] = {bf16_low(k[t].x), bf16_high(k[t].x), bf16_low(k[t].y),
                             bf16_high(k[t].y)};
        const float k1[4] = {bf16_low(k[t + 1].x), bf16_high(k[t + 1].x), bf16_low(k[t + 1].y),
                             bf16_high(k[t + 1].y)};
        // b |k_0|; b |k_1| as if token 0 added nothing; what there is of |k_0| along |k_1| by
        // then; and the squares.
        float sums[5] = {};
        float carried[num_channels];  // |k_0| e^a_1
#pragma unroll
        for (int c = 0; c < num_channels; ++c) {
            const float decay = ex2_approx(log2_decay(g1[c], bias[c], gate));
            bound[c] *= ex2_approx(log2_decay(g0[c], bias[c], gate));
            sums[0] = fmaf(bound[c], fabsf(k0[c]), sums[0]);
            bound[c] *= decay;
            sums[1] = fmaf(bound[c], fabsf(k1[c]), sums[1]);
            carried[c] = fabsf(k0[c]) * decay;
            sums[2] = fmaf(carried[c], fabsf(k1[c]), sums[2]);
            sums[3] = fmaf(k0[c], k0[c], sums[3]);
            sums[4] = fmaf(k1[c], k1[c], sums[4]);
        }
        warp_sums(sums);
        // Where squares overflow there is no telling.
        const float nan = __int_as_float(0x7fffffff);
        const float part0 = sums[3] < 1e37f ? sums[0] * rcp_approx(sums[3] + 1e-6f) : nan;
        const float sum1 = fmaf(part0, sums[2], sums[1]);
        const float part1 = sums[4] < 1e37f ? sum1 * rcp_approx(sums[4] + 1e-6f) : nan;
#pragma unroll
        for (int c = 0; c < num_channels; ++c) {
            bound[c] = fmaf(part1, fabsf(k1[c]), fmaf(part0, carried[c], bound[c]));
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

// g, k: bf16 [B, T, H, 128]; A_log: fp32 [H] or null; dt_bias: fp32 [H, 128] or null; cu_seqlens
// to num_slots, begins and counts: see struct Work. Where a sequence is not cut it is joined, from
// segment first_joined on, at every join_every-th (0: nowhere). Writes begins [num_slots, H], and
// zeros to counts and, if it is there, to ready [num_slots, H].
extern "C" __global__ void __launch_bounds__(scout_threads, 4)
    kda_cuts(const u16* g, const u16* k, const float* A_log, const float* dt_bias,
             float lower_bound, const void* cu_seqlens, int cu_seqlens_bytes, int num_sequences,
             i64 num_tokens, int num_heads, int segment, u32 num_slots, int first_joined,
             int join_every, Begin* begins, Counts* counts, u32* ready) {
    __shared__ float left[scout_warps];
    const Work work = {cu_seqlens, cu_seqlens_bytes, num_sequences, num_tokens,
                       num_heads,  segment,          num_slots,     begins};
    const u32 slot = blockIdx.x / num_heads;
    const int head = static_cast<int>(blockIdx.x - slot * num_heads);
    if (blockIdx.x == 0 && threadIdx.x == 0) *counts = {};
    if (ready && threadIdx.x == 0) ready[blockIdx.x] = 0;
    const Segment mine = work.segment_of(slot, work.lane_sequence());
    if (mine.index <= 0 || mine.index >= mine.num_segments) {
        const bool is_there = mine.index == 0 && mine.num_segments > 0;
        if (threadIdx.x == 0) begins[blockIdx.x] = is_there ? is_first : goes_on;
        return;
    }

    const int warp = threadIdx.x / 32;
    const i64 cut = mine.index * segment;  // rows of the sequence before it
    const i64 column = static_cast<i64>(head) * head_dim + threadIdx.x % 32 * 4;
    const i64 token_stride = static_cast<i64>(num_heads) * head_dim;
    const i64 offset = (mine.begin + cut) * token_stride + column;
    CutSource source = {g + offset, k + offset, token_stride, A_log ? A_log[head] : 0.0f,
                        {},         lower_bound};
    for (int c = 0; c < 4; ++c) source.bias[c] = dt_bias ? dt_bias[column + c] : 0.0f;

    // What is left by each chunk multiplies.
    float log2_left = 0.0f;
    int num_chunks = 0;
    for (int round = 0; round < scout_rounds && num_chunks == 0; ++round) {
        const int before = chunk * (round * scout_warps + warp);
        const float here = before + chunk <= cut ? log2_left_by_chunk(source, before) : 0.0f;
        if (threadIdx.x % 32 == 0) left[warp] = here;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < scout_warps; ++i) {
            log2_left += left[i];
            if (num_chunks == 0 && log2_left < log2_nothing) {
                num_chunks = round * scout_warps + i + 1;
            }
        }
        __syncthreads();
        // Give up on what is not on its way; NaN is not.
        if (!(log2_left < log2_nothing * (round + 1) / scout_rounds)) break;
    }
    if (threadIdx.x == 0) {
        const i64 after = mine.index - first_joined;
        const bool may_join = join_every > 0 && after >= 0 && after % join_every == 0;
        begins[blockIdx.x] = num_chunks > 0 ? static_cast<Begin>(num_chunks)
                             : may_join     ? is_joined
                                            : goes_on;
    }
}
