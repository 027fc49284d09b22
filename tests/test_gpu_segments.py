"""Segments that run side by side and are joined where there is no cut: as exact as one pass, right
where cuts and joins meet in one sequence, and in memory of their own.
"""

import itertools

import hardware
import inputs
import numpy as np
import oracle
import pytest
from inputs import BF16, TOKENS

from cukda import jit, kda, plan
from cukda.workspace import Workspace, _memory_pools

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state, against the recurrence: of all rows, and
# of as little as one.
TOLERANCE = (1e-2, 1e-2)
FEW = 3e-2
SEGMENT = 64
# How often segments are joined, and the first of them: never; each one; each second; each one
# behind a lead of three; each second behind a lead of one; and that with a longer first segment.
NEVER, EACH, SECOND, BEHIND_LEAD, ODD = (0,), (1,), (2,), (1, 3), (2, 1)
EXTRA = 16
LONGER_FIRST = (2, 1, EXTRA)
JOINS = [EACH, SECOND, BEHIND_LEAD, ODD, LONGER_FIRST]
# Codes of a begin (cuda_src/work.cuh).
GOES_ON, MOST_CUT, IS_FIRST, IS_JOINED = 0, 8, 254, 255
FAST, SLOW = 0, 1
DTYPES = {"bfloat16": BF16, "float32": np.dtype(np.float32)}
# Shorter than a segment, as long, longer by one; with the first token's chunk anywhere.
LENGTHS = [300, 0, 64, 65, 1, 129, 400, 0, 63]


def allowed(own_error):
    """Of joined segments, by the error of one pass over the same rows."""
    return 1.1 * own_error + 1e-4


def outs(case, state="float32"):
    return [None if x is None else hardware.host(x) for x in hardware.run(case, state)]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert hardware.same_bits(a, b)


def assert_as_exact_as_one_pass(case, cut_every, segment=SEGMENT, joins=EACH):
    """Each sequence and head, out by 64 rows and more. Leaves calls joined, and returns what they
    give.
    """
    cut_every(0)
    one_pass = outs(case)
    cut_every(segment, *joins)
    joined = outs(case)
    want = [hardware.host(x) for x in hardware.want(case)]

    def compare(where, index):
        got, own, exact = (x[index][where] for x in (joined, one_pass, want))
        own_error, error = oracle.error(own, exact), oracle.error(got, exact)
        assert own_error <= FEW
        assert error <= allowed(own_error), f"{where}: {error} where one pass has {own_error}"

    for seq_idx, (batch_idx, rows) in enumerate(inputs.spans(case)):
        for head in range(case["q"].shape[2]):
            compare((seq_idx, head), 1)
            num_blocks = (rows.stop - rows.start) // 64
            for block in np.array_split(np.r_[rows], max(1, num_blocks)):
                compare((batch_idx, block, head), 0)
    return joined


@pytest.mark.parametrize("size", [1, 1e6])
@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("segment", [64, 96])
@pytest.mark.parametrize("num_tokens", [65, 129, 500, 1000])
@pytest.mark.parametrize("gate", ["slow", "rand", "half"])
def test_as_exact_as_one_pass(gate, num_tokens, segment, joins, size, cut_every):
    case = inputs.make([num_tokens], 4, gate, seed=120, batch=1)
    case["initial_state"] *= np.float32(size)
    assert_as_exact_as_one_pass(case, cut_every, segment, joins)


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("beta", [None, 8])
def test_no_decay_at_all(beta, joins, cut_every):
    """Nothing but keys takes anything of a state away."""
    case = inputs.make([600], 2, seed=121, batch=1)
    case = inputs.changed(case, "g", np.s_[:], -100)
    if beta is not None:
        case = inputs.changed(case, "beta", np.s_[:], beta)
    assert_as_exact_as_one_pass(case, cut_every, joins=joins)


def slow_at_times(num_tokens=1000, seed=122):
    """Raw gates of -40 keep the state for 150 tokens of 300."""
    case = inputs.make([num_tokens], 3, seed=seed, batch=1)
    slow = np.arange(num_tokens) // 150 % 2 == 1
    return inputs.changed(case, "g", np.s_[:, slow], -40)


@pytest.mark.parametrize("size", [1, 1e6])
@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("segment", [64, 96])
def test_cuts_and_joins_in_one_sequence(segment, joins, size, cut_every, workspaces):
    case = slow_at_times()
    case["initial_state"] *= np.float32(size)
    assert_as_exact_as_one_pass(case, cut_every, segment, joins)
    made = workspaces(fill=0xFF)
    hardware.run(case)
    found = made[0].begins(case)
    check_codes(found, joins)
    is_cut = is_a_cut(found[1:])
    # Of neighbouring places, all four pairs, in each head; where they lie a chunk on, not all.
    pairs = 2 * is_cut[:-1] + is_cut[1:]
    for head in range(3):
        assert set(pairs[:, head]) == {0, 1, 2, 3} or joins == LONGER_FIRST
        assert 0 < is_cut[:, head].sum() < len(is_cut)


def is_a_cut(begins):
    return (begins > GOES_ON) & (begins <= MOST_CUT)


def check_codes(begins, joins):
    """Of one sequence's segments: [num_slots, H]."""
    assert (begins[0] == IS_FIRST).all()
    every, first, *_ = joins if len(joins) > 1 else (*joins, *joins)
    places = range(first, len(begins), every) if every else ()
    for index in range(1, len(begins)):
        want = IS_JOINED if index in places else GOES_ON
        assert (is_a_cut(begins[index]) | (begins[index] == want)).all(), index


def cut_where(is_cut, num_tokens, seed):
    """A call of one sequence whose segments begin with a cut where is_cut [num_slots, H] says:
    their gates are fast in front of it, and closed in front of all others.
    """
    case = inputs.make([num_tokens], is_cut.shape[1], seed=seed, batch=1)
    is_slow = np.repeat(~is_cut[1:], SEGMENT, axis=0)
    return inputs.changed(case, "g", (0, *np.nonzero(is_slow)), -40)


def check_begins(workspace, case, is_cut, joins):
    """All of them are where cut_where was told."""
    found = workspace.begins(case)
    check_codes(found, joins)
    assert np.array_equal(is_a_cut(found[1:]), is_cut[1:])


# As a plan would have them: half chunks, and runs between joins that are all of one length.
@pytest.mark.parametrize("num_tokens", [2033, 2041, 2047, 2048])
@pytest.mark.parametrize("gate", ["slow", "half", "at times"])
def test_runs_of_one_length(gate, num_tokens, cut_every, workspaces):
    if gate == "at times":
        case = slow_at_times(num_tokens)
    else:
        case = inputs.make([num_tokens], 3, gate, seed=137, batch=1)
    joins = (2, 1, 24)
    assert_as_exact_as_one_pass(case, cut_every, 184, joins)
    made = workspaces(fill=0xFF)
    hardware.run(case)
    found = made[0].begins(case)
    assert len(found) == 11
    check_codes(found, joins)
    if gate == "at times":
        assert is_a_cut(found[1::2]).any() and (found[1::2] == IS_JOINED).any()


# The chain of a sequence's joined segments looks at 32 segments at a time.
@pytest.mark.parametrize("joins", [*JOINS[:-1], (33, 1), (5, 31)], ids=str)
@pytest.mark.parametrize("num_segments", [32, 33, 65, 131])
def test_many_segments(num_segments, joins, cut_every, workspaces):
    """Cut nowhere, everywhere, at times, and where a look ends; joined runs of several segments
    that a cut ends early, and such that it does not.
    """
    rng, places = np.random.default_rng(142), np.arange(num_segments)
    rules = (
        places < 0,
        places > 0,
        rng.random(num_segments) < 0.5,
        rng.random(num_segments) < 0.1,
        places % 32 == 0,
        places % 32 == 31,
        places % 3 == 1,
    )
    is_cut = np.stack(rules, axis=1)
    case = cut_where(is_cut, num_segments * SEGMENT - 5, seed=142)
    assert_as_exact_as_one_pass(case, cut_every, joins=joins)
    made = workspaces(fill=0xFF)
    hardware.run(case)
    check_begins(made[0], case, is_cut, joins)


# Of the last segment: how it begins; how all are joined, of how many segments, and which are cut.
LAST_SEGMENTS = {
    "joined": (IS_JOINED, EACH, 6, ()),
    "joined behind a cut": (IS_JOINED, EACH, 6, (4,)),
    "the only one joined": (IS_JOINED, BEHIND_LEAD, 4, ()),
    "cut": (None, EACH, 6, (5,)),
    "goes on from a joined one": (GOES_ON, SECOND, 6, ()),
    "goes on from a cut": (GOES_ON, SECOND, 6, (4,)),
    "goes on from the first": (GOES_ON, BEHIND_LEAD, 3, ()),
}


@pytest.mark.parametrize("tail", [1, 17, SEGMENT])
@pytest.mark.parametrize("last", LAST_SEGMENTS)
def test_final_state(last, tail, cut_every, workspaces):
    """However the last segment begins, and whatever the final state's dtype, or there is none."""
    code, joins, num_segments, cuts = LAST_SEGMENTS[last]
    is_cut = np.zeros((num_segments, 3), bool)
    is_cut[list(cuts)] = True
    num_tokens = (num_segments - 1) * SEGMENT + tail
    case = cut_where(is_cut, num_tokens, seed=143)
    out, final_state = assert_as_exact_as_one_pass(case, cut_every, joins=joins)
    made = workspaces(fill=0xFF)
    for dtype in None, "bfloat16", "float32":
        got_out, got_state = outs(case, dtype)
        assert hardware.same_bits(got_out, out)
        if dtype:
            assert hardware.same_bits(got_state, final_state.astype(DTYPES[dtype]))
    for workspace in made:
        check_begins(workspace, case, is_cut, joins)
        last_begins = workspace.begins(case)[-1]
        assert (is_a_cut(last_begins) if code is None else last_begins == code).all()


@pytest.mark.parametrize("size", [1, 1e6])
@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
def test_scales(joins, size, cut_every):
    """Of outputs alone: what transfers put out has no scale until it meets a state."""
    case = inputs.make([500], 4, "half", seed=144, batch=1)
    case["initial_state"] *= np.float32(size)
    found = {
        scale: assert_as_exact_as_one_pass({**case, "scale": scale}, cut_every, joins=joins)
        for scale in (1.0, -1.0, 1e30, 1e-30)
    }
    found[0.0] = outs({**case, "scale": 0.0})
    for _, final_state in found.values():
        assert hardware.same_bits(final_state, found[1.0][1])
    plus, minus, zero = (found[scale][0].astype(np.float32) for scale in (1.0, -1.0, 0.0))
    assert np.array_equal(minus, -plus)
    assert not zero.any()


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
def test_rows_of_all_sizes(joins, cut_every):
    """Rows of v and of the state from 1e-30 to 1e30, side by side: each as exact as the others."""
    case = inputs.make([400], 2, "half", seed=145, batch=1)
    sizes = np.logspace(-30, 30, inputs.HEAD_DIM, dtype=np.float32)
    case["v"] = (case["v"].astype(np.float32) * sizes).astype(BF16)
    case["initial_state"] *= sizes[:, None]
    cut_every(SEGMENT, *joins)
    got, want = outs(case), [hardware.host(x) for x in hardware.want(case)]
    for row, size in enumerate(sizes):
        for x, exact, rows in zip(got, want, (np.s_[..., row], np.s_[:, :, row]), strict=True):
            assert oracle.error(x[rows], exact[rows]) <= FEW, size


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("sizes", [[1e-20], [1e-12], [1e-20, 1e18, 1]], ids=str)
def test_queries_of_all_lengths(sizes, joins, cut_every):
    """Each row of out is as exact as the others, however short its q."""
    case = inputs.make([400], 2, "slow", seed=146, batch=1)
    of_token = np.resize(np.float32(sizes), 400)[:, None, None]
    case["q"] = (case["q"].astype(np.float32) * of_token).astype(BF16)
    cut_every(SEGMENT, *joins)
    got, want = outs(case)[0], hardware.host(hardware.want(case)[0])
    for token in range(400):
        assert oracle.error(got[:, token], want[:, token]) <= FEW, token


@pytest.mark.parametrize("joins", [NEVER, EACH, SECOND], ids=str)
@pytest.mark.parametrize("repeats", [1, 5])
def test_each_sequence_has_one_first_segment(repeats, joins, cut_every, workspaces):
    """One without tokens too; and no more joined segments than there are tokens for."""
    lengths = np.array(LENGTHS * repeats)
    case = inputs.make(lengths, 2, "slow", seed=145)
    cut_every(SEGMENT, *joins)
    made = workspaces(fill=0xFF)
    hardware.run(case)
    found = made[0].begins(case)
    num_later = -(-lengths // SEGMENT) - 1
    num_joined = (num_later // joins[0]).clip(0).sum() if joins[0] else 0
    assert ((found == IS_FIRST).sum(axis=0) == len(lengths)).all()
    assert ((found == IS_JOINED).sum(axis=0) == num_joined).all()
    assert ((found == GOES_ON).sum(axis=0) == len(found) - len(lengths) - num_joined).all()


@pytest.mark.parametrize("joins", [NEVER, EACH, BEHIND_LEAD], ids=str)
@pytest.mark.parametrize("lower_bound", [-5.0, -2.0, -1.8, -1.0, 0.0])
def test_cuts_are_where_the_bound_says(lower_bound, joins, cut_every, workspaces):
    """The gates' sigmoid is the GPU's here and exact there, and close calls may go either way."""
    case = {**slow_at_times(), "lower_bound": lower_bound}
    cut_every(SEGMENT, *joins)
    made = workspaces(fill=0xFF)
    hardware.run(case)
    found = made[0].begins(case)
    check_codes(found, joins)
    is_cut = is_a_cut(found)
    nothing, near = -60, 1
    for slot in range(1, 16):
        for head in range(3):
            left = log2_left(case, head, slot * SEGMENT)
            num_chunks = int(found[slot, head])
            if is_cut[slot, head]:
                assert left[num_chunks - 1] < nothing + near
                assert num_chunks == 1 or left[num_chunks - 2] > nothing - near
            else:
                # Four chunks are looked at first, and four more only where they are worth it.
                looks_on = left[3] < nothing / 2 - near
                assert left[-1 if looks_on else 3] > nothing - near
    assert is_cut.any() == (lower_bound < -1)


def log2_left(case, head, cut):
    """log2 of the bound on what the last 1, 2, ... 8 chunks before a cut leave of a state, each
    multiplied: b <- b e^a; b <- b + (b |k|) |k| from b = 1, the largest b; in float64.
    """
    g, k = (case[name][0, :, head].astype(np.float64) for name in ("g", "k"))
    k = np.abs(k) / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    slope = np.exp(case["A_log"][head].astype(np.float64))
    sigmoid = 1 / (1 + np.exp(-slope * (g + case["dt_bias"][head])))
    decay = np.exp(case["lower_bound"] * sigmoid)
    left, found = 0.0, []
    for end in range(cut, max(0, cut - 128), -16):
        bound = np.ones(inputs.HEAD_DIM)
        for t in range(end - 16, end):
            bound *= decay[t]
            bound += (bound @ k[t]) * k[t]
        left += np.log2(bound.max())
        found.append(left)
    return found


@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("gate", ["half", "slow"])
@pytest.mark.parametrize("repeats", [1, 5])
@pytest.mark.parametrize("segment", [SEGMENT, 72])
def test_packed(segment, repeats, gate, joins, cut_every):
    """Fewer sequences than a warp has lanes, and more; each has the bits that it has alone."""
    case = inputs.make([*LENGTHS, 72, 71] * repeats, 2, gate, seed=123)
    joins = (*joins[:2], 24) if len(joins) > 2 and segment % 16 else joins
    out, final_state = assert_as_exact_as_one_pass(case, cut_every, segment, joins)
    for seq_idx, (_, rows) in enumerate(inputs.spans(case)):
        alone = outs(inputs.alone(case, seq_idx))
        assert_same((out[:, rows], final_state[seq_idx : seq_idx + 1]), alone)


def test_what_is_finite_in_one_pass_is_finite(cut_every):
    """Where parts of a sum, scaled, would overflow."""
    case = inputs.make([400], 1, "slow", seed=142, batch=1)
    case |= {"scale": 3e37, "initial_state": case["initial_state"] * np.float32(300)}
    case["v"] = (case["v"].astype(np.float32) * 30).astype(BF16)
    cut_every(0)
    one_pass = outs(case)[0].astype(np.float32)
    cut_every(SEGMENT, 1)
    joined = outs(case)[0].astype(np.float32)
    is_finite = np.abs(one_pass) < 3e38
    assert 0.1 < is_finite.mean() < 1
    assert np.isfinite(joined[is_finite]).all()


@pytest.mark.parametrize("integer", [np.int32, np.int64])
@pytest.mark.parametrize("num_others", [0, 40])
def test_packed_with_rows_of_no_sequence(num_others, integer, cut_every):
    """Before the first and behind the last; with sequences that have none."""
    case = inputs.make([70, 200, 330, 100], 2, "half", seed=124)
    ends = [70, 270, *[270] * num_others, 600]
    case["cu_seqlens"] = np.array(ends, integer)
    rng = np.random.default_rng(124)
    shape = (len(ends) - 1, *case["initial_state"].shape[1:])
    case["initial_state"] = rng.standard_normal(shape, dtype=np.float32)
    out, final_state = assert_as_exact_as_one_pass(case, cut_every)
    for rows in np.s_[:, :70], np.s_[:, 600:]:
        assert (hardware.bits(out[rows]) == 0x7FC0).all()
    assert hardware.same_bits(final_state[1:-1], case["initial_state"][1:-1])


@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("num_tokens", [65, 128, 400])
def test_batch(num_tokens, joins, cut_every):
    case = inputs.make([num_tokens], 2, "half", seed=125, batch=3)
    out, final_state = assert_as_exact_as_one_pass(case, cut_every, joins=joins)
    for sample in range(3):
        one = slice(sample, sample + 1)
        assert_same((out[one], final_state[one]), outs(inputs.alone(case, sample)))


EVERY_VARIANT = [(variant, (SEGMENT, *x)) for variant in plan.variants() for x in ((1, 1), (2, 1))]


@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=str, indirect=True)
def test_every_variant(variant):
    """Of 128, 64 and 32 rows of V a block: parts of a state and of its transfer."""
    case = inputs.make(LENGTHS, 3, "half", seed=126)
    hardware.check(case, *TOLERANCE)


def make(batch, seed, gate="half"):
    """Packed or in a batch, with states as large as what the tokens add to them."""
    if batch:
        case = inputs.make([400], 3, gate, seed=seed, batch=batch)
    else:
        case = inputs.make([300, 0, 65, 5], 3, gate, seed=seed)
    case["initial_state"] *= 10
    return case


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("initial", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("final", [None, "bfloat16", "float32"])
def test_states(initial, final, batch, joins, cut_every):
    """Whatever the arrays' dtypes, the arithmetic is that of float32 states of the same values."""
    case = make(batch, seed=127)
    state = case["initial_state"]
    same = np.zeros_like(state) if initial is None else state.astype(DTYPES[initial])
    case["initial_state"] = None if initial is None else same
    cut_every(SEGMENT, *joins)
    out, final_state = outs(case, final)
    same_out, same_state = outs({**case, "initial_state": same.astype(np.float32)})
    assert hardware.same_bits(out, same_out)
    if final is not None:
        assert hardware.same_bits(final_state, same_state.astype(DTYPES[final]))


@pytest.mark.parametrize("joins", [NEVER, EACH, SECOND], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("gate", ["rand", "half"])
def test_states_in_place(gate, batch, dtype, joins, cut_every, cupy):
    """The bits of states apart, also where last segments end long before first ones begin: more
    than there are multiprocessors, and most of them of fast heads.
    """
    import cukda

    heads = cupy.cuda.Device().attributes["MultiProcessorCount"] // 4
    case = inputs.make([1000], heads, gate, seed=128, batch=batch)
    if not batch:
        case = inputs.make([700, 0, 65, 235], heads, gate, seed=128)
    case["initial_state"] = case["initial_state"].astype(DTYPES[dtype])
    cut_every(SEGMENT, *joins)
    want = outs(case, dtype)
    for _ in range(3):
        call = hardware.upload(case)
        tokens = [call.pop(n) for n in TOKENS]
        out = hardware.nans(case["v"].shape, "bfloat16")
        cukda.fwd(*tokens, **call, out=out, final_state=call["initial_state"])
        assert_same((out, call["initial_state"]), want)


# A long sequence among short ones: fewer than a warp has lanes, and more.
UNEVEN = [[2000, *LENGTHS], [*LENGTHS * 3, 2000, *LENGTHS]]


@pytest.mark.parametrize("joins", [NEVER, EACH, SECOND], ids=str)
@pytest.mark.parametrize("lengths", UNEVEN, ids=len)
@pytest.mark.parametrize("gate", ["slow", "half"])
def test_same_bits_every_run(gate, lengths, joins, cut_every, cupy):
    """Whichever block has taken which item. Half of the runs beside other work, which holds some of
    the multiprocessors, for other times in each, so that blocks come late, or find nothing left.
    """
    case = inputs.make(lengths, 6, gate, seed=129)
    cut_every(SEGMENT, *joins)
    want = outs(case)
    given = hardware.upload(case)
    others = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    num_blocks = -(-jit.gpu().num_sms // 8)
    rng = np.random.default_rng(129)
    for i in range(40):
        if i % 2:
            for other in others:
                hardware.spin(other.ptr, rng.integers(1_000_000), num_blocks, hardware.SHARED_BYTES)
        assert_same(outs(given), want)


@pytest.mark.parametrize("segments", [(0,), *((SEGMENT, *x) for x in (NEVER, *JOINS))], ids=str)
@pytest.mark.parametrize("lengths", UNEVEN, ids=len)
def test_same_bits_however_many_blocks(lengths, segments, cut_every, monkeypatch):
    """From one that takes every item to one for each; some wait for others to end, and some find
    nothing left.
    """
    case = inputs.make(lengths, 4, "half", seed=141)
    cut_every(*segments)
    want = outs(case)
    gpu = jit.gpu()
    for num_sms in 1, 2, 13, gpu.num_sms // 2, gpu.num_sms - 1, 10**6:
        monkeypatch.setattr(jit, "gpu", lambda num_sms=num_sms: gpu._replace(num_sms=num_sms))
        monkeypatch.setattr(kda, "_launches", {})
        assert_same(outs(case), want)


@pytest.mark.parametrize("joins", [EACH, SECOND, LONGER_FIRST], ids=str)
@pytest.mark.parametrize("change", ["finite", "nan", "inf"])
@pytest.mark.parametrize("name", TOKENS)
def test_later_tokens_leave_no_trace(name, change, joins, cut_every):
    """Rows before token t are bitwise the same when an input changes at t, or from t on."""
    case = inputs.make([5, 300], 2, "half", seed=130)
    begin = 5
    cut_every(SEGMENT, *joins)
    clean = outs(case)[0]
    for t in 1, 40, 63, 64, 65, 79, 80, 100, 127, 128, 129, 143, 144, 191, 192, 255, 257, 299:
        for later in np.s_[:, begin + t], np.s_[:, begin + t :]:
            value = 3 - 2 * case[name][later] if change == "finite" else float(change)
            dirty = outs(inputs.changed(case, name, later, value))[0]
            assert hardware.same_bits(dirty[:, : begin + t], clean[:, : begin + t]), t
            if change == "finite":
                assert not hardware.same_bits(dirty[:, begin + t :], clean[:, begin + t :]), t


LATER_GATES = [("rand", -40), ("slow", 40), ("rand", np.nan), ("slow", np.nan)]


@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("segment", [SEGMENT, 72, 184])
def test_later_gates_decide_no_earlier_cut(segment, joins, cut_every):
    """Fast gates that close from t on, and slow ones that open; and NaN."""
    extra = 16 + segment % 16 if len(joins) > 2 else 0
    cut_every(segment, *joins[:2], *([extra] if extra else []))
    places = {extra + i * segment + j for i in (1, 2, 3) for j in (-40, -16, -9, -8, -1, 0, 16)}
    for (gate, value), t in itertools.product(LATER_GATES, sorted(places)):
        case = inputs.make([700], 2, gate, seed=131, batch=1)
        before = outs(case)[0]
        after = outs(inputs.changed(case, "g", np.s_[:, t:], value))[0]
        assert hardware.same_bits(before[:, :t], after[:, :t])


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("repeats", [1, 10])
def test_neighbours_leave_no_trace(repeats, bad, joins, cut_every):
    """Rows and state of one sequence are bitwise the same whatever all others hold."""
    case = inputs.make([129, 0, 70, 200] * repeats, 2, "half", seed=132)
    cut_every(SEGMENT, *joins)
    clean = outs(case)
    spans = inputs.spans(case)
    for mine in range(4 * repeats - 4, 4 * repeats):
        rows = spans[mine][1]
        dirty = dict(case)
        for name in TOKENS:
            others = np.full_like(case[name], bad)
            others[:, rows] = case[name][:, rows]
            dirty[name] = others
        dirty["initial_state"] = np.full_like(case["initial_state"], bad)
        dirty["initial_state"][mine] = case["initial_state"][mine]
        out, final_state = outs(dirty)
        assert_same((out[:, rows], final_state[mine]), (clean[0][:, rows], clean[1][mine]))
        assert np.isfinite(final_state[mine]).all()


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samples_and_heads_leave_no_trace(bad, joins, cut_every):
    case = inputs.make([200], 3, "half", seed=133, batch=3)
    cut_every(SEGMENT, *joins)
    clean = outs(case)
    for sample, head in (0, 1), (1, 0), (2, 1):
        dirty = dict(case)
        for name in TOKENS:
            dirty = inputs.changed(dirty, name, np.s_[sample, :, head], bad)
        dirty = inputs.changed(dirty, "initial_state", (sample, head), bad)
        for got, want, axis in zip(outs(dirty), clean, (2, 1), strict=True):
            others = np.ones((3, 3), bool)
            others[sample, head] = False
            got, want = (np.moveaxis(x, axis, 1)[others] for x in (got, want))
            assert hardware.same_bits(got, want)


def assert_other_rows_are_clean(row, got, want):
    """Rows of a state, that is columns of out, but one; those of the warp too that has that row,
    which works out its 16 columns of out in another way.
    """
    others = np.arange(inputs.HEAD_DIM) != row
    assert hardware.same_bits(got[0][..., others], want[0][..., others])
    assert hardware.same_bits(got[1][:, :, others], want[1][:, :, others])


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("t", [0, 10, 63, 64, 70, 127, 128, 250])
def test_what_is_not_finite_in_v_stays_in_its_column(t, joins, cut_every):
    """From there on, through all joins, and until a cut; all others are bitwise the same."""
    case = inputs.make([400], 2, "half", seed=134, batch=1)
    cut_every(SEGMENT, *joins)
    clean_out, clean_state = outs(case)
    out, final_state = outs(inputs.changed(case, "v", np.s_[:, t, :, 5], np.nan))
    assert_other_rows_are_clean(5, (out, final_state), (clean_out, clean_state))
    assert hardware.same_bits(out[:, :t], clean_out[:, :t])
    column = out[..., 5].astype(np.float32)
    assert np.isnan(column[:, t:, SLOW]).all()
    assert np.isnan(final_state[:, SLOW, 5]).all()
    # Two or three chunks before a cut make its state.
    end_of_segment = -(-(t + 1) // 64) * 64
    assert np.isnan(column[:, t:end_of_segment, FAST]).all()
    clean_from = end_of_segment + 64
    rows = np.s_[:, clean_from:, FAST]
    assert hardware.same_bits(out[rows], clean_out[rows])


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("name", ["k", "g", "beta"])
@pytest.mark.parametrize("t", [0, 10, 63, 64, 70, 127, 128, 250])
def test_what_is_not_finite_in_a_key_stays_in_later_rows(t, name, joins, cut_every):
    case = inputs.make([400], 2, "slow", seed=135, batch=1)
    cut_every(SEGMENT, *joins)
    clean = outs(case)[0]
    out, final_state = outs(inputs.changed(case, name, np.s_[:, t], np.nan))
    assert hardware.same_bits(out[:, :t], clean[:, :t])
    assert np.isnan(out[:, t:].astype(np.float32)).all()
    assert np.isnan(final_state).all()


@pytest.mark.parametrize("joins", [EACH, SECOND], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_of_an_initial_state_do_not_meet(bad, joins, cut_every):
    """What is not finite in a row of it stays in that column of out, and in that row."""
    case = inputs.make([300], 2, "slow", seed=136, batch=1)
    cut_every(SEGMENT, *joins)
    clean_out, clean_state = outs(case)
    out, final_state = outs(inputs.changed(case, "initial_state", np.s_[:, :, 5, 90], bad))
    assert_other_rows_are_clean(5, (out, final_state), (clean_out, clean_state))
    assert not np.isfinite(out[:, -1, :, 5].astype(np.float32)).any()
    assert not np.isfinite(final_state[:, :, 5]).any()


class Kept(Workspace):
    """In a workspace's place: CuPy's memory, full of a byte, between guards, and kept."""

    # Read as a begin, a byte of zero is none: no item would be there, nor what it writes.
    GUARD_BYTES, GUARD = 1 << 25, 0
    fill = 0

    def __enter__(self):
        import cupy

        guards, self.has_memory = self.GUARD_BYTES, bool(self._num_bytes)
        self.memory = cupy.full(self._num_bytes + 2 * guards, self.GUARD, np.uint8)
        self.memory[guards:-guards] = self.fill
        if self.has_memory:
            self.pointer = self.memory.data.ptr + guards
        return self

    def __exit__(self, kind, error, traceback):
        self.pointer = 0

    def begins(self, case):
        """Of a call that has ended: [num_slots, H]."""
        launch, num_heads = plan.plan(hardware.plan_shape(case), jit.gpu()), case["q"].shape[2]
        at = self.GUARD_BYTES + launch.offsets.begins
        found = self.memory[at : at + launch.num_slots * num_heads]
        return found.get().reshape(-1, num_heads)

    def assert_guards_are_whole(self):
        for guard in self.memory[: self.GUARD_BYTES], self.memory[-self.GUARD_BYTES :]:
            assert int(guard.min()) == int(guard.max()) == self.GUARD


@pytest.fixture
def workspaces(monkeypatch, cupy):
    """A function that gives the calls after it workspaces full of a byte; returns their list."""

    def fill_with(fill):
        made = []

        class Filled(Kept):
            def __enter__(self):
                made.append(self)
                return super().__enter__()

        Filled.fill = fill
        monkeypatch.setattr("cukda.launch.Workspace", Filled)
        return made

    return fill_with


@pytest.mark.parametrize("joins", [NEVER, EACH, SECOND, BEHIND_LEAD], ids=str)
@pytest.mark.parametrize("repeats", [1, 5])
def test_what_memory_held_leaves_no_trace(repeats, joins, cut_every, workspaces):
    """Zeros, ones, and NaN in states, which are joins among begins; and nothing is written beside
    it.
    """
    case = inputs.make(LENGTHS * repeats, 2, "half", seed=137)
    cut_every(SEGMENT, *joins)
    want = outs(case)
    for fill in 0x00, 0x01, 0xFF:
        made = workspaces(fill)
        assert_same(outs(case), want)
        (workspace,) = made
        assert workspace.has_memory
        workspace.assert_guards_are_whole()


def test_whole_sequences_take_no_memory(cut_every, workspaces):
    case = make(None, seed=138)
    cut_every(0)
    made = workspaces(0)
    hardware.run(case)
    assert not any(workspace.has_memory for workspace in made)


MOST = 2**31 - 1
BAD_BOUNDS = [
    [0, 400, 0, 400],
    [0, 400] * 16,
    [400, 0] * 16,
    [0, 400] * 30,
    [400, 0] * 30,
    [0, 399, 1, 398, 2, 397, 3],
    [0, 100, 50, 400, 200, 300],
    [0, 100, 50, 400, 200, 300] * 8,
    [-5, 500, 100, 1000, 50],
    [-100, -50, -1],
    [400, 300, 200, 100, 0],
    [1000, 2000, 3000],
    [0, MOST, -MOST - 1, 400],
    [0, MOST, -MOST - 1, 400] * 12,
    [200, *[0, 400] * 20],
    [200] * 6,
    [200] * 40,
    [300, 50, 120, 90, 250],
    [300, 50, 120, 90, 250] * 9,
    [250, 100, 240, 110, 230, 120],
]


@pytest.mark.parametrize("joins", [NEVER, *JOINS], ids=str)
@pytest.mark.parametrize("integer", [np.int32, np.int64])
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=lambda bounds: f"{bounds[:6]} of {len(bounds)}")
def test_bad_cu_seqlens_stay_inside(bounds, integer, joins, cut_every, workspaces):
    """No byte beside the arrays is written, nor beside the workspace, whatever that held; nor rows
    of no sequence.
    """
    check_bad_cu_seqlens(np.array(bounds, integer), joins, cut_every, workspaces)


@pytest.mark.parametrize("joins", JOINS, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_cu_seqlens_stay_inside(seed, joins, cut_every, workspaces):
    rng = np.random.default_rng(seed)
    num_bounds = 30 if seed % 2 else 70
    if seed < 4:
        bounds = rng.integers(-100, 500, num_bounds)
    else:
        bounds = rng.integers(-(2**63), 2**63 - 1, num_bounds)
    check_bad_cu_seqlens(bounds, joins, cut_every, workspaces)


def check_bad_cu_seqlens(bounds, joins, cut_every, workspaces):
    import cukda

    num_tokens, guard = 400, 64
    case = inputs.make([num_tokens], 2, "half", seed=139, batch=1)
    num_sequences = len(bounds) - 1
    rng = np.random.default_rng(139)
    shape = (num_sequences, *case["initial_state"].shape[1:])
    case["initial_state"] = rng.standard_normal(shape, dtype=np.float32)
    case["cu_seqlens"] = bounds
    is_of_a_sequence = np.zeros(num_tokens, bool)
    for begin, end in itertools.pairwise(bounds.clip(0, num_tokens)):
        is_of_a_sequence[begin:end] = True
    cut_every(SEGMENT, *joins)
    for fill in 0x00, 0xFF:
        made = workspaces(fill)
        call = hardware.upload(case)
        out = hardware.nans((1, guard + num_tokens + guard, *case["v"].shape[2:]), "bfloat16")
        states = hardware.nans((num_sequences + 2, *shape[1:]), "float32")
        tokens = [call.pop(n) for n in TOKENS]
        cukda.fwd(*tokens, **call, out=out[:, guard:-guard], final_state=states[1:-1])
        out, states = hardware.bits(out), hardware.host(states)
        assert (out[:, :guard] == 0x7FC0).all() and (out[:, -guard:] == 0x7FC0).all()
        assert (out[:, guard:-guard][:, ~is_of_a_sequence] == 0x7FC0).all()
        assert np.isnan(states[[0, -1]]).all()
        assert hardware.same_bits(call["initial_state"], case["initial_state"])
        for workspace in made:
            workspace.assert_guards_are_whole()


def test_out_of_memory(cut_every, need_memory, cupy):
    """An error that names it, outputs as they were, and all is well once there is memory again."""
    import cukda

    # And no other test with much of it meanwhile, which would miss what is taken here.
    need_memory(1)
    runtime = cupy.cuda.runtime
    case = inputs.make([16_384], 8, "half", seed=140, batch=1)
    # 256 segments of 8 heads, two states and a state's half each: 320 MiB.
    cut_every(SEGMENT, *EACH)
    want = outs(case)
    call = hardware.upload(case)
    tokens = [call.pop(n) for n in TOKENS]
    out = hardware.nans(case["v"].shape, "bfloat16")
    final_state = hardware.nans(hardware.state_shape(case), "float32")
    launch = hardware.kernel("spin")
    launch((1,), (1,), (np.int64(1), np.uint64(0)))
    cupy.get_default_memory_pool().free_all_blocks()
    runtime.deviceSynchronize()
    runtime.memPoolTrimTo(_memory_pools[runtime.getDevice()], 0)
    taken = []
    try:
        take_all(runtime, taken)
        for _ in range(3):
            with pytest.raises(MemoryError, match=r"^cukda: the GPU has no \d+ bytes "):
                cukda.fwd(*tokens, **call, out=out, final_state=final_state)
            # Which would report what was left.
            launch((1,), (1,), (np.int64(1), np.uint64(0)))
            runtime.deviceSynchronize()
    finally:
        for pointer in taken:
            runtime.free(pointer)
    for output in out, final_state:
        assert np.isnan(hardware.host(output).astype(np.float32)).all()
    cukda.fwd(*tokens, **call, out=out, final_state=final_state)
    assert_same((out, final_state), want)


def take_all(runtime, taken):
    """Append pointers to pieces of the GPU's memory until none of 2 MiB is left."""
    size = 1 << 33
    while size >= 1 << 21:
        try:
            taken.append(runtime.malloc(size))
        except runtime.CUDARuntimeError:
            size //= 2
