"""Whether what a call writes lies apart from the rest, against sets of addresses."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cukda import overlap
from cukda.arrays import Array
from cukda.overlap import Apart, refuse_overlap

BASE = 0x7F00_0000_0000
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def array(pointer, shape, strides=None, dtype="bfloat16", name="x"):
    return Array(name, pointer, tuple(shape), strides, dtype, 0, "cupy", True, None)


def strides_of(x):
    if x.strides is not None:
        return x.strides
    return tuple(math.prod(x.shape[i + 1 :]) for i in range(len(x.shape)))


def is_alike(a, b):
    """In all but the name, and strides of axes of length 1."""
    strides = (
        tuple(0 if n == 1 else stride for stride, n in zip(strides_of(x), x.shape, strict=True))
        for x in (a, b)
    )
    fields = ((x.pointer, x.shape, of_x, x.dtype) for x, of_x in zip((a, b), strides, strict=True))
    return len(set(fields)) == 1


def addresses(x):
    """Of all bytes of all elements."""
    item_bytes, strides = ITEM_BYTES[x.dtype], strides_of(x)
    steps = [
        range(0, n * stride, stride) if stride else [0] * n
        for n, stride in zip(x.shape, strides, strict=True)
    ]
    begins = (x.pointer + item_bytes * sum(step) for step in itertools.product(*steps))
    return {begin + byte for begin in begins for byte in range(item_bytes)}


def is_refused(output, others, in_place=None):
    try:
        refuse_overlap(output, others, in_place)
    except ValueError:
        return True
    return False


@st.composite
def layouts(draw, least_stride=-13):
    """(shape, strides, dtype) of a small array, at times of no elements."""
    shape = draw(st.lists(st.integers(0, 4) | st.integers(1, 3), min_size=1, max_size=4))
    strides = None
    if draw(st.booleans()):
        strides = tuple(draw(st.integers(least_stride, 13)) for _ in shape)
    return tuple(shape), strides, draw(st.sampled_from(list(ITEM_BYTES)))


places = st.integers(0, 120)


@settings(max_examples=300, deadline=None)
@given(layouts(), layouts(), places, places)
def test_two_arrays_overlap_where_they_share_a_byte(first, second, at, other_at):
    a, b = array(BASE + at, *first), array(BASE + other_at, *second, name="y")
    shared = addresses(a) & addresses(b)
    assert is_refused(a, [b]) == is_refused(b, [a]) == bool(shared)
    assert not is_refused(a, [None])


@settings(max_examples=100, deadline=None)
@given(layouts(), layouts(), places)
def test_in_place_is_the_very_same_array(first, second, at):
    a, same = array(BASE + at, *first), array(BASE + at, *first)
    assert not is_refused(a, [same], in_place=same)
    assert is_refused(a, [same]) == is_refused(a, [same], in_place=a) == bool(addresses(a))
    for other in array(BASE + at, *second), array(BASE + at + 2, *first):
        if not is_alike(a, other):
            shared = addresses(a) & addresses(other)
            assert is_refused(a, [other], in_place=other) == bool(shared)


def test_in_place_goes_by_strides_not_by_how_they_are_given():
    plain, said = array(BASE, (2, 3)), array(BASE, (2, 3), (3, 1))
    assert not is_refused(plain, [said], in_place=said)
    assert is_refused(plain, [array(BASE, (2, 3), (3, 2))])
    other = array(BASE, (2, 3), (3, 2))
    assert is_refused(plain, [other], in_place=other)


def test_in_place_whatever_the_strides_of_axes_of_one():
    a, b = array(BASE, (1, 3, 4), (99, 8, 1)), array(BASE, (1, 3, 4), (-7, 8, 1), name="y")
    assert is_refused(a, [b])
    assert not is_refused(a, [b], b)
    assert Apart([a, b], 0, 0, in_place=1).is_usable
    other = array(BASE, (1, 3, 4), (99, 9, 1), name="y")
    assert is_refused(a, [other], other)


@pytest.mark.parametrize("stride", [2**61, 2**62, -(2**62), 2**63 - 1])
def test_strides_beyond_all_memory_are_an_overlap(stride):
    far = array(BASE, (3, 4), (stride, 1), name="y")
    assert is_refused(array(BASE, (5, 4), (8, 1)), [far])
    assert is_refused(array(BASE + (128 if stride > 0 else -128), (5, 4), (8, 1)), [far])


def test_the_message_names_both_and_the_first_of_many():
    output, others = array(BASE, (4,), name="out"), [None, array(BASE + 8, (4,), name="k")]
    others += [array(BASE + 6, (4,), name="v"), array(BASE, (4,), name="g")]
    with pytest.raises(ValueError) as caught:
        refuse_overlap(output, others)
    assert str(caught.value) == "out: expected memory of its own, got an array that overlaps v"


def test_rows_in_turn_at_addresses_of_a_gpu():
    """As large as they come, and quick: nothing is read there."""
    shape, strides = (16, 17477, 64, 128), (17477 * 64 * 256, 64 * 256, 256, 1)
    q, out = array(BASE, shape, strides), array(BASE + 256, shape, strides, name="out")
    assert not is_refused(out, [q])
    # By one element.
    assert is_refused(array(BASE + 254, shape, strides), [q])
    assert is_refused(array(BASE + 258, shape, strides), [q])


def test_what_takes_long_to_tell_is_refused(monkeypatch):
    a = array(BASE, (50, 40, 30, 20), (10**6 + 3, 1013, 97, 7))
    b = array(BASE + 2, (50, 40, 30, 20), (999_983, 1009, 89, 11))
    monkeypatch.setattr(overlap, "_MOST_WORK", 1)
    assert is_refused(a, [b])


def test_strides_of_axes_of_one_may_be_anything():
    a = array(BASE, (1, 4, 8), (2**62, 16, 1))
    assert not is_refused(a, [array(BASE + 16, (1, 4, 8), (-(2**62), 16, 1))])
    assert is_refused(a, [array(BASE + 14, (1, 4, 8), (-(2**62), 16, 1))])


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(layouts(0), layouts(0)),
    st.lists(st.none() | layouts(0) | layouts(-1), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_what_is_apart_at_a_glance_shares_nothing(outputs, others, is_in_place, data):
    """At any addresses, in any order of asking, and where one is the same as the second output."""
    chosen = [*outputs, *others]
    if is_in_place:
        chosen[2] = chosen[1]
    apart = Apart([x and array(BASE, *x) for x in chosen], 0, 1, in_place=2)
    begins = [0 if x is None else overlap._span(array(BASE, *x))[0] for x in chosen]
    assert apart.is_usable == (not any(begins))
    assume(apart.is_usable)
    asked = []
    for _ in range(4):
        if asked and data.draw(st.booleans()):
            pointers = data.draw(st.sampled_from(asked))
        else:
            pointers = [
                0 if x is None else BASE + data.draw(st.integers(0, 60)) * 8 for x in chosen
            ]
            if is_in_place and data.draw(st.booleans()):
                pointers[2] = pointers[1]
        asked.append(pointers)
        there = [x and array(at, *x) for x, at in zip(chosen, pointers, strict=True)]
        first, second, third = there[:3]
        is_same = third is not None and is_alike(second, third)
        rest = [first, *there[3:], *([] if is_same else [third])]
        if apart([*pointers]):
            assert not is_refused(first, there[1:])
            assert not is_refused(second, rest)
            sets = [set() if x is None else addresses(x) for x in there]
            assert not any(sets[0] & other for other in sets[1:])
            others = [i for i in range(len(sets)) if i != 1 and not (is_same and i == 2)]
            assert not any(sets[1] & sets[i] for i in others)


@settings(max_examples=100, deadline=None)
@given(st.lists(layouts(), min_size=3, max_size=8), st.booleans(), st.randoms())
def test_arrays_one_after_the_other_are_apart(chosen, is_in_place, random):
    """Contiguous ones with elements, in any order, without a gap between them; not so by a byte."""
    chosen = [([n or 1 for n in shape], None, dtype) for shape, _, dtype in chosen]
    if is_in_place:
        chosen[2] = chosen[1]
    there, at = [None] * len(chosen), BASE
    for i in random.sample(range(len(chosen)), len(chosen)):
        there[i] = array(at, *chosen[i])
        at += there[i].num_bytes
    if is_in_place:
        there[2] = there[1]
    apart = Apart(there, 0, 1, in_place=2)
    pointers = [x.pointer for x in there]
    assert apart(pointers)
    for i, j in itertools.permutations(range(len(there)), 2):
        if i < 2 and not (is_in_place and {i, j} == {1, 2}):
            moved = [*pointers]
            moved[i] = pointers[j] + there[j].num_bytes - 1
            assert not apart(moved)


def test_in_place_is_of_one_and_the_same_layout():
    """Of another dtype, shape or strides it overlaps, and with nothing else in its place."""
    out, state = array(BASE, (4,)), array(BASE + 64, (2, 4), dtype="float32")
    pointers = [BASE, BASE + 64, BASE + 64]
    others = {
        "same": ((2, 4), None, "float32"),
        "said": ((2, 4), (4, 1), "float32"),
        "dtype": ((2, 4), None, "bfloat16"),
        "shape": ((2, 3), None, "float32"),
        "strides": ((2, 4), (5, 1), "float32"),
    }
    for name, layout in others.items():
        initial = array(BASE + 64, *layout)
        assert Apart([out, state, initial], 0, 1, in_place=2)(pointers) == (
            name in ("same", "said")
        )
        assert not Apart([out, state, initial], 0, 1)(pointers)
    assert not Apart([out, state, state], 0, 1, in_place=2)([BASE + 60, BASE + 64, BASE + 64])
    assert not Apart([out, state, state], 0, 1, in_place=2)([BASE, BASE + 64, BASE + 68])


def test_apart_remembers_the_addresses_that_it_was_given():
    """And only those that are apart; a list that is changed afterwards is another one."""
    x = array(BASE, (8,))
    apart = Apart([x, x, x], 0, 1)
    right, wrong = [BASE, BASE + 16, BASE + 32], [BASE, BASE + 16, BASE + 30]
    for pointers in right, wrong, wrong, right, right, wrong, right:
        assert apart([*pointers]) == (pointers is right)


def test_span():
    x = np.zeros((4, 6, 8), np.float32)[::2, ::-1, 1:]
    strides = tuple(stride // 4 for stride in x.strides)
    seen = array(x.ctypes.data, x.shape, strides, "float32")
    begin, end = (seen.pointer + offset for offset in overlap._span(seen))
    assert (begin, end) == (min(addresses(seen)), max(addresses(seen)) + 1)
    assert overlap._span(None) == overlap._span(array(BASE, (0, 3), (5, -7))) == (0, 0)
