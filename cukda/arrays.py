"""Any caller's array -> pointer, shape, strides, dtype, device.

torch, CuPy and NumPy are read directly, in about a microsecond an array, and only if the caller
has imported them; every other library through DLPack, which takes several times as long, or through
`__cuda_array_interface__` where it has no DLPack.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cukda import cuda_array_interface, dlpack, streams
from cukda.jit import import_cupy, no_usable_gpu

CPU = -1
# What strides a kernel takes: row-major without gaps; any, but along the last axis; any.
CONTIGUOUS, ROWS, ANY = "contiguous", "rows", "any"
# An address below may be the offset that torch gives for a storage without memory; none above.
MOST_OFFSET = 2**44

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}

# Types of torch tensors and of CuPy arrays seen so far, which signature.py looks up too: a look
# here takes 0.07 us less than isinstance.
torch_types: set[type] = set()
cupy_types: set[type] = set()


# Frozen would say more, and take five times as long to make.
@dataclass(slots=True, eq=False)
class Array:
    """A caller's array as a kernel needs it; not changed once made."""

    name: str  # the parameter's name, for messages
    pointer: int  # address of element 0; 0 when there is no memory
    shape: tuple[int, ...]  # torch.Size from torch: making it a plain one costs 0.1 us
    strides: tuple[int, ...] | None  # in elements; None is row-major without gaps
    dtype: str  # "bfloat16", "float16", "float32", "int64", ...
    device: int  # CUDA ordinal, or CPU
    library: str  # "torch", "cupy", "numpy", "jax", "dlpack" or "cuda_array_interface"
    writable: bool
    # What keeps the memory alive: the caller's array, a dlpack.Loan, a cuda_array_interface.Export.
    owner: object

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Of an element of a dtype that kernels take."""
        return _ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes from element 0 to the end of a contiguous array of a dtype that kernels take."""
        return _num_bytes(self.shape, self.dtype)


def view(name: str, array: object, stream: object = None) -> Array:
    """A caller's array, by whichever route its library offers; nothing is copied.

    stream: as in streams.launch_on; a DLPack producer on a GPU is told that its memory will be used
    there.
    Errors: TypeError (no array, or none with plain strided memory), ValueError (a device that is
    neither CPU nor CUDA, strides that are no multiple of the element size), ImportError (another
    library's array on a GPU, and no CuPy).
    """
    if type(array) not in torch_types:
        return _view_other(name, array, stream)
    tensor = array
    if tensor.is_cuda:
        device = tensor.get_device()
    elif tensor.is_cpu:
        device = CPU
    else:
        raise ValueError(f"{name}: expected a CPU or CUDA device, got {tensor.device}")
    try:
        pointer, shape = tensor.data_ptr(), tensor.shape
        strides = None if tensor.is_contiguous() else tensor.stride()
        if pointer < MOST_OFFSET:
            # A nested tensor has none, and a shape that is no numbers.
            if tensor.layout is not sys.modules["torch"].strided:
                raise RuntimeError("no data pointer")
            # Of a storage without memory torch gives the offset.
            if tensor.storage_offset() and not tensor.untyped_storage().data_ptr():
                pointer = 0
    except (RuntimeError, ValueError) as error:
        # A ValueError is of a parameter that has no memory yet, nor a layout.
        if isinstance(error, RuntimeError) and tensor.layout is not sys.modules["torch"].strided:
            got = f"layout {tensor.layout}"
            raise TypeError(f"{name}: expected a strided tensor, got {got}") from error
        got = f"{type(tensor).__name__} ({error})"
        raise TypeError(f"{name}: expected a tensor with plain memory, got {got}") from error
    # The lazy conjugate of complex numbers is refused with their dtype; its imaginary part is not.
    if tensor.is_neg():
        got = "a lazily negated view"
        raise TypeError(f"{name}: expected a tensor with its values in memory, got {got}")
    # The same as Array(...), in half its 0.2 us.
    array = object.__new__(Array)
    array.name = name
    array.pointer = pointer
    array.shape = shape
    array.strides = strides
    array.dtype = _torch_dtype_names[tensor.dtype]
    array.device = device
    array.library = "torch"
    array.writable = True
    array.owner = tensor
    return array


def _view_other(name: str, array: object, stream: object) -> Array:
    """view, of all but torch tensors of types that have been seen."""
    # Not isinstance, which asks the object: a proxy says what another one is.
    kind = type(array)
    if _is_kind_of(kind, "torch", "Tensor"):
        torch_types.add(kind)
        return view(name, array, stream)
    if _is_kind_of(kind, "cupy", "ndarray"):
        cupy_types.add(kind)
        strides = None
        # What array.flags says, in a tenth of its 0.3 us.
        if not array._c_contiguous:
            strides = _in_elements(name, array.strides, array.itemsize)
        dtype, data = _dtype_name(array.dtype), array.data
        device = data.device_id
        return Array(name, data.ptr, array.shape, strides, dtype, device, "cupy", True, array)
    if issubclass(kind, np.ndarray):
        pointer, read_only = array.__array_interface__["data"]
        strides = _in_elements(name, array.strides, array.itemsize)
        dtype, writable = _dtype_name(array.dtype), not read_only
        return Array(name, pointer, array.shape, strides, dtype, CPU, "numpy", writable, array)
    if dlpack.is_producer(name, array):
        return _view_dlpack(name, array, stream)
    if cuda_array_interface.is_producer(name, array):
        return _view_cuda_array_interface(name, array)
    expected = "an array (torch, CuPy, NumPy, DLPack or __cuda_array_interface__)"
    got = kind.__name__
    if _is_kind_of(kind, "jax.core", "Tracer"):
        got += ": inside jax.jit, grad and vmap there is no array yet"
    raise TypeError(f"{name}: expected {expected}, got {got}")


def _is_kind_of(kind: type, module: str, name: str) -> bool:
    """Whether a type is a library's, or derived from it, without importing the library."""
    # A module that another thread is importing may have no such name yet, nor any array; and what
    # stands in for one may have anything.
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(kind, base)


def check(
    array: Array,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    device: int,
    alignment: int = 0,
    written: bool = False,
    strides: str = CONTIGUOUS,
) -> None:
    """Refuse an array that a kernel could not take as it is. alignment is in bytes, of the array
    and of each row, where strides may be those of rows apart; 0 is an element's size.

    Errors: TypeError (dtype), then ValueError (shape, device, strides, no memory, alignment,
    read-only when written), as `name: expected X, got Y`, strides in elements.
    """
    if array.dtype not in dtypes:
        raise TypeError(f"{array.name}: expected dtype {' or '.join(dtypes)}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{array.name}: expected shape {tuple(shape)}, got {tuple(array.shape)}")
    if array.device != device:
        expected, got = device_name(device), device_name(array.device)
        raise ValueError(f"{array.name}: expected device {expected}, got {got}")
    alignment = alignment or array.item_bytes
    if array.strides is not None and not _is_contiguous(shape, array.strides):
        _check_strides(array, strides, alignment, written)
    pointer = array.pointer
    if not pointer:
        _refuse_null(array)
    if pointer % alignment and array.size:
        got = f"{pointer:#x}, {pointer % alignment} past one"
        raise ValueError(f"{array.name}: expected an address divisible by {alignment}, got {got}")
    if written and not array.writable:
        got = "one of JAX, which nobody may write" if array.library == "jax" else "a read-only one"
        raise ValueError(f"{array.name}: expected a writable array, got {got}")


def _check_strides(array: Array, allowed: str, alignment: int, written: bool) -> None:
    """Of an array that is not contiguous. What is written may have no element twice."""
    got = f"strides {array.strides}, in elements, for shape {tuple(array.shape)}"
    if allowed == CONTIGUOUS:
        raise ValueError(f"{array.name}: expected a contiguous array, got {got}")
    axes = list(zip(array.strides, array.shape, strict=True))
    if allowed == ROWS:
        *outer, (stride, n) = axes
        if n != 1 and stride != 1:
            raise ValueError(f"{array.name}: expected a contiguous last axis, got {got}")
        item_bytes = array.item_bytes
        if any(n != 1 and stride * item_bytes % alignment for stride, n in outer):
            expected = f"rows at multiples of {alignment} bytes"
            raise ValueError(f"{array.name}: expected {expected}, got {got}")
    if written:
        size = 1  # of the axes with smaller strides
        for stride, n in sorted((abs(stride), n) for stride, n in axes if n != 1):
            if stride < size:
                expected = "rows side by side, no element twice"
                raise ValueError(f"{array.name}: expected {expected}, got {got}")
            size += stride * (n - 1)


def pointers_of(given: Sequence[Array | None]) -> list[int]:
    """Addresses, 0 for None."""
    return [0 if array is None else array.pointer for array in given]


def is_contiguous(array: Array) -> bool:
    """Row-major without gaps."""
    return array.strides is None or _is_contiguous(array.shape, array.strides)


def are_rows_at(array: Array, num_bytes: int) -> bool:
    """Whether an array, and each row along its last axis, begins at a multiple of so many bytes."""
    if array.strides is None and array.pointer % num_bytes == 0:
        return array.shape[-1] * array.item_bytes % num_bytes == 0
    if array.size == 0:
        return True
    steps = zip(strides_of(array)[:-1], array.shape[:-1], strict=True)
    offsets = [stride * array.item_bytes for stride, n in steps if n != 1]
    return not any(offset % num_bytes for offset in (array.pointer, *offsets))


def strides_of(array: Array) -> tuple[int, ...]:
    """In elements."""
    return _row_major(tuple(array.shape)) if array.strides is None else array.strides


def real(name: str, value: object) -> float:
    """A real number as float: int, float, NumPy scalar or 0-d array on the CPU.

    Errors: TypeError for anything else, bool, arrays on a GPU and numbers that no float can be made
    of too; ValueError for an int beyond the range of float.
    """
    if type(value) is float:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        # A subclass may raise anything.
        except Exception as error:
            raise _no_float(name, value, error) from error
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a real number, got {type(value).__name__}")
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) and not dlpack.is_producer(name, value):
        raise TypeError(f"{name}: expected a real number, got {type(value).__name__}")
    array = view(name, value)
    if array.shape:
        raise TypeError(
            f"{name}: expected a real number, got an array of shape {tuple(array.shape)}"
        )
    if not array.dtype.startswith(("int", "uint", "float", "bfloat")) or not _is_known(array.dtype):
        raise TypeError(f"{name}: expected a real number, got {array.dtype}")
    if array.device != CPU:
        got = (
            f"a 0-d array on {device_name(array.device)}, whose value only a synchronisation tells"
        )
        raise TypeError(f"{name}: expected a real number on the CPU, got {got}")
    if not array.pointer:
        _refuse_null(array)
    return float(to_numpy(array))


def empty_like(array: Array, stream: object = None) -> object:
    """A new contiguous array of array's shape, dtype and device, in the caller's library; for JAX,
    whose arrays nobody may write, in CuPy or NumPy: hand_over makes it JAX's afterwards.

    stream: as in streams.launch_on. The memory comes from the library's current stream, so a stream
    given here first waits for that one.
    Errors: ValueError that names `out` when a DLPack library has no array API to allocate with, and
    that or TypeError when it allocates another array; what it raises itself comes out as it is.
    """
    if array.library == "numpy" or (array.library == "jax" and array.device == CPU):
        return np.empty(array.shape, _numpy_dtype(array.dtype))
    if array.library in ("dlpack", "cuda_array_interface"):
        return _empty_by_array_api(array, stream)
    if array.library == "torch":
        torch = sys.modules["torch"]
        dtype = getattr(torch, array.dtype)
        new = torch.empty(array.shape, dtype=dtype, device=array.owner.device)
    else:
        cupy = import_cupy()
        with cupy.cuda.Device(array.device):
            new = cupy.empty(array.shape, _numpy_dtype(array.dtype))
    if stream is not None and array.device != CPU:
        pointer = streams.stream_pointer(stream, array.device)
        with import_cupy().cuda.Device(array.device):
            current = streams.current_stream(array.library, array.device)
            streams.wait_before(pointer, {current} - {pointer})
    return new


def hand_over(new: object, array: Array, stream: object = None) -> object:
    """What empty_like made, in array's library, once the work that fills it has been launched.

    stream: as in streams.launch_on. What reads the result in JAX waits for CuPy's current stream,
    and that one for a stream given here.
    """
    if array.library != "jax":
        return new
    library = sys.modules["jax"].numpy
    if array.device == CPU:
        return library.asarray(new, device=array.owner.producer.device)
    if not array.size:
        return library.empty(new.shape, new.dtype, device=array.owner.producer.device)
    with import_cupy().cuda.Device(array.device):
        if stream is not None:
            pointer = streams.stream_pointer(stream, array.device)
            current = streams.current_stream(array.library, array.device)
            if current != pointer:
                streams.wait(current, pointer)
        return library.from_dlpack(new)


def to_numpy(array: Array) -> np.ndarray:
    """The same memory as a NumPy array, bfloat16 as ml_dtypes.bfloat16. CPU arrays only."""
    if array.library == "numpy":
        # A subclass may have writes of its own: a masked array leaves out what is masked.
        return array.owner.view(np.ndarray)
    return elements(array).view(_numpy_dtype(array.dtype))


def elements(array: Array) -> np.ndarray:
    """The same memory as NumPy sees it, elements without a type; to look at one is an error if they
    are not on the CPU.
    """
    return np.asarray(_Memory(array))


def device_name(device: int) -> str:
    """ "cpu" or "cuda:1", as messages say it."""
    return "cpu" if device == CPU else f"cuda:{device}"


class _Memory:
    """An Array in NumPy's array interface, as elements without a type."""

    def __init__(self, array: Array):
        itemsize, strides = _ITEM_BYTES.get(array.dtype), array.strides
        if itemsize is None:
            itemsize = _numpy_dtype(array.dtype).itemsize
        if strides is not None:
            # Of an axis of length 1 it may be beyond what NumPy holds.
            axes = zip(strides, array.shape, strict=True)
            strides = tuple(0 if n == 1 else stride * itemsize for stride, n in axes)
        self.owner = array.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (array.pointer, not array.writable),
            "shape": tuple(array.shape),
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


def _view_dlpack(name: str, producer: object, stream: object) -> Array:
    ordinal = dlpack.cuda_ordinal(name, producer)
    if ordinal is None:
        loan = dlpack.borrow(name, producer, None, None)
    else:
        cuda = import_cupy().cuda
        try:
            num_devices = cuda.runtime.getDeviceCount()
            if not 0 <= ordinal < num_devices:
                expected, got = f"one of {num_devices} CUDA devices", f"number {ordinal}"
                raise ValueError(f"{name}: expected an array on {expected}, got one on {got}")
            if stream is None:
                pointer = streams.current_stream("dlpack", ordinal)
            else:
                pointer = streams.stream_pointer(stream, ordinal)
            # Some producers export only what is on the current device.
            with cuda.Device(ordinal):
                loan = dlpack.borrow(name, producer, ordinal, pointer)
        except cuda.runtime.CUDARuntimeError as error:
            raise no_usable_gpu(error) from error
    device = CPU if ordinal is None else ordinal
    memory = (loan.pointer, loan.shape, loan.strides, loan.dtype)
    # JAX does not mark its arrays as read-only, but takes for granted that nobody writes them.
    if _is_kind_of(type(producer), "jax", "Array"):
        return Array(name, *memory, device, "jax", False, loan)
    return Array(name, *memory, device, "dlpack", loan.writable, loan)


def _view_cuda_array_interface(name: str, producer: object) -> Array:
    export = cuda_array_interface.Export(name, producer)
    pointer, strides = export.pointer, export.strides
    if strides is not None:
        strides = _in_elements(name, strides, export.dtype.itemsize)
    runtime = import_cupy().cuda.runtime
    try:
        # An empty array may have no address, which is on any device.
        device = runtime.getDevice()
        if pointer:
            attributes = runtime.pointerGetAttributes(pointer)
            if attributes.type == runtime.memoryTypeUnregistered:
                raise ValueError(f"{name}: expected memory of a CUDA device, got {pointer:#x}")
            device = attributes.device
    except runtime.CUDARuntimeError as error:
        raise no_usable_gpu(error) from error
    memory = (pointer, export.shape, strides, _dtype_name(export.dtype), device)
    return Array(name, *memory, "cuda_array_interface", export.writable, export)


def _refuse_null(array: Array) -> None:
    """Raise if an array without memory has elements; only empty ones may do without."""
    if array.size:
        raise ValueError(f"{array.name}: expected an array with memory, got a null pointer")


def _no_float(name: str, value: object, error: Exception) -> Exception:
    """The refusal of an int or float that float() raises for."""
    if isinstance(error, OverflowError) and isinstance(value, int):
        # Not the number: Python does not print one of more than 4300 digits.
        got = f"an int of {int.bit_length(value)} bits"
        return ValueError(f"{name}: expected a number in float's range, got {got}")
    got = f"{type(value).__name__} ({dlpack.error_text(error)})"
    return TypeError(f"{name}: expected a real number, got {got}")


def _empty_by_array_api(array: Array, stream: object) -> object:
    producer = array.owner.producer
    try:
        library = producer.__array_namespace__()
        empty, dtype, device = library.empty, getattr(library, array.dtype), producer.device
    except Exception as error:
        kind = type(producer).__name__
        got = f"None, and {kind} ({array.name}) has no array API to make one of {array.dtype} with"
        raise ValueError(f"out: expected an array, got {got}") from error
    new = empty(array.shape, dtype=dtype, device=device)
    check(view("out", new, stream), (array.dtype,), array.shape, array.device)
    return new


def _in_elements(name: str, strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    # A dtype without any bytes is refused later, by its name.
    itemsize = itemsize or 1
    if any(stride % itemsize for stride in strides):
        expected = f"strides that are multiples of {itemsize} bytes"
        raise ValueError(f"{name}: expected {expected}, got {strides} bytes")
    return tuple(stride // itemsize for stride in strides)


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: object) -> str:
    """The name of a dtype of CuPy or NumPy; a foreign byte order keeps its mark."""
    return str(dtype)


class _TorchDtypeNames(dict):
    """torch's dtype -> its name; 0.05 us less than a function's cache."""

    def __missing__(self, dtype: object) -> str:
        name = self[dtype] = sys.intern(str(dtype).removeprefix("torch."))
        return name


_torch_dtype_names = _TorchDtypeNames()


@functools.lru_cache(maxsize=1024)
def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _ITEM_BYTES[dtype]


def _numpy_dtype(name: str) -> np.dtype:
    # Names that NumPy has given up raise AttributeError.
    with contextlib.suppress(TypeError, AttributeError):
        return np.dtype(name)
    # Not before: torch's callers on a GPU may be without it.
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _is_known(dtype: str) -> bool:
    """Whether NumPy or ml_dtypes has such a dtype; DLPack names others too."""
    try:
        _numpy_dtype(dtype)
    except (TypeError, AttributeError):
        return False
    return True


# Shapes repeat from call to call; looking strides up takes a tenth of working them out.
@functools.lru_cache(maxsize=1024)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    return tuple(reversed(strides)) if shape else ()


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Row-major without gaps. Strides of axes of length 1, and of empty arrays, are free."""
    if strides == _row_major(shape):
        return True
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return 0 in shape
        step *= n
    return True
