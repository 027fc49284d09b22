"""The contract's accuracy table, and its two examples as they stand there."""

import hardware
import inputs
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state.
TOLERANCE = {
    "rand": (4.3e-3, 2.8e-3),
    "slow": (4.7e-3, 3.7e-3),
    "collinear": (1.5e-2, 2e-2),
    # So few rows that their errors do not average out.
    "example": (6e-3, 6e-3),
}
MIXED = (1300, 547, 2048, 963, 271, 3063)


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize(
    ("seq_lens", "heads", "batch"),
    [
        ((8192,), 4, 1),
        ((2048,), 12, 1),
        ((1024,), 3, 4),
        (MIXED, 3, None),
        ((64,) * 16, 8, None),
    ],
)
def test_table(seq_lens, heads, batch, gate):
    hardware.check(inputs.make(seq_lens, heads, gate, seed=1, batch=batch), *TOLERANCE[gate])


@pytest.mark.parametrize("gate", ["rand", "slow", "collinear"])
def test_every_variant(gate, variant):
    case = inputs.make([1024, 500, 33, 0, 491], 3, gate, seed=6)
    hardware.check(case, *TOLERANCE[gate])


@pytest.fixture(scope="module")
def full_size():
    """The tokens of both layouts below; they take a while to make."""
    return inputs.make(MIXED, 96, seed=2)


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("layout", ["packed", "one sequence"])
def test_full_size_on_some_heads(full_size, layout, gate):
    case = dict(full_size)
    if layout == "one sequence":
        case.update(cu_seqlens=None, initial_state=case["initial_state"][:1])
    if gate == "slow":
        small = inputs.make([1], 96, "slow")
        case.update(A_log=small["A_log"], dt_bias=small["dt_bias"])
    out, final_state = hardware.run(case)
    heads = [0, 47, 95]
    want_out, want_state = hardware.want(inputs.pick_heads(case, heads))
    out, final_state = hardware.host(out), hardware.host(final_state)
    assert oracle.error(out[:, :, heads], want_out) <= TOLERANCE[gate][0]
    assert oracle.error(final_state[:, heads], want_state) <= TOLERANCE[gate][1]
    # No head is left over, without a recurrence for each.
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(final_state).all()


@pytest.mark.parametrize("heads", [2, 96])
def test_one_key_for_all_tokens(heads):
    case = inputs.make([2048], heads, "collinear", seed=3, batch=1)
    out, final_state = (hardware.host(x) for x in hardware.run(case))
    # Heads differ in nothing but key and value: two tell as much as all.
    some = [0, heads - 1]
    want_out, want_state = hardware.want(inputs.pick_heads(case, some))
    assert oracle.error(out[:, :, some], want_out) <= TOLERANCE["collinear"][0]
    assert oracle.error(final_state[:, some], want_state) <= TOLERANCE["collinear"][1]


def test_the_contracts_example_with_torch(torch):
    torch.manual_seed(0)
    # fmt: off
    from cukda import fwd
    B, T, H, D = 1, 32, 8, 128
    q = torch.randn(B, T, H, D, dtype=torch.bfloat16, device="cuda")
    k = torch.randn_like(q); v = torch.randn_like(q); g = torch.randn_like(q)  # noqa: E702
    beta = torch.randn(B, T, H, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(v)
    fwd(q, k, v, g, beta, 0.5, out,
        A_log=torch.zeros(H, dtype=torch.float32, device="cuda"),
        dt_bias=torch.zeros(H, D, dtype=torch.float32, device="cuda"), lower_bound=-5.0)
    # fmt: on
    case = [hardware.host(x) for x in (q, k, v, g, beta)]
    want_out, _ = hardware.want(dict(zip(inputs.TOKENS, case, strict=True), scale=0.5))
    assert oracle.error(hardware.host(out), want_out) <= TOLERANCE["example"][0]


def test_the_contracts_example_with_cupy(cupy):
    from cukda import fwd

    B, T, H, D = 1, 32, 8, 128
    rng = np.random.default_rng(4)

    # On the host: cupy.random needs cuRAND, which the contract does not ask for.
    def randn(*shape):
        return cupy.asarray(rng.standard_normal(shape).astype(inputs.BF16))

    q, k, v, g = (randn(B, T, H, D) for _ in range(4))
    beta = randn(B, T, H)
    out = hardware.nans(v.shape, "bfloat16")
    fwd(
        *(q, k, v, g, beta, 0.5, out),
        A_log=cupy.zeros(H, dtype=cupy.float32),
        dt_bias=cupy.zeros((H, D), dtype=cupy.float32),
        lower_bound=-5.0,
    )
    want_out, _ = hardware.want({"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 0.5})
    assert oracle.error(out, want_out) <= TOLERANCE["example"][0]


def test_the_contracts_sigmoid_example(torch):
    torch.manual_seed(0)
    # fmt: off
    from cukda import sigmoid_ext
    result = sigmoid_ext.sigmoid_tanh_fp32(torch.randn(1024, dtype=torch.float32, device="cuda"))
    # fmt: on
    assert result.dtype is torch.float32 and result.shape == (1024,) and result.is_cuda
    assert bool(((result > 0) & (result < 1)).all())


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_defaults(library, cupy, torch):
    """out=None allocates in the caller's library; all that can be left out is."""
    import cukda

    case = inputs.make([100], 3, seed=5, batch=2)
    q, k, v, g, beta = (
        hardware.upload(case)[n] if library == "cupy" else hardware.torch_case(case)[n]
        for n in inputs.TOKENS
    )
    # So that the allocation gets a block that is full of NaN.
    stale = (
        hardware.nans(q.shape, "bfloat16") if library == "cupy" else hardware.torch_nans(q.shape)
    )
    del stale
    out = cukda.fwd(q, k, v, g, beta)
    assert type(out) is type(q) and out.dtype == q.dtype and out.shape == q.shape
    want_out, _ = hardware.want({n: case[n] for n in inputs.TOKENS})
    assert oracle.error(hardware.host(out), want_out) <= TOLERANCE["example"][0]
    # The flat form of dt_bias, and the defaults spelled out.
    explicit = hardware.run(
        {
            **case,
            "A_log": np.zeros(3, np.float32),
            "dt_bias": np.zeros(3 * inputs.HEAD_DIM, np.float32),
            "initial_state": None,
        },
        state=None,
    )
    assert hardware.same_bits(out, explicit[0])
