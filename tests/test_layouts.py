"""Which kernels a call's strides take, and what strides those are given: of CuPy arrays at made-up
addresses.
"""

import dataclasses
import struct

import hardware
import numpy as np
import pytest
from made_up import D, fwd_call, made, step_call
from test_launch import LARGEST, STREAM

import cukda
from cukda import decode, jit, launch, plan

ROWS = ("q", "k", "v", "g", "out", "initial_state", "final_state")
# In the order of plan.STRIDES_FORMAT.
STRIDED = ("q", "k", "v", "g", "out", "beta", "A_log", "dt_bias", "initial_state", "final_state")
NUM_STRIDES = {"A_log": 1, "dt_bias": 1}
T, H, N = 5, 4, 3


def in_elements(x):
    strides = x.row_major if x.strides is None else x.strides
    return [stride // x.row_major[-1] for stride in strides]


def with_strides(x, *strides):
    """In elements."""
    item_bytes = x.row_major[-1]
    return dataclasses.replace(x, strides=tuple(stride * item_bytes for stride in strides))


def with_gap(x, gap):
    """Behind each row, so many elements."""
    wide = dataclasses.replace(x, shape=(*x.shape[:-1], x.shape[-1] + gap))
    return dataclasses.replace(x, strides=wide.row_major)


def launched(gpus, call):
    """(layout, entry, packed) of each launch."""
    gpus.launches.clear()
    gpus.work.clear()
    cukda.fwd(**made(call))
    keys = {kernel._pointer: key for key, kernel in jit._kernels.items()}
    found = []
    for _, function, *_, packed in gpus.launches:
        _, _, entry, defines = keys[function]
        found.append((dict(defines)["LAYOUT"], entry, packed))
    return found


def strides_in(call, entry, packed):
    """What a launch has behind its other parameters, by name."""
    without = {"kda_fwd": launch.PARAMETERS, "kda_cuts": launch.CUTS_PARAMETERS}[entry]
    size = struct.calcsize(f"{without.format} 0q")
    assert struct.calcsize(f"{without.format} {plan.STRIDES_FORMAT}") == len(packed)
    values = list(struct.unpack(f"@{plan.STRIDES_FORMAT}", packed[size:]))
    found = {name: [values.pop(0) for _ in range(NUM_STRIDES.get(name, 3))] for name in STRIDED}
    assert values == []
    return found


def check_strides(call, found, row_major=()):
    """row_major: names of those that are copied to memory without gaps."""
    for name, strides in found.items():
        x = call[name]
        if x is not None and name in row_major:
            x = dataclasses.replace(x, strides=None)
        want = [0] * len(strides) if x is None else in_elements(x)[: len(strides)]
        if name == "dt_bias" and x is not None and len(x.shape) == 1:
            want = [D]
        # Of one nothing is beside it.
        shape = x.shape if x is not None else strides
        for axis, (got, expected) in enumerate(zip(strides, want, strict=True)):
            assert got == expected or shape[axis] == 1, (name, axis)


def without_strides(launch_of):
    sizes = {"kda_fwd": launch.PARAMETERS.size, "kda_cuts": launch.CUTS_PARAMETERS.size}
    return all(len(packed) == sizes[entry] for _, entry, packed in launch_of)


@pytest.fixture(params=["whole", "cut"])
def entries(request, monkeypatch):
    """What is launched."""
    lengths = {"whole": (0,), "cut": (64, 1, 1)}
    hardware.force(monkeypatch.setattr, LARGEST, *lengths[request.param])
    return ["kda_fwd"] if request.param == "whole" else ["kda_cuts", "kda_fwd"]


def a_call():
    return fwd_call(num_tokens=1000, heads=H, num_sequences=N)


def test_contiguous_arrays_take_no_strides(gpus, entries):
    """However they are said; and beta, A_log, dt_bias and cu_seqlens at any element."""
    call = a_call()
    for name in (None, *STRIDED, "cu_seqlens"):
        given = dict(call)
        if name is not None:
            x = call[name]
            given[name] = dataclasses.replace(x, strides=x.row_major)
            if name not in ROWS:
                given[name] = dataclasses.replace(x, pointer=x.pointer + x.row_major[-1])
        found = launched(gpus, given)
        assert [entry for _, entry, _ in found] == entries
        assert {layout for layout, *_ in found} == {plan.CONTIGUOUS} and without_strides(found)


@pytest.mark.parametrize("name", STRIDED)
def test_rows_at_16_bytes(gpus, entries, name):
    call = a_call()
    x = call[name]
    gap = 1 if name == "beta" else 16
    call[name] = with_strides(x, 3) if name == "A_log" else with_gap(x, gap)
    found = launched(gpus, call)
    assert [entry for _, entry, _ in found] == entries
    for layout, entry, packed in found:
        assert layout == plan.STRIDED
        check_strides(call, strides_in(call, entry, packed))


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [(name, n) for name in ROWS for n in (2, 4, 8) if n > 2 or not name.endswith("state")],
)
@pytest.mark.parametrize("of", ["base", "rows", "heads", "both"])
def test_rows_at_any_element(gpus, entries, name, num_bytes, of):
    call = a_call()
    x = call[name]
    item_bytes = x.row_major[-1]
    if of in ("rows", "both"):
        x = with_gap(x, num_bytes // item_bytes)
    if of == "heads":
        strides = list(x.row_major)
        strides[0] *= 2
        strides[1] += num_bytes
        x = dataclasses.replace(x, strides=tuple(strides))
    if of in ("base", "both"):
        x = dataclasses.replace(x, pointer=x.pointer + num_bytes)
    call[name] = x
    found = launched(gpus, call)
    assert [entry for _, entry, _ in found] == entries
    for layout, entry, packed in found:
        assert layout == plan.UNALIGNED
        check_strides(call, strides_in(call, entry, packed))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
@pytest.mark.parametrize("sign", [1, -1])
def test_tokens_far_apart(gpus, entries, name, sign):
    """The kernels for rows at 16 bytes count from one to the next in 32 bits."""
    call = a_call()
    for step, want in (plan.MOST_STEP // 8 * 8, plan.STRIDED), (2**31, plan.UNALIGNED):
        call[name] = with_strides(call[name], 0, sign * step, D, 1)
        found = launched(gpus, call)
        assert [entry for _, entry, _ in found] == entries
        for layout, entry, packed in found:
            assert layout == want
            check_strides(call, strides_in(call, entry, packed))


def test_one_token_is_far_from_none(gpus):
    call = fwd_call(num_tokens=1, heads=H, num_sequences=1)
    call["q"] = with_strides(call["q"], 0, 2**31, 2 * D, 1)
    assert [layout for layout, *_ in launched(gpus, call)] == [plan.STRIDED]


def test_tokens_far_apart_without_gaps(gpus):
    """Of that many heads; nothing counts in 32 bits there."""
    call = fwd_call(num_tokens=2, heads=2**24, num_sequences=1)
    call |= {"initial_state": None, "final_state": None}
    for i, name in enumerate(("q", "k", "v", "g", "out"), 1):
        call[name] = dataclasses.replace(call[name], pointer=i << 44)
    assert {layout for layout, *_ in launched(gpus, call)} == {plan.CONTIGUOUS}
    call["q"] = with_gap(call["q"], 8)
    assert {layout for layout, *_ in launched(gpus, call)} == {plan.UNALIGNED}


def test_axes_of_one_do_not_count(gpus, entries):
    """B = 1, and one head, token or sequence, whatever their strides are."""
    call = fwd_call(num_tokens=1000, heads=1, num_sequences=1)
    for name in STRIDED:
        x = call[name]
        # Not even a number of elements.
        strides = [s if n != 1 else 7 for s, n in zip(x.row_major, x.shape, strict=True)]
        call[name] = dataclasses.replace(x, strides=tuple(strides))
    found = launched(gpus, call)
    assert {layout for layout, *_ in found} == {plan.CONTIGUOUS} and without_strides(found)
    # Nor beside others that do.
    call["q"] = with_gap(call["q"], 8)
    call["q"] = with_strides(call["q"], 7, *in_elements(call["q"])[1:])
    for layout, entry, packed in launched(gpus, call):
        assert layout == plan.STRIDED
        check_strides(call, strides_in(call, entry, packed))


@pytest.mark.parametrize("seed", range(8))
def test_strides_of_all_at_once(gpus, entries, seed):
    """Any number of them missing; axes in any order; a flat dt_bias."""
    rng, call = np.random.default_rng(seed), a_call()
    for name in "A_log", "dt_bias", "initial_state", "final_state":
        if rng.random() < 0.3:
            call[name] = None
    if call["dt_bias"] is not None and seed % 2:
        call["dt_bias"] = dataclasses.replace(call["dt_bias"], shape=(H * D,))
    is_aligned = rng.random() < 0.5
    for name in STRIDED:
        x = call[name]
        if x is None or (name == "dt_bias" and len(x.shape) == 1):
            continue
        order = [*rng.permutation(len(x.shape) - 1), len(x.shape) - 1]
        if name == "A_log":
            call[name] = with_strides(x, 3)
            continue
        wide = dataclasses.replace(x, shape=tuple(x.shape[i] for i in order))
        wide = in_elements(with_gap(wide, 8 if is_aligned else 1))
        call[name] = with_strides(x, *(wide[order.index(i)] for i in range(len(order))))
    found = launched(gpus, call)
    assert {layout for layout, *_ in found} == {plan.STRIDED if is_aligned else plan.UNALIGNED}
    for _, entry, packed in found:
        check_strides(call, strides_in(call, entry, packed))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_states_in_place_of_sequences_that_are_cut(gpus, monkeypatch, gap, dtype):
    """The initial ones are copied to where they have no gaps, on the launches' stream."""
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    call = a_call()
    state = dataclasses.replace(call["initial_state"], dtype=dtype)
    state = with_gap(state, gap) if gap else state
    call["initial_state"] = call["final_state"] = state
    # So that there are strides where the states have none.
    call["q"] = with_gap(call["q"], 8)
    for _ in range(2):
        gpus.memory.clear()
        found = launched(gpus, call)
        copied, *launches = gpus.work
        assert [entry for _, entry, _ in found] == ["kda_cuts", "kda_fwd"]
        assert len(launches) == 2
        (memory,) = gpus.memory
        to = copied[0]
        assert memory.pointer < to and to % 16 == 0
        assert to + state.num_bytes == memory.pointer + memory.num_bytes
        if gap:
            item_bytes = state.row_major[-1]
            bits = f"uint{8 * item_bytes}"
            want = to, state.pointer, state.shape, state.strides, bits, STREAM
        else:
            want = to, state.pointer, state.num_bytes, STREAM
        assert copied == want
        assert (memory.taken, memory.freed) == (len(gpus.work) - 3, len(gpus.work))
        for layout, entry, packed in found:
            assert layout == (plan.UNALIGNED if gap == 1 else plan.STRIDED)
            strides = strides_in(call, entry, packed)
            check_strides(call, strides, row_major=["initial_state"])
            assert strides["initial_state"] == [H * D * D, D * D, D]
            if entry == "kda_fwd":
                assert to.to_bytes(8, "little") in packed
        assert state.pointer.to_bytes(8, "little") in found[1][2], "the final ones"


def test_states_in_place_of_whole_sequences_are_not_copied(gpus, monkeypatch):
    hardware.force(monkeypatch.setattr, LARGEST, 0)
    call = a_call()
    call["initial_state"] = call["final_state"] = with_gap(call["initial_state"], 8)
    ((_, entry, packed),) = launched(gpus, call)
    assert gpus.memory == [] and len(gpus.work) == 1
    check_strides(call, strides_in(call, entry, packed))


@pytest.mark.parametrize("changed", ["nothing", "rows", "A_log", "flat dt_bias", "state"])
def test_strides_of_step(gpus, changed):
    call = step_call()
    if changed == "rows":
        for name, gap in zip(("q", "k", "v", "g", "beta", "out"), (1, 2, 3, 4, 5, 6), strict=True):
            call[name] = with_gap(call[name], gap)
    elif changed == "A_log":
        call["A_log"] = with_strides(call["A_log"], -3)
        call["dt_bias"] = with_gap(call["dt_bias"], 5)
    elif changed == "flat dt_bias":
        call["dt_bias"] = dataclasses.replace(call["dt_bias"], shape=(2 * D,))
    elif changed == "state":
        call["state"] = with_gap(call["state"], 4)
    for _ in range(2):
        cukda.step(**made(call))
        packed = gpus.launches[-1][-1]
        values = list(decode._PARAMETERS.unpack(packed))
        for name in "q", "k", "v", "g", "beta":
            assert values[:4] == [call[name].pointer, *in_elements(call[name])[:3]], name
            del values[:4]
        assert values.pop(0) == 0.25
        assert values[:4] == [call["out"].pointer, *in_elements(call["out"])[:3]]
        of_dt_bias = D if changed == "flat dt_bias" else in_elements(call["dt_bias"])[0]
        assert values[4:6] == [call["A_log"].pointer, in_elements(call["A_log"])[0]]
        assert values[6:8] == [call["dt_bias"].pointer, of_dt_bias]
        assert values[8] == -2.5
        assert values[9:13] == [call["state"].pointer, *in_elements(call["state"])[:3]]
        assert values[13] == call["state_indices"].pointer
        assert values[14:] == [call["state"].shape[0], 2, 2]
