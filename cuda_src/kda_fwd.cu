// Kimi Delta Attention, forward, one fused kernel.
//
//   a  = lower_bound sigmoid(exp(A_log) (g + dt_bias))    beta = sigmoid(beta)
//   S <- S diag(e^a);  S <- S + beta (v - S k) k^T;  o = scale S q     q, k normalised, per token
//
// in chunks of 16 tokens (factors.cuh, solve.cuh, recurrence.cuh have the chunked form).
//
// Block: one sequence of one head, v_rows of the 128 rows of its state. Two producer groups of four
//   warps turn raw chunks into Stages, taking turns; v_rows / 16 consumer warps walk all of them.
// Grid: (sequence, head, part of V), the part fastest; no block waits for another.
// Shared memory: struct Shared, dynamic.
// Global memory is read once and written once; there is no workspace.
#include "chunk.cuh"
#include "factors.cuh"
#include "gate.cuh"
#include "ptx.cuh"
#include "recurrence.cuh"
#include "solve.cuh"
#include "tile.cuh"

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

__device__ inline int tokens_in_chunk(int num_tokens, int index) {
    return max(0, min(chunk, num_tokens - index * chunk));
}

// Asks for q, k, g of a chunk; rows past the end become zeros. One cp.async group per call.
__device__ inline void fetch(RawChunk& raw, const u16* q, const u16* k, const u16* g,
                             i64 token_stride, int num_tokens, int thread) {
    const int column = thread % 16 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = thread / 16 + 8 * i;
        const bool live = row < num_tokens;
        const i64 offset = live ? row * token_stride + column : 0;
        const u32 bytes = live ? 16 : 0;
        cp_async_16(shared_address(&raw.q[row][column]), q + offset, bytes);
        cp_async_16(shared_address(&raw.k[row][column]), k + offset, bytes);
        cp_async_16(shared_address(&raw.g[row][column]), g + offset, bytes);
    }
    cp_async_commit_group();
}

// One group's share of the chunks: group, group + 2, group + 4, ...
__device__ inline void produce(Shared& smem, const Item& item, const u16* q, const u16* k,
                               const u16* g, const u16* beta, const float* dt_bias,
                               const HeadGate& gate, float scale, int num_heads) {
    const int group_idx = threadIdx.x / group_threads, thread = threadIdx.x % group_threads;
    const int warp = thread / 32, lane = thread % 32;
    Group& group = smem.group[group_idx];
    const i64 token_stride = static_cast<i64>(num_heads) * head_dim;
    const i64 chunk_stride = chunk * token_stride;
    const i64 first_row = item.begin * num_heads + item.head;
    q += first_row * head_dim;
    k += first_row * head_dim;
    g += first_row * head_dim;
    beta += first_row;

    const Triangle triangle = triangle_of_ones(lane);
    float half_shift[warp_tiles][2];  // of the lane's channels
#pragma unroll
    for (int i = 0; i < 2 * warp_tiles; ++i) {
        const int channel = tile_channel(warp, i / 2) + 8 * (i % 2) + lane / 4;
        const float bias = dt_bias ? dt_bias[item.head * head_dim + channel] : 0.0f;
        half_shift[i / 2][i % 2] = bias * gate.half_slope;
    }

    const auto fetch_chunk = [&](int index, RawChunk& raw) {
        const i64 offset = index * chunk_stride;
        const int num_tokens = tokens_in_chunk(item.num_tokens, index);
        const i64 safe = num_tokens > 0 ? offset : 0;
        fetch(raw, q + safe, k + safe, g + safe, token_stride, num_tokens, thread);
    };
    const auto load_beta = [&](int index) {
        const bool live = lane < tokens_in_chunk(item.num_tokens, index);
        return live ? beta[static_cast<i64>(index * chunk + lane) * num_heads] : u16{0};
    };
    const auto inspect = [&](int buffer, u16 beta_logit) {
        if (warp == 2) inspect_q_g(group.raw[buffer], group.tokens[buffer], lane);
        if (warp == 3) inspect_k_beta(group.raw[buffer], group.tokens[buffer], beta_logit, lane);
    };

    const int num_chunks = (item.num_tokens + chunk - 1) / chunk;
    u16 beta_logit = load_beta(group_idx);
    fetch_chunk(group_idx, group.raw[0]);
    fetch_chunk(group_idx + num_groups, group.raw[1]);
    cp_async_wait_group<1>();
    sync_group(group_idx);
    inspect(0, beta_logit);
    sync_group(group_idx);

    int buffer = 0, stage_idx = group_idx;
    u32 parity = 1;  // an empty stage needs no wait the first time round
    for (int index = group_idx; index < num_chunks; index += num_groups) {
        Stage& stage = smem.stage[stage_idx];
        const Tokens& tokens = group.tokens[buffer];
        if (warp == 3) beta_logit = load_beta(index + num_groups);
        const int num_finite = min(tokens.num_finite_g, tokens.num_finite_k);
        const int num_live = min(num_finite, tokens_in_chunk(item.num_tokens, index));

        wait(smem.empty[stage_idx], parity);
        make_factors(group.raw[buffer], tokens, warp, gate, half_shift, triangle, num_live, stage,
                     group.k_inverse, lane);
        if (warp == 0 && lane < chunk) {
            stage.beta[lane] = tokens.beta[lane];
            stage.o_scale[lane] = scale * tokens.q_scale[lane];
            if (lane == 0) stage.num_finite = num_finite;
        }

        cp_async_wait_group<0>();
        sync_group(group_idx);  // the factors are whole, this buffer is free, the next has landed
        fetch_chunk(index + 2 * num_groups, group.raw[buffer]);
        if (warp == 0) {
            solve_inverse(stage, group.k_inverse, tokens, group.lower, lane);
        } else if (warp == 1) {
            solve_p(stage, group.k_inverse, lane);
        }
        arrive(smem.full[stage_idx]);
        buffer ^= 1;
        inspect(buffer, beta_logit);
        sync_group(group_idx);

        stage_idx += num_groups;
        if (stage_idx >= num_stages) {
            stage_idx -= num_stages;
            parity ^= 1;
        }
    }
    cp_async_wait_group<0>();
}

// One warp's 16 rows of the state, through all chunks.
__device__ inline void consume(Shared& smem, const Item& item, const u16* v, u16* out,
                               const void* initial_state, StateKind initial_kind, void* final_state,
                               StateKind final_kind, int num_heads) {
    const int warp = threadIdx.x / 32 - num_groups * group_warps, lane = threadIdx.x % 32;
    const i64 half_stride = static_cast<i64>(num_heads) * head_dim * (chunk / 2);
    // Of this lane's rows in v and out.
    i64 offset = (item.begin * num_heads + item.head) * head_dim + lane / 4 * (half_stride / 8) +
                 item.part * v_rows + 16 * warp + 4 * (lane % 4);

    // Read from shared memory each time: as registers through the loop, the item would spill.
    const auto state_rows = [&](const void* base, StateKind kind) {
        const i64 matrix = smem.item.sequence * num_heads + smem.item.head;
        const i64 row = matrix * head_dim + smem.item.part * v_rows + 16 * warp;
        return static_cast<const char*>(base) + row * head_dim * (kind == StateKind::FP32 ? 4 : 2);
    };
    float state[k_tiles][4];
    load_state(state, state_rows(initial_state, initial_kind), initial_kind, lane);

    int stage_idx = 0, left = item.num_tokens;
    u32 parity = 0;
    const auto consume_chunk = [&](Rows& rows) {
        wait(smem.full[stage_idx], parity);
        const Rows o = step(state, smem.stage[stage_idx], rows, min(left, chunk), lane);
        arrive(smem.empty[stage_idx]);
        load_rows(rows, v + offset + 4 * half_stride, half_stride, left - 2 * chunk, lane);
        store_rows(out + offset, half_stride, left, o, lane);
        offset += 2 * half_stride;
        left -= chunk;
        if (++stage_idx == num_stages) {
            stage_idx = 0;
            parity ^= 1;
        }
    };
    // Two chunks of V are on their way, in registers of their own: moving them from one to another
    // would wait for them.
    Rows even, odd;
    load_rows(even, v + offset, half_stride, left, lane);
    load_rows(odd, v + offset + 2 * half_stride, half_stride, left - chunk, lane);
    while (left > 0) {
        consume_chunk(even);
        if (left > 0) consume_chunk(odd);
    }
    store_state(state, const_cast<char*>(state_rows(final_state, final_kind)), final_kind, lane);
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

    if (threadIdx.x < num_stages) {
        mbarrier_init(shared_address(&smem.full[threadIdx.x]), group_threads);
        mbarrier_init(shared_address(&smem.empty[threadIdx.x]), 32 * num_consumers);
    }
    if (threadIdx.x == 0) {
        smem.item = item_of_block(num_tokens, num_heads, cu_seqlens, cu_seqlens_bytes);
    }
    __syncthreads();

    const Item item = smem.item;
    if (threadIdx.x < num_groups * group_threads) {
        const HeadGate gate = head_gate(A_log, item.head, lower_bound);
        produce(smem, item, q, k, g, beta, dt_bias, gate, scale, num_heads);
    } else {
        consume(smem, item, v, out, initial_state, initial_kind, final_state, final_kind,
                num_heads);
    }
}
