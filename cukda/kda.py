"""Kimi Delta Attention, forward: the documented function, its checks and its launch."""

import math
import struct
from dataclasses import dataclass

from cukda import arrays, jit, plan, reference

_BF16 = ("bfloat16",)
_FP32 = ("float32",)
_STATES = ("bfloat16", "float32")
_BOUNDS = ("int32", "int64")
# The kernels' parameters in their order: pointers (P), floats, ints (i) and unsigned ones (I).
_PARAMETERS = struct.Struct("@PPPPP f PPP f Pi Pi Pii I i i i I PP PPP P II")
_CUTS_PARAMETERS = struct.Struct("@PPPP PP f Pii I i i i I ii PPP")
# The kernel's StateKind.
_STATE_KINDS = {None: 0, "bfloat16": 1, "float32": 2}
_BOUND_BYTES = {None: 0, "int32": 4, "int64": 8}
_MAX_FLOAT32 = 3.4028234663852886e38
# The kernels count rows, and the states of heads, in 32 bits.
_MOST = 2**31 - 1
_LOWEST_BOUND = -5.0


def fwd(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    out=None,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
    *,
    stream=None,
):
    """Kimi Delta Attention over whole sequences. Per sequence and head, for each token:

        q̂ = q / sqrt(Σ q² + 1e-6)        k̂ = k / sqrt(Σ k² + 1e-6)
        a = lower_bound · sigmoid(exp(A_log) · (g + dt_bias))        β = sigmoid(beta)
        S ← S · diag(exp(a));  S ← S + β (v − S k̂) k̂ᵀ;  out = scale · S q̂

    with S a float32 [V, K] matrix, K = V = 128, and sigmoid(x) = 0.5 tanh.approx(0.5 x) + 0.5.

    q, k, g:        bfloat16 [B, T, H, 128]; g is the gate before its activation.
    v:              bfloat16 [B, T, H, 128].
    beta:           bfloat16 [B, T, H], logits.
    scale:          real number; None is 1/sqrt(128).
    out:            bfloat16 [B, T, H, 128], written; None allocates one in q's library. Rows of no
                    sequence in cu_seqlens are not written: in a new one they hold what was there.
    A_log:          float32 [H]; None is exp(A_log) = 1.
    dt_bias:        float32 [H, 128] or [H·128]; None is 0.
    lower_bound:    real number in [-5, 0], the least natural log of a token's decay.
    initial_state:  bfloat16 or float32 [N, H, V, K]; None is 0.
    final_state:    bfloat16 or float32 [N, H, V, K], written; may be initial_state itself.
    cu_seqlens:     int32 or int64 [N + 1] on the arrays' device: sequence n is rows
                    cu_seqlens[n] to cu_seqlens[n + 1] of a packed batch, B = 1. Without it N = B.
    stream:         what to run on instead of the caller's current stream; ignored on the CPU.

    All arrays are contiguous and on one device: an NVIDIA GPU (torch, CuPy, any DLPack library), or
    the CPU (NumPy, torch, ...), where `cukda.reference` computes. q, k, v, g, out and the states
    start at a multiple of 16 bytes. out overlaps no other array, final_state none but
    initial_state. Returns out. The call does not synchronise.

    Raises TypeError (kind, dtype) or ValueError (shape, range, device, layout), naming the
    argument, before anything is launched. ImportError without CuPy for arrays on a GPU.

    Source: Kimi Linear (Moonshot AI, 2025), arXiv:2510.26692; the argument order is FlashKDA's.
    """
    call, out = _checked(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
        cu_seqlens, stream,
    )  # fmt: skip
    if call.q.device == arrays.CPU:
        _compute_on_cpu(call)
    else:
        _launch(call, stream)
    return out


# Frozen would take a microsecond longer to make, of a call's 30 to 40.
@dataclass(slots=True)
class _Call:
    """The checked arguments of `fwd`, and the number of sequences."""

    q: arrays.Array
    k: arrays.Array
    v: arrays.Array
    g: arrays.Array
    beta: arrays.Array
    scale: float
    out: arrays.Array
    A_log: arrays.Array | None
    dt_bias: arrays.Array | None
    lower_bound: float
    initial_state: arrays.Array | None
    final_state: arrays.Array | None
    cu_seqlens: arrays.Array | None
    num_sequences: int


def _checked(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
    cu_seqlens, stream,
) -> tuple[_Call, object]:  # fmt: skip
    """The call, and out as the caller has it. Checks in signature order, so that the first wrong
    argument is the one named.
    """
    q = arrays.view("q", q, stream)
    if len(q.shape) != 4 or q.shape[3] != plan.HEAD_DIM:
        raise ValueError(f"q: expected shape (B, T, H, {plan.HEAD_DIM}), got {tuple(q.shape)}")
    batch, num_tokens, num_heads, head_dim = shape = q.shape
    device = q.device
    if batch * num_tokens > _MOST:
        got = f"B = {batch}, T = {num_tokens}"
        raise ValueError(f"q: expected B · T of at most {_MOST}, got {got}")
    _check_num_states("q", batch, num_heads)

    view, check = arrays.view, arrays.check
    check(q, _BF16, shape, device, plan.ROW_ALIGNMENT)
    k = view("k", k, stream)
    check(k, _BF16, shape, device, plan.ROW_ALIGNMENT)
    v = view("v", v, stream)
    check(v, _BF16, shape, device, plan.ROW_ALIGNMENT)
    g = view("g", g, stream)
    check(g, _BF16, shape, device, plan.ROW_ALIGNMENT)
    beta = view("beta", beta, stream)
    check(beta, _BF16, (batch, num_tokens, num_heads), device, 2)
    scale = checked_scale(scale)
    if out is None and q.library == "dlpack":
        # What another library makes is looked at like what the caller gives.
        out = arrays.empty_like(q, stream)
    result = out
    if out is not None:
        out = view("out", out, stream)
        check(out, _BF16, shape, device, plan.ROW_ALIGNMENT, written=True)
    if A_log is not None:
        A_log = view("A_log", A_log, stream)
        check(A_log, _FP32, (num_heads,), device, 4)
    if dt_bias is not None:
        dt_bias = view("dt_bias", dt_bias, stream)
        check_dt_bias(dt_bias, num_heads, device)
    lower_bound = checked_lower_bound(lower_bound)

    # N, which the states' shapes hang on, comes from the last argument.
    num_sequences = batch
    if cu_seqlens is not None:
        cu_seqlens = view("cu_seqlens", cu_seqlens, stream)
        if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"cu_seqlens: expected shape (N + 1,), got {tuple(cu_seqlens.shape)}")
        if batch != 1:
            raise ValueError(f"cu_seqlens: expected q with B = 1, got B = {batch}")
        num_sequences = cu_seqlens.shape[0] - 1
        _check_num_states("cu_seqlens", num_sequences, num_heads)
    state_shape = (num_sequences, num_heads, head_dim, head_dim)
    if initial_state is not None:
        initial_state = view("initial_state", initial_state, stream)
        check(initial_state, _STATES, state_shape, device, plan.ROW_ALIGNMENT)
    if final_state is not None:
        final_state = view("final_state", final_state, stream)
        check(final_state, _STATES, state_shape, device, plan.ROW_ALIGNMENT, written=True)
    if cu_seqlens is not None:
        alignment = 8 if cu_seqlens.dtype == "int64" else 4
        check(cu_seqlens, _BOUNDS, (num_sequences + 1,), device, alignment)

    if _may_overlap(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens):
        inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        if out is not None:
            _refuse_overlap(out, inputs)
        if final_state is not None:
            _refuse_overlap(final_state, (*inputs, out), in_place=initial_state)
    if out is None:
        result = arrays.empty_like(q, stream)
        out = view("out", result, stream)
    call = _Call(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
        cu_seqlens, num_sequences,
    )  # fmt: skip
    return call, result


def checked_scale(scale) -> float:
    """Of `fwd`, or its default."""
    scale = 1 / math.sqrt(plan.HEAD_DIM) if scale is None else arrays.real("scale", scale)
    if not abs(scale) <= _MAX_FLOAT32:
        raise ValueError(f"scale: expected a finite number in float32's range, got {scale}")
    return scale


def check_dt_bias(dt_bias: arrays.Array, num_heads: int, device: int) -> None:
    by_head, flat = (num_heads, plan.HEAD_DIM), (num_heads * plan.HEAD_DIM,)
    if dt_bias.dtype in _FP32 and dt_bias.shape not in (by_head, flat):
        got = tuple(dt_bias.shape)
        raise ValueError(f"dt_bias: expected shape {by_head} or {flat}, got {got}")
    arrays.check(dt_bias, _FP32, dt_bias.shape, device, 4)


def checked_lower_bound(lower_bound) -> float:
    lower_bound = arrays.real("lower_bound", lower_bound)
    if not _LOWEST_BOUND <= lower_bound <= 0:
        raise ValueError(f"lower_bound: expected a number in [-5, 0], got {lower_bound}")
    return lower_bound


def _check_num_states(name: str, num_sequences: int, num_heads: int) -> None:
    if num_sequences * num_heads > _MOST:
        got = f"N = {num_sequences}, H = {num_heads}"
        raise ValueError(f"{name}: expected N · H of at most {_MOST}, got {got}")


def _may_overlap(
    q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens
) -> bool:
    """Whether _refuse_overlap must look: it takes 4 us where all are apart, this 2."""
    rows_bytes = q.num_bytes
    out_begin = out_end = final_begin = final_end = 0
    if out is not None:
        out_begin = out.pointer
        out_end = out_begin + rows_bytes
    if final_state is not None:
        final_begin = final_state.pointer
        final_end = final_begin + final_state.num_bytes
        if final_begin < out_end and out_begin < final_end:
            return True
        if initial_state is not None and initial_state.pointer == final_begin:
            if initial_state.dtype != final_state.dtype:
                return True
            initial_state = None
    for array in q, k, v, g:
        begin = array.pointer
        end = begin + rows_bytes
        if (begin < out_end and out_begin < end) or (begin < final_end and final_begin < end):
            return True
    for array in beta, A_log, dt_bias, initial_state, cu_seqlens:
        if array is not None:
            begin = array.pointer
            end = begin + array.num_bytes
            if (begin < out_end and out_begin < end) or (begin < final_end and final_begin < end):
                return True
    return False


def _refuse_overlap(output: arrays.Array, others, in_place: arrays.Array | None = None) -> None:
    """Raise if output shares memory with another array; in_place may be the very same one."""
    begin, end = output.pointer, output.pointer + output.num_bytes
    for other in others:
        if other is None or other.pointer >= end or begin >= other.pointer + other.num_bytes:
            continue
        # An empty array may lie anywhere.
        if not (output.num_bytes and other.num_bytes):
            continue
        if other is in_place and other.pointer == begin and other.dtype == output.dtype:
            continue
        raise ValueError(
            f"{output.name}: expected memory of its own, got an array that overlaps {other.name}"
        )


def _compute_on_cpu(call: _Call) -> None:
    # Without sequences, or heads, or tokens and a state to pass on, there is nothing to do, of
    # however large shapes.
    num_states = call.num_sequences * call.q.shape[2]
    if num_states == 0 or (call.q.size == 0 and call.final_state is None):
        return

    def array(name):
        checked = getattr(call, name)
        return None if checked is None else arrays.to_numpy(checked)

    reference.fwd(
        q=array("q"),
        k=array("k"),
        v=array("v"),
        g=array("g"),
        beta=array("beta"),
        scale=call.scale,
        out=array("out"),
        A_log=array("A_log"),
        dt_bias=array("dt_bias"),
        lower_bound=call.lower_bound,
        initial_state=array("initial_state"),
        final_state=array("final_state"),
        cu_seqlens=array("cu_seqlens"),
    )


def _launch(call: _Call, stream) -> None:
    candidates = (
        call.q, call.k, call.v, call.g, call.beta, call.out, call.A_log, call.dt_bias,
        call.initial_state, call.final_state, call.cu_seqlens,
    )  # fmt: skip
    used = [array for array in candidates if array is not None]
    _, num_tokens, num_heads, _ = call.q.shape
    with arrays.launch_on(used, stream) as stream_pointer:
        packed = call.cu_seqlens is not None
        initial_pointer, final_pointer = _pointer(call.initial_state), _pointer(call.final_state)
        in_place = initial_pointer != 0 and initial_pointer == final_pointer
        shape = plan.Shape(call.num_sequences, num_tokens, num_heads, packed)
        launch = plan.plan(shape, jit.gpu())
        segments = launch.segments
        # A last segment may write its final state before the first has read the initial one.
        is_copied = in_place and segments.length > 0
        copy_bytes = call.initial_state.num_bytes if is_copied else 0
        at = launch.layout
        with arrays.Workspace(at.end + copy_bytes, stream_pointer) as workspace:
            begin = workspace.pointer
            if is_copied:
                initial_pointer = begin + at.end
                workspace.copy(initial_pointer, final_pointer, copy_bytes)
            sequences = (
                _pointer(call.cu_seqlens),
                _BOUND_BYTES[_dtype(call.cu_seqlens)],
                call.num_sequences,
                num_tokens,
                num_heads,
                segments.length,
                segments.first_extra,
                launch.num_slots,
            )
            found = begin + at.begins, begin + at.counts
            joined = begin + at.locals, begin + at.transfers, begin + at.partials
            ready = begin + at.ready if segments.join_every else 0

            def run(kernel, variant, grid, layout, *parameters):
                block, shared_bytes = variant.num_threads, variant.shared_bytes
                kernel(grid, block, shared_bytes, stream_pointer, layout, *parameters)

            # Before the first launch: a kernel that cannot be had leaves none behind.
            scan = _kernel(launch.variant)
            if segments.length:
                run(
                    _kernel(plan.CUTS),
                    plan.CUTS,
                    launch.cuts_grid,
                    _CUTS_PARAMETERS,
                    call.q.pointer,
                    call.k.pointer,
                    call.v.pointer,
                    call.g.pointer,
                    _pointer(call.A_log),
                    _pointer(call.dt_bias),
                    call.lower_bound,
                    *sequences,
                    segments.first_joined,
                    segments.join_every,
                    *found,
                    ready,
                )
            run(
                scan,
                launch.variant,
                launch.grid,
                _PARAMETERS,
                call.q.pointer,
                call.k.pointer,
                call.v.pointer,
                call.g.pointer,
                call.beta.pointer,
                call.scale,
                call.out.pointer,
                _pointer(call.A_log),
                _pointer(call.dt_bias),
                call.lower_bound,
                initial_pointer,
                _STATE_KINDS[_dtype(call.initial_state)],
                final_pointer,
                _STATE_KINDS[_dtype(call.final_state)],
                *sequences,
                *found,
                *joined,
                ready,
                *launch.runs,
            )


def _kernel(variant: plan.Variant | plan.Helper) -> jit.Kernel:
    return jit.kernel(variant.source, variant.entry, variant.defines, variant.shared_bytes)


def _pointer(array: arrays.Array | None) -> int:
    return 0 if array is None else array.pointer


def _dtype(array: arrays.Array | None) -> str | None:
    return None if array is None else array.dtype
