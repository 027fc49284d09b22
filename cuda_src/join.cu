// Joins segments that have run side by side (work.cuh). With S the state where a joined segment
// begins, S_local and M what its items left, O_local and Q_M what they put aside:
//   S where the next one begins = S M + S_local    (chain.cuh)
//   O = scale (O_local + Q_M S^T)                  (outputs.cuh)
//
// Block: a chain, that is 16 rows of the states of one sequence and head; or outputs, run after run
//   of tiles, each once S is ready.
// Grid: a block for each chain, then any number for outputs. A block takes the next number, so
//   whoever is waited for is running.
// Shared memory: struct JoinShared, dynamic.
#include "chain.cuh"
#include "chunk.cuh"
#include "outputs.cuh"
#include "work.cuh"

struct JoinShared {
    union {
        ChainShared chain;
        OutputsShared outputs;
    };
    LaneSequence sequences[32];
    u32 number;
};
static_assert(sizeof(JoinShared) == 51472 && join_threads == 256 && num_chain_parts == 8 &&
                  tile_rows == 96,
              "cukda/plan.py has other sizes");

// cu_seqlens to num_slots, and begins to partials: see struct Work. ready: [num_slots, H], zeros:
// how many warps have stored their part of the S that follows a slot. run_tiles, item_runs: see
// run_outputs. final_state, out: as kda_fwd's.
extern "C" __global__ void __launch_bounds__(join_threads, 2)
    kda_join(float scale, u16* out, void* final_state, StateKind final_kind, const void* cu_seqlens,
             int cu_seqlens_bytes, int num_sequences, i64 num_tokens, int num_heads, int segment,
             u32 num_slots, u32 run_tiles, u32 item_runs, const Begin* begins, Counts* counts,
             float* locals, float* transfers, float* partials, u32* ready) {
    extern __shared__ __align__(128) unsigned char storage[];
    JoinShared& smem = *reinterpret_cast<JoinShared*>(storage);
    const Work work = {cu_seqlens, cu_seqlens_bytes, num_sequences, num_tokens, num_heads, segment,
                       num_slots,  begins,           locals,        transfers,  partials,  counts};
    const u32 num_chains = num_sequences * num_heads * num_chain_parts;
    if (!counts->any_joined) return;
    if (threadIdx.x == 0) {
        // The first blocks lie on a multiprocessor each, but for a few. So do chains, if the others
        // let them be first: two on one take 1.6 us for products that one has in 1.0 (H200).
        if (blockIdx.x >= num_chains) nanosleep(1000);
        smem.number = atomicAdd(&counts->join_blocks, 1);
    }
    if (threadIdx.x < 32) smem.sequences[threadIdx.x] = work.lane_sequence();
    __syncthreads();
    const u32 number = smem.number;
    if (number < num_chains) {
        run_chain(smem.chain, work, smem.sequences, {final_state, final_kind}, ready, number);
    } else {
        run_outputs(smem.outputs, work, smem.sequences, run_tiles, item_runs, out, scale, ready,
                    number - num_chains, gridDim.x - num_chains);
    }
}
