// One chunk of one head: its sizes, what lies in shared memory while it is worked on, and the rings
// that carry it from one kind of warp to the next.
#pragma once

#include "ptx.cuh"
#include "strides.cuh"
#include "tile.cuh"

constexpr int chunk = 16;       // tokens
constexpr int v_rows = V_ROWS;  // rows of the state that this block owns

// Warps of a block, by what they do, in this order.
constexpr int num_factor_warps = NUM_FACTOR_WARPS;
constexpr int num_stages = NUM_STAGES;
constexpr int num_solvers = NUM_SOLVERS;  // they take turns at chunks
// A barrier's parity tells its last two phases apart. So whoever waits on it must know that the one
// before last is over: a solver does, if its chunk before this one is not further back.
static_assert(num_solvers <= num_stages);
constexpr int num_consumers = v_rows / 16;  // 16 rows of the state each
constexpr int num_threads = 32 * (num_factor_warps + num_solvers + num_consumers);
static_assert(num_threads == NUM_THREADS, "cukda/plan.py launches another block");

// Slots of the ring of raw chunks; chunk n is in slot n % num_raw, and in stage n % num_stages. The
// slots of a solver's chunks are its own (fetch.cuh).
constexpr int num_raw = NUM_RAW;
static_assert(num_raw % num_solvers == 0);

// Rows as they come, in pieces of eight channels: piece p of row t is at p ^ t % 8, in its own half
// of the row. So the same piece of eight rows, which ldmatrix reads, is in eight bank groups, and
// a row fills its 256 bytes: padded ones took 2.6 times as many cycles to be written (ncu).
struct RawChunk {  // 12,288 bytes
    alignas(256) u16 q[chunk][head_dim];
    u16 k[chunk][head_dim];
    u16 g[chunk][head_dim];
};

// Where a piece of a row is, in bytes.
__device__ inline u32 raw_offset(int row, int piece) {
    return row * (head_dim * sizeof(u16)) + (piece ^ row % 8) * 16;
}

// Where this lane points ldmatrix.x4 in a raw tile: rows of (tokens 0-7, tokens 8-15) of channels
// 0-7, then of channels 8-15. For channels 16 i and on: raw_lane_address ^ raw_channels(i). The
// other tiles of a chunk are whole raw_tiles on.
__device__ inline u32 raw_lane_address(const u16 (&tile)[chunk][head_dim], int lane) {
    return shared_address(tile) + raw_offset(lane % 16, lane / 16);
}
__device__ inline u32 raw_channels(int i) { return i * 32; }
constexpr u32 raw_tile = sizeof(RawChunk::q);

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
    Square inverse;                  // (I + A diag(beta))^-1, columns contiguous
    Square p;                        // q k^T e^(G_i - G_j) diag(beta) lift, i >= j, k normalised
    float4 decay[head_dim / 16][4];  // e^G_last of channels 16 i + 2 j + (0, 1, 8, 9)
    // NaN from the first token on that is not finite.
    float k_norm[chunk];     // k_norm / lift
    float beta_norm[chunk];  // beta k_norm
    float q_norm[chunk];     // scale q_norm / lift
};

// Where its parts begin, in bytes; there is no offsetof without the standard library.
constexpr u32 kq_in_at = 0, k_inverse_at = kq_in_at + sizeof(Stage::kq_in),
              k_out_at = k_inverse_at + sizeof(Stage::k_inverse),
              inverse_at = k_out_at + sizeof(Stage::k_out),
              p_at = inverse_at + sizeof(Stage::inverse), decay_at = p_at + sizeof(Stage::p),
              k_norm_at = decay_at + sizeof(Stage::decay),
              beta_norm_at = k_norm_at + sizeof(Stage::k_norm),
              q_norm_at = beta_norm_at + sizeof(Stage::beta_norm);

// Whose state an item begins or ends with: nobody's (zero, or dropped), the caller's; a segment's
// local state or transfer, for join.cuh. The last two are what such items begin with.
enum class StateOf { Nobody, Caller, Local, Transfer, Identity, Zero };

// What a block works on at a time (items.cuh).
struct Item {
    u32 begin;  // the first row of [B * T]; with strides of [T], of its batch
    // Where among those states its own are, in states of [128 x 128]. With strides the sequence,
    // where they are the caller's; from_matrix always.
    u32 from_matrix, to_matrix;
    u32 partials_end;  // where its chunks end in partials (work.cuh), or 0
    StateOf from, to;
    int head, part;  // part: which v_rows of the state
    int num_tokens, num_chunks;
    int num_written;  // its last chunks, which go to out
};

// Of an item's head, what the gate wants: zeros where the caller gave none.
struct HeadInputs {
    alignas(16) float bias[head_dim];
    float A_log;
};

// A sequence, in a warp that holds one a lane (work.cuh).
struct LaneSequence {
    u32 begin;
    int length;
    u32 first_slot;
    int num_segments;
};

enum class StateKind { None = 0, BF16 = 1, FP32 = 2 };

// Matrices of [128 (v), 128 (k)], numbered through. With strides: by sequence and head.
struct States {
    void* base;
    StateKind kind;
    StateStrides strides;  // where the layout has them

    __device__ int row_bytes() const { return head_dim * (kind == StateKind::FP32 ? 4 : 2); }
    __device__ RowOffset row_stride() const {
        if constexpr (is_strided) {
            return strides.row;
        } else {
            return head_dim;
        }
    }
    // matrix: with strides the sequence.
    __device__ char* row(i64 matrix, int head, int row) const {
        if constexpr (is_strided) {
            const i64 at = matrix * strides.sequence + head * strides.head + row * strides.row;
            return static_cast<char*>(base) + at * (row_bytes() / head_dim);
        } else {
            return static_cast<char*>(base) + (matrix * head_dim + row) * row_bytes();
        }
    }
};
// Of a call's own, numbered through in every layout.
constexpr StateStrides own_strides = {head_dim * head_dim, 0, head_dim};

// As many as chunks may be on their way, since each may be of another item: in stages, in raw
// slots, and those that the first solver finds for the others.
constexpr int num_item_slots = num_stages + num_raw + num_solvers;

// How far find_piece has come (work.cuh).
struct Walk {
    u32 window;      // the first of the 128 begins that are looked at
    u32 before;      // pieces of work before those
    u32 any_joined;  // whether some of those are of joined segments
};

// How far a solver is with fetching (fetch.cuh).
struct FetchState {
    u32 num_items;   // that it has come to
    int chunk_idx;   // of its next chunk, in the last one of these
    int num_chunks;  // of that item; negative: there was none
    // Of the first solver: items that it has found, their chunks from its next one on, and where it
    // looks for the next.
    u32 num_found;
    int num_chunks_found;
    u32 round;
    Walk walk;
};

struct SolverScratch {                   // 1,328 bytes
    alignas(16) float lower[chunk][20];  // A diag(beta); rows padded to 80 bytes
    FetchState fetch;  // not in registers, which a solver has none to spare of from chunk to chunk
};

struct Shared {
    Stage stage[num_stages];
    RawChunk raw[num_raw];
    SolverScratch scratch[num_solvers];
    // Who waits on each: factor warps and solvers; solvers; consumers; factor warps.
    u64 raw_full[num_raw];
    u64 factors_full[num_stages];
    u64 full[num_stages];
    u64 empty[num_stages];
    // All warps; the first solver.
    u64 item_full[num_item_slots];
    u64 item_empty[num_item_slots];
    Item item[num_item_slots];
    HeadInputs head_inputs[num_item_slots];
    LaneSequence sequences[32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cukda/plan.py launches with another size");

template <int size>
__device__ inline void init(u64 (&ring)[size], u32 arrivals) {
    for (u64& barrier : ring) mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline int tokens_in_chunk(int num_tokens, int index) {
    return max(0, min(chunk, num_tokens - index * chunk));
}

__device__ inline void wait(const u64& barrier, u32 parity) {
    const u32 address = shared_address(&barrier);
    while (!mbarrier_test_wait_parity(address, parity)) {
    }
}

// Waits until the ring's slot of chunk, or item, `index` has been filled for it. Indices are
// unsigned: the remainder of a signed one takes a chain of instructions.
template <int size>
__device__ inline void wait_full(u64 (&ring)[size], u32 index) {
    wait(ring[index % size], index / size % 2);
}

// Waits until the slot that `index` wants is free; the first time round it is.
template <int size>
__device__ inline void wait_empty(u64 (&ring)[size], u32 index) {
    wait(ring[index % size], index / size % 2 ^ 1);
}

template <int size>
__device__ inline void arrive(u64 (&ring)[size], u32 index) {
    mbarrier_arrive(shared_address(&ring[index % size]));
}

// Before the arrival that hands a stage to the consumers, whose products read it through another
// proxy: by the solver, which has waited for what factor warps wrote.
__device__ inline void publish() {
    if constexpr (use_wgmma) fence_proxy_async();
}
