"""DLPack, the protocol for arrays of any library: a producer's capsule, read with ctypes.

The structures are those of dlpack.h, version 1: https://dmlc.github.io/dlpack/latest/c_api.html
"""

import ctypes
import operator
import traceback

MAX_VERSION = (1, 0)

# A capsule is renamed when its memory is taken over. It keeps the address of its name, so these
# live as long as the module.
_FRESH, _USED = b"dltensor", b"used_dltensor"
_FRESH_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"

_FLAG_READ_ONLY = 1
_FLAG_IS_COPIED = 2

_HOST_DEVICES = (1, 3)  # plain and pinned memory
_CUDA_DEVICES = (2, 13)  # device and managed memory

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

# The capsule functions and the deleters are called with the interpreter's lock held: some
# producers' deleters take that for granted, the others take the lock again.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class Loan:
    """Memory lent by a producer; given back through the producer's deleter when this dies.

    pointer is the address of element 0, 0 without memory; strides are in elements; dtype is a name
    like "bfloat16"; device is DLPack's type and number.
    """

    def __init__(self, name: str, producer: object, capsule: object):
        """Take the capsule over; name is the parameter's, for messages.

        Errors: TypeError (no fresh capsule, or of another major version, or without a shape),
        ValueError (a copy, or a size below 0).
        """
        if _is_valid(capsule, _FRESH_VERSIONED):
            structure, fresh, used = _ManagedVersioned, _FRESH_VERSIONED, _USED_VERSIONED
        elif _is_valid(capsule, _FRESH):
            structure, fresh, used = _Managed, _FRESH, _USED
        else:
            is_used = any(_is_valid(capsule, used) for used in (_USED, _USED_VERSIONED))
            got = "one that is used up" if is_used else type(capsule).__name__
            raise TypeError(f"{name}: expected a fresh DLPack capsule, got {got}")
        self._managed = structure.from_address(_get_pointer(capsule, fresh))
        _set_name(capsule, used)
        self.producer = producer

        flags = 0
        if structure is _ManagedVersioned:
            if self._managed.major != MAX_VERSION[0]:
                got = f"{self._managed.major}.{self._managed.minor}"
                raise TypeError(f"{name}: expected DLPack version {MAX_VERSION[0]}, got {got}")
            flags = self._managed.flags
        if flags & _FLAG_IS_COPIED:
            raise ValueError(f"{name}: expected the array's own memory, got a copy made for DLPack")
        self.writable = not flags & _FLAG_READ_ONLY

        tensor = self._managed.tensor
        if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
            got = f"ndim = {tensor.ndim} and {'a' if tensor.shape else 'no'} shape"
            expected = "a DLPack capsule with ndim ≥ 0 and a shape"
            raise TypeError(f"{name}: expected {expected}, got {got}")
        self.device = tensor.device_type, tensor.device_id
        self.shape = tuple(tensor.shape[: tensor.ndim])
        if any(n < 0 for n in self.shape):
            raise ValueError(f"{name}: expected sizes of at least 0, got shape {self.shape}")
        # As addresses are added.
        self.pointer = (tensor.data + tensor.byte_offset) % 2**64 if tensor.data else 0
        # No strides mean row-major order.
        self.strides = (
            tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(self.shape)
        )
        self.dtype = _dtype_name(tensor.dtype)

    def __del__(self):
        managed = getattr(self, "_managed", None)
        if managed is not None and managed.deleter:
            _Deleter(managed.deleter)(ctypes.addressof(managed))


def is_producer(name: str, array: object) -> bool:
    """Whether an object speaks the protocol. Errors: TypeError (it raises when it is asked)."""
    try:
        return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    except Exception as error:
        raise _refusal(name, array, error) from error


def cuda_ordinal(name: str, producer: object) -> int | None:
    """The CUDA device that a producer's memory is on; None for the CPU.

    Errors: TypeError (the producer raises, or says nonsense), ValueError (another kind of device).
    """
    try:
        device_type, device_id = map(operator.index, producer.__dlpack_device__())
    except Exception as error:
        raise _refusal(name, producer, error) from error
    if device_type in _HOST_DEVICES:
        return None
    if device_type in _CUDA_DEVICES:
        return device_id
    got = f"DLPack device type {device_type}"
    raise ValueError(f"{name}: expected a CPU or CUDA device, got {got}")


def borrow(name: str, producer: object, ordinal: int | None, stream: int | None) -> Loan:
    """The producer's memory on a CUDA device, ready for later work on a stream there; both None for
    the CPU.

    stream: a pointer, 0 for the legacy default stream.
    Errors: TypeError (the producer raises, or gives no capsule), ValueError (a copy of its memory,
    or memory elsewhere).
    """
    # The protocol's number for the legacy default stream is 1.
    arguments = {} if stream is None else {"stream": stream or 1}
    try:
        try:
            capsule = producer.__dlpack__(**arguments, max_version=MAX_VERSION)
        except TypeError:
            # A producer older than the versioned protocol does not know the argument.
            capsule = producer.__dlpack__(**arguments)
    except Exception as error:
        raise _refusal(name, producer, error) from error
    loan = Loan(name, producer, capsule)
    device_type, device_id = loan.device
    if ordinal is None:
        is_there = device_type in _HOST_DEVICES
    else:
        is_there = device_type in _CUDA_DEVICES and device_id == ordinal
    if not is_there:
        expected = "the CPU" if ordinal is None else f"CUDA device {ordinal}"
        got = f"some on number {device_id} of DLPack device type {device_type}"
        raise ValueError(f"{name}: expected memory on {expected}, as it says, got {got}")
    return loan


def _refusal(name: str, producer: object, error: Exception) -> TypeError:
    got = f"{type(producer).__name__} ({error_text(error)})"
    return TypeError(f"{name}: expected an array that DLPack can export, got {got}")


def error_text(error: Exception) -> str:
    """Kind and text of an error of the caller's own, whose str() may raise too."""
    return traceback.format_exception_only(error)[0].strip()


def _dtype_name(dtype: _DataType) -> str:
    kind = _KINDS.get(dtype.code, f"dlpack-code-{dtype.code}-")
    name = "bool" if kind == "bool" and dtype.bits == 8 else f"{kind}{dtype.bits}"
    return name if dtype.lanes == 1 else f"{name}x{dtype.lanes}"


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
