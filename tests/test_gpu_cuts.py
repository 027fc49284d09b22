"""Sequences that are cut into segments: right where the gate is fast, and whole where it is not."""

import hardware
import inputs
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state, against the recurrence.
TOLERANCE = (1e-2, 1e-2)
# Of a cut sequence against the whole one: nothing that counts is left out.
CUT = 1e-3
FAST, SLOW = 0, 1


def two_gates(num_tokens, seed):
    """A head whose gate forgets within 32 tokens, and one that remembers thousands."""
    case = inputs.make([num_tokens], 2, seed=seed, batch=1)
    case["A_log"][:] = 0.5, 0
    case["dt_bias"][SLOW] = -9
    return case


def outs(case, cut_every, segment):
    cut_every(segment)
    return [hardware.host(x) for x in hardware.run(case)]


@pytest.mark.parametrize("segment", [64, 96, 512])
@pytest.mark.parametrize("num_tokens", [65, 127, 128, 129, 1000])
def test_fast_and_slow_heads(num_tokens, segment, cut_every):
    case = two_gates(num_tokens, seed=90)
    out, final_state = outs(case, cut_every, segment)
    whole_out, whole_state = outs(case, cut_every, 0)
    want_out, want_state = hardware.want(case)
    for head in FAST, SLOW:
        assert oracle.error(out[:, :, head], want_out[:, :, head]) <= TOLERANCE[0]
        assert oracle.error(final_state[:, head], want_state[:, head]) <= TOLERANCE[1]
        assert oracle.error(out[:, :, head], whole_out[:, :, head]) <= CUT
        assert oracle.error(final_state[:, head], whole_state[:, head]) <= CUT


def test_slow_heads_are_not_cut(cut_every):
    """The segment before goes on, chunk by chunk as without cuts: the same bits."""
    case = two_gates(700, seed=91)
    out, final_state = outs(case, cut_every, 64)
    whole_out, whole_state = outs(case, cut_every, 0)
    assert hardware.same_bits(out[:, :, SLOW].copy(), whole_out[:, :, SLOW].copy())
    assert hardware.same_bits(final_state[:, SLOW].copy(), whole_state[:, SLOW].copy())


def test_one_slow_channel_is_enough(cut_every):
    case = inputs.make([500], 2, seed=92, batch=1)
    case["dt_bias"][:, 77] = -9
    case["A_log"][:] = 0
    out, final_state = outs(case, cut_every, 64)
    whole_out, whole_state = outs(case, cut_every, 0)
    assert hardware.same_bits(out, whole_out) and hardware.same_bits(final_state, whole_state)


@pytest.mark.parametrize("segment", [64, 96])
def test_gates_that_take_turns(segment, cut_every):
    """Each channel forgets all within 32 tokens, but keys carry the state from those that are about
    to close to those that have been closed: nothing is forgotten, and there is no cut.
    """
    case = inputs.make([300], 2, seed=98, batch=1)
    case["A_log"][:] = case["dt_bias"][:] = 0
    case["k"] = inputs.bf16(np.abs(case["k"].astype(np.float32)))
    open_first = np.arange(300)[:, None] // 16 % 2 == np.arange(128) % 2
    case["g"] = inputs.changed(case, "g", np.s_[:], 30)["g"]
    case["g"][np.broadcast_to(open_first[None, :, None], case["g"].shape)] = -30
    case["initial_state"] *= np.float32(1e6)
    out, final_state = outs(case, cut_every, segment)
    whole_out, whole_state = outs(case, cut_every, 0)
    assert hardware.same_bits(out, whole_out) and hardware.same_bits(final_state, whole_state)


def test_keys_that_overflow_are_no_reason_to_cut(cut_every):
    """Where a key's square is beyond float32 the bound on what is left says nothing."""
    case = two_gates(200, seed=99)
    case["k"][:, 20:190] = (case["k"][:, 20:190].astype(np.float32) * 1e20).astype(inputs.BF16)
    out, final_state = outs(case, cut_every, 64)
    want_out, want_state = hardware.want(case)
    assert oracle.error(out, want_out) <= TOLERANCE[0]
    assert oracle.error(final_state, want_state) <= TOLERANCE[1]


def test_gate_that_is_slow_at_some_cuts(cut_every):
    """Raw gates of -40 keep the state for 200 tokens: no cut there, cuts before and after."""
    case = inputs.make([640], 2, seed=93, batch=1)
    case = inputs.changed(case, "g", np.s_[:, 200:400], -40)
    out, final_state = outs(case, cut_every, 64)
    want_out, want_state = hardware.want(case)
    for rows in np.s_[:, :200], np.s_[:, 200:400], np.s_[:, 400:]:
        assert oracle.error(out[rows], want_out[rows]) <= TOLERANCE[0]
    assert oracle.error(final_state, want_state) <= TOLERANCE[1]


@pytest.mark.parametrize("size", [1e6, 1e10])
def test_large_states(size, cut_every):
    case = two_gates(400, seed=94)
    case["initial_state"] *= np.float32(size)
    out, final_state = outs(case, cut_every, 64)
    want_out, want_state = hardware.want(case)
    for begin in 0, 64, 128, 192, 256, 320:
        for head in FAST, SLOW:
            rows = np.s_[:, begin : begin + 64, head]
            assert oracle.error(out[rows], want_out[rows]) <= 2 * TOLERANCE[0], (begin, head)
    assert oracle.error(final_state, want_state) <= TOLERANCE[1]


def test_later_gates_change_no_bit(cut_every):
    """Whether there is a cut at 256 hangs on tokens before it alone."""
    case = two_gates(400, seed=95)
    before = outs(case, cut_every, 64)[0]
    after = outs(inputs.changed(case, "g", np.s_[:, 256:], -40), cut_every, 64)[0]
    assert hardware.same_bits(before[:, :256].copy(), after[:, :256].copy())


def test_what_is_not_finite_lasts_until_a_cut(cut_every):
    """A NaN in v is in every row of its column from there on, until the gate has forgotten it."""
    case = two_gates(400, seed=96)
    clean = outs(case, cut_every, 64)[0]
    out = outs(inputs.changed(case, "v", np.s_[:, 70, :, 5], np.nan), cut_every, 64)[0]
    assert hardware.same_bits(out[:, :70].copy(), clean[:, :70].copy())
    assert np.isnan(out[:, 70:128, :, 5].astype(np.float32)).all()
    assert np.isnan(out[:, 70:, SLOW, 5].astype(np.float32)).all()
    assert hardware.same_bits(out[:, 192:, FAST].copy(), clean[:, 192:, FAST].copy())


def test_packed_sequences(cut_every):
    """More sequences than a warp has lanes, and fewer; each as it is alone."""
    lengths = [300, 0, 64, 65, 1, 129, 400, 0, 63]
    for repeats in 1, 5:
        case = inputs.make(lengths * repeats, 2, seed=97)
        got = outs(case, cut_every, 64)
        for seq_idx, (_, tokens) in enumerate(inputs.spans(case)):
            alone = [hardware.host(x) for x in hardware.run(inputs.alone(case, seq_idx))]
            assert oracle.error(got[0][:, tokens], alone[0]) <= CUT, seq_idx
            assert oracle.error(got[1][seq_idx : seq_idx + 1], alone[1]) <= CUT, seq_idx
