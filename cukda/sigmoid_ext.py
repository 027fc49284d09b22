"""The sigmoid that KDA's gates use, elementwise: y = 0.5 · tanh.approx(0.5 · x) + 0.5.

Each kernel file has a Python file that checks the caller's arrays, states the sizes and launches.
This one and `cuda_src/sigmoid.cu` are the smallest such pair; `kda.py` is the large one.
"""

import dataclasses
import struct

import numpy as np

from cukda import arrays, jit, reference, streams

# By value of `enum class Dtype` in sigmoid.cu.
_DTYPES = ("float32", "bfloat16", "float16")
_NUM_THREADS = 256
# 16-byte loads that a thread has in flight.
_VECTORS = 4
_VECTOR_BYTES = 16
# x, y, size.
_PARAMETERS = struct.Struct("@PPq")


def _variant(input_dtype: str, output_dtype: str) -> jit.Variant:
    defines = (
        ("INPUT_DTYPE", _DTYPES.index(input_dtype)),
        ("OUTPUT_DTYPE", _DTYPES.index(output_dtype)),
        ("NUM_THREADS", _NUM_THREADS),
        ("VECTORS", _VECTORS),
    )
    return jit.Variant("sigmoid.cu", "sigmoid_forward", defines)


_VARIANTS = {(dtype, out): _variant(dtype, out) for dtype in _DTYPES for out in (dtype, "float32")}
VARIANTS = tuple(_VARIANTS.values())


def sigmoid_tanh_fp32(x, *, stream=None):
    """0.5 · tanh.approx(0.5 · x) + 0.5, computed and returned in float32.

    x:       float32, bfloat16 or float16, any shape, contiguous; on a GPU, or on the CPU, where
             NumPy computes.
    stream:  what to run on instead of the caller's current stream; ignored on the CPU.

    Returns a new float32 array of x's shape, library and device. NaN gives NaN, ±inf exactly 1
    and 0. The call does not synchronise. Raises TypeError (kind, dtype) or ValueError (layout)
    that names x.
    """
    source = _checked_input(x, stream)
    out = arrays.empty_like(dataclasses.replace(source, dtype="float32"), stream)
    target = arrays.view("out", out, stream)
    _check_output(target, source, "float32")
    _compute(source, target, stream)
    return arrays.hand_over(out, source, stream)


def sigmoid(x, out=None, *, stream=None):
    """0.5 · tanh.approx(0.5 · x) + 0.5, computed in float32 and rounded to x's dtype.

    x:       as for sigmoid_tanh_fp32.
    out:     of x's dtype, shape and device, written and returned; may be x itself. None allocates
             one in x's library.
    stream:  what to run on instead of the caller's current stream; ignored on the CPU.

    Raises TypeError (kind, dtype) or ValueError (shape, device, layout) that names the argument.
    """
    source = _checked_input(x, stream)
    result = arrays.empty_like(source, stream) if out is None else out
    target = arrays.view("out", result, stream)
    _check_output(target, source, source.dtype)
    _compute(source, target, stream)
    return arrays.hand_over(result, source, stream) if out is None else out


def _item_bytes(array: arrays.Array) -> int:
    return 4 if array.dtype == "float32" else 2


def _checked_input(x, stream) -> arrays.Array:
    source = arrays.view("x", x, stream)
    arrays.check(
        source,
        dtypes=_DTYPES,
        shape=source.shape,
        device=source.device,
        alignment=_item_bytes(source),
    )
    return source


def _check_output(target: arrays.Array, source: arrays.Array, dtype: str) -> None:
    arrays.check(
        target,
        dtypes=(dtype,),
        shape=source.shape,
        device=source.device,
        alignment=_item_bytes(target),
        written=True,
    )
    # In place, each thread reads its elements before it writes them; others would read results.
    begin, other = target.pointer, source.pointer
    is_in_place = begin == other and dtype == source.dtype
    if not is_in_place and begin < other + source.num_bytes and other < begin + target.num_bytes:
        distance = abs(begin - other)
        raise ValueError(f"out: expected x or no memory of x's, got a start {distance} bytes off")


def _flat(array: arrays.Array) -> np.ndarray:
    """A contiguous array's memory in one dimension: NumPy has no more than 64."""
    if array.library == "numpy":
        return arrays.to_numpy(array).reshape(-1)
    return arrays.to_numpy(dataclasses.replace(array, shape=(array.size,), strides=None))


def _compute(source: arrays.Array, target: arrays.Array, stream) -> None:
    if source.size == 0:
        return
    if source.device == arrays.CPU:
        # NaN, inf and what underflows are values like others here.
        with np.errstate(all="ignore"):
            values = _flat(source).astype(np.float32)
            _flat(target)[...] = reference.sigmoid(values)
        return
    variant = _VARIANTS[source.dtype, target.dtype]
    block_size = _NUM_THREADS * _VECTORS * (_VECTOR_BYTES // _item_bytes(source))
    grid = -(-source.size // block_size)
    with streams.launch_on((source, target), stream) as stream_pointer:
        kernel = jit.kernel(variant.source, variant.entry, variant.defines)
        args = (source.pointer, target.pointer, source.size)
        kernel(grid, _NUM_THREADS, 0, stream_pointer, _PARAMETERS, *args)
