// One chunk of one head: its sizes, what lies in shared memory while it is worked on, and the rings
// that carry it from one kind of warp to the next.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

constexpr int head_dim = 128;   // K = V
constexpr int chunk = 16;       // tokens
constexpr int v_rows = V_ROWS;  // rows of the state that this block owns

// Warps of a block, by what they do, in this order.
constexpr int group_warps = 4;
constexpr int num_groups = NUM_GROUPS;  // of factor warps, taking turns at chunks
constexpr int num_factor_warps = group_warps * num_groups;
constexpr int num_stages = NUM_STAGES;
// Solvers take turns at chunks, each at one stage: a barrier's parity tells its last two phases
// apart, so whoever waits on it must see every phase.
constexpr int num_solvers = num_stages;
constexpr int num_consumers = v_rows / 16;  // 16 rows of the state each
constexpr int num_threads = 32 * (num_factor_warps + num_solvers + num_consumers);
static_assert(num_threads == NUM_THREADS, "cukda/plan.py launches another block");

// Slots of the rings; chunk n is in slot n % size.
constexpr int num_raw = NUM_RAW;
constexpr int num_tokens_slots = 2 * num_solvers;
static_assert(num_raw % num_groups == 0 && num_stages % num_groups == 0,
              "a slot belongs to one group");
static_assert(num_raw % num_solvers == 0, "a slot belongs to one solver");

// Raw rows are padded to 272 bytes: the eight rows that ldmatrix reads start on eight bank groups.
constexpr int raw_row = head_dim + 8;

struct RawChunk {  // 13,056 bytes
    alignas(16) u16 q[chunk][raw_row];
    alignas(16) u16 k[chunk][raw_row];
    alignas(16) u16 g[chunk][raw_row];
};

// Where this lane points ldmatrix.x4 in a padded raw tile: rows of (tokens 0-7, tokens 8-15) of
// channels 0-7, then of channels 8-15.
__device__ inline u32 raw_lane_address(const u16 (&tile)[chunk][raw_row], int lane) {
    return shared_address(&tile[lane % 16][lane / 16 * 8]);
}

// Per-token scalars of a chunk.
struct Tokens {            // 260 bytes
    float k_norm[chunk];   // 1 / sqrt(sum k^2 + 1e-6)
    float q_norm[chunk];   // makes q a vector of length 2^12 ...
    float q_scale[chunk];  // ... whose length the output gets back
    float beta[chunk];     // sigmoid(beta); 0 where it is NaN
    int num_finite;        // tokens before the first whose g, k or beta is not finite
};

// [16 channel groups][token groups] core matrices, tokens as rows.
template <int token_groups>
struct Factor {
    alignas(128) u16 core[head_dim / 8][token_groups][64];
};

// [2 (i)][2 (j)] core matrices of a [16 x 16] matrix, rows i.
struct Square {
    alignas(128) u16 core[2][2][64];
};

// A chunk between factor warps, solvers and consumers.
struct Stage {              // 18,176 bytes
    Factor<4> kq_in;        // token groups 0, 1: k e^G; 2, 3: q e^G
    Factor<2> k_inverse;    // k e^-G
    Factor<2> k_out;        // k e^(G_last - G)
    Square inverse;         // (I + diag(beta) A)^-1
    Square p;               // q k^T e^(G_i - G_j), i >= j
    float decay[head_dim];  // e^G_last
    float beta[chunk];
    float o_scale[chunk];  // scale, and the length of q
    int num_finite;        // tokens before the first that is not finite
};

// What a block works on.
struct Item {
    i64 sequence, begin;  // begin: the sequence's first row of [B * T]
    int head, part;       // part: which v_rows of the state
    int num_tokens;
};

struct Shared {
    Stage stage[num_stages];
    RawChunk raw[num_raw];
    Tokens tokens[num_tokens_slots];
    alignas(16) float lower[num_solvers][chunk][20];  // a solver's scratch; rows padded to 80 bytes
    // Who waits on each: solvers and factor warps; factor warps; solvers; consumers; factor warps.
    u64 raw_full[num_raw];
    u64 tokens_full[num_tokens_slots];
    u64 factors_full[num_stages];
    u64 full[num_stages];
    u64 empty[num_stages];
    Item item;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cukda/plan.py launches with another size");

template <int size>
__device__ inline void init(u64 (&ring)[size], u32 arrivals) {
    for (u64& barrier : ring) mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline int tokens_in_chunk(int num_tokens, int index) {
    return max(0, min(chunk, num_tokens - index * chunk));
}

// Waits until the ring's slot of chunk `index` has been filled for it.
template <int size>
__device__ inline void wait_full(u64 (&ring)[size], int index) {
    const u32 address = shared_address(&ring[index % size]);
    const u32 parity = index / size % 2;
    while (!mbarrier_test_wait_parity(address, parity)) {
    }
}

// Waits until the slot that chunk `index` wants is free; the first time round it is.
template <int size>
__device__ inline void wait_empty(u64 (&ring)[size], int index) {
    const u32 address = shared_address(&ring[index % size]);
    const u32 parity = index / size % 2 ^ 1;
    while (!mbarrier_test_wait_parity(address, parity)) {
    }
}

template <int size>
__device__ inline void arrive(u64 (&ring)[size], int index) {
    mbarrier_arrive(shared_address(&ring[index % size]));
}
