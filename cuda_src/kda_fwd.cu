// Kimi Delta Attention, forward, one fused kernel.
//
//   a  = lower_bound sigmoid(exp(A_log) (g + dt_bias))    beta = sigmoid(beta)
//   S <- S diag(e^a);  S <- S + beta (v - S k) k^T;  o = scale S q     q, k normalised, per token
//
// in chunks of 16 tokens (factors.cuh, solve.cuh, recurrence.cuh have the chunked form).
//
// Block: item after item (items.cuh), each the segments of a sequence from one begin to the next,
// of one head, and v_rows of the 128 rows of its state; joined ones twice, from zero and from the
// identity, with outputs aside. Its warps do three things, chunk by chunk, and meet only at the
// mbarriers of struct Shared:
//   factor warps (factors.cuh): of q, k, g the factors k e^G, q e^G, k e^-G, k e^(G_last - G);
//   solvers (fetch.cuh, solve.cuh): find items, fetch q, k, g; norms and beta, the matrices
//     (I + A diag(beta))^-1 and P;
//   consumers (recurrence.cuh): 16 rows of the state each, in registers, through all chunks.
// Where segments are joined all warps go on to that when no items are left (join.cuh).
// Grid: any number of blocks, which share what there is to do; none waits for one that may not run.
// Shared memory: struct Shared (chunk.cuh), dynamic.
#include "chunk.cuh"
#include "factors.cuh"
#include "join.cuh"
#include "ptx.cuh"
#include "recurrence.cuh"
#include "solve.cuh"
#include "strides.cuh"
#include "work.cuh"

// What a thread has where all have as many: at first, and in joins.
constexpr int even_registers = 65536 / num_threads;

// q, k, g, v, out: bf16 [B, T, H, 128]; beta: bf16 [B, T, H]; A_log: fp32 [H] or null; dt_bias:
// fp32 [H, 128] or null; states: [N, H, 128 (v), 128 (k)] of the kind given, or null; cu_seqlens:
// int32 or int64 [N + 1] or null (then N = B). All contiguous, or all but cu_seqlens as strides
// (strides.cuh) say. num_tokens is T. segment to ready: see struct Work; run_tiles, item_runs: see
// run_outputs.
extern "C" __global__ void __launch_bounds__(num_threads, 1)
    kda_fwd(const u16* q, const u16* k, const u16* v, const u16* g, const u16* beta, float scale,
            u16* out, const float* A_log, const float* dt_bias, float lower_bound,
            const void* initial_state, StateKind initial_kind, void* final_state,
            StateKind final_kind, const void* cu_seqlens, int cu_seqlens_bytes, int num_sequences,
            u32 num_tokens, int num_heads, int segment, int first_extra, u32 num_slots,
            const Begin* begins, Counts* counts, float* locals, float* transfers, float* partials,
            u32* ready, u32 run_tiles, u32 item_runs STRIDES_PARAMETER) {
    extern __shared__ __align__(256) unsigned char storage[];
    Shared& smem = *reinterpret_cast<Shared*>(storage);
    const Work work = {STRIDES_ADDRESS, cu_seqlens, cu_seqlens_bytes, num_sequences, num_tokens,
                       num_heads,       segment,    first_extra,      num_slots,     begins,
                       locals,          transfers,  partials,         counts,        ready};
    States initial = {const_cast<void*>(initial_state), initial_kind};
    States final = {final_state, final_kind};
    if constexpr (is_strided) {
        initial.strides = work.strides->initial_state;
        final.strides = work.strides->final_state;
    }

    const int warp = threadIdx.x / 32;
    if (warp == num_factor_warps) prepare_solvers(smem, work);
    if (threadIdx.x == 0) {
        // Every thread that wrote, or read, arrives for itself.
        init(smem.raw_full, 32);
        init(smem.factors_full, 32 * num_factor_warps);
        init(smem.full, 32);
        init(smem.empty, 32 * num_consumers);
        init(smem.item_full, 1);
        init(smem.item_empty, num_threads);
    }
    __syncthreads();

    if (warp < num_factor_warps + num_solvers) {
        if constexpr (use_wgmma) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp < num_factor_warps) {
            run_factors(smem, lower_bound);
        } else {
            const Inputs inputs = {q, k, g, v, beta, A_log, dt_bias, initial};
            run_solver(smem, work, inputs, scale, lower_bound);
        }
    } else {
        if constexpr (use_wgmma) setmaxnreg_inc<CONSUMER_REGISTERS>();
        run_recurrence(smem, work, v, out, initial, final);
    }
    if (!ready) return;
    // Only then are registers taken back: consumers may not have had theirs yet, if the block has
    // had no items.
    __syncthreads();
    if constexpr (use_wgmma) {
        if (warp < num_factor_warps + num_solvers) {
            setmaxnreg_inc<even_registers>();
        } else {
            setmaxnreg_dec<even_registers>();
        }
    }
    run_join(smem, work, out, scale, final, run_tiles, item_runs);
}
