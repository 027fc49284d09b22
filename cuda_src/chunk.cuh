// One chunk of one head: its sizes, and what lies in shared memory while it is worked on.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

constexpr int head_dim = 128;   // K = V
constexpr int chunk = 16;       // tokens
constexpr int v_rows = V_ROWS;  // rows of the state that this block owns
constexpr int num_groups = 2;   // producer groups, taking turns at chunks
constexpr int group_warps = 4;
constexpr int group_threads = 32 * group_warps;
constexpr int num_consumers = v_rows / 16;  // warps, 16 rows each
constexpr int num_threads = num_groups * group_threads + 32 * num_consumers;
constexpr int num_stages = NUM_STAGES;  // chunks between producers and consumers
static_assert(num_threads == NUM_THREADS, "cukda/plan.py launches another block");
static_assert(num_stages % num_groups == 0, "a stage belongs to one group");

// Raw rows are padded to 272 bytes: the eight rows that ldmatrix reads start on eight bank groups.
constexpr int raw_row = head_dim + 8;

struct RawChunk {  // 13,056 bytes
    alignas(16) u16 q[chunk][raw_row];
    alignas(16) u16 k[chunk][raw_row];
    alignas(16) u16 g[chunk][raw_row];
};

// Per-token scalars of a chunk.
struct Tokens {            // 272 bytes
    float k_norm[chunk];   // 1 / sqrt(sum k^2 + 1e-6)
    float q_norm[chunk];   // makes q a vector of about unit length ...
    float q_scale[chunk];  // ... whose length the output gets back
    float beta[chunk];     // sigmoid(beta); 0 where it is NaN
    // The tokens before the first whose g, or whose k or beta, is not finite.
    int num_finite_g, num_finite_k;
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

// All that the recurrence needs of a chunk.
struct Stage {              // 14,080 bytes
    Factor<4> kq_in;        // token groups 0, 1: k e^G; 2, 3: q e^G
    Factor<2> k_out;        // k e^(G_last - G)
    Square inverse;         // (I + diag(beta) A)^-1
    Square p;               // q k^T e^(G_i - G_j), i >= j
    float decay[head_dim];  // e^G_last
    float beta[chunk];
    float o_scale[chunk];  // scale, and the length of q
    int num_finite;        // tokens before the first that is not finite
};

struct Group {  // 32,128 bytes
    RawChunk raw[2];
    Factor<2> k_inverse;     // k e^-G
    float lower[chunk][20];  // diag(beta) A below the diagonal; rows padded to 80 bytes
    Tokens tokens[2];
};

// What a block works on.
struct Item {
    i64 sequence, begin;  // begin: the sequence's first row of [B * T]
    int head, part;       // part: which v_rows of the state
    int num_tokens;
};

struct Shared {
    Stage stage[num_stages];
    Group group[num_groups];
    u64 full[num_stages];
    u64 empty[num_stages];
    Item item;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cukda/plan.py launches with another size");

// Named barrier of a producer group.
__device__ inline void sync_group(int group) { bar_sync(1 + group, group_threads); }

__device__ inline void wait(u64& barrier, u32 parity) {
    const u32 address = shared_address(&barrier);
    while (!mbarrier_test_wait_parity(address, parity)) {
    }
}

__device__ inline void arrive(u64& barrier) { mbarrier_arrive(shared_address(&barrier)); }
