// Where rows of the caller's arrays are. Those of contiguous arrays are known from the shapes;
// where others are, a last parameter of the kernels says.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

// LAYOUT 0: all arrays are contiguous. 1: they have strides, all of their rows are at multiples of
// 16 bytes, and a token's is less than 2^31 elements from the next one's. 2: they have strides, and
// rows are at any element, any number of elements apart.
constexpr bool is_strided = LAYOUT > 0, is_aligned = LAYOUT < 2;

// All in elements, and of either sign; the last axis, which has none here, is contiguous.
//
// q, k, v, g, out [B, T, H, 128] and beta [B, T, H].
struct TokenStrides {
    i64 batch, token, head;

    __device__ i64 offset(u32 of_batch, u32 of_token, u32 of_head) const {
        return of_batch * batch + of_token * token + of_head * head;
    }
};

// States [N, H, 128 (v), 128 (k)].
struct StateStrides {
    i64 sequence, head, row;
};

struct Strides {
    TokenStrides q, k, v, g, out, beta;
    i64 A_log, dt_bias;  // from head to head
    StateStrides initial_state, final_state;
};
static_assert(sizeof(Strides) == 26 * 8, "cukda/plan.py packs another size");

// A kernel's last parameter, which those for contiguous arrays have not, and its address. Constant
// memory: what is read of it takes few registers.
#if LAYOUT
#define STRIDES_PARAMETER , const __grid_constant__ Strides strides
#define STRIDES_ADDRESS &strides
#else
#define STRIDES_PARAMETER
#define STRIDES_ADDRESS nullptr
#endif

// From a token's row of q, k, v, g or out to the next one's, in elements; of 32 bits where it can
// be, which plan.MOST_STEP is for: another row's address is one instruction then, not four.
//
// Read anew: what is worked out from one, which is a constant, would be kept in registers through
// loops, and spill.
__device__ inline i64 token_step(const TokenStrides& of) {
    typename Select<is_aligned, int, i64>::type step = of.token;
    forget(step);
    return step;
}

// Offsets between rows of states. Those of contiguous ones are known, and need no more than 32
// bits.
using RowOffset = typename Select<is_strided, i64, int>::type;

// Brings what is at a place of the caller's into L2. An instruction's address may have to be
// aligned: the place's 16 bytes are in the same page, and line.
__device__ inline void prefetch_place(const void* place) {
    if constexpr (is_aligned) {
        prefetch_global_l2(place);
    } else {
        const u64 address = reinterpret_cast<u64>(place);
        prefetch_global_l2(reinterpret_cast<const void*>(address - address % 16));
    }
}

// Pairs of neighbours, one by one: they may begin at any element.
template <int size>
__device__ inline void load_pairs(u32 (&pairs)[size], const u16* from) {
#pragma unroll
    for (int i = 0; i < size; ++i) pairs[i] = from[2 * i] | static_cast<u32>(from[2 * i + 1]) << 16;
}

template <int size>
__device__ inline void store_pairs(u16* to, const u32 (&pairs)[size]) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
        to[2 * i] = static_cast<u16>(pairs[i]);
        to[2 * i + 1] = static_cast<u16>(pairs[i] >> 16);
    }
}
