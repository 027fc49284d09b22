"""The CPU path: `cukda.reference`, and `cukda.fwd` on arrays of NumPy and of torch on the CPU."""

import itertools
import time

import inputs
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cukda
from cukda import reference

# No input may make NumPy print a warning.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# Errors of the float32 values, out and state. Measured: rand 2.7e-7 and 3.8e-7, slow 8.5e-6 and
# 9.4e-6 (0.5 tanh(x / 2) + 0.5 cancels where a gate is nearly shut), collinear 3.0e-7 and 2.2e-6.
TOLERANCE = {"rand": (8e-7, 1e-6), "slow": (3e-5, 3e-5), "collinear": (1e-6, 6e-6)}
# A call's out is rounded to bf16, its state too when asked: measured 1.67e-3 and 1.66e-3.
BF16_TOLERANCE = 1.75e-3

TAILS = tuple(range(1, 65))


def run(case, final_state=None):
    """`reference.fwd` with float32 outputs, NaN where they are not written."""
    num_states = len(case["q"]) if case["cu_seqlens"] is None else len(case["cu_seqlens"]) - 1
    heads = case["q"].shape[2]
    out = np.full(case["v"].shape, np.nan, np.float32)
    if final_state is None:
        final_state = np.full((num_states, heads, 128, 128), np.nan, np.float32)
    reference.fwd(**case, out=out, final_state=final_state)
    return out, final_state


def check(case, gate="rand"):
    out, state = run(case)
    want_out, want_state = oracle.recurrence(**case)
    out_tolerance, state_tolerance = TOLERANCE[gate]
    assert oracle.error(out, want_out) < out_tolerance
    assert oracle.error(state, want_state) < state_tolerance


def packed(lengths, heads=2, gate="rand", seed=0, pad=0):
    """A case with cu_seqlens, `pad` rows longer than its sequences."""
    case = inputs.make([*lengths, pad], heads, gate, seed)
    case["cu_seqlens"] = case["cu_seqlens"][:-1].copy()
    case["initial_state"] = case["initial_state"][:-1].copy()
    return case


def single(length, heads=1, gate="rand"):
    """A case of one sequence, without cu_seqlens."""
    return inputs.make([length], heads, gate, batch=1)


def replaced(case, rows, value):
    """The case with other values in these rows of every input."""
    case = case | {name: case[name].copy() for name in inputs.TOKENS}
    for name in inputs.TOKENS:
        case[name][:, rows] = value
    return case


def filled(case, values):
    """The case with every element of the named arguments set to a value."""
    return case | {
        name: value if isinstance(case[name], float) else np.full_like(case[name], value)
        for name, value in values.items()
    }


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("lengths", [[1500], [130, 547, 204, 96, 27, 306], [127, 129, 255, 257]])
def test_accuracy(lengths, gate):
    check(packed(lengths, gate=gate), gate)


@pytest.mark.parametrize("gate", ["rand", "slow"])
def test_accuracy_of_a_batch(gate):
    check(inputs.make([200], 3, gate, 1, batch=4), gate)


def test_accuracy_on_one_key():
    check(single(2048, 2, "collinear"), "collinear")


def test_equal_keys_among_random_ones():
    case = single(96, 2)
    for name in "q", "k":
        case[name][:, 40:56] = case[name][:, 40:41]
    check(case)


def test_every_tail_alone_and_packed():
    case = packed(TAILS)
    check(case)
    out, state = run(case)
    for idx, end in enumerate(case["cu_seqlens"][1:]):
        out_alone, state_alone = run(inputs.alone(case, idx))
        np.testing.assert_array_equal(out[:, end - TAILS[idx] : end], out_alone)
        np.testing.assert_array_equal(state[idx : idx + 1], state_alone)


@pytest.mark.parametrize("length", [1, 17])
def test_many_tiny_sequences(length):
    check(packed([length] * 1000, heads=1))


@pytest.mark.parametrize("heads", [1, 3, 13])
def test_heads_are_independent(heads):
    case = single(40, heads)
    out, state = run(case)
    for head in range(heads):
        out_alone, state_alone = run(inputs.pick_heads(case, [head]))
        np.testing.assert_array_equal(out[:, :, [head]], out_alone)
        np.testing.assert_array_equal(state[:, [head]], state_alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_neighbours_and_padding_do_not_leak(value):
    case = packed([17, 30], pad=17)
    out, state = run(case)
    bad_out, bad_state = run(replaced(case, slice(17, None), value))
    np.testing.assert_array_equal(bad_out[:, :17], out[:, :17])
    np.testing.assert_array_equal(bad_state[0], state[0])
    bad_out, bad_state = run(replaced(case, slice(47, None), value))
    np.testing.assert_array_equal(bad_out, out)
    np.testing.assert_array_equal(bad_state, state)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1.0])
@pytest.mark.parametrize("token", [1, 15, 16, 20, 47])
@pytest.mark.parametrize("name", inputs.TOKENS)
def test_causality(name, token, value):
    case = single(48)
    out, _ = run(case)
    later_out, _ = run(inputs.changed(case, name, (0, token), value))
    np.testing.assert_array_equal(later_out[:, :token], out[:, :token])
    assert np.isfinite(later_out[:, :token]).all()


def test_more_tokens_leave_earlier_ones():
    case = single(50)
    out, _ = run(case)
    for length in range(1, 50):
        shorter = inputs.tokens(case, 0, length, case["initial_state"])
        np.testing.assert_array_equal(run(shorter)[0], out[:, :length])


@pytest.mark.parametrize("state_dtype", [None, inputs.BF16, np.float32])
def test_empty_sequences(state_dtype):
    case = packed([0, 17, 0, 47, 0])
    if state_dtype is None:
        case["initial_state"] = np.zeros_like(case["initial_state"])
    else:
        case["initial_state"] = case["initial_state"].astype(state_dtype)
    check(case)
    empty = [0, 2, 4]
    want = case["initial_state"][empty].astype(np.float32)
    if state_dtype is None:
        case["initial_state"] = None
    np.testing.assert_array_equal(run(case)[1][empty], want)
    if state_dtype is not None:
        run(case, final_state=case["initial_state"])
        np.testing.assert_array_equal(case["initial_state"][empty].astype(np.float32), want)


@pytest.mark.parametrize(
    "shape", [(1, 100_000, 0, 128), (2**40, 0, 0, 128), (0, 0, 2**50, 128), (2**31 - 1, 0, 1, 128)]
)
def test_shapes_of_nothing_take_no_time_and_no_memory(shape):
    torch = pytest.importorskip("torch")
    q, out = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    beta = torch.empty(shape[:3], dtype=torch.bfloat16)
    start = time.perf_counter()
    assert cukda.fwd(q, q, q, q, beta, out=out) is out
    assert time.perf_counter() - start < 0.5


def test_nothing_but_empty_sequences():
    case = packed([0, 0, 0], pad=5)
    out, state = run(case)
    assert np.isnan(out).all()
    np.testing.assert_array_equal(state, case["initial_state"].astype(np.float32))


def test_padding_is_not_written():
    case = packed([20, 25, 0, 0], pad=19)
    out, state = run(case)
    assert np.isnan(out[:, 45:]).all()
    assert not np.isnan(out[:, :45]).any()
    np.testing.assert_array_equal(state[2:], case["initial_state"][2:].astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(-4, 60), min_size=1, max_size=6))
def test_any_cu_seqlens_stays_inside(cu):
    case = single(50) | {"initial_state": None, "cu_seqlens": np.array(cu)}
    out, state = run(case)
    want_out, want_state = oracle.recurrence(**case)
    owners = np.zeros(50, int)
    for begin, end in itertools.pairwise(cu):
        owners[np.clip(begin, 0, 50) : np.clip(end, 0, 50)] += 1
    assert np.isnan(out[:, owners == 0]).all()
    if (owners == 1).any():
        assert oracle.error(out[:, owners == 1], want_out[:, owners == 1]) < TOLERANCE["rand"][0]
    if state.size:
        assert oracle.error(state, want_state) < TOLERANCE["rand"][1]


@pytest.mark.parametrize(
    "changes",
    [
        {"lower_bound": 0.0},
        {"lower_bound": -1e-3},
        {"g": 100.0},
        {"g": np.inf},
        {"g": -np.inf},
        {"g": 3e38},
        {"g": -3e38},
        {"g": 3e38, "dt_bias": 3e38},
        {"A_log": 10.0},
        {"A_log": -20.0},
        {"A_log": 200.0, "g": 0.0, "dt_bias": 0.0},
        {"A_log": -200.0, "g": 3e38},
        {"beta": 88.0},
        {"beta": -88.0, "lower_bound": -0.01},
        {"beta": np.inf},
        {"beta": -np.inf, "lower_bound": -0.01},
        {"q": 0.0},
        {"k": 0.0, "lower_bound": -0.01},
        {"k": 0.0, "g": np.inf, "lower_bound": -0.01},
        {"scale": 0.0},
        {"scale": -2.5},
    ],
    ids=str,
)
def test_extreme_values(changes):
    check(filled(single(50), changes))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("A_log", [-200.0, 200.0])
def test_finite_gates_beyond_float32_give_no_nan(A_log, sign):
    largest = {"g": 3e38 * sign, "dt_bias": 3e38 * sign, "A_log": A_log}
    for array in run(filled(single(20), largest)):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("names", ["q", "k", "qk"])
@pytest.mark.parametrize("magnitude", [1e-20, 1e18, 3e37])
def test_magnitudes(names, magnitude, from_zero):
    case = single(50)
    if from_zero:
        case["initial_state"] = None
    for name in names:
        case[name] = (case[name].astype(np.float32) * np.float32(magnitude)).astype(inputs.BF16)
        case[name][:, 20] = 0
    check(case)


@pytest.mark.parametrize(("q", "scale", "v"), [(1e-20, 1e-30, 1e30), (1e-30, 3e38, 1)])
def test_scale_and_queries_that_leave_float32_together(q, scale, v):
    case = single(50)
    case["scale"] = scale
    case["initial_state"] = None
    for name, factor in (("q", q), ("v", v)):
        case[name] = (case[name].astype(np.float32) * np.float32(factor)).astype(inputs.BF16)
    check(case)


@pytest.mark.parametrize("gate", ["rand", "slow"])
def test_large_initial_state(gate):
    case = single(100, 2, gate)
    case["initial_state"] = (case["initial_state"].astype(np.float32) * 1e7).astype(np.float32)
    check(case, gate)


def test_each_channel_of_a_mixed_head():
    case = single(200)
    case["dt_bias"][:, ::2] = 20.0
    case["dt_bias"][:, 1::2] = -20.0
    _, state = run(case)
    _, want = oracle.recurrence(**case)
    for channel in range(128):
        assert oracle.error(state[..., channel], want[..., channel]) < TOLERANCE["rand"][1]


@pytest.mark.parametrize("split", [1, 50, 64])
def test_split_run_equals_one_run(split):
    case = single(130, 2)
    out, state = run(case)
    first_out, carry = run(inputs.tokens(case, 0, split, case["initial_state"]))
    second_out, split_state = run(inputs.tokens(case, split, 130, carry))
    out_tolerance, state_tolerance = TOLERANCE["rand"]
    assert oracle.error(np.concatenate([first_out, second_out], axis=1), out) < out_tolerance
    assert oracle.error(split_state, state) < state_tolerance


def test_inputs_are_kept_and_runs_repeat():
    case = packed([33, 70])
    before = {name: np.array(array, copy=True) for name, array in case.items()}
    first, second = run(case), run(case)
    for name, array in before.items():
        np.testing.assert_array_equal(case[name], array)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_time_of_a_real_size():
    case = single(2048, 8)
    start = time.perf_counter()
    run(case)
    assert time.perf_counter() - start < 10


def test_sigmoid():
    x = np.array([np.nan, np.inf, -np.inf, 0, 1, -1, 3e38, -3e38, 1e-40], np.float32)
    got = reference.sigmoid(x)
    assert got.dtype == np.float32
    assert np.isnan(got[0])
    assert got[1:4].tolist() == [1.0, 0.0, 0.5]
    np.testing.assert_allclose(got[4:6], [0.7310585786, 0.2689414214], rtol=3e-7)
    assert got[6:].tolist() == [1.0, 0.0, 0.5]


def test_sigmoid_of_more_dimensions_than_numpy_has():
    torch = pytest.importorskip("torch")
    x = torch.zeros([1] * 65, dtype=torch.bfloat16)
    for y in cukda.sigmoid(x), cukda.sigmoid_ext.sigmoid_tanh_fp32(x):
        assert y.shape == x.shape and y.flatten().tolist() == [0.5]


@pytest.mark.parametrize(
    "dtype, signalling_nan",
    [(np.float32, 0x7FA00000), (np.float16, 0x7D00), (inputs.BF16, 0x7FA0)],
)
def test_sigmoid_raises_no_error_that_numpy_is_told_to_raise(dtype, signalling_nan):
    with np.errstate(all="ignore"):
        x = np.float32([np.nan, np.inf, -np.inf, 3e38, 1e-40, -17, 0]).astype(dtype)
    # Every operation flags it.
    x.view(f"u{x.itemsize}")[-1] = signalling_nan
    with np.errstate(all="raise"):
        for got in cukda.sigmoid(x), cukda.sigmoid_ext.sigmoid_tanh_fp32(x):
            assert np.isnan(got[[0, -1]].astype(np.float32)).all()
            assert got[1:5].tolist() == [1.0, 0.0, 1.0, 0.5]


def to_numpy(array):
    return array


def to_torch(array):
    """The array as a CPU tensor."""
    torch = pytest.importorskip("torch")
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype == inputs.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_float32(array):
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float().numpy()


def call(convert, case, **changes):
    return cukda.fwd(**{name: convert(value) for name, value in (case | changes).items()})


LIBRARIES = pytest.mark.parametrize("convert", [to_numpy, to_torch])


@LIBRARIES
@pytest.mark.parametrize("final_dtype", [None, inputs.BF16, np.float32])
@pytest.mark.parametrize("initial_dtype", [None, inputs.BF16, np.float32])
@pytest.mark.parametrize("cu_dtype", [None, np.int32, np.int64])
def test_state_mixes(convert, initial_dtype, final_dtype, cu_dtype):
    case = inputs.make([50], 2, "rand", 0, batch=2) if cu_dtype is None else packed([31, 50])
    if cu_dtype is not None:
        case["cu_seqlens"] = case["cu_seqlens"].astype(cu_dtype)
    shape = case["initial_state"].shape
    if initial_dtype is None:
        case["initial_state"] = None
    else:
        case["initial_state"] = case["initial_state"].astype(initial_dtype)
    want_out, want_state = oracle.recurrence(**case)
    state = None if final_dtype is None else convert(np.full(shape, np.nan, final_dtype))
    out = convert(np.full_like(case["v"], np.nan))
    assert call(convert, case, out=out, final_state=state) is out
    assert oracle.error(as_float32(out), want_out) < BF16_TOLERANCE
    if final_dtype is not None:
        tolerance = TOLERANCE["rand"][1] if final_dtype == np.float32 else BF16_TOLERANCE
        assert oracle.error(as_float32(state), want_state) < tolerance


@LIBRARIES
@pytest.mark.parametrize("dtype", [inputs.BF16, np.float32])
def test_state_in_place(convert, dtype):
    case = packed([31, 0, 50])
    case["initial_state"] = case["initial_state"].astype(dtype)
    _, want = oracle.recurrence(**case)
    state = convert(case["initial_state"].copy())
    call(convert, case, out=None, initial_state=state, final_state=state)
    tolerance = TOLERANCE["rand"][1] if dtype == np.float32 else BF16_TOLERANCE
    assert oracle.error(as_float32(state), want) < tolerance


@LIBRARIES
def test_defaults(convert):
    case = single(40, 2)
    tokens = {name: case[name] for name in inputs.TOKENS}
    out = cukda.fwd(*(convert(array) for array in tokens.values()))
    assert type(out) is type(convert(case["v"]))
    assert out.dtype == convert(case["v"]).dtype
    assert oracle.error(as_float32(out), oracle.recurrence(**tokens)[0]) < BF16_TOLERANCE


@LIBRARIES
def test_dt_bias_flat_and_scalars_of_any_kind(convert):
    case = single(40, 2) | {"scale": 2.0, "lower_bound": -3.0}
    want = as_float32(call(convert, case, out=None))
    case["dt_bias"] = case["dt_bias"].reshape(-1)
    for kind in int, np.float32, np.float64, np.int32:
        got = call(convert, case, out=None, scale=kind(2), lower_bound=kind(-3))
        np.testing.assert_array_equal(as_float32(got), want)


@LIBRARIES
@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0)])
def test_no_tokens_or_no_batch(convert, shape):
    tokens = np.zeros((*shape, 2, 128), inputs.BF16)
    initial = np.random.default_rng(0).standard_normal((shape[0], 2, 128, 128)).astype(np.float32)
    state = convert(np.full_like(initial, np.nan))
    case = dict.fromkeys("qkvg", tokens) | {"beta": tokens[..., 0].copy()}
    out = call(convert, case, initial_state=initial, final_state=state)
    assert tuple(out.shape) == tokens.shape
    np.testing.assert_array_equal(as_float32(state), initial)


def test_call_of_the_contract_on_the_cpu():
    torch = pytest.importorskip("torch")
    from cukda import fwd

    B, T, H, D = 1, 32, 8, 128
    q = torch.randn(B, T, H, D, dtype=torch.bfloat16)
    k = torch.randn_like(q)
    v = torch.randn_like(q)
    g = torch.randn_like(q)
    beta = torch.randn(B, T, H, dtype=torch.bfloat16)
    out = torch.empty_like(v)
    A_log = torch.zeros(H, dtype=torch.float32)
    dt_bias = torch.zeros(H, D, dtype=torch.float32)
    fwd(q, k, v, g, beta, 0.5, out, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0)
    tokens = (array.float().numpy() for array in (q, k, v, g, beta))
    want, _ = oracle.recurrence(*tokens, scale=0.5)
    assert oracle.error(out.float().numpy(), want) < BF16_TOLERANCE
