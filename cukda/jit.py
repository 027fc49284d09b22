"""The one door to the compiler: a kernel by file, name and variant.

`kernel` compiles a file of `cuda_src/` with NVRTC on first use, through CuPy's `RawModule`, whose
disk cache makes later processes start at once. `compile` needs no GPU and returns the binary with
what the assembler says about registers and spills. No other file knows compiler options.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cukda.plan import Gpu

Defines = tuple[tuple[str, int], ...]

OLDEST_ARCH = 80
# Older ones take no second -arch, and CuPy always gives one.
_OLDEST_NVRTC_FOR_WGMMA = (12, 9)


class Variant(NamedTuple):
    """One compiled form of a kernel."""

    source: str
    entry: str
    defines: Defines = ()


_kernels: dict[tuple[int, str, str, Defines], "Kernel"] = {}
_compiling = threading.Lock()
# The first use of CuPy sets the environment for a while, and makes a folder at times.
_importing = threading.RLock()


class _Arguments(threading.local):
    """A launch's arguments as the driver takes them: packed, behind a table that says where.

    One for each thread, because the driver reads them while other threads run.
    """

    def __init__(self):
        buffer, size = ctypes.create_string_buffer(512), ctypes.c_size_t()
        buffer_pointer, buffer_size, end = 1, 2, 0  # CU_LAUNCH_PARAM_...
        self._table = (ctypes.c_void_p * 5)(
            buffer_pointer,
            ctypes.addressof(buffer),
            buffer_size,
            ctypes.addressof(size),
            end,
        )
        # Together, because each look into a thread's own things takes 0.04 us.
        self.buffer_size_extra = buffer, size, ctypes.addressof(self._table)


_arguments = _Arguments()


class Kernel:
    """A compiled entry on one device, ready to launch."""

    __slots__ = ("_function", "_launch", "_pointer", "shared_bytes")

    def __init__(self, function):
        self._function = function  # keeps the module loaded
        self._pointer = function.ptr
        self._launch = import_cupy().cuda.driver.launchKernel
        self.shared_bytes = 0

    def __call__(
        self, grid: int, block: int, shared_bytes: int, stream: int, layout: struct.Struct, *args
    ) -> None:
        """Launch on a stream pointer of the current device, without synchronising.

        layout: the types of the entry's parameters, as C aligns them ("@..."); args: their values.
        Packing them costs 1 us where CuPy's own launch takes 8 for as many NumPy scalars. A grid
        of no blocks launches nothing.
        """
        if grid == 0:
            return
        buffer, size, extra = _arguments.buffer_size_extra
        layout.pack_into(buffer, 0, *args)
        size.value = layout.size
        self._launch(self._pointer, grid, 1, 1, block, 1, 1, shared_bytes, stream, 0, extra)

    def allow_shared(self, shared_bytes: int) -> None:
        """Raise the limit of dynamic shared memory; a launch above 48 KB is an error without."""
        driver = import_cupy().cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(self._pointer, attribute, shared_bytes)
        self.shared_bytes = shared_bytes


@dataclass(frozen=True, slots=True)
class Resources:
    """What one entry takes, from the assembler's report. shared_bytes is the static part."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A binary for one architecture. resources: entry -> Resources."""

    cubin: bytes
    log: str
    resources: dict[str, Resources]


def kernel(source: str, entry: str, defines: Defines = (), shared_bytes: int = 0) -> Kernel:
    """The entry of cuda_src/<source>, for the current device; compiled on first use.

    defines: (name, value) pairs, each a -D. shared_bytes: the most dynamic shared memory that a
    launch will ask for.
    Errors: ImportError without CuPy; RuntimeError when driver, CuPy, NVRTC and GPU do not fit
    together, naming which.
    """
    key = (_current_device(), source, entry, defines)
    found = _kernels.get(key)
    if found is None or found.shared_bytes < shared_bytes:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                found = Kernel(_load(source, entry, defines))
            if found.shared_bytes < shared_bytes:
                found.allow_shared(shared_bytes)
            _kernels[key] = found
    return found


def compile(source: str, defines: Defines, arch: str) -> Compiled:
    """Compile cuda_src/<source> for arch ("sm_90a") with NVRTC; needs no GPU.

    Errors: RuntimeError with the compiler's log.
    """
    nvrtc = _nvrtc()
    options = (*_options(defines), f"-arch={arch}", "-ftz=true", "--ptxas-options=-v")
    program = nvrtc.createProgram(_code(source), "cukda", (), ())
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        # CuPy 14.2 cuts the last byte off, as if this were text with a zero after it.
        cubin = nvrtc.getCUBIN(program) + b"\0"
    except nvrtc.NVRTCError as error:
        raise _compile_error(source, arch, nvrtc.getProgramLog(program) or error) from error
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(cubin, log, _parse_resources(log))


def gpu() -> Gpu:
    """The current device, as plans see it. Without wgmma where CUKDA_WGMMA=0 is set."""
    return _gpu(_current_device())


def source_dir() -> Path:
    """Where the CUDA sources are: inside the installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "cuda_src"
    return installed if installed.is_dir() else package.parent / "cuda_src"


def source_digest() -> str:
    """SHA-256 over the names and bytes of all files in cuda_src/, as hex.

    Among the compiler options it makes CuPy's disk cache, which hashes only the code string and
    the options, see an edit of a file that is included.
    """
    digest = hashlib.sha256()
    for path in sorted(source_dir().glob("*.cu*")):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def import_cupy():
    """CuPy, imported on first use. Errors: ImportError that names the extras."""
    try:
        with _importing, _writable_cache():
            import cupy

            # Another package, or a folder, of that name has none.
            _ = cupy.__version__
    # A CuPy that does not fit what is installed beside it may raise anything.
    except Exception as error:
        raise ImportError(
            "cukda: arrays on a GPU need CuPy: pip install 'cukda[cuda12]', or 'cukda[cuda13]' "
            f"for a CUDA 13 driver ({error})"
        ) from error
    return cupy


@functools.cache
def cache_folder() -> str | None:
    """Where CuPy, imported by import_cupy, keeps binaries: CUPY_CACHE_DIR, else
    ~/.cupy/kernel_cache; a folder of this process when that one cannot be written; None when there
    is no place for one either.
    """
    folder = os.environ.get("CUPY_CACHE_DIR")
    if folder is None:
        folder = os.path.expanduser("~/.cupy/kernel_cache")
        # Without a home it stays what it is, which is a folder `~` of the current one.
        folder = folder if os.path.isabs(folder) else ""
    with _importing, contextlib.suppress(OSError):
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            return _process_folder().name
    return None


def why_no_gpu() -> str | None:
    """Why nothing can run on a GPU here, in words for messages; None where something can."""
    try:
        count = import_cupy().cuda.runtime.getDeviceCount()
    except ImportError as error:
        return str(error)
    # CUDA's own, or CuPy's where half of a driver is there.
    except RuntimeError as error:
        return _gpu_error_text(error)
    return None if count else "the driver lists no GPU"


def no_usable_gpu(error: RuntimeError) -> RuntimeError:
    """To raise in place of what CUDA raises where its GPU cannot be used; names who takes part."""
    return RuntimeError(f"cukda: no usable GPU: {_versions()}: {_gpu_error_text(error)}")


def nvrtc_version() -> str:
    """As in "12.9". Errors: ImportError without CuPy; RuntimeError without NVRTC, naming the
    extra.
    """
    return "{}.{}".format(*_nvrtc().getVersion())


@contextlib.contextmanager
def _writable_cache():
    """CuPy makes its cache folder when imported and fails if it cannot, as in a read-only home;
    here it is told of one that can be written.
    """
    name, folder = "CUPY_CACHE_DIR", cache_folder()
    if folder is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory:
    """Held until the interpreter exits, which removes it."""
    return tempfile.TemporaryDirectory(prefix="cukda-")


def _current_device() -> int:
    runtime = import_cupy().cuda.runtime
    try:
        return runtime.getDevice()
    except runtime.CUDARuntimeError as error:
        raise no_usable_gpu(error) from error


def _gpu_error_text(error: RuntimeError) -> str:
    """What the error says; but of a driver that is not there CUDA says that it is too old."""
    has_driver = import_cupy().cuda.runtime.driverGetVersion() != 0
    return str(error) if has_driver else "no NVIDIA driver is installed"


@functools.cache
def _gpu(device: int) -> Gpu:
    cuda = import_cupy().cuda
    runtime = cuda.runtime
    has_wgmma = (
        cuda.Device(device).compute_capability == "90"
        and os.environ.get("CUKDA_WGMMA") != "0"
        and _nvrtc().getVersion() >= _OLDEST_NVRTC_FOR_WGMMA
    )
    has_pools = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryPoolsSupported, device)
    return Gpu(
        runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device),
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        has_wgmma,
        runtime.getDeviceProperties(device)["totalGlobalMem"] if has_pools else 0,
    )


def _load(source: str, entry: str, defines: Defines):
    cupy = import_cupy()
    nvrtc = _nvrtc()
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < OLDEST_ARCH:
        raise RuntimeError(
            f"cukda: expected a GPU of compute capability {OLDEST_ARCH / 10} or newer (Ampere), "
            f"got {int(capability) / 10}"
        )
    arch, options = f"sm_{capability}", _options(defines)
    if dict(defines).get("WGMMA"):
        # All that Hopper has. Beside CuPy's own -arch=sm_90 it is the one that counts.
        arch = f"{arch}a"
        options = (*options, f"-arch={arch}")
    try:
        try:
            module = cupy.RawModule(code=_code(source), options=options)
            return module.get_function(entry).kernel
        except OSError:
            # The cache folder went away, filled up or became read-only since CuPy was imported.
            module = cupy.cuda.function.Module()
            module.load(compile(source, defines, arch).cubin)
            return module.get_function(entry)
    except (cupy.cuda.compiler.CompileException, nvrtc.NVRTCError) as error:
        raise _compile_error(source, arch, error) from error
    except cupy.cuda.driver.CUDADriverError as error:
        raise RuntimeError(
            f"cukda: {source} for {arch} was compiled but does not load: {_versions()}: {error}"
        ) from error


def _code(source: str) -> str:
    # An include, not the text itself, keeps file names and lines in the compiler's messages.
    return f'#include "{source}"\n'


def _options(defines: Defines) -> tuple[str, ...]:
    folder = str(source_dir())
    try:
        folder.encode()
    except UnicodeEncodeError as error:
        raise RuntimeError(f"cukda: NVRTC takes no folder that is not UTF-8: {folder!a}") from error
    return (
        f"-I{folder}",
        "-std=c++17",
        f"-DCUKDA_DIGEST={source_digest()}",
        *(f"-D{name}={value}" for name, value in defines),
    )


def _nvrtc():
    cupy = import_cupy()
    nvrtc = cupy.cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError) as error:
        major = cupy.cuda.driver.get_build_version() // 1000
        # CuPy's message has several lines.
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"cukda: NVRTC for CUDA {major}, which this CuPy needs, was not found: "
            f"pip install 'cukda[cuda{major}]' ({reason})"
        ) from error
    return nvrtc


def _compile_error(source: str, arch: str, error: object) -> RuntimeError:
    return RuntimeError(f"cukda: {source} does not compile for {arch}: {_versions()}: {error}")


def _versions() -> str:
    """Who takes part, for messages: "driver for CUDA 12.4, CuPy 14.2.0 for CUDA 12, NVRTC 12.9"."""
    cupy = import_cupy()
    driver = cupy.cuda.runtime.driverGetVersion()
    names = [
        f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no driver",
        f"CuPy {cupy.__version__} for CUDA {cupy.cuda.driver.get_build_version() // 1000}",
    ]
    with contextlib.suppress(RuntimeError):
        names.append(f"NVRTC {nvrtc_version()}")
    return ", ".join(names)


_ENTRY = re.compile(
    r"Compiling entry function '(?P<entry>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def _parse_resources(log: str) -> dict[str, Resources]:
    resources = {}
    for match in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        resources[match["entry"]] = Resources(
            registers=int(match["registers"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
            stack_bytes=int(match["stack"]),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return resources
