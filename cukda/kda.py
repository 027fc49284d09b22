"""Kimi Delta Attention, forward: the documented function, and its checks."""

import math

from cukda import arrays, plan, reference, streams
from cukda.launch import FINAL, INITIAL, OUT, Call, Launch, keep, launch_again
from cukda.overlap import Apart, refuse_overlap
from cukda.signature import signature

_BF16 = ("bfloat16",)
_FP32 = ("float32",)
_STATES = ("bfloat16", "float32")
_BOUNDS = ("int32", "int64")
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

    All arrays are on one device: an NVIDIA GPU (torch, CuPy, any DLPack library), or the CPU
    (NumPy, torch, ...), where `cukda.reference` computes. They may have any strides and begin at
    any element; the last axis is contiguous in all but beta and A_log, and cu_seqlens is
    contiguous. Inputs are read where they are; only an initial_state that is final_state too is
    copied, where sequences are split. Strides take kernels of their own, of which those for rows
    that do not all begin at multiples of 16 bytes are slow (README, Measured). out has no element
    in common with another array, nor has final_state but for initial_state, which it may be.
    Returns out. The call does not synchronise.

    Raises TypeError (kind, dtype) or ValueError (shape, range, device, layout), naming the
    argument, before anything is launched. ImportError without CuPy for arrays on a GPU.

    Source: Kimi Linear (Moonshot AI, 2025), arXiv:2510.26692; the argument order is FlashKDA's.
    """
    given = q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens
    key, pointers = signature(given) if stream is None else (None, [])
    launch = _launches.get(key)
    if launch is not None and launch.fits(pointers):
        # All has been checked but these.
        scale, lower_bound = checked_scale(scale), checked_lower_bound(lower_bound)
        result = launch_again(launch, pointers, q, out, scale, lower_bound)
        if result is not None:
            return result

    call, result = _checked(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
        cu_seqlens, stream,
    )  # fmt: skip
    if call.q.device == arrays.CPU:
        _compute_on_cpu(call)
    else:
        with streams.launch_on(call.arrays, stream) as stream_pointer:
            launch = Launch(call)
            pointers = arrays.pointers_of(call.arrays)
            launch(stream_pointer, pointers, call.scale, call.lower_bound)
        keep(_launches, key, launch)
    return arrays.hand_over(result, call.q, stream) if out is None else out


# By the signatures of calls' arrays: what was checked for one call is not checked for the next.
_launches: dict[tuple | None, Launch] = {}


def _checked(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
    cu_seqlens, stream,
) -> tuple[Call, object]:  # fmt: skip
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

    def rows(name, array, written=False):
        array = view(name, array, stream)
        check(array, _BF16, shape, device, written=written, strides=arrays.ROWS)
        return array

    check(q, _BF16, shape, device, strides=arrays.ROWS)
    k, v, g = rows("k", k), rows("v", v), rows("g", g)
    beta = view("beta", beta, stream)
    check(beta, _BF16, (batch, num_tokens, num_heads), device, strides=arrays.ANY)
    scale = checked_scale(scale)
    result = out
    if out is not None:
        out = rows("out", out, written=True)
    if A_log is not None:
        A_log = view("A_log", A_log, stream)
        check(A_log, _FP32, (num_heads,), device, strides=arrays.ANY)
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
        check(initial_state, _STATES, state_shape, device, strides=arrays.ROWS)
    if final_state is not None:
        final_state = view("final_state", final_state, stream)
        check(final_state, _STATES, state_shape, device, written=True, strides=arrays.ROWS)
    if cu_seqlens is not None:
        check(cu_seqlens, _BOUNDS, (num_sequences + 1,), device)

    if out is None:
        result = arrays.empty_like(q, stream)
        out = view("out", result, stream)
        check(out, _BF16, shape, device)
    given = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    apart = Apart(given, OUT, FINAL, in_place=INITIAL)
    if not (apart.is_usable and apart(arrays.pointers_of(given))):
        inputs = [array for array in given if array is not out and array is not final_state]
        refuse_overlap(out, inputs)
        if final_state is not None:
            refuse_overlap(final_state, (*inputs, out), in_place=initial_state)
    return Call(*given, scale, lower_bound, num_sequences, apart), result


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
    arrays.check(dt_bias, _FP32, dt_bias.shape, device, strides=arrays.ROWS)


def checked_lower_bound(lower_bound) -> float:
    lower_bound = arrays.real("lower_bound", lower_bound)
    if not _LOWEST_BOUND <= lower_bound <= 0:
        raise ValueError(f"lower_bound: expected a number in [-5, 0], got {lower_bound}")
    return lower_bound


def _check_num_states(name: str, num_sequences: int, num_heads: int) -> None:
    if num_sequences * num_heads > _MOST:
        got = f"N = {num_sequences}, H = {num_heads}"
        raise ValueError(f"{name}: expected N · H of at most {_MOST}, got {got}")


def _compute_on_cpu(call: Call) -> None:
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
