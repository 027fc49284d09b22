"""A number of bytes, and a stream -> memory for what is launched on that stream meanwhile."""

from cukda import arrays
from cukda.jit import import_cupy

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

# CUDA's pool for Workspace, by device; and what it keeps between calls.
_KEPT_BYTES = 2**30
_memory_pools: dict[int, int] = {}


class Workspace:
    """with Workspace(num_bytes, stream_pointer) as workspace: memory between two points of a stream
    of the current device, for the kernels launched inside: workspace.pointer, at a multiple of 256.

    It comes from a CUDA memory pool of ours, by stream-ordered allocation: nothing waits, and a
    graph that is captured meanwhile has the memory for its own. The pool keeps what it has had.
    None is taken for 0 bytes.

    Errors: MemoryError when the GPU has no more.
    """

    __slots__ = ("_num_bytes", "_stream_pointer", "pointer")

    def __init__(self, num_bytes: int, stream_pointer: int):
        self._num_bytes = num_bytes
        self._stream_pointer = stream_pointer
        self.pointer = 0

    def __enter__(self) -> "Workspace":
        if self._num_bytes:
            runtime = import_cupy().cuda.runtime
            pool = _memory_pool(runtime.getDevice(), self._stream_pointer)
            try:
                if pool is None:
                    self.pointer = runtime.mallocAsync(self._num_bytes, self._stream_pointer)
                else:
                    self.pointer = runtime.mallocFromPoolAsync(
                        self._num_bytes, pool, self._stream_pointer
                    )
            except runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                raise MemoryError(
                    f"cukda: the GPU has no {self._num_bytes} bytes for what segments put aside"
                ) from error
        return self

    def copy(self, target: int, source: int, like: arrays.Array) -> None:
        """Copy an array from one pointer on the device to another, where it is contiguous, on the
        stream. like: its shape, strides and dtype; the pointer there is not looked at.
        """
        cupy = import_cupy()
        runtime = cupy.cuda.runtime
        if arrays.is_contiguous(like):
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(target, source, like.num_bytes, kind, self._stream_pointer)
            return
        device = runtime.getDevice()

        def bits(pointer, strides):
            memory = cupy.cuda.UnownedMemory(pointer, like.num_bytes, None, device)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            return cupy.ndarray(like.shape, f"u{like.item_bytes}", pointer, strides)

        strides = tuple(stride * like.item_bytes for stride in like.strides)
        with cupy.cuda.Stream.from_external(_Stream(self._stream_pointer)):
            cupy.copyto(bits(target, None), bits(source, strides))

    def __exit__(self, kind, error, traceback) -> None:
        if self.pointer:
            import_cupy().cuda.runtime.freeAsync(self.pointer, self._stream_pointer)


def _memory_pool(device: int, stream_pointer: int) -> int | None:
    """A pool on the device that keeps up to 1 GiB between calls: to give it back to the system
    would cost 0.1 ms a call.

    None while a graph is captured and there is no pool yet, for none can be made then; nor is one
    wanted, because what a graph allocates is the graph's.
    """
    pool = _memory_pools.get(device)
    if pool is None:
        runtime = import_cupy().cuda.runtime
        if runtime.streamIsCapturing(stream_pointer):
            return None
        pinned, no_handle, on_device = 1, 0, 1  # cudaMemAllocationTypePinned, ...
        properties = runtime.MemPoolProps(pinned, no_handle, on_device, device)
        pool = _memory_pools.setdefault(device, runtime.memPoolCreate(properties))
        threshold = runtime.cudaMemPoolAttrReleaseThreshold
        runtime.memPoolSetAttribute(pool, threshold, _KEPT_BYTES)
    return pool


class _Stream:
    """A stream pointer, as CuPy takes it."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer
