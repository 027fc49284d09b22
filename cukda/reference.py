"""Kimi Delta Attention forward in NumPy: for arrays on the CPU, for tests and for reading.

It is the kernel's algorithm (`cuda_src/kda_fwd.cu`) in float32, all sequences and heads at once,
chunk after chunk.
"""

import numpy as np

# exp(a) is at least e^-5 a token, so over a chunk no factor leaves e^±80: inside float32's range.
CHUNK = 16


def fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state,
    final_state,
    cu_seqlens,
) -> None:
    """Per sequence and head, for token t, with S of shape [V, K]:

        q̂ = q / sqrt(Σ q² + 1e-6)    k̂ = k / sqrt(Σ k² + 1e-6)
        a = lower_bound · sigmoid(exp(A_log) · (g + dt_bias))    β = sigmoid(beta)
        S ← S · diag(exp(a));  S ← S + β (v − S k̂) k̂ᵀ;  o = scale · S q̂

    The arguments are those of `cukda.fwd`, as NumPy arrays that have been checked: q, k, v, g, out
    bf16 [B, T, H, D]; beta bf16 [B, T, H]; A_log float32 [H] or None; dt_bias float32 [H, D] or
    [H·D] or None; states bf16 or float32 [N, H, V, K] or None; cu_seqlens int32 or int64 [N+1] or
    None. `out` and `final_state` are written in place; `final_state` may be `initial_state`.
    """
    _, _, num_heads, head_dim = q.shape
    batch, begin, length = _sequences(q.shape, cu_seqlens)
    # Longest first: the sequences that have a chunk at a given step are then a leading slice.
    order = np.argsort(-length, kind="stable")
    batch, begin, length = batch[order], begin[order], length[order]

    state = np.zeros((len(order), num_heads, head_dim, head_dim), np.float32)
    if initial_state is not None:
        state[:] = initial_state[order]

    # NaN, inf and what overflows to them are values like others here.
    with np.errstate(all="ignore"):
        rate, bias = _gate_parameters(A_log, dt_bias, num_heads, head_dim)
        for start in range(0, length.max(initial=0), CHUNK):
            live = slice(0, np.count_nonzero(length > start))
            last = length[live, None] - 1
            token = start + np.arange(CHUNK)
            inside = token <= last
            rows = np.broadcast_arrays(batch[live, None], begin[live, None] + token.clip(max=last))
            Q, q_length = _direction(_gather(q, rows, inside))
            K, k_length = _direction(_gather(k, rows, inside))
            K *= k_length
            V = _gather(v, rows, inside)
            a = np.float32(lower_bound) * sigmoid(rate * (_gather(g, rows, inside) + bias))
            # Past the end of a sequence K and V are zero; with a = 0 too the state stays as it is.
            a = np.where(inside[:, None, :, None], a, np.float32(0))
            b = sigmoid(_gather(beta[..., None], rows, inside))

            o, state[live] = _chunk(Q, K, V, a, b, state[live])
            # Only now the length of q̂: a short q̂ times e^G would leave float32's range, as may
            # a part of this product.
            o = (scale * q_length.astype(np.float64) * o).astype(np.float32).swapaxes(1, 2)
            out[tuple(row[inside] for row in rows)] = o[inside].astype(out.dtype)

        if final_state is not None:
            final_state[order] = state.astype(final_state.dtype)


def sigmoid(x):
    """0.5 · tanh(0.5 · x) + 0.5, float32 of any shape; NaN gives NaN, ±inf exactly 1 and 0."""
    half = np.float32(0.5)
    return half * np.tanh(half * x) + half


def _chunk(Q, K, V, a, b, S):
    """One chunk of every sequence and head: o for Q without scale, and the state after it.

    Q, K, V, a: [N, H, C, D], b: [N, H, C, 1], S: [N, H, V, K], all float32. With G the running sum
    of a and i, j tokens of the chunk:

        A_ij = Σ_c K_i[c] K_j[c] e^(G_i[c] − G_j[c])    P_ij = Σ_c Q_i[c] K_j[c] e^(G_i[c] − G_j[c])
        U    = b (V − (K e^G) Sᵀ − tril(A, −1) U)
        o    = (Q e^G) Sᵀ + tril(P) U
        S'   = S diag(e^G_last) + Uᵀ (K e^(G_last − G))
    """
    G = np.cumsum(a, axis=2)
    G_last = G[:, :, -1:]
    decay = np.exp(G)
    K_read = K * decay
    Q_read = Q * decay
    K_undone = (K * np.exp(-G)).swapaxes(2, 3)
    A = K_read @ K_undone
    P = Q_read @ K_undone

    S_t = S.swapaxes(2, 3)
    U = V - K_read @ S_t
    o = Q_read @ S_t
    # Token by token, each product over the tokens so far: with a triangle of zeros instead, the
    # NaN of a later token would reach an earlier one as 0 · NaN.
    for i in range(CHUNK):
        now, before, so_far = slice(i, i + 1), slice(0, i), slice(0, i + 1)
        U[:, :, now] -= A[:, :, now, before] @ U[:, :, before]
        U[:, :, now] *= b[:, :, now]
        o[:, :, now] += P[:, :, now, so_far] @ U[:, :, so_far]

    return o, S * np.exp(G_last) + U.swapaxes(2, 3) @ (K * np.exp(G_last - G))


def _sequences(shape, cu_seqlens):
    """Each sequence's index in the batch, first token and length."""
    num_batches, num_tokens = shape[:2]
    if cu_seqlens is None:
        batch = np.arange(num_batches)
        return batch, np.zeros_like(batch), np.full_like(batch, num_tokens)
    cu = cu_seqlens.astype(np.int64)
    begin = np.clip(cu[:-1], 0, num_tokens)
    length = np.clip(cu[1:], begin, num_tokens) - begin
    return np.zeros_like(begin), begin, length


def _gate_parameters(A_log, dt_bias, num_heads, head_dim):
    """exp(A_log) and dt_bias, of shapes that broadcast over [N, H, C, D]."""
    rate, bias = np.float32(1), np.float32(0)
    if A_log is not None:
        # Neither 0 nor inf from a finite A_log, so that no finite gate becomes 0 · inf.
        info = np.finfo(np.float32)
        rate = np.clip(np.exp(A_log), info.smallest_subnormal, info.max).reshape(num_heads, 1, 1)
    if dt_bias is not None:
        bias = dt_bias.reshape(num_heads, 1, head_dim)
    return rate, bias


def _gather(array, rows, inside):
    """[B, T, H, D] -> float32 [N, H, C, D] of the given rows, zero where they are not inside."""
    tokens = array[tuple(rows)].astype(np.float32)
    tokens[~inside] = 0
    return np.ascontiguousarray(tokens.swapaxes(1, 2))


def _direction(x):
    """x / |x|, zero for zero, and |x| / sqrt(|x|² + 1e-6): their product is x̂."""
    # In float64, since squares of bf16 values can leave float32's range.
    square = np.square(x, dtype=np.float64).sum(axis=-1, keepdims=True)
    norm = np.sqrt(square)
    length = (norm / np.sqrt(square + 1e-6)).astype(np.float32)
    return (x / np.where(norm == 0, 1, norm)).astype(np.float32), length
