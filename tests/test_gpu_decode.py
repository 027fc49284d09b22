"""cukda.step on a GPU: against the recurrence, pools, padding, strides, graphs, bits."""

import decoding
import hardware
import inputs
import numpy as np
import oracle
import pytest
from inputs import BF16, TOKENS

import cukda

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out, rounded to bfloat16, and of a pool, which a bfloat16 one
# rounds too.
OUT_TOLERANCE = 2.5e-3
STATE_TOLERANCE = {"float32": 2e-5, "bfloat16": 2.5e-3}
OPTIONS = ("A_log", "dt_bias", "scale", "lower_bound")


def run(case):
    """(out, pool) of a call with CuPy arrays, as NumPy ones; out full of NaN before."""
    case = hardware.upload(case)
    out = hardware.nans(case["q"].shape, "bfloat16")
    tokens = [case.pop(name) for name in TOKENS]
    pool = case.pop("state")
    assert cukda.step(*tokens, pool, **case, out=out) is out
    return hardware.host(out), hardware.host(pool)


def assert_close(got, case, state):
    want_out, want_pool = decoding.want(case, sigmoid=lambda x: hardware.sigmoid(x).get())
    out, pool = got
    assert oracle.error(out, want_out) < OUT_TOLERANCE
    slots = case["state_indices"]
    assert oracle.error(pool[slots], want_pool[slots]) < STATE_TOLERANCE[state]


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
@pytest.mark.parametrize(("num_sequences", "heads"), [(1, 1), (3, 5), (40, 2)])
def test_against_the_recurrence(num_sequences, heads, num_tokens, gate, state):
    case = decoding.make(num_sequences, num_tokens, heads, num_tokens, state, gate)
    got = run(case)
    assert_close(got, case, state)
    others = np.setdiff1d(np.arange(len(case["state"])), case["state_indices"])
    assert hardware.same_bits(got[1][others], case["state"][others])


def test_gates_and_defaults_that_are_left_out():
    case = decoding.make(3, 2, 2)
    case |= {"A_log": None, "dt_bias": None, "scale": None, "lower_bound": -1.5}
    case["state_indices"] = None
    got = run(case)
    case |= {"state_indices": np.arange(3), "scale": 128**-0.5}
    assert_close(got, case, "float32")


def test_a_sequence_alone_has_the_same_bits():
    case = decoding.make(300, 2, 3)
    out, pool = run(case)
    for n in 0, 17, 299:
        alone = case | {name: case[name][n : n + 1] for name in (*TOKENS, "state_indices")}
        alone_out, alone_pool = run(alone)
        slot = case["state_indices"][n]
        assert hardware.same_bits(alone_out[0], out[n])
        assert hardware.same_bits(alone_pool[slot], pool[slot])


@pytest.mark.parametrize("padding", decoding.PADDING)
def test_padding_leaves_out_and_states_alone(padding):
    decoding.check_padding(run, padding)


def test_a_nan_stays_in_its_sequence_and_head():
    case = decoding.make(4, 2, 3)
    clean_out, clean_pool = run(case)
    for name in TOKENS:
        bad = case | {name: case[name].copy()}
        bad[name][2, 1, 1] = np.nan
        out, pool = run(bad)
        slot = case["state_indices"][2]
        # Before that token too.
        assert hardware.same_bits(out[2, 0], clean_out[2, 0])
        for head in 0, 2:
            assert hardware.same_bits(out[2, :, head], clean_out[2, :, head])
            assert hardware.same_bits(pool[slot, head], clean_pool[slot, head])
        others = np.setdiff1d(np.arange(len(case["state"])), slot)
        assert hardware.same_bits(out[[0, 1, 3]], clean_out[[0, 1, 3]])
        assert hardware.same_bits(pool[others], clean_pool[others])


@pytest.mark.parametrize("size", [0, 1e-20, 1e18, 3e38])
@pytest.mark.parametrize("name", ["q", "k"])
def test_magnitudes(name, size):
    case = decoding.make(2, 3, 2)
    case[name] = (case[name].astype(np.float32) * np.float32(size)).astype(BF16)
    assert_close(run(case), case, "float32")


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 2, 0)])
def test_any_strides(axes, library, torch, cupy):
    case = decoding.make(3, 2, 4)
    expected = run(case)

    def upload(x):
        if library == "cupy":
            return cupy.asarray(x)
        return torch.from_dlpack(cupy.asarray(x).view(np.int16)).view(torch.bfloat16)

    def apart(x):
        order = (*axes, 3)
        wide = np.zeros((*(x.shape[axis] for axis in order[:-1]), x.shape[-1] + 65), BF16)
        wide[..., 1:129] = x.transpose(order)
        wide = upload(wide)[..., 1:129]
        back = [int(axis) for axis in np.argsort(order)]
        return wide.permute(back) if library == "torch" else wide.transpose(back)

    given = {name: apart(case[name]) for name in ("q", "k", "v", "g")}
    given["beta"] = upload(np.repeat(case["beta"], 2, axis=-1))[..., ::2]
    out = apart(np.full(case["q"].shape, np.nan, BF16))
    pool = cupy.asarray(np.stack([case["state"], case["state"]], axis=1))
    options = {name: hardware.spread(case[name], 1) for name in ("A_log", "dt_bias")}
    options["state_indices"] = cupy.asarray(case["state_indices"])
    if library == "torch":
        pool = torch.from_dlpack(pool)
        options = {name: torch.from_dlpack(x) for name, x in options.items()}
        torch.cuda.synchronize()
    got = cukda.step(**given, **options, scale=case["scale"], state=pool[:, 1], out=out)
    assert got is out
    assert hardware.same_bits(out, expected[0])
    assert hardware.same_bits(pool[:, 1], expected[1])
    assert hardware.same_bits(pool[:, 0], case["state"])


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_steps_follow_a_whole_call(state, cupy):
    """A prompt by fwd, then steps, against one fwd of all."""
    case = inputs.make([120], 3, "slow", 7, batch=2)
    whole_out, whole_state = hardware.run(case)
    prompt = case | {name: case[name][:, :100] for name in TOKENS}
    out, pool = hardware.run(prompt, state)
    parts = [hardware.host(out)]
    for rows in slice(100, 101), slice(101, 104), slice(104, 120):
        tokens = {name: cupy.asarray(case[name][:, rows]) for name in TOKENS}
        options = {n: cupy.asarray(case[n]) for n in ("A_log", "dt_bias")}
        parts.append(hardware.host(cukda.step(**tokens, **options, state=pool)))
    # Two ways of rounding: fwd has its factors in bfloat16.
    whole = hardware.host(whole_out).astype(np.float64)
    assert oracle.error(np.concatenate(parts, axis=1), whole) < 5e-3
    whole_state = hardware.host(whole_state).astype(np.float64)
    assert oracle.error(hardware.host(pool), whole_state) < 5e-3


def test_graph_follows_new_values_and_indices(torch):
    first, second = decoding.make(6, 2, 2, seed=1), decoding.make(6, 2, 2, seed=2)
    second["state_indices"][3] = -1
    expected = [run(case) for case in (first, second)]

    def tensor(x):
        return torch.from_numpy(x.view(np.int16) if x.dtype == BF16 else x).cuda()

    def fill(case):
        for name, to in static.items():
            (to.view(torch.int16) if to.dtype == torch.bfloat16 else to).copy_(tensor(case[name]))

    names = (*TOKENS, "state", "state_indices", "A_log", "dt_bias")
    static = {
        n: tensor(first[n]).view(torch.bfloat16) if n in TOKENS else tensor(first[n]) for n in names
    }
    out = torch.full_like(static["q"], torch.nan)
    cukda.step(**static, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cukda.step(**static, out=out)
    for case, (want_out, want_pool) in zip((first, second), expected, strict=True):
        fill(case)
        out.fill_(torch.nan)
        graph.replay()
        bits = out.view(torch.int16).cpu().numpy()
        there = case["state_indices"] >= 0
        assert np.array_equal(bits[there], want_out.view(np.int16)[there])
        assert torch.isnan(out[torch.from_numpy(~there).cuda()]).all()
        assert hardware.same_bits(static["state"], want_pool)


def test_pool_of_more_than_32_bits_of_elements(need_memory, cupy):
    need_memory(20)
    num_slots, heads = 2 * 4096 + 9, 17
    case = decoding.make(3, 2, heads)
    slots = np.array([0, num_slots - 1, 4096], np.int32)
    small = case["state"][:3].copy()
    pool = cupy.zeros((num_slots, heads, 128, 128), np.float32)
    assert pool.size > 2**31
    pool[slots] = cupy.asarray(small)
    case |= {"state": small, "state_indices": np.arange(3, dtype=np.int32)}
    expected = run(case)
    given = {name: cupy.asarray(case[name]) for name in (*TOKENS, "A_log", "dt_bias")}
    out = cukda.step(**given, state=pool, state_indices=cupy.asarray(slots))
    assert hardware.same_bits(out, expected[0])
    assert hardware.same_bits(pool[slots], expected[1])
    for between in slice(1, 4096), slice(4097, num_slots - 1):
        assert not pool[between].any()
