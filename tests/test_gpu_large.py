"""Offsets past 2³¹: every sample and state equals the same one alone."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state, against a call of another shape.
TOLERANCE = (1e-3, 2e-4)


def test_elements(torch, need_memory):
    """B·T·H·128 elements are over 2³¹, a single sample far under."""
    import cukda

    need_memory(32)
    B, T, H, D = 16, 17477, 64, 128
    assert B * T * H * D > 2**31
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)

    tokens = [randn(B, T, H, D) for _ in range(4)] + [randn(B, T, H)]
    state = randn(B, H, D, D, dtype=torch.float32)
    out = torch.full_like(tokens[2], float("nan"))
    final_state = torch.full_like(state, float("nan"))
    cukda.fwd(*tokens, out=out, initial_state=state, final_state=final_state)
    # Sample 14 crosses element 2³¹.
    for sample in 0, 13, 14, 15:
        one = slice(sample, sample + 1)
        want_out = torch.full_like(out[one], float("nan"))
        want_state = torch.full_like(state[one], float("nan"))
        cukda.fwd(
            *(x[one] for x in tokens),
            out=want_out,
            initial_state=state[one],
            final_state=want_state,
        )
        assert error(out[one], want_out) <= TOLERANCE[0]
        assert error(final_state[one], want_state) <= TOLERANCE[1]


def test_states(torch, need_memory):
    """N·H·128·128 elements are over 2³¹ in both states."""
    import cukda

    need_memory(24)
    N, H, D = 2050, 64, 128
    assert N * H > 131072
    generator = torch.Generator("cuda").manual_seed(1)

    def randn(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)

    tokens = [randn(1, N, H, D) for _ in range(4)] + [randn(1, N, H)]
    state = randn(N, H, D, D)
    final_state = torch.full(state.shape, float("nan"), dtype=torch.float32, device="cuda")
    out = torch.full_like(tokens[2], float("nan"))
    cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device="cuda")
    cukda.fwd(*tokens, out=out, initial_state=state, final_state=final_state, cu_seqlens=cu_seqlens)
    for sample in 0, 1023, 1024, 2047, 2048, 2049:
        one = slice(sample, sample + 1)
        want_out = torch.full_like(out[:, one], float("nan"))
        want_state = torch.full_like(final_state[one], float("nan"))
        cukda.fwd(
            *(x[:, one] for x in tokens),
            out=want_out,
            initial_state=state[one],
            final_state=want_state,
        )
        assert error(out[:, one], want_out) <= TOLERANCE[0]
        assert error(final_state[one], want_state) <= TOLERANCE[1]
    assert all(bool(part.isfinite().all()) for part in final_state.split(128))


def error(got, want):
    """‖got − want‖ / ‖want‖ on the GPU, a part at a time."""
    pairs = zip(got.flatten().split(1 << 26), want.flatten().split(1 << 26), strict=True)
    difference, size = np.sum([sums(a.double(), b.double()) for a, b in pairs], axis=0)
    assert np.isfinite(difference) and np.isfinite(size) and size > 0
    return (difference / size) ** 0.5


def sums(a, b):
    return float((a - b).square().sum()), float(b.square().sum())
