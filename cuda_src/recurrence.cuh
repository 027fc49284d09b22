// Consumers: 16 rows of the state, [16 (v) x 128 (k)], in one warp's float32 registers.
//
//   [KS | QS] = S [k e^G; q e^G]^T    (times lift, which k_norm and q_norm take out)
//   W = V - diag(k_norm) KS    U = W inverse^T    O = diag(q_norm) (QS + U P^T)
//   S = S diag(e^G_last) + (diag(beta_norm) U)^T k_out
// all with v as rows, so S, W and U are A operands as they come out of the product before.
#pragma once

#include "chunk.cuh"
#include "items.cuh"
#include "rows.cuh"
#include "transfer.cuh"

constexpr int k_tiles = head_dim / 8;

// Four words each of a quad's lanes, transposed: word i of lane c becomes word c of lane i. So the
// pairs of columns that a lane has of four tiles are 16 bytes in a row of one tile, and back.
__device__ inline void transpose_quad(u32 (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32& low = x[step == 1 ? 2 * i : i];
            u32& high = x[step == 1 ? 2 * i + 1 : i + 2];
            const bool upper = lane & step;
            const u32 other = __shfl_xor_sync(~0u, upper ? low : high, step);
            low = upper ? other : low;
            high = upper ? high : other;
        }
    }
}

// rows: the first of the warp's 16.
__device__ inline void load_state(float (&state)[k_tiles][4], const void* rows, StateKind kind,
                                  RowOffset row_stride, int lane) {
    const RowOffset row_offset = state_row_offset(lane, row_stride), half_offset = 2 * row_stride;
    const u16* halves = static_cast<const u16*>(rows) + row_offset + 8 * (lane % 4);
    const float* floats = static_cast<const float*>(rows) + row_offset + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4 * k_tiles; ++i) state[i / 4][i % 4] = 0.0f;
    if (kind == StateKind::FP32) {
#pragma unroll
        for (int i = 0; i < 2 * k_tiles; ++i) {
            float* s = &state[i / 2][i % 2 * 2];
            const float* from = floats + i % 2 * half_offset + i / 2 * 8;
            if constexpr (is_aligned) {
                const float2 two = *reinterpret_cast<const float2*>(from);
                s[0] = two.x;
                s[1] = two.y;
            } else {
                s[0] = from[0];
                s[1] = from[1];
            }
        }
    } else if (kind == StateKind::BF16) {
#pragma unroll
        for (int i = 0; i < k_tiles / 2; ++i) {
            const int half = i % 2, tile = i / 2 * 4;
            const u16* from = halves + half * half_offset + tile * 8;
            u32 packed[4];
            if constexpr (is_aligned) {
                const uint4 row = *reinterpret_cast<const uint4*>(from);
                packed[0] = row.x;
                packed[1] = row.y;
                packed[2] = row.z;
                packed[3] = row.w;
            } else {
                load_pairs(packed, from);
            }
            transpose_quad(packed, lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                state[tile + j][2 * half] = bf16_low(packed[j]);
                state[tile + j][2 * half + 1] = bf16_high(packed[j]);
            }
        }
    }
}

// Row first_row + i of the identity is the fragment's row i, in the order of v that it has.
__device__ inline void make_identity(float (&state)[k_tiles][4], int first_row, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * k_tiles; ++i) {
        const int row = first_row + state_row_offset(lane) / head_dim + 2 * (i % 4 / 2);
        const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        state[i / 4][i % 4] = row == column ? 1.0f : 0.0f;
    }
}

__device__ inline void store_state(const float (&state)[k_tiles][4], void* rows, StateKind kind,
                                   RowOffset row_stride, int lane) {
    const RowOffset row_offset = state_row_offset(lane, row_stride), half_offset = 2 * row_stride;
    u16* halves = static_cast<u16*>(rows) + row_offset + 8 * (lane % 4);
    float* floats = static_cast<float*>(rows) + row_offset + 2 * (lane % 4);
    if (kind == StateKind::FP32) {
#pragma unroll
        for (int i = 0; i < 2 * k_tiles; ++i) {
            const float* s = &state[i / 2][i % 2 * 2];
            float* to = floats + i % 2 * half_offset + i / 2 * 8;
            if constexpr (is_aligned) {
                *reinterpret_cast<float2*>(to) = make_float2(s[0], s[1]);
            } else {
                to[0] = s[0];
                to[1] = s[1];
            }
        }
    } else if (kind == StateKind::BF16) {
#pragma unroll
        for (int i = 0; i < k_tiles / 2; ++i) {
            const int half = i % 2, tile = i / 2 * 4;
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                packed[j] = cvt_bf16x2(state[tile + j][2 * half], state[tile + j][2 * half + 1]);
            }
            transpose_quad(packed, lane);
            u16* to = halves + half * half_offset + tile * 8;
            if constexpr (is_aligned) {
                *reinterpret_cast<uint4*>(to) =
                    make_uint4(packed[0], packed[1], packed[2], packed[3]);
            } else {
                store_pairs(to, packed);
            }
        }
    }
}

// Not zero if any of these bf16 is not finite: its product with zero is NaN.
__device__ inline u32 not_finite(const u32 (&x)[4]) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fma_zero_bf16x2(x[i], sum);
    return sum;
}

// For each of the lane's two rows of v, the first token at which x is not finite, or 16. x is W or
// U, rounded, as an A operand: word m holds tokens 8 (m / 2) + pair and + 1 of row half m % 2.
__device__ inline void first_bad_tokens(int (&first)[2], const u32 (&x)[4], int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int token = chunk;
#pragma unroll
        for (int m = 2 + half; m >= 0; m -= 2) {
            const int pair = 8 * (m / 2) + 2 * (lane % 4);
            if ((x[m] & 0x7f800000u) == 0x7f800000u) token = pair + 1;
            if ((x[m] & 0x7f80u) == 0x7f80u) token = pair;
        }
        token = min(token, __shfl_xor_sync(~0u, token, 1));
        first[half] = min(token, __shfl_xor_sync(~0u, token, 2));
    }
}

// x = 0 from the first bad token on.
__device__ inline void clear_from(u32 (&x)[4], const int (&first_bad)[2], int lane) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const int left = first_bad[m % 2] - (8 * (m / 2) + 2 * (lane % 4));
        x[m] = left <= 0 ? 0 : left == 1 ? x[m] & 0xffffu : x[m];
    }
}

// A stage's squares as B operands.
using InverseB = WarpB<Major::N, 2 * core_bytes, core_bytes>;
using PB = WarpB<Major::K, 2 * core_bytes, core_bytes>;

// U anew, from W, for a chunk in which it is not finite somewhere: as if each row of v ended before
// the first such token, because a product over tokens carries one token's NaN to all of them.
// Returns those tokens in first_bad.
__device__ inline void end_before_bad(u32 (&frag_u)[4], int (&first_bad)[2], u32 (&frag_w)[4],
                                      u32 stage, int lane) {
    first_bad_tokens(first_bad, frag_w, lane);
    clear_from(frag_w, first_bad, lane);
    float u[2][4] = {};
    rs_gemm(u, frag_w, InverseB(stage + inverse_at, lane));
    pack_a(frag_u, u[0], u[1]);
    int first_overflow[2];
    first_bad_tokens(first_overflow, frag_u, lane);
    first_bad[0] = min(first_bad[0], first_overflow[0]);
    first_bad[1] = min(first_bad[1], first_overflow[1]);
    clear_from(frag_u, first_bad, lane);
}

// Of a stage's numbers per token, those of the tokens that a lane has of a product [16 x tokens].
__device__ inline void load_numbers(float (&x)[2][2], u32 numbers, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 pair = ld_shared_v2(numbers + (8 * half + 2 * (lane % 4)) * sizeof(float));
        x[half][0] = pair.x;
        x[half][1] = pair.y;
    }
}

__device__ inline void scale_tokens(float (&x)[2][4], const float (&numbers)[2][2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] *= numbers[i / 4][i % 2];
}

// One chunk. O, and the state after it, are NaN from the first token on that is not finite. v: its
// rows, transposed; from here on the next chunk's, which load_next() returns. Calls store(o).
template <typename LoadNext, typename Store>
__device__ inline void step(float (&state)[k_tiles][4], u32 stage, Rows& v, int lane,
                            const LoadNext& load_next, const Store& store) {
    constexpr int kq_k_stride = 4 * core_bytes;
    // Single elements of v take registers that mma.sync does not have before the end.
    constexpr bool loads_late = !use_wgmma && !is_aligned;

    // wgmma wants all of its operands before the first; mma.sync has no registers for so many.
    u32 frag_s[head_dim / 16][4];
    const auto pack = [&](int k16) { pack_a(frag_s[k16], state[2 * k16], state[2 * k16 + 1]); };
    if constexpr (use_wgmma) {
#pragma unroll
        for (int k16 = 0; k16 < head_dim / 16; ++k16) pack(k16);
    }
    float kq[4][4] = {};  // KS of tokens 0-7, 8-15, QS of tokens 0-7, 8-15
    ConsumerB<Major::K, core_bytes, kq_k_stride> kq_in(stage, kq_in_at, lane);
    gemm_begin();
#pragma unroll
    for (int k16 = 0; k16 < head_dim / 16; ++k16) {
        if constexpr (!use_wgmma) pack(k16);
        rs_gemm(kq, frag_s[k16], kq_in);
        kq_in.advance(2 * kq_k_stride);
    }
    gemm_commit();
    // While KQ is under way, all that U waits for: loaded behind KQ, the inverse alone cost 3 %
    // (H200). mma.sync has no registers for v yet.
    Rows next_v;
    if constexpr (use_wgmma) next_v = load_next();
    float k_norm[2][2];
    load_numbers(k_norm, stage + k_norm_at, lane);
    u32 inverse[4];
    ldmatrix_x4_trans(inverse, InverseB(stage + inverse_at, lane).at);

    // U is a product of a warp alone: a group's would wait for the slowest of its warps.
    gemm_wait<0>();
    hold(kq);
    float w[2][4];
    unpack_rows(w, v);
    const auto load_decay = [&](int i) {
        return ld_shared_v4(stage + decay_at + (4 * i + lane % 4) * sizeof(float4));
    };
    // On its way before it is wanted, in registers that frag_s had; mma.sync has none to spare.
    float4 decay[k_tiles / 2];
    if constexpr (use_wgmma) {
#pragma unroll
        for (int i = 0; i < k_tiles / 2; ++i) decay[i] = load_decay(i);
    }
    if constexpr (!use_wgmma && !loads_late) next_v = load_next();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        w[i / 4][i % 4] = fmaf(-k_norm[i / 4][i % 2], kq[i / 4][i % 4], w[i / 4][i % 4]);
    }

    u32 frag_w[4], frag_u[4], frag_ku[4];
    pack_a(frag_w, w[0], w[1]);
    float u[2][4] = {};
    mma_m16n8k16_bf16(u[0], frag_w, inverse[0], inverse[1]);
    mma_m16n8k16_bf16(u[1], frag_w, inverse[2], inverse[3]);
    float beta_norm[2][2];
    load_numbers(beta_norm, stage + beta_norm_at, lane);
    const auto decay_state = [&] {
#pragma unroll
        for (int tile = 0; tile < k_tiles; tile += 2) {
            const float4 decay_t = use_wgmma ? decay[tile / 2] : load_decay(tile / 2);
            state[tile][0] *= decay_t.x;
            state[tile][1] *= decay_t.y;
            state[tile][2] *= decay_t.x;
            state[tile][3] *= decay_t.y;
            state[tile + 1][0] *= decay_t.z;
            state[tile + 1][1] *= decay_t.w;
            state[tile + 1][2] *= decay_t.z;
            state[tile + 1][3] *= decay_t.w;
        }
    };
    // wgmma is waited for, so there is always something to do meanwhile; mma.sync is done in the
    // order that wants the fewest registers.
    if constexpr (use_wgmma) decay_state();
    pack_a(frag_u, u[0], u[1]);
    scale_tokens(u, beta_norm);
    pack_a(frag_ku, u[0], u[1]);
    float o[2][4] = {};
    if constexpr (!use_wgmma) {
        u32 p[4];
        ldmatrix_x4(p, PB(stage + p_at, lane).at);
        mma_m16n8k16_bf16(o[0], frag_u, p[0], p[1]);
        mma_m16n8k16_bf16(o[1], frag_u, p[2], p[3]);
    }
    const auto finish_output = [&] {
        float q_norm[2][2];
        // With strides the compiler leaves these loads where they are, and behind the branch below
        // they were waited for, 3 % of T=8192, H=96 with slow gates (H200). Without, it moves them
        // up itself.
        constexpr bool loads_early = use_wgmma && is_strided;
        if constexpr (loads_early) load_numbers(q_norm, stage + q_norm_at, lane);
        if constexpr (use_wgmma) {
            gemm_wait<1>();
            hold(o);
        }
        const bool rare = __any_sync(~0u, not_finite(frag_u) != 0);
        int first_bad[2] = {chunk, chunk};
        if (rare) {
            // O anew, and by another instruction where it was wgmma's. From zero both give the same
            // bits (H200: of 12,582,912 random sums), so that a later token changes none before it.
            end_before_bad(frag_u, first_bad, frag_w, stage, lane);
#pragma unroll
            for (int i = 0; i < 8; ++i) o[i / 4][i % 4] = 0.0f;
            rs_gemm(o, frag_u, PB(stage + p_at, lane));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i / 4][i % 4] += kq[2 + i / 4][i % 4];
        if constexpr (!loads_early) load_numbers(q_norm, stage + q_norm_at, lane);
        scale_tokens(o, q_norm);
        const float nan = __int_as_float(0x7fffffff);
        if (rare) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                if (token >= first_bad[i % 4 / 2]) o[i / 4][i % 4] = nan;
            }
        }
        store(o);
    };
    if constexpr (!use_wgmma) {
        finish_output();
        decay_state();
    }
    hold(state);
    gemm_begin();
    if constexpr (use_wgmma) {
        rs_gemm_first(o, frag_u, GroupB<Major::K, 2 * core_bytes, core_bytes>(stage, p_at, lane));
        gemm_commit();
    }
    rs_gemm(state, frag_ku, ConsumerB<Major::N, 2 * core_bytes, core_bytes>(stage, k_out_at, lane));
    gemm_commit();
    if constexpr (loads_late) next_v = load_next();
    v = transposed(next_v);
    if constexpr (use_wgmma) finish_output();
    gemm_wait<0>();
}

// A consumer's life: its 16 rows of the state, through all chunks of an item, item after item.
__device__ inline void run_recurrence(Shared& smem, const Work& work, const u16* v, u16* out,
                                      const States& initial, const States& final) {
    const int num_heads = work.num_heads;
    const i64 half_stride = static_cast<i64>(num_heads) * head_dim * (chunk / 2);
    const auto half_stride_of = [&](TokenStrides Strides::* of) -> i64 {
        if constexpr (is_strided) {
            return token_step(work.strides->*of) * (chunk / 2);
        } else {
            return half_stride;
        }
    };
    // Without strides rows of out are where those of v are: one pointer does for both.
    const i64 to_out = reinterpret_cast<i64>(out) - reinterpret_cast<i64>(v);
    const u32 stages = shared_address(smem.stage);
    u32 index = 0;
    for (Items items(smem); items.next();) {
        const int lane = mov_tid_x() % 32;
        // Worked out anew for each use: as registers through the loop, these addresses would spill.
        const auto first_row = [&] {
            const int warp = mov_tid_x() / 32 - num_factor_warps - num_solvers;
            return items.item().part * v_rows + 16 * warp;
        };
        // With strides: to where this lane's first row of the item's chunk i begins in an array.
        const auto offset_of = [&](const TokenStrides& of, int i) {
            const Item& item = items.item();
            // In the program's order, or what it is worked out from would be kept for later uses.
            const u32 sequence = ld_shared(shared_address(&item.from_matrix));
            const u32 begin = ld_shared(shared_address(&item.begin));
            const int head = ld_shared(shared_address(&item.head));
            const int part = ld_shared(shared_address(&item.part));
            const int warp = mov_tid_x() / 32 - num_factor_warps - num_solvers;
            const u32 row = begin + i * chunk + mov_tid_x() % 32 / 4;
            return of.offset(work.batch_of(sequence), row, head) + part * v_rows + 16 * warp +
                   4 * (mov_tid_x() % 4);
        };
        // ... and how many rows there are from it on.
        const auto num_left_from = [&](int i) {
            const int num_tokens = ld_shared(shared_address(&items.item().num_tokens));
            return num_tokens - i * chunk - static_cast<int>(mov_tid_x() % 32 / 4);
        };
        const auto states_of = [&](StateOf of, const States& callers) {
            const States locals = {work.locals, StateKind::FP32, own_strides};
            return of == StateOf::Caller  ? callers
                   : of == StateOf::Local ? locals
                                          : States{nullptr, StateKind::None};
        };

        // Where this lane's rows of the chunk begin, in v and out, and how many there are to the
        // last. A transfer has no v: no rows of it are left.
        const bool is_transfer = items.item().from == StateOf::Identity;
        const u16* rows_v;
        if constexpr (is_strided) {
            rows_v = v + offset_of(work.strides->v, 0);
        } else {
            const i64 first = static_cast<i64>(items.item().begin) * num_heads + items.item().head;
            rows_v =
                v + first * head_dim + lane / 4 * (half_stride / 8) + first_row() + 4 * (lane % 4);
        }
        // With strides rows of out are apart; mma.sync has no registers to keep where.
        constexpr bool keeps_rows_out = is_strided && use_wgmma;
        u16* rows_out = nullptr;
        if constexpr (keeps_rows_out) rows_out = out + offset_of(work.strides->out, 0);
        int num_left = is_transfer ? -items.item().num_tokens : items.item().num_tokens - lane / 4;
        Rows rows = load_rows(rows_v, half_stride_of(&Strides::v), num_left);

        // Behind the load of v, which takes as long.
        float state[k_tiles][4];
        const States from = states_of(items.item().from, initial);
        load_state(state, from.row(items.item().from_matrix, items.item().head, first_row()),
                   from.kind, from.row_stride(), lane);
        if (is_transfer) make_identity(state, first_row(), lane);
        // Else the state's registers would be copied, from chunk to chunk, behind each wgmma
        // (C7514).
        hold(state);
        rows = transposed(rows);

        // Of an item without tokens the chunk is let pass: the state stays what it is, infinities
        // too.
        const auto is_empty = [&] { return __shfl_sync(~0u, items.item().num_tokens, 0) == 0; };
        for (int i = is_empty() ? 0 : items.num_chunks; i > 0; --i, ++index) {
            wait_full(smem.full, index);
            int num_written;
            const auto load_num_written = [&] {
                num_written = ld_shared(shared_address(&items.item().num_written));
            };
            const auto load_next = [&] {
                // While KQ is under way: where it is wanted it was waited for, 3 % of T=8192, H=96
                // with slow gates (H200).
                if constexpr (is_aligned) load_num_written();
                const i64 v_half_stride = half_stride_of(&Strides::v);
                rows_v += 2 * v_half_stride;
                if constexpr (is_strided && !keeps_rows_out) {
                    const int from = ld_shared(shared_address(&items.item().from));
                    const bool has_v = from != static_cast<int>(StateOf::Identity);
                    num_left = has_v ? num_left_from(items.num_chunks - i + 1) : 0;
                } else {
                    num_left -= chunk;
                }
                return load_rows(rows_v, v_half_stride, num_left);
            };
            const auto store = [&](const float (&o)[2][4]) {
                if constexpr (!is_aligned) load_num_written();
                // The first chunks behind a cut only make the state; a joined item's go aside.
                if (i > num_written) {
                    if (items.item().partials_end > 0) {
                        const i64 at = items.item().partials_end - i;
                        store_partial(work.partials + (at * head_dim + first_row()) * chunk, o);
                    }
                    return;
                }
                // load_next has gone on to the next chunk, but for rows_out.
                if constexpr (keeps_rows_out) {
                    store_rows(rows_out, half_stride_of(&Strides::out), num_left + chunk,
                               transposed(round_rows(o)));
                } else if constexpr (is_strided) {
                    u16* to = out + offset_of(work.strides->out, items.num_chunks - i);
                    store_rows(to, half_stride_of(&Strides::out),
                               num_left_from(items.num_chunks - i), transposed(round_rows(o)));
                } else {
                    u16* to = beside(rows_v - 2 * half_stride, to_out);
                    store_rows(to, half_stride, num_left + chunk, transposed(round_rows(o)));
                }
            };
            step(state, stages + index % num_stages * sizeof(Stage), rows, mov_tid_x() % 32,
                 load_next, store);
            if constexpr (keeps_rows_out) rows_out += 2 * half_stride_of(&Strides::out);
            arrive(smem.empty, index);
        }
        if (is_empty()) {
            wait_full(smem.full, index);
            arrive(smem.empty, index++);
        }
        if (items.item().to == StateOf::Transfer) {
            store_transfer(state, work.transfers, items.item().to_matrix, first_row() / 16,
                           mov_tid_x() % 32);
            continue;
        }
        const States to = states_of(items.item().to, final);
        store_state(state, to.row(items.item().to_matrix, items.item().head, first_row()), to.kind,
                    to.row_stride(), mov_tid_x() % 32);
    }
}
