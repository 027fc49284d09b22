"""Whether what a call writes lies apart from its other arrays."""

import numpy as np

from cukda.arrays import Array, elements, is_contiguous, strides_of

# More steps than these to find a common element are not taken, and arrays of a few axes take fewer.
_MOST_WORK = 10**6
_MOST_ADDRESS = 2**63 - 1


def refuse_overlap(output: Array, others, in_place: Array | None = None) -> None:
    """Raise if output has an element in common with another array, None being none; in_place may be
    the very same one.

    Errors: ValueError that names both.
    """
    for other in others:
        if other is None or not _overlap(output, other):
            continue
        if other is in_place and _is_same(output, other):
            continue
        alone = "memory of its own"
        expected = f"{alone}, or {other.name} itself" if other is in_place else alone
        got = f"an array that overlaps {other.name}"
        raise ValueError(f"{output.name}: expected {expected}, got {got}")


class Apart:
    """Whether the two arrays that a call writes lie apart from all others, told from addresses.

    arrays: in the order in which their addresses come, None for those not given. first, second: the
    places of those written; in_place: of an input that may be the second itself, if dtype, shape
    and strides are the same. "No" may also be of arrays that only interleave, which refuse_overlap
    tells. is_usable: no array has elements below its address, which this does not follow.
    """

    __slots__ = (
        "_first",
        "_in_place",
        "_num_overlaps",
        "_pointers",
        "_second",
        "_spans",
        "is_usable",
    )

    def __init__(self, arrays, first: int, second: int, in_place: int | None = None):
        # Only of arrays with no element before their address.
        self.is_usable, self._spans = True, []
        for array in arrays:
            begin, end = _span(array)
            self._spans.append(end)
            if begin:
                self.is_usable = False
        self._first, self._second, self._in_place = first, second, None
        if in_place is not None and _is_alike(arrays[in_place], arrays[second]):
            self._in_place = in_place
        # An output overlaps itself.
        self._num_overlaps = sum(self._spans[output] > 0 for output in (first, second))
        self._pointers = None

    def __call__(self, pointers: list[int]) -> bool:
        """Whether arrays at these addresses are surely apart; 0 is none."""
        # Callers come back with the same arrays: 1.5 us less.
        if pointers == self._pointers:
            return True
        spans, second = self._spans, self._second
        first_begin, second_begin = pointers[self._first], pointers[second]
        first_end, second_end = first_begin + spans[self._first], second_begin + spans[second]
        num_overlaps = 0
        for begin, span in zip(pointers, spans, strict=True):
            end = begin + span
            if begin < first_end and first_begin < end:
                num_overlaps += 1
            if begin < second_end and second_begin < end:
                num_overlaps += 1
        if self._in_place is not None and pointers[self._in_place] == second_begin < second_end:
            num_overlaps -= 1
        if num_overlaps != self._num_overlaps:
            return False
        self._pointers = pointers
        return True


def _overlap(a: Array, b: Array) -> bool:
    (a_begin, a_end), (b_begin, b_end) = _span(a), _span(b)
    a_begin, a_end = a_begin + a.pointer, a_end + a.pointer
    b_begin, b_end = b_begin + b.pointer, b_end + b.pointer
    # An empty array may lie anywhere.
    if a_begin >= b_end or b_begin >= a_end or a_begin == a_end or b_begin == b_end:
        return False
    if is_contiguous(a) and is_contiguous(b):
        return True
    # Strides that reach beyond all memory, where NumPy's numbers end.
    if min(a_begin, b_begin) < 0 or max(a_end, b_end) > _MOST_ADDRESS:
        return True
    try:
        return np.shares_memory(elements(a), elements(b), max_work=_MOST_WORK)
    except RuntimeError:
        # TooHardError, which is not in one place in all versions of NumPy.
        return True


def _is_same(a: Array, b: Array) -> bool:
    return a.pointer == b.pointer and _is_alike(a, b)


def _is_alike(a: Array | None, b: Array | None) -> bool:
    """But for the address."""
    if a is None or b is None:
        return False
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.strides == b.strides:
        return True
    # Those of axes of length 1 are free.
    axes = zip(strides_of(a), strides_of(b), a.shape, strict=True)
    return all(of_a == of_b for of_a, of_b, n in axes if n != 1)


def _span(array: Array | None) -> tuple[int, int]:
    """Where the memory from an array's first element to its last begins and ends, in bytes from the
    array's address.
    """
    if array is None:
        return 0, 0
    if array.strides is None or is_contiguous(array):
        return 0, array.num_bytes
    steps = [stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True)]
    first = sum(step for step in steps if step < 0)
    last = sum(step for step in steps if step > 0)
    return first * array.item_bytes, (last + 1) * array.item_bytes
