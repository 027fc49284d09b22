// One chunk of one head: its sizes, what lies in shared memory while it is worked on, and the rings
// that carry it from one kind of warp to the next.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

constexpr int head_dim = 128;   // K = V
constexpr int chunk = 16;       // tokens
constexpr int v_rows = V_ROWS;  // rows of the state that this block owns

// Warps of a block, by what they do, in this order.
constexpr int num_factor_warps = NUM_FACTOR_WARPS;
constexpr int num_stages = NUM_STAGES;
// Solvers take turns at chunks, each at one stage: a barrier's parity tells its last two phases
// apart, so whoever waits on it must see every phase.
constexpr int num_solvers = num_stages;
constexpr int num_consumers = v_rows / 16;  // 16 rows of the state each
constexpr int num_threads = 32 * (num_factor_warps + num_solvers + num_consumers);
static_assert(num_threads == NUM_THREADS, "cukda/plan.py launches another block");

// Slots of the ring of raw chunks; chunk n is in slot n % num_raw, and in stage n % num_stages.
// When the stage that chunk n wants is free, all are done with chunk n - num_stages, so its raw
// slot can take chunk n + raw_ahead.
constexpr int raw_ahead = 2;
constexpr int num_raw = num_stages + raw_ahead;

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

// [16 channel groups][token groups] core matrices, tokens as rows.
template <int token_groups>
struct Factor {
    alignas(128) u16 core[head_dim / 8][token_groups][64];
};

// [2 (i)][2 (j)] core matrices of a [16 x 16] matrix, rows i.
struct Square {
    alignas(128) u16 core[2][2][64];
};

// G is lifted by this many powers of two where it meets the state: what there is of q e^G after 16
// tokens at the bound (2^-115.4) keeps 12 bits more, and k e^-G may be 12 bits larger.
constexpr float lift_log2 = 12.0f, lift = 0x1p12f;

// A chunk between factor warps, solvers and consumers.
struct Stage {                       // 18,176 bytes
    Factor<4> kq_in;                 // token groups 0, 1: k e^G lift; 2, 3: q e^G lift
    Factor<2> k_inverse;             // k e^-G / lift
    Factor<2> k_out;                 // k e^(G_last - G)
    Square inverse;                  // (I + diag(beta) A)^-1
    Square p;                        // q k^T e^(G_i - G_j), i >= j, q and k normalised
    float4 decay[head_dim / 16][4];  // e^G_last of channels 16 i + 2 j + (0, 1, 8, 9)
    float beta[chunk];
    float beta_norm[chunk];  // beta k_norm / lift; NaN from the first token on that is not finite
    float k_norm[chunk];
    float q_norm[chunk];  // q_norm / lift
};

// Where its matrices begin, in bytes; there is no offsetof without the standard library.
constexpr u32 kq_in_at = 0, k_inverse_at = kq_in_at + sizeof(Stage::kq_in),
              k_out_at = k_inverse_at + sizeof(Stage::k_inverse),
              inverse_at = k_out_at + sizeof(Stage::k_out),
              p_at = inverse_at + sizeof(Stage::inverse);

// What a block works on at a time (work.cuh).
struct Item {
    i64 sequence, begin;  // begin: the first row of [B * T]
    int head, part;       // part: which v_rows of the state
    int num_tokens, num_chunks;
    int num_warm_up;         // chunks at its begin that make the state and no output
    bool is_first, is_last;  // of its sequence's segments
};

enum class StateKind { None = 0, BF16 = 1, FP32 = 2 };

// The states before or after all sequences: [N, H, 128 (v), 128 (k)].
struct States {
    void* base;
    StateKind kind;

    __device__ int row_bytes() const { return head_dim * (kind == StateKind::FP32 ? 4 : 2); }
    __device__ char* row(const Item& item, int num_heads, int row) const {
        const i64 matrix = item.sequence * num_heads + item.head;
        return static_cast<char*>(base) + (matrix * head_dim + row) * row_bytes();
    }
};

// As many as chunks may be on their way, and one more: each may be of another item.
constexpr int num_item_slots = 8;
static_assert(num_item_slots > num_raw);

struct SolverScratch {                   // 1,344 bytes
    alignas(16) float lower[chunk][20];  // diag(beta) A; rows padded to 80 bytes
    float q_norm[chunk];
};

struct Shared {
    Stage stage[num_stages];
    RawChunk raw[num_raw];
    SolverScratch scratch[num_solvers];
    // Who waits on each: solvers and factor warps; solvers; consumers; factor warps.
    u64 raw_full[num_raw];
    u64 factors_full[num_stages];
    u64 full[num_stages];
    u64 empty[num_stages];
    // All warps; the scouts.
    u64 item_full[num_item_slots];
    u64 item_empty[num_item_slots];
    Item item[num_item_slots];
    float left[4];  // the scouts' (work.cuh)
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cukda/plan.py launches with another size");

template <int size>
__device__ inline void init(u64 (&ring)[size], u32 arrivals) {
    for (u64& barrier : ring) mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline int tokens_in_chunk(int num_tokens, int index) {
    return max(0, min(chunk, num_tokens - index * chunk));
}

// A chunk's slot in the ring of raw chunks, and the parity of its phase there: kept, not worked out
// from the chunk's index, because num_raw is no power of two.
struct RawCursor {
    int slot;
    u32 parity;

    // n < num_raw chunks on.
    __device__ void advance(int n) {
        slot += n;
        if (slot >= num_raw) {
            slot -= num_raw;
            parity ^= 1;
        }
    }
};

__device__ inline void wait(const u64& barrier, u32 parity) {
    const u32 address = shared_address(&barrier);
    while (!mbarrier_test_wait_parity(address, parity)) {
    }
}

// Waits until the ring's slot of chunk `index` has been filled for it. Indices are unsigned: the
// remainder of a signed one takes a chain of instructions.
template <int size>
__device__ inline void wait_full(u64 (&ring)[size], u32 index) {
    wait(ring[index % size], index / size % 2);
}

// Waits until the slot that chunk `index` wants is free; the first time round it is.
template <int size>
__device__ inline void wait_empty(u64 (&ring)[size], u32 index) {
    wait(ring[index % size], index / size % 2 ^ 1);
}

template <int size>
__device__ inline void arrive(u64 (&ring)[size], u32 index) {
    mbarrier_arrive(shared_address(&ring[index % size]));
}

// Before an arrival that hands matrices to the consumers' products.
__device__ inline void publish() {
    if constexpr (use_wgmma) fence_proxy_async();
}
