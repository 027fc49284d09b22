"""The inputs of the tests: made with NumPy whatever the library, so that all see the same bits,
unless a generator of another library is given.
"""

import ml_dtypes
import numpy as np

HEAD_DIM = 128
TOKENS = ("q", "k", "v", "g", "beta")
BF16 = np.dtype(ml_dtypes.bfloat16)


def bf16(x):
    """float32, all finite, rounded to nearest even. By its bits: not every library knows bf16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(BF16)


def make(seq_lens, heads, gate="rand", seed=0, xp=np, batch=None, rng=None):
    """A call's inputs by name: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale,
    lower_bound.

    seq_lens are packed into one row with int32 cu_seqlens; or, with `batch`, they hold the one
    length of that many rows, and cu_seqlens is None. rng: a generator to use in place of seed;
    CuPy's makes on the GPU what takes NumPy ten seconds at T = 8192, H = 96.

    gate "rand": q, k standard normal, L2-normalised; v, g, beta standard normal; A_log, dt_bias
    uniform in [0, 1); initial state 0.1 · standard normal, float32.
    gate "slow": A_log = 0, dt_bias = −9 on even channels and −2 on odd ones.
    gate "half": even heads are rand, odd ones slow.
    gate "collinear": one key a head for all tokens, q = k, g = −12, beta = 8, A_log = dt_bias = 0,
    initial state 0.
    """
    rng = np.random.default_rng(seed) if rng is None else rng
    seq_lens = list(seq_lens)
    if batch is None:
        shape = (1, sum(seq_lens), heads)
        cu_seqlens = np.cumsum([0, *seq_lens], dtype=np.int32)
        num_seqs = len(seq_lens)
    else:
        (num_tokens,) = seq_lens
        shape = (batch, num_tokens, heads)
        cu_seqlens = None
        num_seqs = batch

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    def unit(x):
        return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(1e-6))

    q, k = unit(normal(*shape, HEAD_DIM)), unit(normal(*shape, HEAD_DIM))
    v, g, beta = normal(*shape, HEAD_DIM), normal(*shape, HEAD_DIM), normal(*shape)
    A_log = rng.random(heads, dtype=np.float32)
    dt_bias = rng.random((heads, HEAD_DIM), dtype=np.float32)
    initial_state = normal(num_seqs, heads, HEAD_DIM, HEAD_DIM) * np.float32(0.1)
    if gate in ("slow", "half"):
        slow = slice(None) if gate == "slow" else slice(1, None, 2)
        A_log[slow] = 0
        dt_bias[slow, 0::2] = -9
        dt_bias[slow, 1::2] = -2
    elif gate == "collinear":
        k[:] = unit(normal(heads, HEAD_DIM))
        q[:] = k
        g[:], beta[:] = -12, 8
        A_log[:], dt_bias[:], initial_state[:] = 0, 0, 0
    elif gate != "rand":
        raise ValueError(f"gate: expected rand, slow, half or collinear, got {gate}")

    return {
        **{n: xp.asarray(bf16(x)) for n, x in zip(TOKENS, (q, k, v, g, beta), strict=True)},
        "A_log": xp.asarray(A_log),
        "dt_bias": xp.asarray(dt_bias),
        "initial_state": xp.asarray(initial_state),
        "cu_seqlens": None if cu_seqlens is None else xp.asarray(cu_seqlens),
        "scale": HEAD_DIM**-0.5,
        "lower_bound": -5.0,
    }


def changed(case, name, index, value):
    """The case of NumPy arrays with one array's entries set, in a copy."""
    array = case[name].copy()
    array[index] = value
    return {**case, name: array}


def spans(case):
    """Of each sequence: its index in the batch and the slice of its tokens."""
    if case["cu_seqlens"] is None:
        return [(b, slice(0, case["q"].shape[1])) for b in range(case["q"].shape[0])]
    ends = case["cu_seqlens"].tolist()
    return [(0, slice(begin, end)) for begin, end in zip(ends[:-1], ends[1:], strict=True)]


def alone(case, seq_idx):
    """One sequence of the case of NumPy arrays as a call of its own, without cu_seqlens."""
    batch_idx, tokens = spans(case)[seq_idx]
    part = {n: np.ascontiguousarray(case[n][batch_idx, tokens][None]) for n in TOKENS}
    if case["initial_state"] is not None:
        part["initial_state"] = case["initial_state"][seq_idx : seq_idx + 1]
    return {**case, **part, "cu_seqlens": None}


def tokens(case, begin, end, initial_state):
    """Tokens begin to end of a case without cu_seqlens, as a call of its own."""
    part = {n: np.ascontiguousarray(case[n][:, begin:end]) for n in TOKENS}
    return {**case, **part, "initial_state": initial_state}


def pick_heads(case, heads):
    """The case of NumPy arrays with the given heads only."""
    part = {n: np.ascontiguousarray(case[n][:, :, heads]) for n in TOKENS}
    state = case["initial_state"]
    return {
        **case,
        **part,
        "A_log": case["A_log"][heads],
        "dt_bias": case["dt_bias"][heads],
        "initial_state": None if state is None else np.ascontiguousarray(state[:, heads]),
    }
