"""Kimi Delta Attention for decoding: a few tokens a sequence, on a pool of states in place."""

import struct
from typing import NamedTuple

import numpy as np

from cukda import arrays, jit, kda, plan, reference, streams
from cukda.launch import OUT, Kept, head_strides, keep, launch_again
from cukda.overlap import Apart, refuse_overlap
from cukda.signature import signature

MOST_TOKENS = 16
_BF16 = ("bfloat16",)
_FP32 = ("float32",)
_STATES = ("bfloat16", "float32")
# The kernel counts blocks in 31 bits, of which there are four a state; and states.
_MOST = 2**29 - 1

# Of a block; lanes to a row of a state; rows of a lane; and how many blocks a multiprocessor holds,
# which decides registers. By measurement (docs/log.md).
_NUM_THREADS, _ROW_LANES, _LANE_ROWS, _MIN_BLOCKS = 128, 8, 2, 5
_V_ROWS = _NUM_THREADS // _ROW_LANES * _LANE_ROWS

# The kernel's parameters in their order. Rows by sequence, token and head are a pointer and three
# strides, and so is the pool; what is by head has one.
_ROWS, _BY_HEAD = "Pqqq", "Pq"
_FIELDS = (*[_ROWS] * 5, "f", _ROWS, _BY_HEAD, _BY_HEAD, "f", _ROWS, "P", "i", "i", "i")
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

    Arrays may have any strides; the last axis is contiguous in all but beta and A_log,
    state_indices is contiguous, and rows of state begin at multiples of 16 bytes. out and state
    have no element in common with another array. All are on one device, as for `cukda.fwd`. Returns
    out. The call does not synchronise and can be captured in a CUDA graph: replays follow new
    values, of state_indices too. Between tokens the state is float32; a bfloat16 pool rounds it
    once a call.

    Raises TypeError (kind, dtype) or ValueError (shape, range, device, layout), naming the
    argument, before anything is launched. ImportError without CuPy for arrays on a GPU.

    Source: Kimi Linear (Moonshot AI, 2025), arXiv:2510.26692.
    """
    given = q, k, v, g, beta, out, A_log, dt_bias, state, state_indices
    key, pointers = signature(given) if stream is None else (None, [])
    launch = _launches.get(key)
    if launch is not None and launch.fits(pointers):
        # All has been checked but these.
        scale, lower_bound = kda.checked_scale(scale), kda.checked_lower_bound(lower_bound)
        result = launch_again(launch, pointers, q, out, scale, lower_bound)
        if result is not None:
            return result

    call, result = _checked(
        q, k, v, g, beta, state, state_indices, scale, out, A_log, dt_bias, lower_bound, stream
    )
    is_empty = call.q.shape[0] * call.q.shape[2] == 0
    if not is_empty and call.q.device == arrays.CPU:
        _compute_on_cpu(call)
    elif not is_empty:
        with streams.launch_on(call.arrays, stream) as stream_pointer:
            launch = _Launch(call)
            pointers = arrays.pointers_of(call.arrays)
            launch(stream_pointer, pointers, call.scale, call.lower_bound)
        keep(_launches, key, launch)
    return arrays.hand_over(result, call.q, stream) if out is None else out


# As those of `fwd`.
_launches: dict[tuple | None, "_Launch"] = {}
# Places among a call's arrays, beside OUT.
_STATE, _NUM_ARRAYS = 8, 10


class _Call(NamedTuple):
    """The checked arguments of `step`, and what tells overlaps."""

    q: arrays.Array
    k: arrays.Array
    v: arrays.Array
    g: arrays.Array
    beta: arrays.Array
    out: arrays.Array
    A_log: arrays.Array | None
    dt_bias: arrays.Array | None
    state: arrays.Array
    state_indices: arrays.Array | None
    scale: float
    lower_bound: float
    apart: Apart

    @property
    def arrays(self) -> tuple[arrays.Array | None, ...]:
        return self[:_NUM_ARRAYS]


def _checked(
    q, k, v, g, beta, state, state_indices, scale, out, A_log, dt_bias, lower_bound, stream
) -> tuple[_Call, object]:
    """The call, and out as the caller has it. Checks in signature order."""
    view, check = arrays.view, arrays.check
    q = view("q", q, stream)
    if len(q.shape) != 4 or q.shape[3] != plan.HEAD_DIM or not 1 <= q.shape[1] <= MOST_TOKENS:
        expected = f"shape (N, T, H, {plan.HEAD_DIM}) with T from 1 to {MOST_TOKENS}"
        raise ValueError(f"q: expected {expected}, got {tuple(q.shape)}")
    num_sequences, _, num_heads, head_dim = shape = q.shape
    device = q.device
    if num_sequences * num_heads > _MOST:
        got = f"N = {num_sequences}, H = {num_heads}"
        raise ValueError(f"q: expected N · H of at most {_MOST}, got {got}")

    def rows(name, array, written=False):
        array = view(name, array, stream)
        check(array, _BF16, shape, device, written=written, strides=arrays.ROWS)
        return array

    check(q, _BF16, shape, device, strides=arrays.ROWS)
    k, v, g = rows("k", k), rows("v", v), rows("g", g)
    beta = view("beta", beta, stream)
    check(beta, _BF16, shape[:3], device, strides=arrays.ANY)
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
        check(state_indices, ("int32",), (num_sequences,), device)
    elif num_slots < num_sequences:
        expected = f"a state for each of {num_sequences} sequences"
        raise ValueError(f"state: expected {expected}, or state_indices, got {num_slots}")
    scale = kda.checked_scale(scale)
    result = out
    if out is not None:
        out = rows("out", out, written=True)
    if A_log is not None:
        A_log = view("A_log", A_log, stream)
        check(A_log, _FP32, (num_heads,), device, strides=arrays.ANY)
    if dt_bias is not None:
        dt_bias = view("dt_bias", dt_bias, stream)
        kda.check_dt_bias(dt_bias, num_heads, device)
    lower_bound = kda.checked_lower_bound(lower_bound)
    if out is None:
        result = arrays.empty_like(q, stream)
        out = view("out", result, stream)
        check(out, _BF16, shape, device)
    given = (q, k, v, g, beta, out, A_log, dt_bias, state, state_indices)
    apart = Apart(given, OUT, _STATE)
    if not (apart.is_usable and apart(arrays.pointers_of(given))):
        inputs = [array for array in given if array is not out and array is not state]
        refuse_overlap(state, inputs)
        refuse_overlap(out, (*inputs, state))
    return _Call(*given, scale, lower_bound, apart), result


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


class _Launch(Kept):
    """What calls of `step` launch on the current device, as launch.Launch of `fwd`."""

    __slots__ = ("_grid", "_kernel", "_sizes", "_strides")

    def __init__(self, call: _Call):
        super().__init__(call)
        num_sequences, num_tokens, num_heads, head_dim = call.q.shape
        variant = _VARIANTS[call.state.dtype]
        self._kernel = jit.kernel(variant.source, variant.entry, variant.defines)
        self._grid = num_sequences * num_heads * (head_dim // _V_ROWS)
        self._sizes = call.state.shape[0], num_tokens, num_heads
        rows = (call.q, call.k, call.v, call.g, call.beta, call.out, call.state)
        self._strides = (
            *(arrays.strides_of(array)[:3] for array in rows),
            head_strides(call.A_log, call.dt_bias),
        )

    def __call__(
        self, stream_pointer: int, pointers: list[int], scale: float, lower_bound: float
    ) -> None:
        q, k, v, g, beta, out, A_log, dt_bias, state, state_indices = pointers
        of_q, of_k, of_v, of_g, of_beta, of_out, of_state, (of_A_log, of_dt_bias) = self._strides
        self._kernel(
            self._grid,
            _NUM_THREADS,
            0,
            stream_pointer,
            _PARAMETERS,
            q,
            *of_q,
            k,
            *of_k,
            v,
            *of_v,
            g,
            *of_g,
            beta,
            *of_beta,
            scale,
            out,
            *of_out,
            A_log,
            of_A_log,
            dt_bias,
            of_dt_bias,
            lower_bound,
            state,
            *of_state,
            state_indices,
            *self._sizes,
        )
