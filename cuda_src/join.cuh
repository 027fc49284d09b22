// Joins segments that have run side by side (work.cuh). With S the state where a joined segment
// begins, S_local and M what its items left, O_local and Q_M what they put aside:
//   S where the next one begins = S M + S_local    (chain.cuh)
//   O = scale (O_local + Q_M S^T)                  (outputs.cuh)
//
// Blocks with no items left do this, in groups of eight warps. Whoever has time takes the next
// chain, that is 16 rows of the states of one sequence and head, then the next run of tiles of
// outputs. All wait until all items are done, and a run until S is there. Both end, whatever else
// the GPU does: the items have been taken by blocks that run, and chains are taken by this block's
// first group, if by nobody else, before it waits for any.
#pragma once

#include "chain.cuh"
#include "outputs.cuh"
#include "work.cuh"

// Of a group; they lie over the stages and raw chunks.
struct JoinShared {
    union {
        ChainShared chain;
        OutputsShared outputs;
    };
    Walk walk;  // of outputs
    u32 number;
};
static_assert(join_threads == 256 && num_chain_parts == 8 && tile_rows == 96,
              "cukda/plan.py has other sizes");
static_assert(num_groups > 0 &&
              num_groups * sizeof(JoinShared) <= sizeof(Shared::stage) + sizeof(Shared::raw));

// The next of what is counted, for a group.
__device__ inline u32 take(JoinShared& smem, u32& count) {
    group_sync();
    if (group_thread() == 0) smem.number = atomicAdd(&count, 1);
    group_sync();
    return smem.number;
}

// The same work, but the compiler does not know that it is: what it worked out before it would keep
// in registers, or in memory, until then.
__device__ inline Work anew(Work work) {
    forget(work.cu_seqlens);
    forget(work.cu_seqlens_bytes);
    forget(work.num_sequences);
    forget(work.num_tokens);
    forget(work.num_heads);
    forget(work.segment);
    forget(work.num_slots);
    forget(work.begins);
    forget(work.locals);
    forget(work.transfers);
    forget(work.partials);
    forget(work.ready);
    forget(work.first_extra);
    return work;
}

// By a whole block that has done its items. run_tiles, item_runs: see run_outputs.
__device__ inline void run_join(Shared& block, const Work& work, u16* out, float scale,
                                const States& final, u32 run_tiles, u32 item_runs) {
    const FetchState& fetch = block.scratch[0].fetch;
    if (!fetch.walk.any_joined) return;
    // The last that was found says that there are no more.
    if (mov_tid_x() == 0) red_release_add(&work.counts->items_done, fetch.num_found - 1);
    if (mov_tid_x() / join_threads == num_groups) return;  // too few for another group
    u32 num_items = fetch.walk.before;
    const auto smem = [&]() -> JoinShared& {
        return reinterpret_cast<JoinShared*>(&block)[mov_tid_x() / join_threads];
    };
    const u32 num_chains = work.num_sequences * work.num_heads * num_chain_parts;
    // One to a multiprocessor: two take half as long again.
    if (mov_tid_x() < join_threads || num_chains > gridDim.x) {
        for (;;) {
            const Work chains = anew(work);
            const u32 number = take(smem(), work.counts->chains);
            if (number >= num_chains) break;
            run_chain(smem().chain, chains, block.sequences, final, number, num_items);
        }
    }
    if (group_thread() == 0) smem().walk = {};
    for (;;) {
        const Work outputs = anew(work);
        const u32 number = take(smem(), work.counts->runs);
        const bool is_there = run_outputs(smem().outputs, outputs, block.sequences, smem().walk,
                                          number, num_items, run_tiles, item_runs, out, scale);
        if (!is_there) break;
    }
}
