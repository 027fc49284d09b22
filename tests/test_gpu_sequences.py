"""Sequences do not touch each other: neighbours, empty ones, tails, later tokens, padding."""

import hardware
import inputs
import numpy as np
import oracle
import pytest
from inputs import BF16, TOKENS

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state.
TOLERANCE = {
    # Against the recurrence, over so few rows that errors do not average out.
    "few": (1e-2, 1e-2),
    # Against another schedule of the same arithmetic: float32 rounding of the carried state, which
    # now and then tips a bf16 rounding.
    "carry": (1e-3, 2e-4),
}
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def assert_close(got, want, kind="carry"):
    errors = [oracle.error(hardware.host(a), b) for a, b in zip(got, want, strict=True)]
    assert errors[0] <= TOLERANCE[kind][0] and errors[1] <= TOLERANCE[kind][1], errors


def assert_as_alone(case, got, seq_indices):
    """The sequences' rows and states are those of calls of their own."""
    out, final_state = (hardware.host(x) for x in got)
    for seq_idx in seq_indices:
        batch_idx, tokens = inputs.spans(case)[seq_idx]
        expected = [hardware.host(x) for x in hardware.run(inputs.alone(case, seq_idx))]
        part = out[batch_idx, tokens][None], final_state[seq_idx : seq_idx + 1]
        assert_close(part, expected)


def poisoned(case, names, rows, value):
    for name in names:
        case = inputs.changed(case, name, rows, value)
    return case


@pytest.fixture(scope="module")
def packed():
    """Two sequences, the first with a tail, and rows of no sequence after them."""
    case = inputs.make([17, 47, 16], 3, seed=10)
    case["cu_seqlens"] = case["cu_seqlens"][:3]
    case["initial_state"] = case["initial_state"][:2]
    return case


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("names", [*([n] for n in TOKENS), TOKENS], ids=lambda n: "+".join(n))
def test_neighbours_leave_no_trace(packed, names, bad, variant):
    """Rows and states of one sequence are bitwise the same whatever is in the rows of another."""
    clean = hardware.run(packed)
    for rows, mine in [
        (slice(17, None), 0),
        (slice(64, None), 0),
        (slice(64, None), 1),
        (slice(0, 17), 1),
    ]:
        dirty = hardware.run(poisoned(packed, names, (slice(None), rows), BAD[bad]))
        tokens = inputs.spans(packed)[mine][1]
        for got, expected in zip(dirty, clean, strict=True):
            part = (0, tokens) if got.dtype == BF16 else mine
            got, expected = hardware.host(got)[part], hardware.host(expected)[part]
            assert hardware.same_bits(got, expected), (rows, mine)
            assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("batch_tokens", [1, 17, 64])
def test_samples_leave_no_trace(batch_tokens, bad, variant):
    case = inputs.make([batch_tokens], 2, seed=11, batch=3)
    clean = [hardware.host(x) for x in hardware.run(case)]
    for sample in range(3):
        dirty = hardware.run(poisoned(case, (*TOKENS, "initial_state"), sample, BAD[bad]))
        others = [i for i in range(3) if i != sample]
        for got, expected in zip(dirty, clean, strict=True):
            assert hardware.same_bits(hardware.host(got)[others], expected[others])


@pytest.mark.parametrize("bad", BAD)
def test_states_leave_no_trace(packed, bad, variant):
    clean = [hardware.host(x) for x in hardware.run(packed)]
    for mine in 0, 1:
        tokens = inputs.spans(packed)[mine][1]
        dirty = hardware.run(inputs.changed(packed, "initial_state", 1 - mine, BAD[bad]))
        assert hardware.same_bits(hardware.host(dirty[0])[:, tokens], clean[0][:, tokens])
        assert hardware.same_bits(hardware.host(dirty[1])[mine], clean[1][mine])


@pytest.mark.parametrize("names", [*([n] for n in TOKENS), TOKENS], ids=lambda n: "+".join(n))
def test_heads_leave_no_trace(packed, names, variant):
    clean = [hardware.host(x) for x in hardware.run(packed)]
    dirty = hardware.run(poisoned(packed, names, (slice(None), slice(None), 1), np.nan))
    dirty = [hardware.host(x) for x in dirty]
    assert hardware.same_bits(dirty[0][:, :64, [0, 2]], clean[0][:, :64, [0, 2]])
    assert hardware.same_bits(dirty[1][:, [0, 2]], clean[1][:, [0, 2]])


@pytest.mark.parametrize("change", ["finite", "3e38", *BAD])
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("begin", [0, 5])
def test_later_tokens_leave_no_trace(begin, name, change, variant):
    """Rows before token t are bitwise the same when an input changes at t, within a chunk of 16 or
    32 tokens and across chunks, also where the sequence does not begin at a multiple of them.
    """
    case = inputs.make([begin, 70], 2, seed=12)
    clean = hardware.host(hardware.run(case)[0])
    for t in 1, 2, 7, 8, 15, 16, 17, 23, 31, 32, 33, 47, 48, 63, 64, 69:
        if change == "finite":
            value = 3 - 2 * case[name][:, begin + t]
        else:
            value = {**BAD, "3e38": 3e38}[change]
        dirty = hardware.host(
            hardware.run(inputs.changed(case, name, np.s_[:, begin + t], value))[0]
        )
        assert hardware.same_bits(dirty[:, : begin + t], clean[:, : begin + t]), t
        if change == "finite":
            assert not hardware.same_bits(dirty[:, begin + t :], clean[:, begin + t :]), t


def test_later_tokens_that_overflow_leave_no_trace(variant):
    """Finite values whose difference is beyond float32: one key for all tokens, no decay, and
    beta = 1 make each token take back what the one before it wrote.
    """
    case = inputs.make([40], 2, "collinear", seed=22, batch=1)
    case.update(lower_bound=0.0)
    case["beta"][:] = 88
    clean = hardware.host(hardware.run(case)[0])
    for t in 1, 4, 7, 8, 14, 15, 17, 30, 38:
        dirty = inputs.changed(case, "v", np.s_[:, t], 3e38)
        dirty = inputs.changed(dirty, "v", np.s_[:, t + 1], -3e38)
        out = hardware.host(hardware.run(dirty)[0])
        assert hardware.same_bits(out[:, :t], clean[:, :t]), t


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 40, 63, 64, 100])
def test_more_tokens_leave_earlier_rows(num_tokens):
    case = inputs.make([300], 2, seed=13, batch=1)
    long_out, _ = hardware.run(case)
    prefix = inputs.tokens(case, 0, num_tokens, case["initial_state"])
    out, _ = hardware.run(prefix)
    error = oracle.error(hardware.host(long_out)[:, :num_tokens], hardware.host(out))
    assert error <= TOLERANCE["carry"][0]


STATES = [(a, b) for a in (None, "bfloat16", "float32") for b in (None, "bfloat16", "float32")]


@pytest.mark.parametrize(
    ("initial", "final"), [*STATES, ("bfloat16", "in place"), ("float32", "in place")]
)
@pytest.mark.parametrize(
    "cu_seqlens",
    [
        [0, 0, 17, 17, 64, 64],
        [0, 0, 0],
        [0, 0, 0, 0, 1],
        [64, 64],
        [0],
    ],
    ids=str,
)
def test_empty_sequences(cu_seqlens, initial, final):
    """They pass their state through, and no row of out is touched for them."""
    check_passed_through(packed_case(cu_seqlens, num_tokens=64), initial, final)


@pytest.mark.parametrize(("initial", "final"), STATES)
@pytest.mark.parametrize(("batch", "num_tokens"), [(2, 0), (0, 32), (0, 0), (1, 0)])
def test_no_tokens(batch, num_tokens, initial, final):
    check_passed_through(inputs.make([num_tokens], 2, seed=15, batch=batch), initial, final)


def test_no_packed_tokens():
    check_passed_through(packed_case([0, 0, 0], num_tokens=0), "float32", "float32")


def packed_case(cu_seqlens, num_tokens, seed=14):
    case = inputs.make([num_tokens], 2, seed=seed, batch=1)
    rng = np.random.default_rng(seed)
    shape = (len(cu_seqlens) - 1, *case["initial_state"].shape[1:])
    case["initial_state"] = rng.standard_normal(shape, dtype=np.float32)
    case["cu_seqlens"] = np.array(cu_seqlens, np.int32)
    return case


def check_passed_through(case, initial, final):
    import cukda

    if initial is None:
        case["initial_state"] = None
    else:
        case["initial_state"] = case["initial_state"].astype(
            BF16 if initial == "bfloat16" else "f4"
        )
    call = hardware.upload(case)
    out = hardware.nans(call["v"].shape, "bfloat16")
    if final == "in place":
        final_state = call["initial_state"]
    else:
        final_state = final and hardware.nans(hardware.state_shape(case), final)
    tokens = [call.pop(n) for n in TOKENS]
    cukda.fwd(*tokens, **call, out=out, final_state=final_state)

    touched = np.zeros(case["q"].shape[:2], bool)
    for seq_idx, (batch_idx, rows) in enumerate(inputs.spans(case)):
        touched[batch_idx, rows] = True
        if final_state is None or rows.start != rows.stop:
            continue
        got = hardware.host(final_state)[seq_idx]
        if initial is None:
            assert not hardware.bits(got).any()
        else:
            assert hardware.same_bits(got, case["initial_state"][seq_idx].astype(got.dtype))
    out = hardware.host(out)
    assert (hardware.bits(out[~touched]) == 0x7FC0).all()
    assert np.isfinite(out[touched].astype(np.float32)).all()


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_padding(integer, variant):
    """Rows past the last sequence stay as they are, sequences without rows pass their state."""
    case = packed_case([0, 20, 45, 45, 45], num_tokens=64, seed=16)
    case["cu_seqlens"] = case["cu_seqlens"].astype(integer)
    out, final_state = (hardware.host(x) for x in hardware.run(case))
    assert (hardware.bits(out[:, 45:]) == 0x7FC0).all()
    assert hardware.same_bits(final_state[2:], case["initial_state"][2:])
    want_out, want_state = (hardware.host(x) for x in hardware.want(case))
    assert_close((out[:, :45], final_state), (want_out[:, :45], want_state), "few")


@pytest.mark.parametrize(
    ("seq_lens", "sample"),
    [
        (range(1, 65), range(64)),
        (
            [n + d for n in (16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1)] + [1500],
            range(22),
        ),
        ([1] * 1000, [0, 1, 2, 498, 998, 999]),
        ([17] * 1000, [0, 1, 2, 498, 998, 999]),
    ],
    ids=["1 to 64", "around powers of 2", "1000 of 1", "1000 of 17"],
)
def test_lengths_packed(seq_lens, sample):
    case = inputs.make(seq_lens, 2, seed=17)
    got = hardware.run(case)
    want = [hardware.host(x) for x in hardware.want(case)]
    assert_close(got, want, "few")
    assert_as_alone(case, got, sample)
    # A short sequence weighs little in the sums above.
    out, final_state = (hardware.host(x) for x in got)
    for seq_idx, (_, rows) in enumerate(inputs.spans(case)):
        assert oracle.error(out[:, rows], want[0][:, rows]) <= 0.1, seq_idx
        assert oracle.error(final_state[seq_idx], want[1][seq_idx]) <= 0.1, seq_idx


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 500])
def test_lengths_in_a_batch(num_tokens):
    case = inputs.make([num_tokens], 2, seed=18, batch=3)
    got = hardware.run(case)
    assert_close(got, hardware.want(case), "few")
    assert_as_alone(case, got, range(3))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 12, 13, 96])
@pytest.mark.parametrize("batch", [None, 2])
def test_any_number_of_heads(heads, batch):
    case = inputs.make([70] if batch else [33, 64, 5], heads, seed=19, batch=batch)
    got = hardware.run(case)
    assert_close(got, hardware.want(case), "few")
    one = inputs.pick_heads(case, [heads - 1])
    out, final_state = (hardware.host(x) for x in got)
    assert_close((out[:, :, -1:], final_state[:, -1:]), map(hardware.host, hardware.run(one)))


def test_int64_cu_seqlens():
    case = inputs.make([33, 0, 64, 5], 2, seed=20)
    wide = {**case, "cu_seqlens": case["cu_seqlens"].astype(np.int64)}
    for got, want in zip(hardware.run(wide), hardware.run(case), strict=True):
        assert hardware.same_bits(got, want)


@pytest.mark.parametrize(
    ("cu_seqlens", "integer"),
    [
        ([0, 100, 20, 64], np.int32),
        ([0, 100, 20, 64], np.int64),
        ([-5, 30, 64, 64], np.int32),
        ([64, 32, 0, 0], np.int64),
        ([0, 2**31 - 1, -(2**31), 64], np.int32),
        ([0, 2**31 - 1, -(2**31), 64], np.int64),
        ([0, 2**32 + 20, 2**32 + 40, 64], np.int64),
        ([0, 2**63 - 1, -(2**63), 64], np.int64),
    ],
    ids=str,
)
def test_bad_cu_seqlens_stay_inside(cu_seqlens, integer):
    """Ends are clamped to what there is, and no byte beside the arrays is written."""
    import cukda

    num_tokens, guard = 64, 64
    case = packed_case([0, 0, 0, 0], num_tokens, seed=21)
    case["cu_seqlens"] = np.array(cu_seqlens, integer)
    call = hardware.upload(case)
    _, num_heads, head_dim, _ = hardware.state_shape(case)
    outs = hardware.nans((1, guard + num_tokens + guard, num_heads, head_dim), "bfloat16")
    states = hardware.nans((5, num_heads, head_dim, head_dim), "float32")
    tokens = [call.pop(n) for n in TOKENS]
    cukda.fwd(*tokens, **call, out=outs[:, guard:-guard], final_state=states[1:4])

    outs, states = hardware.bits(outs), hardware.host(states)
    assert (outs[:, :guard] == 0x7FC0).all() and (outs[:, -guard:] == 0x7FC0).all()
    assert np.isnan(states[[0, 4]]).all()
    for seq_idx in range(3):
        begin = min(max(cu_seqlens[seq_idx], 0), num_tokens)
        end = min(max(cu_seqlens[seq_idx + 1], begin), num_tokens)
        initial_state = case["initial_state"][seq_idx : seq_idx + 1]
        if begin == end:
            assert hardware.same_bits(states[1 + seq_idx], initial_state[0])
            continue
        part = inputs.tokens({**case, "cu_seqlens": None}, begin, end, initial_state)
        want = hardware.host(hardware.run(part)[1])
        assert oracle.error(states[1 + seq_idx][None], want) <= TOLERANCE["carry"][1]
