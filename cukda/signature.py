"""What calls have in common whose arrays are treated alike: a key, by which launches are kept."""

from collections.abc import Sequence

from cukda.arrays import MOST_OFFSET, cupy_types, torch_types
from cukda.plan import ROW_ALIGNMENT


def signature(given: Sequence[object]) -> tuple[tuple | None, list[int]]:
    """A key that calls have in common whose arrays `arrays.view` and `arrays.check` treat alike,
    and the arrays' addresses, 0 of None.

    The key holds, array by array, dtype, shape and device, and, of those that are not contiguous or
    not at a multiple of 16 bytes, strides and the address modulo 16. Returns (None, []) where an
    array is of another library than torch and CuPy, on the CPU, of a type that `view` has not seen,
    or one that it may refuse.
    """
    key, pointers = [], []
    add = key.append
    try:
        for array in given:
            kind = type(array)
            if kind in torch_types:
                pointer = array.data_ptr()
                add(array.dtype)
                add(array.shape)
                add(array.get_device())
                if pointer < MOST_OFFSET or not array.is_cuda or array.is_neg():
                    return None, []
                if pointer % ROW_ALIGNMENT or not array.is_contiguous():
                    add((pointer % ROW_ALIGNMENT, array.stride()))
            elif array is None:
                pointer = 0
                add(None)
            elif kind in cupy_types:
                memory = array.data
                pointer = memory.ptr
                if not pointer:
                    return None, []
                add(array.dtype)
                add(array.shape)
                add(memory.device_id)
                # What array.flags says, in a tenth of its 0.3 us.
                if pointer % ROW_ALIGNMENT or not array._c_contiguous:
                    add((pointer % ROW_ALIGNMENT, array.strides))
            else:
                return None, []
            pointers.append(pointer)
    except (RuntimeError, ValueError):
        # torch's, of tensors and parameters without memory.
        return None, []
    return tuple(key), pointers
