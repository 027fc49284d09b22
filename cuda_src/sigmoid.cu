// y = 0.5 * tanh.approx(0.5 * x) + 0.5 elementwise, in float32 whatever the dtypes of x and y.
//
// Bound by memory: float32 moves 8 bytes an element, so at 4.2 TB/s 2^28 elements take 0.51 ms,
// while their tanh takes the special function units of 132 multiprocessors 0.06 ms. What it needs
// is bytes on their way: a thread loads `vectors` independent 16-byte pieces before it uses the
// first.
#include "ptx.cuh"

enum class Dtype { float32, bfloat16, float16 };

// Set by cukda/sigmoid_ext.py, which launches with the same numbers.
constexpr Dtype input = static_cast<Dtype>(INPUT_DTYPE);
constexpr Dtype output = static_cast<Dtype>(OUTPUT_DTYPE);
constexpr int num_threads = NUM_THREADS;
constexpr int vectors = VECTORS;
static_assert(output == input || output == Dtype::float32, "y has x's dtype or is float32");
static_assert(num_threads % 32 == 0 && num_threads <= 1024, "whole warps");

template <Dtype dtype>
struct Storage {
    using Bits = u16;
};
template <>
struct Storage<Dtype::float32> {
    using Bits = u32;
};
using Input = Storage<input>::Bits;
using Output = Storage<output>::Bits;

// A vector is what one 16-byte load brings; y's part of it is one 16-byte store, or two.
constexpr int vector_bytes = 16;
constexpr int vector_size = vector_bytes / sizeof(Input);
constexpr int stores = sizeof(Output) / sizeof(Input);

__device__ inline float sigmoid(float x) { return 0.5f * tanh_approx(0.5f * x) + 0.5f; }

__device__ inline float decode(u32 bits) {
    if constexpr (input == Dtype::float32) return __uint_as_float(bits);
    if constexpr (input == Dtype::bfloat16) return __uint_as_float(bits << 16);
    if constexpr (input == Dtype::float16) return cvt_f32_f16(static_cast<u16>(bits));
}

// Two values as 16-bit elements, `low` at the lower address.
__device__ inline u32 encode_pair(float low, float high) {
    if constexpr (output == Dtype::float16) return cvt_f16x2(low, high);
    return cvt_bf16x2(low, high);
}

__device__ inline Output encode(float value) {
    if constexpr (output == Dtype::float32) return __float_as_uint(value);
    return static_cast<Output>(encode_pair(value, 0.0f));
}

// `vector_size` elements from x. When they do not start at a multiple of 16 bytes they come one by
// one: neighbours in the warp share the cache lines, so memory still moves each byte once.
template <bool aligned>
__device__ inline uint4 load(const Input* x) {
    if constexpr (aligned) return *reinterpret_cast<const uint4*>(x);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Input) == 4) {
            words[i] = x[i];
        } else {
            words[i] = x[2 * i] | static_cast<u32>(x[2 * i + 1]) << 16;
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// The sigmoids of one vector, to y, which is a multiple of 16 bytes.
__device__ inline void store(Output* y, uint4 vector) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    float values[vector_size];
#pragma unroll
    for (int i = 0; i < vector_size; ++i) {
        if constexpr (sizeof(Input) == 4) {
            values[i] = sigmoid(decode(words[i]));
        } else {
            values[i] = sigmoid(decode(words[i / 2] >> (i % 2 * 16) & 0xffff));
        }
    }
    u32 results[4 * stores];
#pragma unroll
    for (int i = 0; i < 4 * stores; ++i) {
        if constexpr (sizeof(Output) == 4) {
            results[i] = encode(values[i]);
        } else {
            results[i] = encode_pair(values[2 * i], values[2 * i + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < stores; ++i) {
        reinterpret_cast<uint4*>(y)[i] = {results[4 * i], results[4 * i + 1], results[4 * i + 2],
                                          results[4 * i + 3]};
    }
}

// This block's vectors out of x[0 .. num_vectors * vector_size).
template <bool aligned>
__device__ inline void transform(const Input* x, Output* y, i64 num_vectors) {
    const i64 first = static_cast<i64>(blockIdx.x) * (num_threads * vectors) + threadIdx.x;
    uint4 loaded[vectors];
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
        const i64 vector_idx = first + i * num_threads;
        if (vector_idx < num_vectors) loaded[i] = load<aligned>(x + vector_idx * vector_size);
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
        const i64 vector_idx = first + i * num_threads;
        if (vector_idx < num_vectors) store(y + vector_idx * vector_size, loaded[i]);
    }
}

// x: `input` [size]; y: `output` [size], each at any multiple of its element; y may be x.
// Grid: num_threads * vectors * vector_size elements a block, at least one block.
// y is cut into a head of single elements up to a multiple of 16 bytes, vectors, and a tail of
// fewer than vector_size elements; the first block takes the head, the last block the tail.
extern "C" __global__ void __launch_bounds__(num_threads)
    sigmoid_forward(const Input* x, Output* y, i64 size) {
    const u32 past_boundary = reinterpret_cast<u64>(y) % vector_bytes;
    const i64 to_boundary = (vector_bytes - past_boundary) % vector_bytes / sizeof(Output);
    const i64 head = to_boundary < size ? to_boundary : size;
    const i64 num_vectors = (size - head) / vector_size;

    if (reinterpret_cast<u64>(x + head) % vector_bytes == 0) {
        transform<true>(x + head, y + head, num_vectors);
    } else {
        transform<false>(x + head, y + head, num_vectors);
    }

    if (blockIdx.x == 0 && threadIdx.x < head) {
        y[threadIdx.x] = encode(sigmoid(decode(x[threadIdx.x])));
    }
    const i64 tail_idx = head + num_vectors * vector_size + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && tail_idx < size) {
        y[tail_idx] = encode(sigmoid(decode(x[tail_idx])));
    }
}
