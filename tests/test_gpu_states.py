"""The states: which are given, their dtypes, in place, their layout, the carry between calls."""

import hardware
import inputs
import numpy as np
import oracle
import pytest
from inputs import BF16, TOKENS

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state.
TOLERANCE = {
    # Against the recurrence, over few rows.
    "few": (1e-2, 1e-2),
    # Against one call: float32 rounding of the carry, which now and then tips a bf16 rounding.
    "carry": (1e-3, 2e-4),
}
DTYPES = {"bfloat16": BF16, "float32": np.dtype(np.float32)}


def assert_close(got, want, kind):
    errors = [oracle.error(a, b) for a, b in zip(got, want, strict=True)]
    assert errors[0] <= TOLERANCE[kind][0] and errors[1] <= TOLERANCE[kind][1], errors


def make(seq_lens=(33, 0, 64, 5), batch=None, gate="rand", seed=50):
    """A case whose state is as large as what the tokens add to it."""
    case = inputs.make(seq_lens, 3, gate, seed, batch=batch)
    case["initial_state"] *= 10
    return case


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("initial", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("final", [None, "bfloat16", "float32"])
def test_mixes(initial, final, batch):
    case = make((70,) if batch else (33, 0, 64, 5), batch, "slow")
    if initial is None:
        case["initial_state"] = None
    else:
        case["initial_state"] = case["initial_state"].astype(DTYPES[initial])
    out, final_state = hardware.run(case, final)
    want_out, want_state = hardware.want(case)
    assert oracle.error(out, want_out) <= TOLERANCE["few"][0]

    # Whatever the arrays' dtypes, the arithmetic is that of float32 states of the same values.
    same = dict(case)
    if initial is None:
        same["initial_state"] = np.zeros(hardware.state_shape(case), np.float32)
    else:
        same["initial_state"] = case["initial_state"].astype(np.float32)
    same_out, same_state = hardware.run(same)
    assert hardware.same_bits(out, same_out)
    if final is not None:
        assert final_state.dtype == DTYPES[final]
        assert oracle.error(final_state, want_state) <= TOLERANCE["few"][1]
        assert hardware.same_bits(final_state, hardware.host(same_state).astype(DTYPES[final]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [None, 2])
def test_in_place(dtype, batch, variant):
    import cukda

    case = make((170,) if batch else (33, 0, 170, 5), batch, "half")
    case["initial_state"] = case["initial_state"].astype(DTYPES[dtype])
    want_out, want_state = hardware.run(case, dtype)
    call = hardware.upload(case)
    tokens = [call.pop(n) for n in TOKENS]
    out = hardware.nans(case["v"].shape, "bfloat16")
    cukda.fwd(*tokens, **call, out=out, final_state=call["initial_state"])
    assert hardware.same_bits(out, want_out)
    assert hardware.same_bits(call["initial_state"], want_state)


@pytest.mark.parametrize("name", ["initial_state", "q", "dt_bias", "cu_seqlens"])
def test_inputs_are_not_altered(name):
    import cukda

    case = make()
    call = hardware.upload(case)
    given = call[name]
    tokens = [call.pop(n) for n in TOKENS]
    out = hardware.nans(case["v"].shape, "bfloat16")
    final_state = hardware.nans(hardware.state_shape(case), "float32")
    cukda.fwd(*tokens, **call, out=out, final_state=final_state)
    assert hardware.same_bits(given, case[name])


@pytest.mark.parametrize("gate", ["rand", "slow"])
def test_rows_are_values_and_columns_keys(gate):
    """A state of one entry sends the key's channel to the value's channel, not the other way."""
    case = make((1,), 1, gate)
    case = inputs.changed(case, "k", slice(None), 0)
    case = inputs.changed(case, "initial_state", slice(None), 0)
    case = inputs.changed(case, "initial_state", np.s_[:, :, 5, 90], 1)
    out, final_state = (hardware.host(x) for x in hardware.run(case))
    assert sorted(set(np.argwhere(out[0, 0].astype(np.float32))[:, 1])) == [5]
    assert {tuple(entry) for entry in np.argwhere(final_state[0])[:, 1:]} == {(5, 90)}
    want_out, want_state = hardware.want(case)
    assert_close((out, final_state), (want_out, want_state), "few")


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize(
    ("cuts", "kind"),
    [
        ([64], "carry"),
        ([32], "carry"),
        ([64, 128], "carry"),
        ([192], "carry"),
        # Other chunks than in one call, so other bf16 roundings.
        ([50], "few"),
        ([1, 2, 3], "few"),
        ([199], "few"),
    ],
    ids=str,
)
def test_run_in_parts(cuts, kind, gate):
    """The float32 state carries a sequence from call to call."""
    case = make((200,), 1, gate)
    want = [hardware.host(x) for x in hardware.run(case)]
    state, outs = case["initial_state"], []
    for begin, end in zip([0, *cuts], [*cuts, 200], strict=True):
        out, state = map(hardware.host, hardware.run(inputs.tokens(case, begin, end, state)))
        outs.append(out)
    assert_close((np.concatenate(outs, axis=1), state), want, kind)


def test_packed_equals_batch():
    batch = make((96,), 2)
    packed = {
        **batch,
        **{n: batch[n].reshape(1, 192, *batch[n].shape[2:]) for n in TOKENS},
        "cu_seqlens": np.array([0, 96, 192], np.int32),
    }
    want_out, want_state = map(hardware.host, hardware.run(batch))
    out, state = map(hardware.host, hardware.run(packed))
    assert_close((out.reshape(want_out.shape), state), (want_out, want_state), "carry")


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_out_over_an_input(name):
    """Right, or refused by name."""
    import cukda

    case = make((70,), 1)
    want_out, _ = hardware.run(case)
    call = hardware.upload(case)
    out = call[name]
    tokens = [call.pop(n) for n in TOKENS]
    try:
        cukda.fwd(*tokens, **call, out=out)
    except ValueError as error:
        assert str(error).startswith("out: ")
        assert hardware.same_bits(out, case[name])
    else:
        assert hardware.same_bits(out, want_out)


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_that_overlap_by_part(shift):
    """Right, or refused by name."""
    import cukda

    case = make()
    want = hardware.run(case)
    call = hardware.upload(case)
    num_states = hardware.num_states(case)
    memory = hardware.nans((num_states + 2, *case["initial_state"].shape[1:]), "float32")
    memory[1:-1] = call["initial_state"]
    call["initial_state"] = memory[1:-1]
    final_state = memory[1 + shift : 1 + shift + num_states]
    out = hardware.nans(case["v"].shape, "bfloat16")
    tokens = [call.pop(n) for n in TOKENS]
    try:
        cukda.fwd(*tokens, **call, out=out, final_state=final_state)
    except ValueError as error:
        assert str(error).startswith("final_state: ")
    else:
        assert hardware.same_bits(out, want[0]) and hardware.same_bits(final_state, want[1])
