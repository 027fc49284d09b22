// Fetching: q, k and g of the chunks, as they come, into the ring of raw chunks.
//
// Solvers fetch, because they have the time. A solver's chunks are in slots of its own, so when it
// is done with one, it fetches the one that is num_raw further on, whose slot that is.
#pragma once

#include "chunk.cuh"
#include "items.cuh"

// What solvers read of global memory.
struct Inputs {
    const u16 *q, *k, *g, *v, *beta;
    const float *A_log, *dt_bias;
    States initial;
};

struct Fetcher {
    Shared& smem;
    const Work& work;
    const Inputs& inputs;

    // A solver's next chunk, if there is one, into a raw slot that is free.
    __device__ void fetch(u32 slot) const {
        // Read anew: what hangs on it alone would be kept in registers from chunk to chunk.
        const int lane = mov_tid_x() % 32;
        __syncwarp();
        FetchState& kept = smem.scratch[slot % num_solvers].fetch;
        FetchState state = kept;
        if (mov_tid_x() / 32 == num_factor_warps) find_items(state);
        while (state.num_chunks >= 0 && state.chunk_idx >= state.num_chunks) {
            state.chunk_idx -= state.num_chunks;
            wait_full(smem.item_full, state.num_items);
            state.num_chunks = smem.item[state.num_items % num_item_slots].num_chunks;
            ++state.num_items;
            // After the last one there is nothing to wait for.
            if (state.num_chunks == 0) state.num_chunks = -1;
        }
        const int chunk_idx = state.chunk_idx;
        state.chunk_idx += num_solvers;
        __syncwarp();
        if (lane == 0) kept = state;
        if (state.num_chunks < 0) return;

        const u32 item_slot = (state.num_items - 1) % num_item_slots;
        const Item& item = smem.item[item_slot];
        if (chunk_idx == 0) fetch_head(item, smem.head_inputs[item_slot]);

        const int num_rows = item.num_tokens - chunk_idx * chunk;
        if constexpr (is_strided) {
            fetch_strided(item, item.begin + chunk_idx * chunk, num_rows, slot);
            return;
        }
        const i64 token_stride = static_cast<i64>(work.num_heads) * head_dim;
        const i64 first = (item.begin + chunk_idx * chunk) * token_stride +
                          static_cast<i64>(item.head) * head_dim;
        if (item.from != StateOf::Identity) {
            prefetch_v(inputs.v + first + item.part * v_rows, token_stride, num_rows);
        }

        // Half a warp to a row, 16 bytes a lane. Rows past the item's end become zeros.
        RawChunk& raw = smem.raw[slot];
        const i64 offset = first + lane / 16 * token_stride + lane % 16 * 8;
        const u32 target = shared_address(raw.q) + raw_offset(lane / 16, lane % 16);
        if (num_rows >= chunk) {
            fetch_whole(target, inputs.q + offset, inputs.k + offset, inputs.g + offset,
                        token_stride, token_stride, token_stride);
        } else {
            fetch_tail(target, offset, token_stride, num_rows - lane / 16);
        }
        cp_async_mbarrier_arrive_noinc(shared_address(&smem.raw_full[slot]));
    }

    // A lane's place `row` rows, an even number, after its first, which is in row 0 or 1.
    __device__ static u32 target_of(u32 first, int row) {
        return (first ^ row % 8 * 16) + row * sizeof(RawChunk::q[0]);
    }

    // A chunk of rows that are all there, and at multiples of 16 bytes.
    __device__ static void fetch_whole(u32 target, const u16* from_q, const u16* from_k,
                                       const u16* from_g, i64 q_step, i64 k_step, i64 g_step) {
#pragma unroll
        for (int row = 0; row < chunk; row += 2) {
            const u32 to = target_of(target, row);
            cp_async_16(to, from_q + row * q_step, 16);
            cp_async_16(to + raw_tile, from_k + row * k_step, 16);
            cp_async_16(to + 2 * raw_tile, from_g + row * g_step, 16);
        }
    }

    // The last rows of an item, the first num_left, and zeros behind them.
    __device__ void fetch_tail(u32 target, i64 offset, i64 token_stride, int num_left) const {
#pragma unroll 1
        for (int row = 0; row < chunk; row += 2) {
            const u32 bytes = num_left > 0 ? 16 : 0;
            // A row that is not there is not pointed at either.
            const i64 from = num_left > 0 ? offset : 0;
            const u32 to = target_of(target, row);
            cp_async_16(to, inputs.q + from, bytes);
            cp_async_16(to + raw_tile, inputs.k + from, bytes);
            cp_async_16(to + 2 * raw_tile, inputs.g + from, bytes);
            offset += 2 * token_stride;
            num_left -= 2;
        }
    }

    // A chunk of arrays with strides: num_rows of an item, or more, from this row on.
    __device__ void fetch_strided(const Item& item, u32 first_row, int num_rows, u32 slot) const {
        const int lane = mov_tid_x() % 32;
        const Strides& strides = *work.strides;
        const u32 batch = work.batch_of(item.from_matrix);
        if (item.from != StateOf::Identity) {
            const i64 at = strides.v.offset(batch, first_row, item.head);
            prefetch_v(inputs.v + at + item.part * v_rows, token_step(strides.v), num_rows);
        }
        const auto offset_of = [&](const TokenStrides& of) {
            return of.offset(batch, first_row + lane / 16, item.head) + lane % 16 * 8;
        };
        RawChunk& raw = smem.raw[slot];
        const u32 target = shared_address(raw.q) + raw_offset(lane / 16, lane % 16);
        const int num_left = num_rows - lane / 16;
        const u32 full = shared_address(&smem.raw_full[slot]);
        if constexpr (is_aligned) {
            const u16 *from_q = inputs.q + offset_of(strides.q),
                      *from_k = inputs.k + offset_of(strides.k),
                      *from_g = inputs.g + offset_of(strides.g);
            if (num_rows >= chunk) {
                fetch_whole(target, from_q, from_k, from_g, token_step(strides.q),
                            token_step(strides.k), token_step(strides.g));
            } else {
                fetch_tail_of(target, inputs.q, from_q, strides.q, num_left);
                fetch_tail_of(target + raw_tile, inputs.k, from_k, strides.k, num_left);
                fetch_tail_of(target + 2 * raw_tile, inputs.g, from_g, strides.g, num_left);
            }
            cp_async_mbarrier_arrive_noinc(full);
        } else {
            copy_rows(target, inputs.q, offset_of(strides.q), strides.q.token, num_left);
            copy_rows(target + raw_tile, inputs.k, offset_of(strides.k), strides.k.token, num_left);
            copy_rows(target + 2 * raw_tile, inputs.g, offset_of(strides.g), strides.g.token,
                      num_left);
            // What fetch_head copies is there too by then.
            cp_async_wait_all();
            mbarrier_arrive(full);
        }
    }

    // The last rows of one array with strides: the first num_left of a chunk's, and zeros.
    __device__ static void fetch_tail_of(u32 target, const u16* base, const u16* from,
                                         const TokenStrides& strides, int num_left) {
        const i64 step = token_step(strides);
#pragma unroll 1
        for (int row = 0; row < chunk; row += 2) {
            const bool is_there = num_left > row;
            // A row that is not there is not pointed at either.
            cp_async_16(target_of(target, row), is_there ? from : base, is_there ? 16 : 0);
            from += 2 * step;
        }
    }

    // A chunk's rows of one array, at any element, from an offset on: with a pointer in its place
    // T=8192, H=96 took 20 % more (H200).
    __device__ static void copy_rows(u32 target, const u16* base, i64 offset, i64 token_stride,
                                     int num_left) {
        // Four rows are on their way at once; more would take registers.
#pragma unroll 4
        for (int row = 0; row < chunk; row += 2) {
            u32 pairs[4] = {};
            if (num_left > row) load_pairs(pairs, base + offset);
            st_shared_v4(target_of(target, row), pairs);
            offset += 2 * token_stride;
        }
    }

    // A chunk of v into L2: consumers load its rows one chunk ahead, and would wait for memory.
    __device__ void prefetch_v(const u16* rows, i64 token_stride, int num_rows) const {
        constexpr int line = v_rows < 64 ? v_rows : 64;  // elements, of no more than 128 bytes
        const int lane = mov_tid_x() % 32;
        const int row = lane * line / v_rows, column = lane * line % v_rows;
        if (row < min(chunk, num_rows)) prefetch_place(rows + row * token_stride + column);
    }

    // Enough for the other solvers to come to their next chunks.
    __device__ void find_items(FetchState& state) const {
        while (state.num_chunks_found < num_solvers) {
            const Item found = find_item(work, smem.sequences, state.round, state.walk);
            wait_empty(smem.item_empty, state.num_found);
            if (threadIdx.x % 32 == 0) {
                smem.item[state.num_found % num_item_slots] = found;
                arrive(smem.item_full, state.num_found);
            }
            ++state.num_found;
            constexpr int enough = 1 << 30;
            state.num_chunks_found += found.num_chunks > 0 ? found.num_chunks : enough;
        }
        state.num_chunks_found -= num_solvers;
    }

    // What of an item is wanted at its begin.
    __device__ void fetch_head(const Item& item, HeadInputs& head) const {
        const int lane = mov_tid_x() % 32;
        const float *A_log = inputs.A_log, *dt_bias = inputs.dt_bias;
        i64 bias_stride = head_dim, slope_stride = 1;
        if constexpr (is_strided) {
            bias_stride = work.strides->dt_bias;
            slope_stride = work.strides->A_log;
        }
        for (int channel = lane; channel < head_dim; channel += 32) {
            const void* bias = dt_bias + item.head * bias_stride + channel;
            cp_async_4(shared_address(&head.bias[channel]), dt_bias ? bias : inputs.g,
                       dt_bias ? 4 : 0);
        }
        if (lane == 0) {
            const void* slope = A_log + item.head * slope_stride;
            cp_async_4(shared_address(&head.A_log), A_log ? slope : inputs.g, A_log ? 4 : 0);
        }
        const States& initial = inputs.initial;
        if (item.from == StateOf::Caller && initial.kind != StateKind::None) {
            // Into L2, for the consumers to find when they get there.
            constexpr int line = 128;
            if constexpr (is_strided) {
                for (int i = lane; i < v_rows; i += 32) {
                    const int row = item.part * v_rows + i;
                    const char* from = initial.row(item.from_matrix, item.head, row);
                    for (int at = 0; at < initial.row_bytes(); at += line) {
                        prefetch_place(from + at);
                    }
                }
            } else {
                const char* rows = initial.row(item.from_matrix, item.head, item.part * v_rows);
                for (int at = lane * line; at < v_rows * initial.row_bytes(); at += 32 * line) {
                    prefetch_place(rows + at);
                }
            }
        }
    }
};
