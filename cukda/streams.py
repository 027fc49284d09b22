"""A call's arrays, and the stream if one is given -> the stream pointer to launch on.

Streams of other libraries wait for it, and it for them; memory is held while it is in use.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cukda import cuda_array_interface
from cukda.jit import import_cupy

if TYPE_CHECKING:
    from cukda.arrays import Array

# Libraries that have no current stream that we know, and whose memory we hold while it is in use.
_LENDERS = ("dlpack", "jax", "cuda_array_interface")

# (event, owners): memory whose library does not know that work which was launched still uses it.
_in_use: deque[tuple[object, list[object]]] = deque()


def is_current(device: int) -> bool:
    """Whether kernels that are launched now run there."""
    cuda = import_cupy().cuda
    # A thread's first CUDA call may be this one: then no context is bound, and a launch, unlike
    # most calls of the runtime, binds none.
    return cuda.runtime.getDevice() == device and bool(cuda.driver.ctxGetCurrent())


class launch_on:
    """with launch_on(arrays, stream) as pointer: launch kernels on that stream pointer.

    Inside, the device of the arrays (all on one) is current; afterwards the former one is again.
    The stream is the current one of the first array's library: torch's for torch, CuPy's for all
    others. When other arrays' libraries have another current stream, ours waits for it before, and
    it for ours after. A stream given instead is used as it is, and its order against the current
    streams is the caller's: a pointer, a torch or CuPy stream, anything with `__cuda_stream__`.
    A stream that a `__cuda_array_interface__` names is waited for, and waits, in either case.

    Nothing waits on the host, and memory that the caller drops right afterwards stays valid until
    the work is done. torch and CuPy arrays on their own current stream cost no event, so that a
    graph can be captured; capturing with arrays whose libraries have different current streams is
    a ValueError, since nothing outside a graph can be waited for from inside.

    Errors: TypeError or ValueError for a stream that is none or of another device; ImportError
    without CuPy.
    """

    __slots__ = ("_arrays", "_device", "_kept", "_others", "_pointer", "_previous", "_stream")

    def __init__(self, arrays: Sequence["Array | None"], stream: object = None):
        self._arrays = [array for array in arrays if array is not None]
        self._stream = stream

    def __enter__(self) -> int:
        cuda = import_cupy().cuda
        runtime = cuda.runtime
        self._device = self._arrays[0].device
        self._previous = runtime.getDevice()
        # See is_current.
        if self._device != self._previous or not cuda.driver.ctxGetCurrent():
            runtime.setDevice(self._device)
        try:
            self._order()
        except BaseException:
            self._restore_device()
            raise
        return self._pointer

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                for other in self._others:
                    wait(other, self._pointer)
                if self._kept:
                    self._keep_in_use()
        finally:
            self._restore_device()

    def _order(self) -> None:
        """Choose the stream, wait for the others, see what memory outlives the call."""
        device, stream = self._device, self._stream
        self._kept, self._others = [], set()
        first = self._arrays[0].library
        # All of torch's on torch's stream, or of CuPy's on CuPy's, is the usual call: 0.6 us less.
        if stream is None and first in ("torch", "cupy"):
            for array in self._arrays:
                if array.library != first:
                    break
            else:
                self._pointer = current_stream(first, device)
                return
        libraries = {array.library for array in self._arrays}
        current = {library: current_stream(library, device) for library in libraries}
        if stream is None:
            self._pointer = current[first]
            self._others = set(current.values()) - {self._pointer}
        else:
            self._pointer = stream_pointer(stream, device)
            if current.get("torch", self._pointer) != self._pointer:
                self._record_stream()
            # CuPy's pool hands freed memory out again on its own stream.
            if current.get("cupy", self._pointer) != self._pointer:
                self._kept = [array.owner for array in self._arrays if array.library == "cupy"]
        if not libraries.isdisjoint(_LENDERS):
            lent = [array.owner for array in self._arrays if array.library in _LENDERS]
            self._kept += lent
            # A stream that the memory is in use on. DLPack has been told of ours.
            used = {getattr(owner, "stream", None) for owner in lent}
            self._others |= used - {None, self._pointer}
        wait_before(self._pointer, self._others)

    def _record_stream(self) -> None:
        """Tell torch's allocator that the tensors are in use on a stream that is not theirs."""
        torch = sys.modules["torch"]
        stream = torch.cuda.ExternalStream(self._pointer, device=self._device)
        for array in self._arrays:
            if array.library == "torch":
                array.owner.record_stream(stream)

    def _keep_in_use(self) -> None:
        """Hold the owners until the work on our stream is done; let go of those of earlier calls.

        A graph holds no memory in any library: what it uses is the caller's to keep.
        """
        cuda = import_cupy().cuda
        if cuda.runtime.streamIsCapturing(self._pointer):
            return
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, self._pointer)
        _in_use.append((event, self._kept))
        # Taken out to be looked at, so that two threads never look at the same one.
        with contextlib.suppress(IndexError):
            while (oldest := _in_use.popleft())[0].done:
                pass
            _in_use.appendleft(oldest)

    def _restore_device(self) -> None:
        if self._device != self._previous:
            import_cupy().cuda.runtime.setDevice(self._previous)


def current_stream(library: str, device: int) -> int:
    """The pointer of a library's current stream; DLPack's others are met on CuPy's."""
    if library == "torch":
        torch = sys.modules["torch"]
        # torch.cuda.current_stream makes an object and takes 5 us.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device)
    return import_cupy().cuda.get_current_stream(device).ptr


def stream_pointer(stream: object, device: int) -> int:
    """The pointer of a stream that the caller gave. Errors: TypeError, ValueError."""
    pointer = stream
    if not isinstance(stream, int):
        # CuPy's default streams belong to no device and say -1.
        ordinal = getattr(stream, "device_index", getattr(stream, "device_id", -1))
        if isinstance(ordinal, int) and ordinal not in (-1, device):
            expected, got = f"cuda:{device}", f"cuda:{ordinal}"
            raise ValueError(f"stream: expected a stream of {expected}, got one of {got}")
        try:
            if hasattr(stream, "__cuda_stream__"):
                _, pointer = stream.__cuda_stream__()
            else:
                # torch's before 2.9.
                pointer = stream.cuda_stream
        # A class, too, has such attributes; and what they do is not ours.
        except Exception as error:
            raise _no_stream(stream) from error
    if not isinstance(pointer, int) or isinstance(pointer, bool):
        raise _no_stream(stream)
    if not 0 <= pointer < cuda_array_interface.MAX_POINTER:
        raise ValueError(f"stream: expected a pointer, got {pointer:#x}")
    return pointer


def _no_stream(stream: object) -> TypeError:
    got = f"the class {stream.__name__}" if isinstance(stream, type) else type(stream).__name__
    expected = "a pointer or an object with __cuda_stream__"
    return TypeError(f"stream: expected {expected}, got {got}")


def wait(waiting: int, awaited: int) -> None:
    """Later work on one stream of the current device runs after the present work of another."""
    cuda = import_cupy().cuda
    event = cuda.Event(disable_timing=True)
    cuda.runtime.eventRecord(event.ptr, awaited)
    cuda.runtime.streamWaitEvent(waiting, event.ptr)


def wait_before(waiting: int, others: set[int]) -> None:
    """Wait for each of the others. Errors: ValueError when the waiting stream is capturing."""
    if others and import_cupy().cuda.runtime.streamIsCapturing(waiting):
        got = f"a capturing one beside {len(others)} more"
        raise ValueError(f"stream: expected one stream for all arrays during capture, got {got}")
    for other in others:
        wait(waiting, other)
