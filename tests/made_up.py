"""CuPy arrays at addresses where nothing is, and the driver's end of two GPUs, for tests of what a
call launches.
"""

import contextlib
import dataclasses
import functools
import math
import types

import ml_dtypes
import numpy as np
import pytest
from test_launch import H200, STREAM, FakeGpu

from cukda import arrays, decode, jit, kda, signature, streams, workspace

D = 128
NEW = 0x7FA0_0000_0000


class Device:
    """CuPy's, of `gpus`."""

    def __init__(self, gpus, device=None):
        self.gpus, self.device = gpus, device
        self.compute_capability = gpus.capability

    def __enter__(self):
        self.previous, self.gpus.device = self.gpus.device, self.device

    def __exit__(self, *_):
        self.gpus.device = self.previous


class TwoGpus(FakeGpu):
    """work: also (to, from, shape, strides, dtype, stream) of copies that CuPy's kernels make."""

    def __init__(self, cupy):
        super().__init__()
        self.has_context, self.num_new, self._stream = True, 0, None
        self.ndarray = cupy.ndarray
        self.cuda.MemoryPointer = cupy.cuda.MemoryPointer
        self.cuda.UnownedMemory = cupy.cuda.UnownedMemory
        self.cuda.Device = functools.partial(Device, self)
        self.cuda.Stream = types.SimpleNamespace(from_external=self._on_stream)
        self.cuda.runtime.setDevice = self._set_device
        self.cuda.driver.ctxGetCurrent = lambda: int(self.has_context)
        self.cuda.get_current_stream = lambda device: types.SimpleNamespace(ptr=STREAM)

    def _set_device(self, device):
        self.device, self.has_context = device, True

    @contextlib.contextmanager
    def _on_stream(self, stream):
        assert self._stream is None
        _, self._stream = stream.__cuda_stream__()
        yield
        self._stream = None

    def empty(self, shape, dtype):
        self.num_new += 1
        return make(Made(shape, str(np.dtype(dtype)), NEW + self.num_new * 2**32, self.device))

    def copyto(self, to, begin):
        assert to.shape == begin.shape and to.dtype == begin.dtype and to.flags.c_contiguous
        assert to.data.device_id == begin.data.device_id == self.device
        work = to.data.ptr, begin.data.ptr, begin.shape, begin.strides, str(to.dtype), self._stream
        self.work.append(work)

    def _launch(self, *arguments):
        assert self.has_context
        super()._launch(*arguments)
        self.launches[-1] = (self.device, *self.launches[-1])
        self.work[-1] = self.launches[-1]


@dataclasses.dataclass(frozen=True)
class Made:
    """What a CuPy array is made of. strides: in bytes, or None."""

    shape: tuple[int, ...]
    dtype: str
    pointer: int
    device: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self):
        return math.prod(self.shape) * np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize

    @property
    def row_major(self):
        """In bytes."""
        item_bytes = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize
        n = len(self.shape)
        return tuple(math.prod(self.shape[i + 1 :]) * item_bytes for i in range(n))


def make(made, owner=None):
    """The array; owner: what it keeps alive."""
    import cupy

    dtype = np.dtype(getattr(ml_dtypes, made.dtype, made.dtype))
    memory = cupy.cuda.UnownedMemory(made.pointer, made.num_bytes, owner, made.device)
    memory = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(made.shape, dtype, memory, made.strides)


def fwd_call(num_tokens=5, heads=2, num_sequences=3):
    rows = (1, num_tokens, heads, D)
    states = (num_sequences, heads, D, D)
    return _placed(
        q=(rows, "bfloat16"),
        k=(rows, "bfloat16"),
        v=(rows, "bfloat16"),
        g=(rows, "bfloat16"),
        beta=(rows[:3], "bfloat16"),
        out=(rows, "bfloat16"),
        A_log=((heads,), "float32"),
        dt_bias=((heads, D), "float32"),
        initial_state=(states, "float32"),
        final_state=(states, "float32"),
        cu_seqlens=((num_sequences + 1,), "int32"),
    )


def step_call(num_tokens=2, heads=2, num_sequences=3):
    rows = (num_sequences, num_tokens, heads, D)
    return _placed(
        q=(rows, "bfloat16"),
        k=(rows, "bfloat16"),
        v=(rows, "bfloat16"),
        g=(rows, "bfloat16"),
        beta=(rows[:3], "bfloat16"),
        out=(rows, "bfloat16"),
        A_log=((heads,), "float32"),
        dt_bias=((heads, D), "float32"),
        state=((num_sequences + 2, heads, D, D), "float32"),
        state_indices=((num_sequences,), "int32"),
    )


def _placed(**arrays):
    places = {
        name: Made(shape, dtype, 0x7F00_0000_0000 + i * 2**28)
        for i, (name, (shape, dtype)) in enumerate(arrays.items())
    }
    return places | {"scale": 0.25, "lower_bound": -2.5}


def made(call):
    """The call with arrays; one array where the same is meant."""
    found = {value: make(value) for value in call.values() if isinstance(value, Made)}
    return {n: found[x] if isinstance(x, Made) else x for n, x in call.items()}


def two_gpus(monkeypatch):
    """A `TwoGpus` that cukda takes for what is there, with nothing launched before."""
    cupy = pytest.importorskip("cupy")
    gpus = TwoGpus(cupy)
    # A type is known from the first call on.
    for module in arrays, signature:
        monkeypatch.setattr(module, "cupy_types", {cupy.ndarray})
    for module in arrays, jit, streams, workspace:
        monkeypatch.setattr(module, "import_cupy", lambda: gpus)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "gpu", lambda: H200)
    monkeypatch.setattr(workspace, "_memory_pools", {})
    monkeypatch.setattr(kda, "_launches", {})
    monkeypatch.setattr(decode, "_launches", {})
    return gpus
