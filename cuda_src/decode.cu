// Kimi Delta Attention, token by token, on states that stay where they are: decoding.
//
//   a  = lower_bound sigmoid(exp(A_log) (g + dt_bias))    beta = sigmoid(beta)
//   S <- S diag(e^a);  u = beta (v - S k);  o = scale (S q + u (k q));  S <- S + u k^T
//
// with q, k normalised; all in float32. Bound by memory: a state of 128 x 128 is read and written
// once, 64 KiB each in float32, however many tokens there are. So loads of the state come first,
// and what the tokens want is made while they are on their way.
//
// Block: `v_rows` rows of one head's state. A row lies in eight lanes, `vectors` pieces of 16 bytes
// to a lane, and a lane has `lane_rows` rows, in registers from the first token to the last. Each
// warp makes the factors of every num_warps-th token, in shared memory.
#include "gate.cuh"
#include "ptx.cuh"
#include "tile.cuh"

// Set by cukda/decode.py, which launches with the same numbers.
constexpr bool is_fp32 = STATE_FP32;
constexpr int row_lanes = ROW_LANES, lane_rows = LANE_ROWS;
constexpr int num_threads = NUM_THREADS, num_warps = num_threads / 32;
constexpr int most_tokens = MOST_TOKENS;

constexpr int v_rows = num_threads / row_lanes * lane_rows;
static_assert(v_rows == 32, "a lane fetches a row's v");
constexpr int vector_size = is_fp32 ? 4 : 8;  // elements of 16 bytes
constexpr int vectors = head_dim / row_lanes / vector_size;
constexpr int lane_channels = vectors * vector_size;

// Rows of 128, or numbers, by sequence, token and head; strides in elements, and 1 along a row.
template <typename T>
struct Rows {
    T* base;
    i64 sequence, token, head;

    __device__ T* at(int n, int t, int h) const {
        return base + n * sequence + t * token + h * head;
    }
};

// A_log or dt_bias: a number or a row of 128 by head, a stride apart; null is zero.
struct ByHead {
    const float* base;
    i64 stride;

    __device__ const float* at(int head) const { return base + head * stride; }
};

// States [128 (v), 128 (k)] by slot and head; strides in elements, and 1 along k.
struct Pool {
    void* base;
    i64 slot, head, row;
};

struct Token {
    alignas(16) float k[head_dim], q[head_dim];  // normalised
    float decay[head_dim];                       // e^a
    float v[v_rows];
    float beta, kq;  // sigmoid(beta), k q
};
struct Shared {
    Token token[most_tokens];
};

__device__ inline float sum_over(float x, int lanes) {
    for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ inline float to_float(u16 bf16) { return __uint_as_float(static_cast<u32>(bf16) << 16); }

// What a lane holds of a token's rows while they are on their way: channels lane, lane + 32, ...,
// since rows may begin at any element.
constexpr int warp_channels = head_dim / 32;
struct RawToken {
    u16 q[warp_channels], k[warp_channels], g[warp_channels], v, beta;
};

// x / sqrt(sum of squares + 1e-6), for elements of any size: those above 2^40, whose squares would
// overflow, are first brought there by a power of two.
__device__ inline void normalise(float (&x)[warp_channels]) {
    float largest = 0.0f;
#pragma unroll
    for (float each : x) largest = fmaxf(largest, fabsf(each));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float power = largest > 0x1p40f ? 0x1p-90f : 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (float& each : x) {
        each *= power;
        sum = fmaf(each, each, sum);
    }
    const float norm = rsqrtf(sum_over(sum, 32) + 1e-6f * (power * power));
#pragma unroll
    for (float& each : x) each *= norm;
}

// What a token brings to this head, and of v to this block's rows. By a warp.
__device__ inline void make_token(Token& token, const RawToken& raw, const HeadGate& gate,
                                  const float (&bias)[warp_channels], int lane) {
    float k[warp_channels], q[warp_channels];
#pragma unroll
    for (int i = 0; i < warp_channels; ++i) {
        k[i] = to_float(raw.k[i]);
        q[i] = to_float(raw.q[i]);
    }
    normalise(k);
    normalise(q);
    float kq = 0.0f;
#pragma unroll
    for (int i = 0; i < warp_channels; ++i) {
        const int channel = lane + 32 * i;
        token.k[channel] = k[i];
        token.q[channel] = q[i];
        token.decay[channel] = ex2_approx(log2_decay(to_float(raw.g[i]), bias[i], gate));
        kq = fmaf(k[i], q[i], kq);
    }
    token.v[lane] = to_float(raw.v);
    kq = sum_over(kq, 32);
    if (lane == 0) {
        token.kq = kq;
        token.beta = 0.5f * tanh_approx(0.5f * to_float(raw.beta)) + 0.5f;
    }
}

// Four of a lane's channels of a factor, from channel i of its own on: they come in pieces of
// vector_size, row_lanes apart.
__device__ inline void load_four(float (&x)[4], const float (&factor)[head_dim], int i, int lane) {
    const int piece = i / vector_size * row_lanes + lane % row_lanes;
    const float4 four =
        *reinterpret_cast<const float4*>(&factor[piece * vector_size + i % vector_size]);
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
}

__device__ inline void unpack(float (&s)[vector_size], uint4 piece) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (is_fp32) {
            s[i] = __uint_as_float(words[i]);
        } else {
            s[2 * i] = bf16_low(words[i]);
            s[2 * i + 1] = bf16_high(words[i]);
        }
    }
}

__device__ inline uint4 pack(const float (&s)[vector_size]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (is_fp32) {
            words[i] = __float_as_uint(s[i]);
        } else {
            words[i] = cvt_bf16x2(s[2 * i], s[2 * i + 1]);
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// q, k, g, v, out: bf16 [N, T, H, 128]; beta: bf16 [N, T, H]; A_log: fp32 [H] or null; dt_bias:
// fp32 [H, 128] or null; pool: bf16 or fp32 [num_slots, H, 128 (v), 128 (k)], rows at multiples of
// 16 bytes, read and written; state_indices: int32 [N], which state is a sequence's, or null:
// sequence n's is state n. One that is none of the pool's is let be, and so is its out.
// Grid: [N, H, 128 / v_rows] blocks in one dimension.
extern "C" __global__ void __launch_bounds__(num_threads, MIN_BLOCKS)
    kda_step(Rows<const u16> q, Rows<const u16> k, Rows<const u16> v, Rows<const u16> g,
             Rows<const u16> beta, float scale, Rows<u16> out, ByHead A_log, ByHead dt_bias,
             float lower_bound, Pool pool, const int* state_indices, int num_slots, int num_tokens,
             int num_heads) {
    __shared__ Shared smem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int num_parts = head_dim / v_rows;
    const int part = blockIdx.x % num_parts;
    const int head = static_cast<int>(blockIdx.x / num_parts % num_heads);
    const int n = static_cast<int>(blockIdx.x / num_parts / num_heads);
    const int slot = state_indices ? state_indices[n] : n;
    const auto load_token = [&](int t) {
        RawToken raw;
#pragma unroll
        for (int i = 0; i < warp_channels; ++i) {
            raw.q[i] = q.at(n, t, head)[lane + 32 * i];
            raw.k[i] = k.at(n, t, head)[lane + 32 * i];
            raw.g[i] = g.at(n, t, head)[lane + 32 * i];
        }
        raw.v = v.at(n, t, head)[part * v_rows + lane];
        raw.beta = *beta.at(n, t, head);
        return raw;
    };
    // While the slot is on its way.
    int t = warp;
    RawToken raw = {};
    if (t < num_tokens) raw = load_token(t);
    float bias[warp_channels];
#pragma unroll
    for (int i = 0; i < warp_channels; ++i) {
        bias[i] = dt_bias.base ? channel_bias(dt_bias.at(head)[lane + 32 * i]) : 0.0f;
    }
    const HeadGate gate = head_gate(A_log.base ? *A_log.at(head) : 0.0f, lower_bound);
    if (slot < 0 || slot >= num_slots) return;

    // The state, on its way. Row m of the lane is first_row + 4 m: four of a warp side by side.
    constexpr int row_step = 32 / row_lanes;
    // Worked out anew for each use, or sm_120 has no registers for what is kept meanwhile.
    const auto first_row = [] {  // of the block's
        return mov_tid_x() / 32 * (row_step * lane_rows) + mov_tid_x() % 32 / row_lanes;
    };
    constexpr int item_bytes = is_fp32 ? 4 : 2;
    char* const state =
        static_cast<char*>(pool.base) +
        (slot * pool.slot + head * pool.head + part * v_rows * pool.row) * item_bytes;
    const auto piece_at = [&](int m, int i) {
        const i64 row = (first_row() + row_step * m) * pool.row * item_bytes;
        return reinterpret_cast<uint4*>(state + row) + i * row_lanes + mov_tid_x() % row_lanes;
    };
    uint4 pieces[lane_rows][vectors];
#pragma unroll
    for (int m = 0; m < lane_rows; ++m) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) pieces[m][i] = *piece_at(m, i);
    }

#pragma unroll 1
    while (t < num_tokens) {
        make_token(smem.token[t], raw, gate, bias, lane);
        t += num_warps;
        if (t >= num_tokens) break;
        raw = load_token(t);
    }
    __syncthreads();

    float s[lane_rows][lane_channels];
#pragma unroll
    for (int m = 0; m < lane_rows; ++m) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            float x[vector_size];
            unpack(x, pieces[m][i]);
#pragma unroll
            for (int j = 0; j < vector_size; ++j) s[m][i * vector_size + j] = x[j];
        }
    }
#pragma unroll 1
    for (t = 0; t < num_tokens; ++t) {
        const Token& token = smem.token[t];
        u16* const row_out = out.at(n, t, head) + part * v_rows;
        float sk[lane_rows] = {}, sq[lane_rows] = {};
        // By fours, or the factors would take registers that there are not.
#pragma unroll
        for (int c = 0; c < lane_channels; c += 4) {
            float decay[4], k_four[4], q_four[4];
            load_four(decay, token.decay, c, lane);
            load_four(k_four, token.k, c, lane);
            load_four(q_four, token.q, c, lane);
#pragma unroll
            for (int m = 0; m < lane_rows; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[m][c + i] *= decay[i];
                    sk[m] = fmaf(s[m][c + i], k_four[i], sk[m]);
                    sq[m] = fmaf(s[m][c + i], q_four[i], sq[m]);
                }
            }
        }
        float u[lane_rows];
#pragma unroll
        for (int m = 0; m < lane_rows; ++m) {
            const int row = first_row() + row_step * m;
            u[m] = token.beta * (token.v[row] - sum_over(sk[m], row_lanes));
            const float o = scale * fmaf(u[m], token.kq, sum_over(sq[m], row_lanes));
            if (lane % row_lanes == 0) row_out[row] = static_cast<u16>(cvt_bf16x2(o, 0.0f));
        }
#pragma unroll
        for (int c = 0; c < lane_channels; c += 4) {
            float k_four[4];
            load_four(k_four, token.k, c, lane);
#pragma unroll
            for (int m = 0; m < lane_rows; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][c + i] = fmaf(u[m], k_four[i], s[m][c + i]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < lane_rows; ++m) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            float x[vector_size];
#pragma unroll
            for (int j = 0; j < vector_size; ++j) x[j] = s[m][i * vector_size + j];
            *piece_at(m, i) = pack(x);
        }
    }
}
