"""Kimi Delta Attention for decoding: a few tokens a sequence, on a pool of states in place."""

import struct
from typing import NamedTuple

import numpy as np

from cukda import arrays, jit, kda, plan, reference

MOST_TOKENS = 16
_BF16 = ("bfloat16",)
_STATES = ("bfloat16", "float32")
# The kernel counts blocks in 31 bits, of which there are four a state; and states.
_MOST = 2**29 - 1

# Of a block; lanes to a row of a state; rows of a lane; and how many blocks a multiprocessor holds,
# which decides registers. By measurement (docs/log.md).
_NUM_THREADS, _ROW_LANES, _LANE_ROWS, _MIN_BLOCKS = 128, 8, 2, 5
_V_ROWS = _NUM_THREADS // _ROW_LANES * _LANE_ROWS

# The kernel's parameters in their order. Rows by sequence, token and head are a pointer and three
# strides, and so is the pool.
_ROWS = "Pqqq"
_FIELDS = (*[_ROWS] * 5, "f", _ROWS, "P", "P", "f", _ROWS, "P", "i", "i", "i")
_PARAMETERS = struct.Struct("@" + "".join(_FIELDS))


def _variant(state_dtype: str) -> jit.Variant:
    defines = (
        # The headers' choice of products, of which there are none here.
        ("WGMMA", 0),
        ("STATE_FP32", int(state_dtype == "float32")),
        ("NUM_THREADS", _NUM_THREADS),
        ("ROW_LANES", _ROW_LANES),
        ("LANE_ROWS", _LANE_ROWS),
        ("MIN_BLOCKS", _MIN_BLOCKS),
        ("MOST_TOKENS", MOST_TOKENS),
    )
    return jit.Variant("decode.cu", "kda_step", defines)


_VARIANTS = {dtype: _variant(dtype) for dtype in _STATES}
VARIANTS = tuple(_VARIANTS.values())


def step(
    q,
    k,
    v,
    g,
    beta,
    state,
    state_indices=None,
    scale=None,
    out=None,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    *,
    stream=None,
):
    """Kimi Delta Attention of the next one to sixteen tokens of each sequence, states in place.

    The formula is that of `cukda.fwd`; for each token of sequence n, with S its state:

        S ← S · diag(exp(a));  S ← S + β (v − S k̂) k̂ᵀ;  out = scale · S q̂

    q, k, g:        bfloat16 [N, T, H, 128], T of 1 to 16; g is the gate before its activation.
    v:              bfloat16 [N, T, H, 128].
    beta:           bfloat16 [N, T, H], logits.
    state:          bfloat16 or float32 [P, H, V, K], read and written: a pool of states.
    state_indices:  int32 [N], which of the pool is a sequence's, each a different one; −1, or what
                    else is none of them, is padding, whose rows of out are not written. None is
                    state n for sequence n.
    scale:          real number; None is 1/sqrt(128).
    out:            bfloat16 [N, T, H, 128], written; None allocates one in q's library.
    A_log:          float32 [H]; None is exp(A_log) = 1.
    dt_bias:        float32 [H, 128] or [H·128]; None is 0.
    lower_bound:    real number in [-5, 0].
    stream:         what to run on instead of the caller's current stream; ignored on the CPU.

    q, k, v, g, beta, out and state may have any strides but along the last axis of 128; rows of
    state start at multiples of 16 bytes; all others are contiguous. out and state overlap no other
    array, from the first element to the last: nor rows that lie between. All on one device, as for
    `cukda.fwd`. Returns out. The call does not synchronise and can be captured in a CUDA graph:
    replays follow new values, of state_indices too. Between tokens the state is float32; a bfloat16
    pool rounds it once a call.

    Raises TypeError (kind, dtype) or ValueError (shape, range, device, layout), naming the
    argument, before anything is launched. ImportError without CuPy for arrays on a GPU.

    Source: Kimi Linear (Moonshot AI, 2025), arXiv:2510.26692.
    """
    view, check = arrays.view, arrays.check
    q = view("q", q, stream)
    if len(q.shape) != 4 or q.shape[3] != plan.HEAD_DIM or not 1 <= q.shape[1] <= MOST_TOKENS:
        expected = f"shape (N, T, H, {plan.HEAD_DIM}) with T from 1 to {MOST_TOKENS}"
        raise ValueError(f"q: expected {expected}, got {tuple(q.shape)}")
    num_sequences, num_tokens, num_heads, head_dim = shape = q.shape
    device = q.device
    if num_sequences * num_heads > _MOST:
        got = f"N = {num_sequences}, H = {num_heads}"
        raise ValueError(f"q: expected N · H of at most {_MOST}, got {got}")

    def rows(name, array, written=False):
        array = view(name, array, stream)
        check(array, _BF16, shape, device, 2, written, arrays.ROWS)
        return array

    check(q, _BF16, shape, device, 2, strides=arrays.ROWS)
    k, v, g = rows("k", k), rows("v", v), rows("g", g)
    beta = view("beta", beta, stream)
    check(beta, _BF16, shape[:3], device, 2, strides=arrays.ANY)
    state = view("state", state, stream)
    state_shape = (num_heads, head_dim, head_dim)
    if len(state.shape) != 4 or state.shape[1:] != state_shape:
        expected = f"shape (P, {num_heads}, {head_dim}, {head_dim})"
        raise ValueError(f"state: expected {expected}, got {tuple(state.shape)}")
    num_slots = state.shape[0]
    if num_slots > _MOST:
        raise ValueError(f"state: expected at most {_MOST} states, got {num_slots}")
    check(state, _STATES, state.shape, device, plan.ROW_ALIGNMENT, True, arrays.ROWS)
    if state_indices is not None:
        state_indices = view("state_indices", state_indices, stream)
        check(state_indices, ("int32",), (num_sequences,), device, 4)
    elif num_slots < num_sequences:
        expected = f"a state for each of {num_sequences} sequences"
        raise ValueError(f"state: expected {expected}, or state_indices, got {num_slots}")
    scale = kda.checked_scale(scale)
    given = out
    if out is not None:
        out = rows("out", out, written=True)
    if A_log is not None:
        A_log = view("A_log", A_log, stream)
        check(A_log, ("float32",), (num_heads,), device, 4)
    if dt_bias is not None:
        dt_bias = view("dt_bias", dt_bias, stream)
        kda.check_dt_bias(dt_bias, num_heads, device)
    lower_bound = kda.checked_lower_bound(lower_bound)
    inputs = (q, k, v, g, beta, A_log, dt_bias, state_indices)
    _refuse_overlap(state, inputs)
    if given is None:
        result = arrays.empty_like(q, stream)
        out = view("out", result, stream)
        check(out, _BF16, shape, device, 2)
    else:
        _refuse_overlap(out, (*inputs, state))
    call = _Call(q, k, v, g, beta, state, state_indices, scale, out, A_log, dt_bias, lower_bound)
    if num_sequences * num_heads:
        if device == arrays.CPU:
            _compute_on_cpu(call)
        else:
            _launch(call, stream)
    return arrays.hand_over(result, q, stream) if given is None else given


class _Call(NamedTuple):
    """The checked arguments of `step`."""

    q: arrays.Array
    k: arrays.Array
    v: arrays.Array
    g: arrays.Array
    beta: arrays.Array
    state: arrays.Array
    state_indices: arrays.Array | None
    scale: float
    out: arrays.Array
    A_log: arrays.Array | None
    dt_bias: arrays.Array | None
    lower_bound: float


def _refuse_overlap(output: arrays.Array, others) -> None:
    """Raise if output shares memory with another array, from its first element to its last."""
    begin, end = arrays.span(output)
    for other in others:
        if other is not None:
            other_begin, other_end = arrays.span(other)
            if begin < other_end and other_begin < end and begin < end and other_begin < other_end:
                expected = "memory of its own, from the first element to the last"
                got = f"an array that overlaps {other.name}"
                raise ValueError(f"{output.name}: expected {expected}, got {got}")


def _compute_on_cpu(call: _Call) -> None:
    def array(name):
        checked = getattr(call, name)
        return None if checked is None else arrays.to_numpy(checked)

    state, out = array("state"), array("out")
    indices = array("state_indices")
    if indices is None:
        indices = np.arange(out.shape[0])
    there = np.flatnonzero((indices >= 0) & (indices < len(state)))
    slots = indices[there]
    states, outs = state[slots], np.empty((len(there), *out.shape[1:]), out.dtype)
    reference.fwd(
        **{name: array(name)[there] for name in ("q", "k", "v", "g", "beta")},
        scale=call.scale,
        out=outs,
        A_log=array("A_log"),
        dt_bias=array("dt_bias"),
        lower_bound=call.lower_bound,
        initial_state=states,
        final_state=states,
        cu_seqlens=None,
    )
    state[slots] = states
    out[there] = outs


def _launch(call: _Call, stream) -> None:
    used = [array for array in call if isinstance(array, arrays.Array)]
    num_sequences, num_tokens, num_heads, head_dim = call.q.shape
    with arrays.launch_on(used, stream) as stream_pointer:
        variant = _VARIANTS[call.state.dtype]
        kernel = jit.kernel(variant.source, variant.entry, variant.defines)
        kernel(
            num_sequences * num_heads * (head_dim // _V_ROWS),
            _NUM_THREADS,
            0,
            stream_pointer,
            _PARAMETERS,
            *_rows(call.q),
            *_rows(call.k),
            *_rows(call.v),
            *_rows(call.g),
            *_rows(call.beta),
            call.scale,
            *_rows(call.out),
            _pointer(call.A_log),
            _pointer(call.dt_bias),
            call.lower_bound,
            *_rows(call.state),
            _pointer(call.state_indices),
            call.state.shape[0],
            num_tokens,
            num_heads,
        )


def _rows(array: arrays.Array) -> tuple[int, ...]:
    """Pointer and the strides of the first three axes, in elements."""
    return array.pointer, *arrays.strides_of(array)[:3]


def _pointer(array: arrays.Array | None) -> int:
    return 0 if array is None else array.pointer
