// Kimi Delta Attention, forward, one fused kernel.
//
//   a  = lower_bound sigmoid(exp(A_log) (g + dt_bias))    beta = sigmoid(beta)
//   S <- S diag(e^a);  S <- S + beta (v - S k) k^T;  o = scale S q     q, k normalised, per token
//
// in chunks of 16 tokens (factors.cuh, solve.cuh, recurrence.cuh have the chunked form).
//
// Block: one sequence of one head, v_rows of the 128 rows of its state. Its warps do three things,
//   chunk by chunk, and meet only at the mbarriers of struct Shared:
//     factor warps (factors.cuh): q, k, g -> the factors k e^G, q e^G, k e^-G, k e^(G_last - G);
//     solvers (solve.cuh): norms and beta before them, (I + diag(beta) A)^-1 and P after them;
//     consumers (recurrence.cuh): 16 rows of the state each, in registers, through all chunks.
// Grid: (sequence, head, part of V), the part fastest; no block waits for another.
// Shared memory: struct Shared (chunk.cuh), dynamic.
// Each part reads its inputs once and writes its outputs once; there is no workspace.
#include "chunk.cuh"
#include "factors.cuh"
#include "ptx.cuh"
#include "recurrence.cuh"
#include "solve.cuh"

// cu_seqlens may hold anything: the bounds are clamped to the rows there are.
__device__ inline i64 sequence_bound(const void* cu_seqlens, int cu_seqlens_bytes, i64 index) {
    return cu_seqlens_bytes == 8 ? static_cast<const i64*>(cu_seqlens)[index]
                                 : static_cast<const int*>(cu_seqlens)[index];
}

__device__ inline i64 clamp(i64 x, i64 low, i64 high) {
    return x < low ? low : x > high ? high : x;
}

__device__ inline Item item_of_block(i64 num_tokens, int num_heads, const void* cu_seqlens,
                                     int cu_seqlens_bytes) {
    constexpr int num_parts = head_dim / v_rows;
    Item item;
    item.part = blockIdx.x % num_parts;
    item.head = blockIdx.x / num_parts % num_heads;
    item.sequence = blockIdx.x / num_parts / num_heads;
    item.begin = item.sequence * num_tokens;
    item.num_tokens = static_cast<int>(num_tokens);
    if (cu_seqlens) {
        item.begin =
            clamp(sequence_bound(cu_seqlens, cu_seqlens_bytes, item.sequence), 0, num_tokens);
        const i64 end = clamp(sequence_bound(cu_seqlens, cu_seqlens_bytes, item.sequence + 1),
                              item.begin, num_tokens);
        item.num_tokens = static_cast<int>(end - item.begin);
    }
    return item;
}

// q, k, g, v, out: bf16 [B, T, H, 128]; beta: bf16 [B, T, H]; A_log: fp32 [H] or null; dt_bias:
// fp32 [H, 128] or null; states: [N, H, 128 (v), 128 (k)] of the kind given, or null; cu_seqlens:
// int32 or int64 [N + 1] or null (then N = B). All contiguous. num_tokens is T.
extern "C" __global__ void __launch_bounds__(num_threads, 1)
    kda_fwd(const u16* q, const u16* k, const u16* v, const u16* g, const u16* beta, float scale,
            u16* out, const float* A_log, const float* dt_bias, float lower_bound,
            const void* initial_state, StateKind initial_kind, void* final_state,
            StateKind final_kind, const void* cu_seqlens, int cu_seqlens_bytes, i64 num_tokens,
            int num_heads) {
    extern __shared__ __align__(128) unsigned char storage[];
    Shared& smem = *reinterpret_cast<Shared*>(storage);

    if (threadIdx.x == 0) {
        smem.item = item_of_block(num_tokens, num_heads, cu_seqlens, cu_seqlens_bytes);
        // Every thread that wrote, or read, arrives for itself.
        constexpr int group_threads = 32 * group_warps, solver_threads = 32;
        init(smem.raw_full, group_threads);
        init(smem.tokens_full, solver_threads);
        init(smem.factors_full, group_threads);
        init(smem.full, group_threads + solver_threads);
        init(smem.empty, solver_threads + 32 * num_consumers);
    }
    __syncthreads();

    const int warp = threadIdx.x / 32;
    if (warp < num_factor_warps) {
        run_factors(smem, q, k, g, A_log, dt_bias, lower_bound, scale, num_heads);
    } else if (warp < num_factor_warps + num_solvers) {
        run_solver(smem, beta, num_heads);
    } else {
        run_recurrence(smem, v, out, initial_state, initial_kind, final_state, final_kind,
                       num_heads);
    }
}
