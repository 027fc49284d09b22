"""cukda.step without a GPU: the CPU path, what is refused, strides, padding."""

import decoding
import numpy as np
import oracle
import pytest
from inputs import BF16, TOKENS

import cukda

# Greatest ‖got − want‖ / ‖want‖ of out, rounded to bfloat16, and of a float32 or bfloat16 pool.
OUT_TOLERANCE = 2.5e-3
STATE_TOLERANCE = {"float32": 1e-6, "bfloat16": 2.5e-3}


def run(case):
    """(out, pool) of NumPy arrays, the case's own pool let be."""
    case = {**case, "state": case["state"].copy()}
    out = np.full(case["q"].shape, np.nan, BF16)
    tokens = [case.pop(name) for name in TOKENS]
    pool = case["state"]
    assert cukda.step(*tokens, **case, out=out) is out
    return out, pool


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_against_the_recurrence(num_sequences, num_tokens, gate, state):
    case = decoding.make(num_sequences, num_tokens, 3, num_tokens, state, gate)
    out, pool = run(case)
    want_out, want_pool = decoding.want(case)
    assert oracle.error(out, want_out) < OUT_TOLERANCE
    assert oracle.error(pool, want_pool) < STATE_TOLERANCE[state]
    others = np.setdiff1d(np.arange(len(pool)), case["state_indices"])
    assert len(others) == decoding.SPARE
    assert np.array_equal(pool[others], case["state"][others])


def test_without_indices_each_sequence_has_its_own_state():
    case = decoding.make(4, 2, 2)
    ordered = {**case, "state_indices": np.arange(4, dtype=np.int32)}
    for got, expected in zip(run({**case, "state_indices": None}), run(ordered), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("padding", decoding.PADDING)
def test_padding_leaves_out_and_states_alone(padding):
    decoding.check_padding(run, padding)


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 2, 0)])
def test_any_strides(axes):
    case = decoding.make(3, 2, 4)
    expected = run(case)
    apart = {name: decoding.strided(case[name], axes) for name in ("q", "k", "v", "g")}
    apart["beta"] = np.repeat(case["beta"], 2, axis=-1)[..., ::2]
    state = decoding.strided(case["state"], axes)
    out = decoding.strided(np.full(case["q"].shape, np.nan, BF16), axes)
    apart["A_log"] = np.repeat(case["A_log"], 3)[::3]
    apart["dt_bias"] = decoding.strided(case["dt_bias"], (0,))
    options = {n: case[n] for n in ("state_indices", "scale", "lower_bound")}
    assert not any(x.flags.c_contiguous for x in (*apart.values(), state, out))
    assert cukda.step(**apart, **options, state=state, out=out) is out
    assert np.array_equal(out, expected[0]) and np.array_equal(state, expected[1])


def test_one_step_after_the_other_is_one_scan():
    case = decoding.make(2, 16, 2, gate="slow")
    out, pool = run(case)
    parts, state = [], case["state"]
    for rows in (slice(0, 1), slice(1, 8), slice(8, 16)):
        part = case | {name: case[name][:, rows] for name in TOKENS} | {"state": state}
        got, state = run(part)
        parts.append(got)
    assert oracle.error(np.concatenate(parts, axis=1), out.astype(np.float64)) < 1e-3
    assert oracle.error(state, pool.astype(np.float64)) < 1e-6


def test_torch_arrays():
    torch = pytest.importorskip("torch")
    case = decoding.make(3, 2, 2)
    expected = run(case)

    def tensor(x):
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == BF16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())

    given = {name: tensor(x) for name, x in case.items()}
    out = cukda.step(**given)
    assert np.array_equal(out.view(torch.int16).numpy(), expected[0].view(np.int16))
    assert np.array_equal(given["state"].numpy(), expected[1])


def test_nothing_to_do():
    for num_sequences, heads in ((0, 3), (2, 0)):
        case = decoding.make(num_sequences, 1, heads)
        out, pool = run(case)
        assert out.shape == (num_sequences, 1, heads, 128)
        assert np.array_equal(pool, case["state"])


def change(case, **changes):
    return {**case, **changes}


F32 = np.float32
WRONG = [
    ("q", lambda c: c["q"][0], ValueError, "q: expected shape (N, T, H, 128) with T from 1 to 16"),
    (
        "q",
        lambda c: c["q"].repeat(9, 1),
        ValueError,
        "q: expected shape (N, T, H, 128) with T from",
    ),
    ("q", lambda c: c["q"][:, :0], ValueError, "q: expected shape (N, T, H, 128) with T from 1"),
    ("q", lambda c: c["q"].astype(F32), TypeError, "q: expected dtype bfloat16, got float32"),
    ("k", lambda c: c["k"][:, :1], ValueError, "k: expected shape (3, 2, 2, 128), got (3, 1, 2"),
    ("v", lambda c: c["v"][..., ::-1], ValueError, "v: expected a contiguous last axis, got strid"),
    ("g", lambda c: c["g"].astype(F32), TypeError, "g: expected dtype bfloat16, got float32"),
    ("beta", lambda c: c["beta"][..., None], ValueError, "beta: expected shape (3, 2, 2), got (3"),
    ("state", lambda c: c["state"][0], ValueError, "state: expected shape (P, 2, 128, 128), got"),
    ("state", lambda c: c["state"][:, :1], ValueError, "state: expected shape (P, 2, 128, 128), g"),
    ("state", lambda c: c["state"].astype("f8"), TypeError, "state: expected dtype bfloat16 or f"),
    (
        "state",
        lambda c: np.broadcast_to(c["state"][:1], c["state"].shape),
        ValueError,
        "state: expected rows side by side, no element twice, got strides (0, ",
    ),
    (
        "state_indices",
        lambda c: c["state_indices"].astype(np.int64),
        TypeError,
        "state_indices: expected dtype int32, got int64",
    ),
    (
        "state_indices",
        lambda c: c["state_indices"][:2],
        ValueError,
        "state_indices: expected shape (3,), got (2,)",
    ),
    ("scale", lambda c: "x", TypeError, "scale: expected a real number, got str"),
    ("scale", lambda c: np.inf, ValueError, "scale: expected a finite number in float32's range"),
    (
        "out",
        lambda c: c["q"],
        ValueError,
        "out: expected memory of its own, got an array that overlaps q",
    ),
    ("out", lambda c: np.zeros((3, 2, 2, 128), F32), TypeError, "out: expected dtype bfloat16, go"),
    ("A_log", lambda c: c["A_log"][:1], ValueError, "A_log: expected shape (2,), got (1,)"),
    ("dt_bias", lambda c: c["dt_bias"][:1], ValueError, "dt_bias: expected shape (2, 128) or (256"),
    ("lower_bound", lambda c: -6, ValueError, "lower_bound: expected a number in [-5, 0], got -6"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "message"), WRONG)
def test_what_is_wrong_is_named(name, wrong, error, message):
    case = decoding.make(3, 2, 2)
    before = case["state"].copy()
    with pytest.raises(error) as caught:
        cukda.step(**change(case, **{name: wrong(case)}))
    assert str(caught.value).startswith(message)
    assert np.array_equal(case["state"], before)


def test_too_few_states_without_indices():
    case = change(decoding.make(3, 2, 2), state_indices=None)
    case["state"] = case["state"][:2]
    with pytest.raises(ValueError, match="state: expected a state for each of 3 sequences, or"):
        cukda.step(**case)


def test_states_overlap_no_input():
    case = decoding.make(2, 1, 1)
    memory = np.zeros(5 * 128 * 128, np.float32)
    case["state"] = memory.reshape(5, 1, 128, 128)
    case["A_log"] = memory[:1]
    with pytest.raises(ValueError, match="state: expected memory of its own, .* overlaps A_log"):
        cukda.step(**case)


def test_rows_of_states_start_at_16_bytes():
    case = decoding.make(2, 1, 1)
    wide = np.zeros((5, 1, 128, 130), np.float32)
    case["state"] = wide[..., :128]
    with pytest.raises(ValueError, match="state: expected rows at multiples of 16 bytes, got"):
        cukda.step(**case)


def test_rows_begin_at_any_element():
    case = decoding.make(3, 2, 4)
    expected = run(case)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out"):
        values = np.full(case["q"].shape, np.nan, BF16) if name == "out" else case[name]
        wide = np.zeros((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
        part = wide[..., 1:-2]
        part[...] = values
        given = {**case, "state": case["state"].copy(), name: part}
        assert np.array_equal(cukda.step(**given), expected[0])
        assert np.array_equal(given["state"], expected[1])


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_out_beside_an_inputs_rows(name):
    case = decoding.make(3, 2, 4)
    expected = run(case)
    buffer = np.full((3, 2, 4, 256), 3, BF16)
    buffer[..., :128] = case[name]
    given = {**case, "state": case["state"].copy(), name: buffer[..., :128]}
    assert np.array_equal(cukda.step(**given, out=buffer[..., 128:]), expected[0])
    assert np.array_equal(given["state"], expected[1])
    assert np.array_equal(buffer[..., :128], case[name])
    before = buffer.copy(), given["state"].copy()
    message = f"^out: expected memory of its own, got an array that overlaps {name}$"
    with pytest.raises(ValueError, match=message):
        cukda.step(**given, out=buffer[..., 127:-1])
    assert np.array_equal(buffer, before[0]) and np.array_equal(given["state"], before[1])


def test_out_between_states():
    """A pool of pages, which have room for more than states."""
    case = decoding.make(2, 1, 3)
    expected = run(case)
    pages = np.zeros((5, 4, 128, 128), np.float32)
    state = pages[:, :3]
    state[...] = case["state"]
    rows = pages[:, 3].view(BF16)
    given = {**case, "state": state}
    out = rows[:2, None, :3, :128]
    assert cukda.step(**given, out=out) is out
    assert np.array_equal(out, expected[0]) and np.array_equal(state, expected[1])
    out = pages[:, 2].view(BF16)[:2, None, :3, :128]
    with pytest.raises(ValueError, match="^out: expected memory of its own, got .* overlaps state"):
        cukda.step(**given, out=out)
