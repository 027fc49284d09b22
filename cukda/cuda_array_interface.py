"""`__cuda_array_interface__`, for arrays on a GPU whose library has no DLPack: Numba's, PyCUDA's.

Version 3: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html. Its types are
NumPy's, which have no bfloat16: what stands for it, two bytes without a type or an unsigned
integer, is taken for what it says.
"""

import operator

import numpy as np

from cukda import dlpack

MAX_VERSION = 3
MAX_POINTER = 2**63
_LEGACY_STREAM = 1


class Export:
    """Memory of a producer, which this keeps alive.

    pointer is the address of element 0; strides are in bytes, None is row-major; dtype is NumPy's;
    stream is the pointer of what the memory is in use on, 0 the legacy default stream, or None.
    """

    def __init__(self, name: str, producer: object):
        """Read the producer's dictionary; name is the parameter's, for messages.

        Errors: TypeError (it raises, or has no such dictionary), ValueError (a mask, or a size,
        an address or a stream that is none).
        """
        try:
            fields = producer.__cuda_array_interface__
            version = operator.index(fields["version"])
            self.shape = tuple(map(operator.index, fields["shape"]))
            strides = fields.get("strides")
            self.strides = None if strides is None else tuple(map(operator.index, strides))
            self.dtype = _dtype(fields["typestr"])
            pointer, read_only = fields["data"]
            self.pointer, self.writable = operator.index(pointer), not read_only
            stream, mask = fields.get("stream"), fields.get("mask")
            self.stream = None if stream is None else operator.index(stream)
        except Exception as error:
            raise _refusal(name, producer, error) from error
        self.producer = producer

        if version > MAX_VERSION:
            expected = f"version {MAX_VERSION} of __cuda_array_interface__, or an older one"
            raise TypeError(f"{name}: expected {expected}, got {version}")
        if mask is not None:
            raise ValueError(f"{name}: expected an array without a mask, got a masked one")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"{name}: expected sizes of at least 0, got shape {self.shape}")
        if self.strides is not None and len(self.strides) != len(self.shape):
            got = f"{self.strides} for shape {self.shape}"
            raise ValueError(f"{name}: expected a stride for each axis, got {got}")
        if any(not -MAX_POINTER <= stride < MAX_POINTER for stride in self.strides or ()):
            raise ValueError(f"{name}: expected strides of 64 bits, got {self.strides}")
        if not 0 <= self.pointer < MAX_POINTER:
            raise ValueError(f"{name}: expected an address, got {self.pointer:#x}")
        # 0 would be one of two streams, and the interface does not say which.
        if self.stream is not None and not 0 < self.stream < MAX_POINTER:
            expected = "a stream of None, 1, 2 or a pointer"
            raise ValueError(f"{name}: expected {expected}, got {self.stream:#x}")
        if self.stream == _LEGACY_STREAM:
            self.stream = 0


def is_producer(name: str, array: object) -> bool:
    """Whether an object has the interface. Errors: TypeError (it raises when it is asked)."""
    try:
        return hasattr(array, "__cuda_array_interface__")
    except Exception as error:
        raise _refusal(name, array, error) from error


def _dtype(typestr: object) -> np.dtype:
    # np.dtype makes one of many other things, of None too.
    if not isinstance(typestr, str):
        raise TypeError(f"typestr is of type {type(typestr).__name__}")
    return np.dtype(typestr)


def _refusal(name: str, producer: object, error: Exception) -> TypeError:
    got = f"{type(producer).__name__} ({dlpack.error_text(error)})"
    return TypeError(f"{name}: expected an array with __cuda_array_interface__, got {got}")
