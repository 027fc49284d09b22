"""What the GPU tests share: kernels that they need, and calls whose outputs start as NaN."""

import functools

import numpy as np
import oracle
from inputs import BF16, HEAD_DIM, TOKENS

from cukda import jit, kda, plan

KERNELS = r"""
// The sigmoid of the contract, one element a thread.
extern "C" __global__ void sigmoid(const float* x, float* y, unsigned long long size) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= size) return;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x[i]));
    y[i] = 0.5f * t + 0.5f;
}

// Holds its SMs for so many clocks, or until the host sets the flag.
extern "C" __global__ void spin(long long clocks, const volatile int* flag) {
    long long start = clock64();
    while (clock64() - start < clocks) {
        if (flag && *flag) return;
    }
}
"""

# A tenth of a second, long beside any call here.
LONG = 200_000_000
# What a block may have of shared memory without asking: there is no room for one of ours beside it.
SHARED_BYTES = 48 * 1024


def force(replace, variant, *segments):
    """Make every plan one of this variant, with sequences split into these plan.Segments.

    replace: setattr, or a monkeypatch's, which takes it back.
    """
    replace(plan, "plan", functools.partial(plan.launch, variant, plan.Segments(*segments)))
    # What was planned before.
    replace(kda, "_launches", {})


def whole_head_variant():
    """The variant of this GPU whose blocks have all 128 rows of V."""
    gpu = jit.gpu()
    usable = [v for v in plan.variants() if v.wgmma == gpu.has_wgmma and v.v_rows == 128]
    return next(v for v in usable if v.shared_bytes <= gpu.max_shared_bytes)


@functools.cache
def kernel(name):
    import cupy

    return cupy.RawModule(code=KERNELS).get_function(name)


def sigmoid(x):
    """0.5 · tanh.approx.f32(0.5 · x) + 0.5 of a float32 array, as a CuPy array."""
    import cupy

    x = cupy.ascontiguousarray(cupy.asarray(x))
    y = cupy.empty(x.shape, np.float32)
    if x.size:
        kernel("sigmoid")(((x.size + 255) // 256,), (256,), (x, y, np.uint64(x.size)))
    return y


def spin(stream_pointer, clocks=LONG, num_blocks=1, shared_bytes=0):
    """Keep a stream busy; does not wait for it."""
    import cupy

    with cupy.cuda.Stream.from_external(Stream(stream_pointer)):
        arguments = np.int64(clocks), np.uint64(0)
        kernel("spin")((num_blocks,), (1,), arguments, shared_mem=shared_bytes)


class Stream:
    """A stream pointer in the form that libraries exchange."""

    def __init__(self, pointer):
        self.pointer = pointer

    def __cuda_stream__(self):
        return 0, self.pointer


def nans(shape, dtype):
    """A CuPy array full of NaN. dtype: "bfloat16" or "float32"."""
    import cupy

    if dtype == "float32":
        return cupy.full(shape, np.nan, np.float32)
    return cupy.full(shape, 0x7FC0, np.uint16).view(BF16)


def upload(case):
    """The same call with CuPy arrays."""
    import cupy

    return {n: cupy.asarray(x) if is_input(n, x) else x for n, x in case.items()}


def is_input(name, value):
    # The two numbers may come as 0-d arrays, which stay on the CPU.
    return isinstance(value, np.ndarray) and name not in ("scale", "lower_bound")


def num_states(case):
    cu_seqlens = case["cu_seqlens"]
    return case["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def state_shape(case):
    _, _, num_heads, head_dim = case["q"].shape
    return num_states(case), num_heads, head_dim, head_dim


def plan_shape(case):
    """What the plan of a call is made of."""
    return plan.Shape(num_states(case), *case["q"].shape[1:3], case["cu_seqlens"] is not None)


def spread(array, shift):
    """The same values with gaps between rows of 128, as long as these, or between numbers: a view
    of a larger CuPy array, from `shift` elements past a multiple of 16 bytes on.
    """
    import cupy

    bits = cupy.asarray(array).view(f"u{array.dtype.itemsize}")
    is_rows = array.shape[-1] == HEAD_DIM
    wide = cupy.zeros((*bits.shape[:-1], 2 * HEAD_DIM) if is_rows else (*bits.shape, 3), bits.dtype)
    apart = wide[..., shift : shift + HEAD_DIM] if is_rows else wide[..., shift]
    apart[...] = bits
    return apart.view(array.dtype)


def spread_all(call, shift):
    """All arrays of a call, by name, but cu_seqlens."""
    names = [n for n, x in call.items() if n != "cu_seqlens" and hasattr(x, "strides")]
    return call | {name: spread(call[name], shift) for name in names}


def run(case, state="float32", shift=None):
    """Call cukda.fwd with CuPy arrays of the case's values and outputs full of NaN; with a shift
    all are `spread`.

    state: the dtype of final_state, or None for none. Returns (out, final_state).
    """
    import cukda

    case = upload(case)
    out = nans(case["v"].shape, "bfloat16")
    final_state = None if state is None else nans(state_shape(case), state)
    if shift is not None:
        case = spread_all(case, shift)
        out = spread(out, shift)
        final_state = None if state is None else spread(final_state, shift)
    tokens = [case.pop(n) for n in TOKENS]
    assert cukda.fwd(*tokens, **case, out=out, final_state=final_state) is out
    return out, final_state


def want(case):
    """The float64 recurrence with the hardware's sigmoid, on the GPU."""
    import cupy

    return oracle.recurrence(**case, xp=cupy, sigmoid=sigmoid)


def check(case, out_tolerance, state_tolerance):
    """Compare a call, all of whose rows belong to a sequence, with the recurrence."""
    out, final_state = run(case)
    want_out, want_state = want(case)
    got = oracle.error(out, want_out), oracle.error(final_state, want_state)
    assert got[0] <= out_tolerance and got[1] <= state_tolerance, f"errors (out, state): {got}"


def host(array):
    """A CuPy, torch or NumPy array as NumPy."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if array.dtype is _torch().bfloat16:
            # torch hands no bf16 to NumPy.
            return array.view(dtype=_torch().int16).numpy().view(BF16)
        return array.numpy()
    return array.get() if hasattr(array, "get") else array


def bits(array):
    array = np.ascontiguousarray(host(array))
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(got, want):
    return np.array_equal(bits(got), bits(want))


def torch_case(case):
    """The same call with torch arrays on the GPU."""
    torch = _torch()

    def tensor(array):
        if array.dtype != BF16:
            return torch.from_numpy(array).to("cuda")
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to("cuda")

    return {n: tensor(x) if is_input(n, x) else x for n, x in case.items()}


def torch_nans(shape, dtype="bfloat16"):
    torch = _torch()
    return torch.full(shape, float("nan"), dtype=getattr(torch, dtype), device="cuda")


def _torch():
    import torch

    return torch
