"""The recurrence of KDA in float64, one token after the other: what every test compares with.

Imports nothing of cukda. Works on NumPy and on CuPy arrays (`xp`).
"""

import numpy as np


def recurrence(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    initial_state=None,
    cu_seqlens=None,
    xp=np,
    sigmoid=None,
):
    """Return (out, final_state) in float64.

    q̂ = q / sqrt(Σ q² + 1e-6)    k̂ = k / sqrt(Σ k² + 1e-6)
    a = lower_bound · sigmoid(exp(A_log) · (g + dt_bias))    β = sigmoid(beta)
    S ← S · diag(exp(a));  S ← S + β (v − S k̂) k̂ᵀ;  o = scale · S q̂

    q, k, v, g: [B, T, H, D], beta: [B, T, H], A_log: [H], dt_bias: [H, D] or [H·D],
    initial_state: [N, H, V, K], cu_seqlens: [N+1]; any real dtype, the last four may be None.
    out: [B, T, H, D], zero in rows that belong to no sequence; final_state: [N, H, V, K].

    `sigmoid`, a function float32 -> float32, takes the place of the exact one: the contract
    defines the gates through a hardware instruction, whose error is not rounding.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    if scale is None:
        scale = head_dim**-0.5
    if cu_seqlens is None:
        begin = np.arange(batch) * num_tokens
        length = np.full(batch, num_tokens)
    else:
        cu = np.asarray(_on_host(cu_seqlens), dtype=np.int64)
        begin = np.clip(cu[:-1], 0, num_tokens)
        length = np.clip(cu[1:], begin, num_tokens) - begin

    # Long sequences first and all tokens by their time: those alive at time t are then the first
    # `alive[t]` states, and their tokens are one slice of every array.
    rank = np.argsort(-length, kind="stable")
    time = np.concatenate([np.arange(n) for n in length[rank]] or [np.arange(0)])
    row = np.repeat(begin[rank], length[rank]) + time
    by_time = np.argsort(time, kind="stable")
    alive = np.bincount(time.astype(np.int64))
    row = xp.asarray(row[by_time].astype(np.int64))

    def tokens(array):
        array = _float64(array, xp)
        return array.reshape(batch * num_tokens, *array.shape[2:])[row]

    with np.errstate(all="ignore"):
        q, k, v, g, beta = tokens(q), tokens(k), tokens(v), tokens(g), tokens(beta)
        q /= xp.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
        k /= xp.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        if dt_bias is not None:
            g += _float64(dt_bias, xp).reshape(num_heads, head_dim)
        if A_log is not None:
            g *= xp.exp(_float64(A_log, xp))[:, None]
        decay = xp.exp(float(lower_bound) * _sigmoid(g, sigmoid, xp))
        beta = _sigmoid(beta, sigmoid, xp)

        if initial_state is None:
            state = xp.zeros((len(length), num_heads, head_dim, head_dim))
        else:
            state = _float64(initial_state, xp)[xp.asarray(rank)]
        out_by_time = xp.empty_like(v)
        start = 0
        for num_alive in alive.tolist():
            now = slice(start, start + num_alive)
            S = state[:num_alive]
            S *= decay[now][..., None, :]
            delta = beta[now][..., None] * (v[now] - _times(S, k[now], xp))
            S += delta[..., None] * k[now][..., None, :]
            out_by_time[now] = scale * _times(S, q[now], xp)
            start = now.stop

    out = xp.zeros((batch * num_tokens, num_heads, head_dim))
    out[row] = out_by_time
    final_state = xp.empty_like(state)
    final_state[xp.asarray(rank)] = state
    return out.reshape(batch, num_tokens, num_heads, head_dim), final_state


def error(got, want):
    """‖got − want‖ / ‖want‖ in float64. Raises ValueError on other shapes and on NaN or inf."""
    if hasattr(got, "get") != hasattr(want, "get"):
        got, want = _on_host(got), _on_host(want)
    if got.shape != want.shape:
        raise ValueError(f"got: expected shape {want.shape}, got {got.shape}")
    norms = []
    with np.errstate(all="ignore"):
        got, want = _float64(got), _float64(want)
        for name, array in ("got", got), ("want", want), ("got - want", got - want):
            # The greatest magnitude, NaN if there is one: no array of flags, and squares that
            # would overflow are scaled.
            peak = float(abs(array).max()) if array.size else 0.0
            if not np.isfinite(peak):
                raise ValueError(f"{name}: expected finite values, got a maximum of {peak}")
            unit = peak or 1.0
            norms.append(unit * float(((array / unit) ** 2).sum()) ** 0.5)
    if norms[2] == 0.0:
        return 0.0
    return norms[2] / norms[1] if norms[1] else float("inf")


def _times(S, x, xp):
    return xp.matmul(S, x[..., None])[..., 0]


def _sigmoid(x, sigmoid, xp):
    if sigmoid is None:
        return 1.0 / (1.0 + xp.exp(-x))
    return sigmoid(x.astype(np.float32)).astype(np.float64)


def _float64(array, xp=None):
    """A new float64 array. bf16 by its bits, since not every library can compute with it."""
    if xp is not None:
        array = xp.asarray(array)
    if array.dtype.name == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _on_host(array):
    return array.get() if hasattr(array, "get") else array
