"""Arrays of any layout whose last axis is contiguous: the bits of contiguous ones, in place, and
nothing written beside.
"""

import hardware
import inputs
import numpy as np
import pytest
from inputs import BF16, HEAD_DIM, TOKENS

from cukda import jit, plan

pytestmark = pytest.mark.gpu

# What memory around an array holds. Of outputs it must be there afterwards.
GUARD = {2: 0x5A5A, 4: 0x5A5A5A5A}
BITS = {2: np.uint16, 4: np.uint32}
NAN = 0x7FC0  # of bfloat16
DTYPES = {"bfloat16": BF16, "float32": np.dtype(np.float32)}
ROWS = ("q", "k", "v", "g", "out")
STATES = ("initial_state", "final_state")


# Of a shape and the size of an element: memory full of guards, and in it a view of that shape.
# Arrays are handled as their bits, for CuPy copies no bf16.
def guards(shape, size):
    import cupy

    return cupy.full(shape, GUARD[size], BITS[size])


def contiguous(shape, size):
    memory = guards(shape, size)
    return memory, memory


def fused_channels(shape, size):
    """One of five beside each other in rows of 640."""
    memory = guards((*shape[:-1], 5 * shape[-1]), size)
    return memory, memory[..., shape[-1] : 2 * shape[-1]]


def fused_heads(shape, size):
    """One of five before the third axis, that of heads."""
    memory = guards((*shape[:2], 5, *shape[2:]), size)
    return memory, memory[:, :, 3]


def time_first(shape, size):
    memory = guards((shape[1], shape[0], *shape[2:]), size)
    return memory, memory.swapaxes(0, 1)


def heads_first(shape, size):
    memory = guards((shape[0], shape[2], shape[1], *shape[3:]), size)
    return memory, memory.swapaxes(1, 2)


def flipped(shape, size):
    memory = guards((shape[0] + 1, *shape[1:]), size)
    return memory, memory[1:][::-1, ::-1, ::-1]


def some_of_each(shape, size):
    """Every second of B, every third of T, from the second head on."""
    batch, tokens, heads, *rest = shape
    memory = guards((2 * batch, 3 * tokens, heads + 2, *rest), size)
    return memory, memory[::2, 1::3, 1:-1]


def odd_rows(shape, size):
    """Rows of 129."""
    memory = guards((*shape[:-1], shape[-1] + 1), size)
    return memory, memory[..., 1:]


def off_by(num_bytes):
    """Contiguous, behind so many bytes, or an element of more."""

    def place(shape, size):
        num_elements = max(1, num_bytes // size)
        memory = guards(num_elements + int(np.prod(shape)) + 1, size)
        return memory, memory[num_elements:-1].reshape(shape)

    place.__name__ = f"off_by_{num_bytes}"
    return place


ALIGNED = (fused_channels, fused_heads, time_first, heads_first, flipped, some_of_each)
UNALIGNED = (odd_rows, off_by(2), off_by(4), off_by(8))
every_place = pytest.mark.parametrize("place", ALIGNED + UNALIGNED, ids=lambda p: p.__name__)
either_batch = pytest.mark.parametrize("batch", [None, 2], ids=["packed", "batched"])
every_split = pytest.mark.parametrize("segments", [(0,), (64,), (64, 1), (64, 2)], ids=str)


def make(batch, seed=120):
    """A case whose sequences are cut, joined and neither, some of them shorter than a chunk."""
    case = inputs.make((210,) if batch else (33, 0, 210, 5), 3, "half", seed, batch=batch)
    case["initial_state"] *= 10
    return case


def empty(array, place):
    """A view of the array's shape and dtype, and the memory that it is in."""
    memory, view = place(array.shape, array.dtype.itemsize)
    assert view.shape == array.shape
    return view.view(array.dtype), memory


def placed(array, place):
    """A view of the same values."""
    view, _ = empty(array, place)
    bits = BITS[array.dtype.itemsize]
    view.view(bits)[...] = array.view(bits)
    return view


def numbers(shape, size):
    """Where numbers of a token and head, or of a head, lie apart."""
    memory = guards((*shape, 3), size)
    return memory, memory[..., 1]


def place_of(name, place):
    """`place` is of arrays of four axes."""
    if name in ("beta", "A_log"):
        return numbers
    if name != "dt_bias":
        return place
    return odd_rows if place in UNALIGNED else fused_channels


def call_of(case, places, state="float32", in_place=False):
    """Of a case of NumPy arrays: the call, with arrays where `places` say, by name, outputs full of
    NaN; and the memory of its outputs.
    """
    import cupy

    call = hardware.upload(case)
    for name, place in places.items():
        if call.get(name) is not None:
            call[name] = placed(call[name], place_of(name, place))
    memories = {}
    for name, like in (
        ("out", np.empty(case["v"].shape, BF16)),
        ("final_state", np.empty(hardware.state_shape(case), DTYPES[state])),
    ):
        view, memories[name] = empty(like, places.get(name, contiguous))
        bits = BITS[like.dtype.itemsize]
        view.view(bits)[...] = cupy.asarray(np.full(1, np.nan, like.dtype).view(bits))
        call[name] = view
    if in_place:
        del memories["final_state"]
        call["final_state"] = call["initial_state"]
    return call, memories


def run(call):
    """(out, final_state) of a call."""
    import cukda

    call = dict(call)
    tokens = [call.pop(name) for name in TOKENS]
    assert cukda.fwd(*tokens, **call) is call["out"]
    return call["out"], call["final_state"]


def same_bits(got, want):
    """CuPy arrays of which the first may have strides."""
    import cupy

    bits = BITS[got.dtype.itemsize]
    return bool((got.view(bits) == cupy.asarray(want).view(bits)).all())


def check(case, places, state="float32"):
    """A call with arrays in these places against the contiguous one."""
    want = hardware.run(case, state)
    call, memories = call_of(case, places, state)
    got = run(call)
    for name, array, expected in zip(("out", "final_state"), got, want, strict=True):
        assert same_bits(array, expected), name
        # All but the array itself is as it was.
        size = array.dtype.itemsize
        array.view(BITS[size])[...] = GUARD[size]
        assert bool((memories[name] == GUARD[size]).all()), name


@every_place
@either_batch
def test_all_arrays(place, batch, variant):
    names = (*ROWS, "beta", "A_log", "dt_bias", *STATES)
    check(make(batch), dict.fromkeys(names, place))


@every_place
@either_batch
@every_split
@pytest.mark.parametrize("state", DTYPES)
def test_states_of_both_kinds(place, batch, state, segments, cut_every):
    cut_every(*segments)
    case = make(batch)
    case["initial_state"] = case["initial_state"].astype(DTYPES[state])
    check(case, dict.fromkeys(STATES, place), state)


@every_split
@either_batch
@pytest.mark.parametrize("place", [some_of_each, odd_rows, off_by(8)], ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", [*ROWS, "beta", "A_log", "dt_bias", *STATES])
def test_one_array_alone(name, place, batch, segments, cut_every):
    """Each has strides of its own."""
    cut_every(*segments)
    check(make(batch), {name: place})


@every_split
@either_batch
def test_each_array_in_another_way(batch, segments, cut_every):
    cut_every(*segments)
    names = (*ROWS, *STATES)
    for first in range(len(ALIGNED)):
        places = {name: ALIGNED[(first + i) % len(ALIGNED)] for i, name in enumerate(names)}
        check(make(batch), places)


@every_split
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", TOKENS)
def test_expanded(name, axis, segments, cut_every):
    """Stride 0 along B, T or H."""
    cut_every(*segments)
    case = make(batch=2)
    first = np.take(case[name], [0], axis)
    case[name] = np.ascontiguousarray(np.broadcast_to(first, case[name].shape))
    want = hardware.run(case)
    call, _ = call_of(case, {})
    call[name] = expanded(hardware.upload({name: first})[name], case[name].shape)
    for got, expected in zip(run(call), want, strict=True):
        assert same_bits(got, expected)


def expanded(array, shape):
    import cupy

    bits = cupy.broadcast_to(array.view(BITS[array.dtype.itemsize]), shape)
    return bits.view(array.dtype)


@every_split
@pytest.mark.parametrize("name", ["initial_state", "A_log", "dt_bias"])
def test_expanded_heads(name, segments, cut_every):
    cut_every(*segments)
    case = make(batch=2)
    axis = 1 if name == "initial_state" else 0
    first = np.take(case[name], [0], axis)
    case[name] = np.ascontiguousarray(np.broadcast_to(first, case[name].shape))
    want = hardware.run(case)
    call, _ = call_of(case, {})
    call[name] = expanded(hardware.upload({name: first})[name], case[name].shape)
    for got, expected in zip(run(call), want, strict=True):
        assert same_bits(got, expected)


@every_place
@either_batch
@every_split
@pytest.mark.parametrize("state", DTYPES)
def test_states_in_place(place, batch, state, segments, cut_every):
    cut_every(*segments)
    case = make(batch)
    case["initial_state"] = case["initial_state"].astype(DTYPES[state])
    want = hardware.run(case, state)
    call, _ = call_of(case, {"initial_state": place}, state, in_place=True)
    for got, expected in zip(run(call), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("num_tokens", [1, 15, 17, 64, 81])
@pytest.mark.parametrize("place", [some_of_each, odd_rows], ids=lambda p: p.__name__)
def test_rows_behind_the_last_are_not_read(num_tokens, place, variant):
    """They are NaN in the memory of the inputs."""
    case = inputs.make((num_tokens,), 2, seed=121, batch=2)
    want = hardware.run(case)
    call, _ = call_of(case, {"out": place})
    for name in ("q", "k", "v", "g"):
        shape = case[name].shape
        memory, view = place((shape[0], num_tokens + 40, *shape[2:]), 2)
        memory[...] = NAN
        view[:, :num_tokens] = call[name].view(np.uint16)
        call[name] = view[:, :num_tokens].view(BF16)
    for got, expected in zip(run(call), want, strict=True):
        assert same_bits(got, expected)


# One by each instruction.
@pytest.mark.parametrize("found", [plan.variants()[0], plan.variants()[-1]], ids=str)
@pytest.mark.parametrize(("num_tokens", "apart"), [(40, 2**26), (17, 2**28), (3, 2**31)])
def test_offsets_above_32_bits(num_tokens, apart, found, need_memory, monkeypatch, cupy):
    """Tokens so many elements apart, and states 2^31."""
    from cupy.lib.stride_tricks import as_strided

    if found.wgmma and not jit.gpu().has_wgmma:
        pytest.skip("this GPU has no wgmma")
    hardware.force(monkeypatch.setattr, found)
    need_memory(24)
    num_heads = 2
    case = inputs.make((num_tokens,), num_heads, seed=122, batch=1)
    case["initial_state"] = case["initial_state"].astype(BF16)
    want = hardware.run(case, "bfloat16")
    call, _ = call_of(case, {}, "bfloat16")
    row = num_heads * HEAD_DIM
    shape = (1, num_tokens, num_heads, HEAD_DIM)
    memories = [cupy.empty((num_tokens - 1) * apart + 4 * row, np.uint16) for _ in range(2)]
    for i, name in enumerate(("q", "k", "v", "g", "out")):
        memory = memories[1] if name == "out" else memories[0][i * row :]
        strides = (0, 2 * apart, 2 * HEAD_DIM, 2)
        view = as_strided(memory, shape, strides)
        view[...] = call[name].view(np.uint16)
        call[name] = view.view(BF16)
    # Heads of the state 2^31 elements apart.
    states = cupy.empty(2**31 + HEAD_DIM**2, np.uint16)
    view = as_strided(states, (1, 2, HEAD_DIM, HEAD_DIM), (0, 2**32, 2 * HEAD_DIM, 2))
    view[...] = call["initial_state"].view(np.uint16)
    call["initial_state"] = view.view(BF16)
    for got, expected in zip(run(call), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("width", [5 * HEAD_DIM, 5 * HEAD_DIM + 1])
def test_torch_slices_of_one_projection(torch, width, variant):
    import cukda

    batch, num_tokens, num_heads = 2, 150, 3
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(batch, num_tokens, num_heads, width, device="cuda", generator=generator).to(
        torch.bfloat16
    )
    q, k, v, g = (fused[..., i * HEAD_DIM : (i + 1) * HEAD_DIM] for i in range(4))
    beta = fused[..., 4 * HEAD_DIM]
    outs = []
    for tokens in (q, k, v, g, beta), [x.contiguous() for x in (q, k, v, g, beta)]:
        out = torch.empty(batch, num_heads, num_tokens, HEAD_DIM, device="cuda", dtype=v.dtype)
        state = torch.empty(batch, HEAD_DIM, num_heads, HEAD_DIM, device="cuda")
        cukda.fwd(*tokens, out=out.transpose(1, 2), final_state=state.transpose(2, 1))
        outs.append((out, state))
    for got, expected in zip(*outs, strict=True):
        assert torch.equal(got, expected)
