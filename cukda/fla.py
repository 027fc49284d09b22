"""flash-linear-attention's `chunk_kda` by cukda: a function to call, and a backend to register.

Imports torch, unlike the rest of cukda: its users have it. `import cukda` does not bring it in.
"""

import inspect

import torch

from cukda import arrays, jit, kda, plan

_BF16, _FP32, _BOUNDS = ("bfloat16",), ("float32",), ("int32", "int64")
# Of A_log and dt_bias, which a model in half precision keeps so: float32 holds the same values.
_PARAMETERS = ("float32", "bfloat16", "float16")
# The one value that is served.
_FIXED = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": False,
    "return_intermediate_states": False,
    "cp_context": None,
}
# What fla takes besides the names in its signature, but for transpose_state_layout, an old name of
# state_v_first. It ignores all others, misspelt ones too.
_KEYWORDS = ("A_log", "dt_bias", "chunk_size")
_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")


# As fla's own: traced, a call would be no call of the kernel.
@torch.compiler.disable
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    """`fla.ops.kda.chunk_kda` of fla-core 0.6 for inference, by the formula of `cukda.fwd`.

    q, k, g:        bfloat16 [B, T, H, 128]; g is the gate before its activation.
    v:              bfloat16 [B, T, H, 128], a head for each of q's.
    beta:           bfloat16 [B, T, H], logits.
    scale:          real number; None is 1/sqrt(128).
    initial_state:  float32 [N, H, K, V], or [N, H, V, K] where state_v_first is set; None is 0.
    use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel: True.
    allow_neg_eigval, return_intermediate_states, cp_context: left as they are.
    lower_bound:    real number in [-5, 0], and below 0 with safe_gate, as in fla. None, which is
                    fla's softplus gate, is refused. The gate is bounded with it, whatever safe_gate
                    says: that chooses between fla's kernels.
    cu_seqlens:     int64 or int32 [N + 1] on the tensors' device, of packed sequences, B = 1.
    max_num_seqs:   with use_graph and cu_seqlens, N. A call can always be captured.
    A_log:          [H] or as many elements in another shape; None is exp(A_log) = 1.
    dt_bias:        [H·128] or as many elements in another shape; None is 0. Both float32, bfloat16
                    or float16.
    chunk_size:     32 or 64. Like disable_recompute and cu_seqlens_cpu it changes no result.

    A g or beta in float32, which fla reads as it is, is refused: cukda.fwd reads bfloat16, and to
    round it moves the gate's logit by up to exp(A_log) · |g| / 256 and ln β by up to |beta| / 256.
    That is more than rounding the result does where these are large. The caller may round.

    Strides are those of cukda.fwd; tensors whose last axis is not contiguous, but beta, are copied,
    and so is cu_seqlens. States that are [K, V] are copied twice, before and after.

    Returns (o, final_state): bfloat16 [B, T, H, 128], zero in rows of no sequence, as fla's; and
    float32 of initial_state's layout, or None without output_final_state.

    Raises TypeError (kind, dtype), ValueError (shape, range, device) or NotImplementedError (what
    fla has and cukda has not, gradients among it), naming the argument; ImportError without CuPy
    for tensors on a GPU.
    """
    # First of all, while the arguments are the only locals.
    _check(locals())
    num_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.transpose(-1, -2)
    final_state = None
    if output_final_state:
        final_state = q.new_empty((num_sequences, *_state_shape(q)), dtype=torch.float32)
    out = kda.fwd(
        _in_rows(q),
        _in_rows(k),
        _in_rows(v),
        _in_rows(g),
        beta,
        scale,
        None if cu_seqlens is None else v.new_zeros(v.shape),
        _parameter(kwargs.get("A_log")),
        _parameter(kwargs.get("dt_bias")),
        lower_bound,
        _in_rows(initial_state),
        final_state,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
    )
    if output_final_state and not state_v_first:
        final_state = final_state.transpose(-1, -2).contiguous()
    return out, final_state


_SIGNATURE = inspect.signature(chunk_kda)


def register() -> None:
    """Make `fla.ops.kda.chunk_kda`, and so fla's models, use cukda for the calls that it serves:
    where gradients are off, as under torch.inference_mode(), and chunk_kda above raises nothing.
    All others go where they went before.

    It comes before FlashKDA. FLA_CUKDA=0 in the environment turns it off, at any time; fla's
    FLA_DISABLE_BACKEND_DISPATCH=1 turns off all backends. A second call changes nothing.

    Raises ImportError without fla-core 0.6, or what it imports.
    """
    try:
        from fla.backends import BaseBackend
        from fla.backends import register as register_backend
        from fla.ops.kda import chunk_kda as fla_chunk_kda
    except ImportError as error:
        needs = "fla-core 0.6 or newer, and Triton: pip install fla-core triton"
        raise ImportError(f"cukda.fla.register needs {needs} ({error})") from error

    @register_backend(fla_chunk_kda)
    class CukdaBackend(BaseBackend):
        backend_type = "cukda"
        package_name = "cukda"
        env_var = "FLA_CUKDA"
        default_enable = True
        # Lower comes first; FlashKDA has 3.
        priority = 2

        chunk_kda_verifier = staticmethod(_verify)
        chunk_kda = staticmethod(chunk_kda)


def _verify(*args, **kwargs) -> tuple[bool, str | None]:
    """Whether fla is to hand chunk_kda's call to cukda, and if not, why."""
    # Of any tensor: what is computed from the result may need them.
    if torch.is_grad_enabled():
        return False, "cukda computes no gradients, and they are enabled"
    try:
        call = _SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        _check(call.arguments)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return False, f"cukda: {error}"
    return True, None


def _check(call: dict) -> None:
    """Raise for what is not served of chunk_kda's arguments by name, kwargs among them."""
    keywords = call["kwargs"]
    for name in keywords:
        if name not in _KEYWORDS:
            expected = f"one of {', '.join(_KEYWORDS)}"
            raise TypeError(f"{name}: expected {expected}, got a keyword that is not served")
    tensors = {name: keywords.get(name, call.get(name)) for name in _TENSORS}
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            got = "one that requires a gradient, with gradients enabled"
            raise NotImplementedError(f"{name}: expected a tensor for inference, got {got}")

    q = _view("q", call["q"])
    if len(q.shape) != 4 or q.shape[3] != plan.HEAD_DIM:
        raise ValueError(f"q: expected shape (B, T, H, {plan.HEAD_DIM}), got {tuple(q.shape)}")
    num_sequences, _, num_heads, _ = q.shape

    def check(name, dtypes, shape):
        array = _view(name, tensors[name])
        arrays.check(array, dtypes, shape, q.device, strides=arrays.ANY)

    for name in "q", "k", "v", "g":
        check(name, _BF16, q.shape)
    check("beta", _BF16, q.shape[:3])
    kda.checked_scale(call["scale"])
    for name, served in _FIXED.items():
        value = call[name]
        if bool(value) != bool(served):
            # No values of others: of tensors on a GPU they would be waited for.
            got = value if isinstance(value, bool) else type(value).__name__
            raise NotImplementedError(f"{name}: expected {served}, got {got}")
    if call["lower_bound"] is None:
        expected, got = "a number in [-5, 0]", "None, for which fla has a softplus gate"
        raise NotImplementedError(f"lower_bound: expected {expected}, got {got}")
    lower_bound = kda.checked_lower_bound(call["lower_bound"])
    if call["safe_gate"] and lower_bound == 0:
        raise ValueError("lower_bound: expected a number in [-5, 0) with safe_gate, got 0")
    if tensors["cu_seqlens"] is not None:
        shape = _view("cu_seqlens", tensors["cu_seqlens"]).shape
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"cu_seqlens: expected shape (N + 1,), got {tuple(shape)}")
        if num_sequences != 1:
            raise ValueError(f"cu_seqlens: expected q with B = 1, got B = {num_sequences}")
        check("cu_seqlens", _BOUNDS, shape)
        num_sequences = shape[0] - 1
        if call["use_graph"] and call["max_num_seqs"] not in (None, num_sequences):
            got = call["max_num_seqs"]
            raise ValueError(f"max_num_seqs: expected {num_sequences}, of cu_seqlens, got {got}")
    if tensors["initial_state"] is not None:
        check("initial_state", _FP32, (num_sequences, *_state_shape(q)))
    for name, size in ("A_log", num_heads), ("dt_bias", num_heads * plan.HEAD_DIM):
        if tensors[name] is not None:
            array = _view(name, tensors[name])
            check(name, _PARAMETERS, array.shape if array.size == size else (size,))
    if keywords.get("chunk_size", 64) not in (32, 64):
        raise ValueError(f"chunk_size: expected 32 or 64, got {keywords['chunk_size']}")
    # Where cukda cannot run at all, fla's own kernels may.
    if q.device != arrays.CPU:
        jit.nvrtc_version()
        major, minor = torch.cuda.get_device_capability(q.device)
        if 10 * major + minor < jit.OLDEST_ARCH:
            expected = f"a GPU of compute capability {jit.OLDEST_ARCH / 10} or newer"
            raise NotImplementedError(f"q: expected {expected}, got {major}.{minor}")


def _view(name: str, tensor) -> arrays.Array:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    return arrays.view(name, tensor)


def _state_shape(q) -> tuple[int, int, int]:
    return q.shape[2], plan.HEAD_DIM, plan.HEAD_DIM


def _in_rows(tensor):
    """With a contiguous last axis, a copy where it must be; None stays None."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _parameter(tensor):
    return None if tensor is None else _in_rows(tensor.float().reshape(-1))
