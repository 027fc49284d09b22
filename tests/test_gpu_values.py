"""Values at the edges: alike keys, gates at their ends, great and small magnitudes, scalars."""

import hardware
import inputs
import ml_dtypes
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state, against the recurrence.
TOLERANCE = {
    "values": (1e-2, 1e-2),
    "alike keys": (2e-2, 2e-2),
}
INF = float("inf")


@pytest.mark.parametrize("begin", [0, 24, 31, 40])
@pytest.mark.parametrize("num_equal", [16, 33])
def test_equal_keys_among_random_ones(begin, num_equal, variant):
    case = inputs.make([100], 4, seed=30, batch=1)
    rows = np.s_[:, begin : begin + num_equal]
    for name, value in [("k", case["k"][:, :1]), ("q", case["k"][:, :1]), ("g", -12), ("beta", 8)]:
        case = inputs.changed(case, name, rows, value)
    hardware.check(case, *TOLERANCE["alike keys"])


@pytest.mark.parametrize("kind", ["noise", "signs", "two keys", "other queries", "long", "beta 88"])
def test_alike_keys(kind):
    num_tokens = 1000
    case = inputs.make([num_tokens], 2, "collinear", seed=31, batch=1)
    rng = np.random.default_rng(31)
    k = case["k"].astype(np.float32)
    if kind == "noise":
        k += 1e-3 * rng.standard_normal(k.shape, dtype=np.float32)
    elif kind == "signs":
        k[:, 1::2] *= -1
    elif kind == "two keys":
        k[:, 1::2] = np.roll(k[:, 1::2], 1, axis=-1)
    elif kind == "long":
        k *= 300
    elif kind == "beta 88":
        case["beta"][:] = 88
    case["k"] = k.astype(inputs.BF16)
    if kind == "other queries":
        case["q"] = rng.standard_normal(k.shape, dtype=np.float32).astype(inputs.BF16)
    else:
        case["q"] = case["k"]
    hardware.check(case, *TOLERANCE["alike keys"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"g": 30}, id="all at the bound"),
        pytest.param({"g": 3e38}, id="g 3e38"),
        pytest.param({"g": INF}, id="g inf"),
        pytest.param({"g": -30}, id="no decay"),
        pytest.param({"g": -3e38}, id="g -3e38"),
        pytest.param({"g": -INF}, id="g -inf"),
        pytest.param({"lower_bound": 0.0}, id="bound 0"),
        pytest.param({"lower_bound": -0.0}, id="bound -0"),
        pytest.param({"lower_bound": 0.0, "g": INF}, id="bound 0, g inf"),
        pytest.param({"lower_bound": -1e-3}, id="bound -1e-3"),
        pytest.param({"lower_bound": -1.5}, id="bound -1.5"),
        pytest.param({"A_log": 10.0}, id="A_log 10"),
        pytest.param({"A_log": -20.0}, id="A_log -20"),
        pytest.param({"A_log": 10.0, "g": 3e38}, id="A_log 10, g 3e38"),
        pytest.param({"A_log": 100.0}, id="A_log 100"),
        pytest.param({"A_log": 100.0, "g": 0, "dt_bias": 0}, id="A_log 100, g 0"),
        pytest.param({"A_log": -200.0}, id="A_log -200"),
        pytest.param({"A_log": -80.0, "g": 3e38}, id="A_log -80, g 3e38"),
        pytest.param({"A_log": -20.0, "g": -INF}, id="A_log -20, g -inf"),
        pytest.param({"dt_bias": 3e38}, id="dt_bias 3e38"),
        pytest.param({"beta": 88}, id="beta 88"),
        # Not much decay either, since float32 cannot hold what 200 tokens of it leave.
        pytest.param({"beta": -88, "lower_bound": -0.01}, id="beta -88"),
        pytest.param({"beta": INF}, id="beta inf"),
        pytest.param({"beta": -INF, "lower_bound": -0.01}, id="beta -inf"),
        pytest.param({"beta": 3e38, "g": 30}, id="beta 3e38 at the bound"),
        pytest.param({"beta": INF, "g": -INF}, id="beta inf, no decay"),
    ],
)
def test_gate_range(changes):
    case = inputs.make([200], 2, seed=32, batch=1)
    for name, value in changes.items():
        case = (
            {**case, name: value}
            if name == "lower_bound"
            else inputs.changed(case, name, slice(None), value)
        )
    hardware.check(case, *TOLERANCE["values"])


@pytest.mark.parametrize("t", [4, 15, 20])
@pytest.mark.parametrize(
    ("dt_bias", "A_log"), [(3e38, 2.0), (100.0, 90.0), (3e38, 90.0), (INF, 0.0), (INF, 2.0)]
)
def test_open_gate_against_a_great_bias(dt_bias, A_log, t):
    """g = -inf at one token: 1 there, by the formula, for any finite dt_bias. Earlier rows do not
    see it, whatever dt_bias is.
    """
    case = inputs.make([40], 2, seed=45, batch=1)
    case["dt_bias"][:], case["A_log"][:] = dt_bias, A_log
    dirty = inputs.changed(case, "g", np.s_[:, t], -INF)
    clean, out = (hardware.host(hardware.run(x)[0]) for x in (case, dirty))
    assert hardware.same_bits(out[:, :t], clean[:, :t])
    if np.isfinite(dt_bias):
        # Which refuses NaN.
        hardware.check(dirty, *TOLERANCE["values"])


def test_gate_where_g_and_bias_cancel():
    """A steep sigmoid at exactly 0.5. Products of each, rounded apart, would miss it by up to 0.08,
    and the result by 3e-2.
    """
    case = inputs.make([200], 2, seed=46, batch=1)
    bias = np.random.default_rng(46).uniform(100, 400, case["dt_bias"].shape).astype(inputs.BF16)
    case["g"][:] = bias
    case.update(dt_bias=-bias.astype(np.float32), lower_bound=-1.0)
    case["A_log"][:] = 10
    hardware.check(case, *TOLERANCE["values"])


def test_gates_of_all_kinds_at_once():
    """Every second token at one end of its range, in a pattern that differs by channel."""
    case = inputs.make([200], 2, seed=33, batch=1)
    rng = np.random.default_rng(33)
    ends = np.array([-INF, -3e38, -30, 0, 30, 3e38, INF], np.float32).astype(inputs.BF16)
    case["g"][:, ::2] = rng.choice(ends, case["g"][:, ::2].shape)
    case["beta"][:, ::3] = rng.choice(ends, case["beta"][:, ::3].shape)
    hardware.check(case, *TOLERANCE["values"])


@pytest.mark.parametrize("lower_bound", [-5.46, -5.001, 1, 1e-3, float("nan"), INF, -INF])
def test_lower_bound_out_of_range(lower_bound):
    case = inputs.make([20], 2, seed=34, batch=1)
    with pytest.raises(ValueError, match=r"^lower_bound: expected .*got "):
        hardware.run({**case, "lower_bound": lower_bound})


@pytest.mark.parametrize("num_tokens", [16, 40, 700])
def test_mixed_channels(num_tokens):
    """Channels at the bound beside channels that hardly decay: each right by its own measure."""
    case = inputs.make([num_tokens], 2, seed=35, batch=1)
    case["A_log"][:] = 0
    case["dt_bias"][:, 0::2] = 30
    case["dt_bias"][:, 1::4] = -12
    case["dt_bias"][:, 3::4] = -30
    out, final_state = hardware.run(case)
    want_out, want_state = hardware.want(case)
    assert oracle.error(out, want_out) <= TOLERANCE["values"][0]
    got, want = hardware.host(final_state), hardware.host(want_state)
    worst = max(
        oracle.error(got[:, h, :, c], want[:, h, :, c])
        for h in range(got.shape[1])
        for c in range(got.shape[3])
    )
    # Sums over 128 rows only, and one bf16 rounding of a key is up to 4e-3.
    assert worst <= 2e-2


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize(
    ("q_scale", "k_scale"),
    [
        *[(1e18, 1), (1, 1e18), (1e18, 1e18)],
        *[(1e-20, 1), (1, 1e-20), (1e-20, 1e-20), (1e18, 1e-20)],
        *[(1e-11, 1), (1e-14, 1), (1e-15, 1), (1e-16, 1)],
        # The sum of squares is nearly all that float32 holds, or more.
        *[(1.8e19, 1.8e19), (1.9e19, 1.9e19), (5e19, 5e19), (1e30, 1e30)],
    ],
)
def test_lengths_of_queries_and_keys(q_scale, k_scale, gate):
    case = inputs.make([50], 2, gate, seed=36, batch=1)
    for name, factor in ("q", q_scale), ("k", k_scale):
        case[name] = (case[name].astype(np.float32) * np.float32(factor)).astype(inputs.BF16)
    hardware.check(case, *TOLERANCE["values"])


@pytest.mark.parametrize("part", [5e-4, 2.0**-16])
def test_small_element_of_a_query_at_the_bound(part):
    """The query sees the key only through an element that is small beside its length, after up to
    16 tokens at the bound; each row is compared by itself.
    """
    case = inputs.make([48], 2, seed=46, batch=1)
    case["q"][:], case["k"][:], case["initial_state"][:] = 0, 0, 0
    case["q"][..., 0], case["q"][..., 1], case["k"][..., 1] = 1, part, 1
    case["g"][:] = 30
    out, want = hardware.run(case)[0], hardware.want(case)[0]
    for t in range(48):
        assert oracle.error(out[:, t], want[:, t]) <= TOLERANCE["values"][0], t


@pytest.mark.parametrize("scale", [1e-10, 1e-19, -1e30])
def test_scale_with_short_queries(scale):
    case = inputs.make([40], 2, seed=47, batch=1)
    case["q"] = (case["q"].astype(np.float32) * np.float32(1e-11)).astype(inputs.BF16)
    case["scale"] = scale
    hardware.check(case, *TOLERANCE["values"])


@pytest.mark.parametrize("gate", ["rand", "slow"])
def test_lengths_that_differ_by_token(gate):
    """Rows of 1e18, 1 and 1e-20 in one chunk; out is compared row by row of its own size."""
    case = inputs.make([60], 2, gate, seed=37, batch=1)
    sizes = np.float32([1e18, 1, 1e-20])
    for name, shift in ("q", 0), ("k", 1):
        factor = np.resize(np.roll(sizes, shift), 60)[None, :, None, None]
        case[name] = (case[name].astype(np.float32) * factor).astype(inputs.BF16)
    out, final_state = hardware.run(case)
    want_out, want_state = hardware.want(case)
    assert oracle.error(final_state, want_state) <= TOLERANCE["values"][1]
    for first in range(3):
        rows = np.s_[:, first::3]
        assert oracle.error(out[rows], want_out[rows]) <= TOLERANCE["values"][0], sizes[first]


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("rows", [slice(None), slice(3, 20), slice(0, 1), slice(31, 33)], ids=str)
def test_zero_rows(rows, name, gate):
    case = inputs.changed(inputs.make([50], 2, gate, seed=38, batch=1), name, np.s_[:, rows], 0)
    if rows == slice(None):
        # Else float32 cannot hold what the decay leaves of the state.
        case["lower_bound"] = -0.05
    out, final_state = hardware.run(case)
    want_out, want_state = hardware.want(case)
    assert oracle.error(out, want_out) <= TOLERANCE["values"][0]
    assert oracle.error(final_state, want_state) <= TOLERANCE["values"][1]
    if name == "q":
        assert not hardware.host(out)[:, rows].astype(np.float32).any()


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_size_of_the_state(size, gate):
    case = inputs.make([50], 2, gate, seed=39, batch=1)
    case["initial_state"] *= np.float32(size)
    hardware.check(case, *TOLERANCE["values"])


def test_size_of_the_values():
    case = inputs.make([50], 2, "slow", seed=40, batch=1)
    case["v"] = (case["v"].astype(np.float32) * np.float32(1e20)).astype(inputs.BF16)
    hardware.check(case, *TOLERANCE["values"])


@pytest.mark.parametrize("scale", [-0.5, 1.0, 300.0, 1e-10, 1e-12, -1e-13, 1e-20, 4e-35])
def test_scale(scale):
    case = inputs.make([50], 2, seed=41, batch=1)
    hardware.check({**case, "scale": scale}, *TOLERANCE["values"])


@pytest.mark.parametrize("scale", [1e-12, 9e-13, 1e-20, 1e-35])
def test_scale_with_the_fastest_gate(scale):
    """What brings q down must leave room for the decay."""
    case = inputs.make([50], 2, seed=43, batch=1)
    case = inputs.changed(case, "g", np.s_[:], 30)
    hardware.check({**case, "scale": scale}, *TOLERANCE["values"])


@pytest.mark.parametrize("scale", [1e-12, 1e-15, 1e-17, 1e-19])
def test_scale_with_short_queries_and_a_large_state(scale):
    """What comes of scale, norm and state is a normal number; scale times the norm is none."""
    case = inputs.make([50], 2, seed=59, batch=1)
    case["q"] = (case["q"].astype(np.float32) * np.float32(1e-20)).astype(inputs.BF16)
    case["initial_state"] = case["initial_state"] * np.float32(1e6)
    hardware.check({**case, "scale": scale}, *TOLERANCE["values"])


@pytest.mark.parametrize("size", [1e-32, 1e-30])
def test_small_values(size):
    """What they add to the state counts from the first on."""
    case = inputs.make([50], 2, seed=61, batch=1)
    case["v"] = (case["v"].astype(np.float32) * np.float32(size)).astype(inputs.BF16)
    case["initial_state"] = case["initial_state"] * np.float32(0)
    hardware.check(case, *TOLERANCE["values"])


def test_scale_zero():
    case = inputs.make([50], 2, seed=41, batch=1)
    out, final_state = hardware.run({**case, "scale": 0})
    assert not hardware.host(out).astype(np.float32).any()
    assert hardware.same_bits(final_state, hardware.run(case)[1])


def test_all_zero():
    case = inputs.make([50], 2, seed=42, batch=1)
    for name in (*inputs.TOKENS, "A_log", "dt_bias", "initial_state"):
        case = inputs.changed(case, name, slice(None), 0)
    out, final_state = hardware.run(case)
    assert not hardware.host(out).astype(np.float32).any()
    assert not hardware.host(final_state).any()


SCALARS = [int, float, np.int64, np.int8, np.float16, np.float32, np.float64, np.array]


@pytest.mark.parametrize("kind", [*SCALARS, ml_dtypes.bfloat16, "0-d float32"])
@pytest.mark.parametrize(("name", "number"), [("scale", 2), ("lower_bound", -4)])
def test_scalars_of_all_kinds(name, number, kind):
    case = inputs.make([50], 2, seed=43, batch=1)
    value = np.array(number, np.float32) if kind == "0-d float32" else kind(number)
    for got, want in zip(
        hardware.run({**case, name: value}),
        hardware.run({**case, name: float(number)}),
        strict=True,
    ):
        assert hardware.same_bits(got, want)


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_scalars_of_torch(name, torch):
    case = inputs.make([50], 2, seed=43, batch=1)
    value = torch.tensor(-4.0)
    for got, want in zip(
        hardware.run({**case, name: value}), hardware.run({**case, name: -4.0}), strict=True
    ):
        assert hardware.same_bits(got, want)
    # It would take a synchronisation to read.
    with pytest.raises(TypeError, match=f"^{name}: "):
        hardware.run({**case, name: value.cuda()})
