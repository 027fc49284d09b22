"""Calls whose arrays are like those of one before: what they launch, and what they are refused for,
is what it would be without that one.
"""

import dataclasses
import gc
import math
import weakref

import hardware
import numpy as np
import pytest
from made_up import NEW, Made, fwd_call, made, make, step_call
from test_launch import LARGEST, STREAM

import cukda
from cukda import arrays, decode, kda, signature, streams

FUNCTIONS = {"fwd": (cukda.fwd, kda, fwd_call), "step": (cukda.step, decode, step_call)}
OPTIONAL = (
    "out",
    "A_log",
    "dt_bias",
    "initial_state",
    "final_state",
    "cu_seqlens",
    "state_indices",
)


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


@pytest.fixture(params=["whole", "cut"])
def is_cut(request, monkeypatch, gpus):
    if request.param == "cut":
        hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    return request.param == "cut"


def outcome(gpus, function, call):
    """What the GPU is given to do, memory taken, and what comes back; or the error."""
    for seen in gpus.work, gpus.launches, gpus.memory:
        seen.clear()
    gpus.num_new, current = 0, (gpus.device, gpus.has_context)
    given = made(call)
    try:
        result = function(**given)
    except (TypeError, ValueError) as error:
        assert gpus.work == []
        return type(error), str(error)
    finally:
        assert gpus.device == current[0]
        gpus.has_context = current[1]
    assert (result is given["out"]) == (call["out"] is not None)
    taken = [dataclasses.astuple(memory) for memory in gpus.memory]
    return list(gpus.work), taken, gpus.num_new, result.data.ptr, result.shape


def outcome_alone(gpus, monkeypatch, function, module, call):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_launches", {})
        return outcome(gpus, function, call)


def fail(*_):
    raise AssertionError("it is checked again")


def test_the_second_call_launches_the_same_without_checks(gpus, monkeypatch, function, is_cut):
    call_of, module, make_call = function
    call = make_call()
    if is_cut and module is kda:
        call = make_call(num_tokens=1000)
    for name in (None, *OPTIONAL):
        given = call if name is None else {**call, name: None}
        if name is not None and name not in call:
            continue
        if name == "cu_seqlens":
            for state in "initial_state", "final_state":
                shape = (1, *call[state].shape[1:])
                given[state] = dataclasses.replace(call[state], shape=shape)
        first = outcome(gpus, call_of, given)
        assert first[0] and all(isinstance(work, tuple) for work in first[0])
        with monkeypatch.context() as patch:
            patch.setattr(module, "_checked", fail)
            assert outcome(gpus, call_of, given) == first
            # Other addresses.
            moved = {
                n: dataclasses.replace(x, pointer=x.pointer + 2**36) if isinstance(x, Made) else x
                for n, x in given.items()
            }
            second = outcome(gpus, call_of, moved)
        assert second == outcome_alone(gpus, monkeypatch, call_of, module, moved) != first


def changes_of(rng, call, name):
    """An argument in place of another: of another kind, elsewhere, or wrong."""
    x, others = call[name], [other for other in call.values() if isinstance(other, Made)]
    if x is None:
        return fwd_call()[name] if name in fwd_call() else step_call()[name]
    replace, n = dataclasses.replace, len(x.shape)
    item_bytes = x.row_major[-1]
    kind = rng.integers(0, 12)
    if kind == 0:
        return None
    if kind == 1:
        dtype = str(rng.choice(["bfloat16", "float32", "int32", "int64", "float16"]))
        return replace(x, dtype=dtype, strides=None)
    if kind == 2:
        shape = list(x.shape)
        shape[rng.integers(n)] += rng.choice([-1, 1])
        return replace(x, shape=tuple(int(k) for k in shape), strides=None)
    if kind == 3:
        return replace(x, shape=(*x.shape[1:],) if n > 1 else (*x.shape, 1), strides=None)
    if kind == 4:
        return replace(x, device=1 - x.device)
    if kind == 5:
        return replace(x, pointer=x.pointer + int(rng.choice([1, 2, 4, 8, 16, 32])))
    if kind == 6:
        return replace(x, pointer=0)
    if kind == 7:
        # Where another one begins, ends, or goes on.
        other = others[rng.integers(len(others))]
        at = other.pointer + int(rng.choice([0, 1])) * other.num_bytes
        return replace(x, pointer=at + 16 * int(rng.integers(-1, 2)))
    if kind == 8:
        return others[rng.integers(len(others))]
    if kind == 9 and n > 1:
        # With a gap behind each row, or all in one.
        wide = replace(x, shape=(*x.shape[:-1], x.shape[-1] + int(rng.choice([1, 4, 8, 64]))))
        return replace(x, strides=wide.row_major)
    strides = list(x.strides or x.row_major)
    axis = rng.integers(n)
    if kind == 10:
        strides[axis] = int(rng.choice([0, 1, item_bytes, 16, 256, 1 << 20, 1 << 22]))
    else:
        strides[axis] = -strides[axis]
    return replace(x, strides=tuple(strides))


@pytest.mark.parametrize("seed", range(6))
def test_calls_are_what_they_are_without_those_before(gpus, monkeypatch, function, is_cut, seed):
    call_of, module, make_call = function
    rng = np.random.default_rng(seed)
    start = make_call()
    if module is kda and is_cut:
        start = make_call(num_tokens=1000)
    if module is kda and seed % 2:
        start["final_state"] = start["initial_state"]
    num_checked, real = 0, module._checked

    def counted(*arguments):
        nonlocal num_checked
        num_checked += 1
        return real(*arguments)

    monkeypatch.setattr(module, "_checked", counted)
    outcomes, num_reused, calls = [], 0, [start]
    for _ in range(250):
        call = dict(calls[rng.integers(len(calls))] if rng.random() < 0.5 else start)
        names = [name for name in call if name not in ("scale", "lower_bound")]
        for name in rng.choice(names, rng.integers(0, 3), replace=False):
            call[name] = changes_of(rng, call, str(name))
        call["scale"] = [0.25, None, 3, math.nan, "x"][rng.choice(5, p=[0.5, 0.2, 0.2, 0.05, 0.05])]
        call["lower_bound"] = [-2.5, 0, -6.0, None][rng.choice(4, p=[0.6, 0.3, 0.05, 0.05])]
        gpus.device, gpus.has_context = int(rng.random() < 0.1), rng.random() < 0.9
        want = outcome_alone(gpus, monkeypatch, call_of, module, call)
        for _ in range(2):
            before = num_checked
            assert outcome(gpus, call_of, call) == want, call
            is_reused = num_checked == before
            num_reused += is_reused and isinstance(want[0], list)
            if is_reused:
                x = call["q"]
                assert gpus.has_context and gpus.device == x.device
        outcomes.append(isinstance(want[0], list))
        if outcomes[-1]:
            calls.append(call)
    assert 50 < sum(outcomes) < len(outcomes) - 50 and num_reused > 50


@pytest.mark.parametrize("wrong", [{"scale": math.inf}, {"scale": "x"}, {"lower_bound": 1}])
def test_numbers_are_checked_each_time(gpus, monkeypatch, function, wrong):
    call_of, module, make_call = function
    call = make_call()
    for out in call["out"], None:
        given = {**call, "out": out}
        outcome(gpus, call_of, given)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_checked", fail)
            got = outcome(gpus, call_of, given | wrong)
            assert gpus.num_new == 0
        assert got == outcome_alone(gpus, monkeypatch, call_of, module, given | wrong)
        assert isinstance(got[1], str) and got[1].startswith(f"{next(iter(wrong))}: expected")


def test_a_new_out_each_time(gpus, function):
    call_of, module, make_call = function
    given = made({**make_call(), "out": None})
    results = [call_of(**given) for _ in range(4)]
    assert len({out.data.ptr for out in results}) == gpus.num_new == 4
    packed = {launch[-1] for launch in gpus.launches}
    assert len(packed) == 4 and len(module._launches) == 1
    for launch, out in zip(gpus.launches, results, strict=True):
        assert out.data.ptr.to_bytes(8, "little") in launch[-1]


@pytest.mark.parametrize("places", [(0, 8, 0), (8, 0, 8)])
def test_a_new_out_is_where_its_allocator_says(gpus, monkeypatch, function, places):
    call_of, module, make_call = function
    call, empty = {**make_call(), "out": None}, gpus.empty
    for place in places:
        monkeypatch.setattr(gpus, "empty", lambda *of, at=place: moved(empty(*of), at))
        call_of(**made(call))
        got = gpus.launches[-1]
        with monkeypatch.context() as patch:
            patch.setattr(module, "_launches", {})
            gpus.num_new -= 1
            call_of(**made(call))
        # Rows at any element have a kernel of their own, which may be used for others.
        if place:
            assert got[-1] == gpus.launches[-1][-1]


def moved(array, num_bytes):
    place = Made(array.shape, str(array.dtype), array.data.ptr + num_bytes)
    return make(place)


def test_a_new_out_without_memory_is_refused(gpus, monkeypatch, function):
    """As one of torch's is inside its FakeTensorMode."""
    call_of, _, make_call = function
    call, empty = {**make_call(), "out": None}, gpus.empty
    for is_kept in False, True:
        if is_kept:
            call_of(**made(call))
        with monkeypatch.context() as patch:
            patch.setattr(gpus, "empty", lambda *of: moved(empty(*of), -NEW - gpus.num_new * 2**32))
            gpus.launches.clear()
            with pytest.raises(ValueError, match="^out: expected an array with memory, got a null"):
                call_of(**made(call))
            assert gpus.launches == []


def test_another_device_or_no_context_takes_the_long_way(gpus, monkeypatch, function):
    call_of, module, make_call = function
    call = make_call()
    first = outcome(gpus, call_of, call)
    monkeypatch.setattr(module, "_launches", dict(module._launches))
    for device, has_context in (1, True), (0, False), (1, False):
        gpus.device, gpus.has_context = device, has_context
        with monkeypatch.context() as patch:
            patch.setattr(module, "_checked", fail)
            with pytest.raises(AssertionError, match="checked again"):
                outcome(gpus, call_of, call)
        assert outcome(gpus, call_of, call) == first
    assert {launch[0] for launch in gpus.launches} == {0}


def test_calls_on_two_devices_are_of_two_launches(gpus, function):
    call_of, module, make_call = function
    for device in 0, 1, 0, 1:
        call = {
            n: dataclasses.replace(x, device=device) if isinstance(x, Made) else x
            for n, x in make_call().items()
        }
        gpus.device = 0
        work, *_ = outcome(gpus, call_of, call)
        assert [launch[0] for launch in work] == [device]
    assert len(module._launches) == 2


def test_a_stream_that_is_given_takes_the_long_way(gpus, monkeypatch, function):
    call_of, module, make_call = function
    # No memory is held for a graph, which would take an event.
    gpus.cuda.runtime.streamIsCapturing = lambda stream: True
    given = made(make_call())
    for stream in None, 0x77, None, 0x77:
        call_of(**given, stream=stream)
    assert [0x77 in launch for launch in gpus.launches] == [False, True] * 2
    assert len({launch[-1] for launch in gpus.launches}) == 1
    assert len(module._launches) == 1


def test_no_more_launches_are_kept_than_that(gpus, monkeypatch, function):
    call_of, module, make_call = function
    monkeypatch.setattr("cukda.launch._MOST_KEPT", 4)
    for i in range(30):
        call = make_call(heads=i % 7 + 1)
        want = outcome_alone(gpus, monkeypatch, call_of, module, call)
        assert outcome(gpus, call_of, call) == want
        assert 1 <= len(module._launches) <= 4


class Owner:
    """Of memory."""


def test_kept_launches_keep_no_array(gpus, function):
    call_of, module, make_call = function
    call, owners, given = make_call(), [], {}
    for name, x in call.items():
        given[name] = x
        if isinstance(x, Made):
            owner = Owner()
            owners.append(weakref.ref(owner))
            given[name] = make(x, owner)
    del owner
    for _ in range(3):
        call_of(**given)
    assert len(module._launches) == 1
    del given
    gc.collect()
    assert [ref() for ref in owners] == [None] * len(owners)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_calls_on_the_cpu_are_never_kept(function, library):
    torch = pytest.importorskip("torch")
    call_of, module, make_call = function
    call = make_call()
    before = dict(module._launches)
    given = {}
    for name, x in call.items():
        given[name] = x
        if isinstance(x, Made):
            given[name] = torch.zeros(x.shape, dtype=getattr(torch, x.dtype))
            if library == "numpy" and x.dtype != "bfloat16":
                given[name] = given[name].numpy()
    for _ in range(2):
        call_of(**given)
        assert signature.signature([x for x in given.values() if hasattr(x, "shape")]) == (None, [])
    assert module._launches == before


def test_arrays_of_two_libraries_are_never_kept(gpus, monkeypatch, function):
    """Whose streams wait for each other."""
    call_of, module, make_call = function
    real = arrays.view

    def view(name, array, stream=None):
        found = real(name, array, stream)
        if name == "A_log":
            found.library = "jax"
        return found

    monkeypatch.setattr(arrays, "view", view)
    monkeypatch.setattr(streams.launch_on, "_order", on_no_other_stream)
    call_of(**made(make_call()))
    assert len(gpus.launches) == 1 and module._launches == {}


def on_no_other_stream(self):
    self._kept, self._others, self._pointer = [], set(), STREAM


def test_keys_tell_positions_apart():
    """Whatever is None, and whether an array has strides or not."""
    pytest.importorskip("cupy")
    x = Made((2, 128), "float32", 0x7F00_0000_0000)
    kinds = [
        None,
        x,
        dataclasses.replace(x, pointer=x.pointer + 4),
        dataclasses.replace(x, strides=(1024, 4)),
        dataclasses.replace(x, strides=(1024, 4), pointer=x.pointer + 4),
        dataclasses.replace(x, shape=(128, 2)),
        dataclasses.replace(x, dtype="int32"),
        dataclasses.replace(x, device=1),
    ]
    made_kinds = [None if kind is None else make(kind) for kind in kinds]
    for array in made_kinds[1:]:
        arrays.view("x", array)
    keys = {}
    for i, first in enumerate(made_kinds):
        for j, second in enumerate(made_kinds):
            key, pointers = signature.signature([first, second])
            assert keys.setdefault(key, (i, j)) == (i, j)
            places = [0 if kinds[n] is None else kinds[n].pointer for n in (i, j)]
            assert pointers == places
    assert len(keys) == len(kinds) ** 2
    null = make(dataclasses.replace(x, pointer=0))
    assert signature.signature([made_kinds[1], null]) == (None, [])
