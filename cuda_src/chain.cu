// Joins the segments of a sequence: the state S where each begins, from what the scan of each made
// of zero (local) and of the identity (transfer, M):
//   S <- S M + S_local
// in float32. Where a segment begins with a cut, or is the first, its local is already S.
//
// Block: 16 rows of S, of one sequence and head, through all of its segments; a thread to
//   a column and four rows.
// Grid: (16 rows of 128, head, sequence), the rows fastest.
#include "chunk.cuh"
#include "work.cuh"

constexpr int chain_rows = 16, chain_threads = 512;

// cu_seqlens and what follows: see struct Work. locals, transfers: fp32 [num_slots, H, 128, 128]; a
// local becomes the state where the next segment begins.
extern "C" __global__ void __launch_bounds__(chain_threads, 1)
    kda_chain(const void* cu_seqlens, int cu_seqlens_bytes, int num_sequences, i64 num_tokens,
              int num_heads, int segment, u32 num_slots, const unsigned char* cuts, u32* taken,
              float* locals, float* transfers) {
    __shared__ alignas(16) float before[chain_rows][head_dim];
    const Work work = {cu_seqlens, cu_seqlens_bytes, num_sequences, num_tokens,
                       num_heads,  segment,          num_slots,     cuts,
                       locals,     transfers,        taken,         Pass::Ends};
    constexpr u32 num_blocks = head_dim / chain_rows;
    const int first_row = blockIdx.x % num_blocks * chain_rows;
    const int head = static_cast<int>(blockIdx.x / num_blocks % num_heads);
    const i64 sequence = blockIdx.x / num_blocks / num_heads;
    const Slots slots = work.slots_of(sequence, work.lane_sequence());

    constexpr int rows = chain_rows * head_dim / chain_threads;  // of a thread
    const int column = threadIdx.x % head_dim, half = threadIdx.x / head_dim * rows;
    bool is_joined = false;  // this segment to the one before
    for (i64 index = 0; index + 1 < slots.count; ++index) {
        const i64 slot = slots.first + index;
        const bool is_next_joined = work.memory(slot + 1, head) == 0;
        if (is_next_joined) {
            float* local = locals + ((slot * num_heads + head) * head_dim + first_row) * head_dim;
            const float* transfer = transfers + (slot * num_heads + head) * head_dim * head_dim;
            float state[rows];
#pragma unroll
            for (int r = 0; r < rows; ++r) state[r] = local[(half + r) * head_dim + column];
            if (is_joined) {
// Enough loads under way to hide the latency of most.
#pragma unroll 8
                for (int k = 0; k < head_dim; k += 4) {
                    float m[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) m[i] = transfer[(k + i) * head_dim + column];
#pragma unroll
                    for (int r = 0; r < rows; ++r) {
                        const float4 s = *reinterpret_cast<const float4*>(&before[half + r][k]);
                        state[r] = fmaf(s.x, m[0], state[r]);
                        state[r] = fmaf(s.y, m[1], state[r]);
                        state[r] = fmaf(s.z, m[2], state[r]);
                        state[r] = fmaf(s.w, m[3], state[r]);
                    }
                }
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                before[half + r][column] = state[r];
                if (is_joined) local[(half + r) * head_dim + column] = state[r];
            }
            __syncthreads();
        }
        is_joined = is_next_joined;
    }
}
