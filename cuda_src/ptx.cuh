// PTX instructions, one per function, named after the instruction. The only file with `asm`.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// The 32-bit shared-memory address that the instructions below take.
__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew at each call; C++'s, and all that is worked out from it, may be kept in
// registers for the whole kernel.
__device__ inline u32 mov_tid_x() {
    u32 tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

// tanh on the special function unit; C++'s tanhf is a software routine.
__device__ inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x on the special function unit, subnormal results flushed.
__device__ inline float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 on the special function unit, to 2^-22 or so.
__device__ inline float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x on the special function unit, to an ulp; C++'s division takes ten instructions.
__device__ inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats rounded to nearest even in one instruction; `low` sits at the lower address.
__device__ inline u32 cvt_bf16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same to float16, which without its header is not a C++ type.
__device__ inline u32 cvt_f16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two products of bf16 pairs, each rounded once. SM80 has no mul.bf16x2: adds -0, which is nothing.
__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

// Two sums a 0 + c of bf16 pairs: c, but NaN where a is not finite.
__device__ inline u32 fma_zero_bf16x2(u32 a, u32 c) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0u), "r"(c));
    return sum;
}

// The float32 of a float16's bits.
__device__ inline float cvt_f32_f16(u16 half) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
    return y;
}

// Copies 16 bytes from global to shared memory without registers in between. Only the first
// `source_bytes` (0 or 16) are read; the rest is filled with zeros.
__device__ inline void cp_async_16(u32 target, const void* source, u32 source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

// The same with 4 bytes.
__device__ inline void cp_async_4(u32 target, const void* source, u32 source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

// Arrives on the barrier once this thread's earlier cp.async have landed; one of the arrivals that
// the barrier was told to expect.
__device__ inline void cp_async_mbarrier_arrive_noinc(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for all of this thread's earlier cp.async.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Reads a count in global memory; what others wrote before their red_release_add to it is seen from
// here on.
__device__ inline u32 ld_acquire(const u32* count) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(count) : "memory");
    return x;
}

// Adds to such a count, after all that this thread wrote, or has seen of others.
__device__ inline void red_release_add(u32* count, u32 x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(x) : "memory");
}

// Sleeps, for no more than twice `duration` nanoseconds.
__device__ inline void nanosleep(u32 duration) {
    asm volatile("nanosleep.u32 %0;" ::"r"(duration));
}

// Volatile keeps an ldmatrix behind the barrier before it; what it reads was always written before
// one, so nothing else needs to stay in place.
//
// Four 8x8 matrices of 16-bit elements, one row address per lane: a row of matrix m from lane
// 8m + row. Lane l receives elements (l/4, 2(l%4)) and (l/4, 2(l%4)+1) of each.
__device__ inline void ldmatrix_x4(u32 (&frag)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(frag[0]), "=r"(frag[1]), "=r"(frag[2]), "=r"(frag[3])
                 : "r"(row_address));
}

// The same, each matrix transposed: lane l receives (2(l%4), l/4) and (2(l%4)+1, l/4).
__device__ inline void ldmatrix_x4_trans(u32 (&frag)[4], u32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(frag[0]), "=r"(frag[1]), "=r"(frag[2]), "=r"(frag[3])
                 : "r"(row_address));
}

// Hopper and newer.
constexpr bool has_stmatrix =
#ifdef __CUDA_ARCH__
    __CUDA_ARCH__ >= 900;
#else
    false;
#endif

// What ldmatrix_x4 reads, written: four matrices, a row address per lane.
__device__ inline void stmatrix_x4(u32 row_address, const u32 (&frag)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
        "r"(frag[0]), "r"(frag[1]), "r"(frag[2]), "r"(frag[3])
        : "memory");
}

// 16 bytes of shared memory, in the program's order: the compiler would move the load to its use,
// and wait for it there.
__device__ inline float4 ld_shared_v4(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
}

// 16 bytes to shared memory, by their address there.
__device__ inline void st_shared_v4(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ inline int ld_shared(u32 address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

__device__ inline float2 ld_shared_v2(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// Transposes one 8x8 matrix of 16-bit elements that lies in a warp's registers. Volatile, as all
// that a whole warp must execute: else the compiler may move it into the branch that uses its
// result.
__device__ inline u32 movmatrix_trans(u32 matrix) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// acc[16x8] += a[16x16] b[16x8], bf16 in, float32 accumulated.
__device__ inline void mma_m16n8k16_bf16(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16x8] = a[16x16] b[16x8] + c, bf16 in, float32 accumulated.
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                         const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

// The same of float16.
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                        const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

// acc[16x8] += a[16x8] b[8x8], bf16 in, float32 accumulated.
__device__ inline void mma_m16n8k8_bf16(float (&acc)[4], u32 a0, u32 a1, u32 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// A float32 rounded to tf32, which has 11 bits. Volatile, or it may be done anew for each use.
__device__ inline float cvt_tf32(float x) {
    u32 rounded;
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return __uint_as_float(rounded);
}

// acc[16x8] += a[16x8] b[8x8], tf32 in, float32 accumulated. A lane has of a (l/4, l%4),
// (l/4 + 8, l%4), (l/4, l%4 + 4), (l/4 + 8, l%4 + 4), and of b (l%4, l/4), (l%4 + 4, l/4).
__device__ inline void mma_m16n8k8_tf32(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Waits for so many threads of whole warps, which all name this barrier of the block's.
__device__ inline void bar_sync(u32 barrier, u32 num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives once; what this thread wrote to shared memory before is visible to those who wait.
__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier)
                 : "memory");
}

// True once the phase of the given parity has completed.
__device__ inline bool mbarrier_test_wait_parity(u32 barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    // try_wait sleeps in hardware for a while before it says no; test_wait would burn issue slots.
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
    return done != 0;
}

// Makes what this thread stored to shared memory visible to wgmma, which reads it by another route.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders a warpgroup's register accesses before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` of the warpgroup's groups are unfinished.
template <int pending>
__device__ inline void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// acc[64 x 8n] += a[64 x 16] b[16 x 8n] by a warpgroup, 16 rows to a warp; asynchronous. b is a
// shared-memory descriptor; transposed_b says that its core matrices are rows of k.
template <int transposed_b>
__device__ inline void wgmma_m64k16_bf16(float (&acc)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, %21;"
        : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]),
          "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3]), "+f"(acc[2][0]), "+f"(acc[2][1]),
          "+f"(acc[2][2]), "+f"(acc[2][3]), "+f"(acc[3][0]), "+f"(acc[3][1]), "+f"(acc[3][2]),
          "+f"(acc[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed_b));
}

// acc[64 x 32] += a[64 x 8] b[8 x 32], tf32 in. b's core matrices are rows of n, four elements
// each.
__device__ inline void wgmma_m64k8_tf32(float (&acc)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1;"
        : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]),
          "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3]), "+f"(acc[2][0]), "+f"(acc[2][1]),
          "+f"(acc[2][2]), "+f"(acc[2][3]), "+f"(acc[3][0]), "+f"(acc[3][1]), "+f"(acc[3][2]),
          "+f"(acc[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int transposed_b>
__device__ inline void wgmma_m64k16_bf16(float (&acc)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
        : "+f"(acc[0][0]), "+f"(acc[0][1]), "+f"(acc[0][2]), "+f"(acc[0][3]), "+f"(acc[1][0]),
          "+f"(acc[1][1]), "+f"(acc[1][2]), "+f"(acc[1][3]), "+f"(acc[2][0]), "+f"(acc[2][1]),
          "+f"(acc[2][2]), "+f"(acc[2][3]), "+f"(acc[3][0]), "+f"(acc[3][1]), "+f"(acc[3][2]),
          "+f"(acc[3][3]), "+f"(acc[4][0]), "+f"(acc[4][1]), "+f"(acc[4][2]), "+f"(acc[4][3]),
          "+f"(acc[5][0]), "+f"(acc[5][1]), "+f"(acc[5][2]), "+f"(acc[5][3]), "+f"(acc[6][0]),
          "+f"(acc[6][1]), "+f"(acc[6][2]), "+f"(acc[6][3]), "+f"(acc[7][0]), "+f"(acc[7][1]),
          "+f"(acc[7][2]), "+f"(acc[7][3]), "+f"(acc[8][0]), "+f"(acc[8][1]), "+f"(acc[8][2]),
          "+f"(acc[8][3]), "+f"(acc[9][0]), "+f"(acc[9][1]), "+f"(acc[9][2]), "+f"(acc[9][3]),
          "+f"(acc[10][0]), "+f"(acc[10][1]), "+f"(acc[10][2]), "+f"(acc[10][3]), "+f"(acc[11][0]),
          "+f"(acc[11][1]), "+f"(acc[11][2]), "+f"(acc[11][3]), "+f"(acc[12][0]), "+f"(acc[12][1]),
          "+f"(acc[12][2]), "+f"(acc[12][3]), "+f"(acc[13][0]), "+f"(acc[13][1]), "+f"(acc[13][2]),
          "+f"(acc[13][3]), "+f"(acc[14][0]), "+f"(acc[14][1]), "+f"(acc[14][2]), "+f"(acc[14][3]),
          "+f"(acc[15][0]), "+f"(acc[15][1]), "+f"(acc[15][2]), "+f"(acc[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed_b));
}

// d[64 x 16] = a b, where there is nothing to add to: the compiler would make zeros for it.
template <int transposed_b>
__device__ inline void wgmma_m64k16_bf16_first(float (&d)[2][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, 0, 1, 1, %13;"
        : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]),
          "=f"(d[1][2]), "=f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed_b));
}

// Takes registers from this warpgroup's threads, down to so many each, for others ...
template <int registers>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ... or gives it more, waiting until there are.
template <int registers>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// No instruction: a place in the program's order by which x has been worked out.
__device__ inline void keep_in_order(float& x) { asm volatile("" : "+f"(x)); }

// No instruction: what is worked out from x behind it is not what was worked out from x before, and
// which the compiler would keep in registers, or in memory, until then.
template <typename Number>
__device__ inline void forget(Number& x) {
    if constexpr (sizeof(Number) == 8) {
        asm volatile("" : "+l"(x));
    } else {
        asm volatile("" : "+r"(x));
    }
}

// 16 bytes of global memory, in the program's order: the compiler would move the load to its use.
__device__ inline uint4 ld_global_v4(const void* pointer) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(pointer));
    return x;
}

// Two words from global memory, or zeros where they are not there; where the program says, as
// ld_shared_v4.
__device__ inline uint2 ld_global_v2(const void* pointer, bool is_there) {
    uint2 x;
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0; "
        "@p ld.global.v2.u32 {%0, %1}, [%2];}"
        : "=&r"(x.x), "=&r"(x.y)
        : "l"(pointer), "r"(static_cast<u32>(is_there)));
    return x;
}

// The same of two elements of 16 bits, as one word.
__device__ inline u32 ld_global_pair(const u16* pointer, bool is_there) {
    u32 x;
    asm volatile(
        "{.reg .pred p; .reg .b16 low, high; setp.ne.u32 p, %2, 0; mov.b16 low, 0; "
        "mov.b16 high, 0; @p ld.global.b16 low, [%1]; @p ld.global.b16 high, [%1 + 2]; "
        "mov.b32 %0, {low, high};}"
        : "=r"(x)
        : "l"(pointer), "r"(static_cast<u32>(is_there)));
    return x;
}

// Two words in one store; C++'s may be split where the words are in registers apart.
__device__ inline void st_global_v2(void* pointer, uint2 x) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(x.x), "r"(x.y) : "memory");
}

// Brings the cache line at this address into L2.
__device__ inline void prefetch_global_l1(const void* pointer) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(pointer));
}

__device__ inline void prefetch_global_l2(const void* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}
