"""GPU tests skip where no GPU is, fail instead under CUKDA_REQUIRE_GPU=1, and leave no error."""

import functools
import os
import sys
import tempfile
from pathlib import Path

import hardware
import pytest

from cukda import jit, plan

GIB = 1 << 30

# JAX would take three quarters of a GPU's memory when it starts, in each process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_why_no_gpu = functools.cache(jit.why_no_gpu)


def _absent(reason):
    if os.environ.get("CUKDA_REQUIRE_GPU") == "1":
        pytest.fail(f"CUKDA_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


# Before any fixture of the test, so that none of them needs to ask.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        _absent(f"no GPU was found ({reason})")


@pytest.fixture(autouse=True)
def no_cuda_error_left(request):
    """After a GPU test: wait for its work, and launch with each library, which would report."""
    yield
    if not request.node.get_closest_marker("gpu"):
        return
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    assert int(cupy.ones(1).sum()) == 1
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
        assert int(torch.ones(1, device="cuda").sum()) == 1


@pytest.fixture
def cupy():
    """CuPy, for tests marked `gpu`."""
    import cupy

    return cupy


@pytest.fixture
def gpus(monkeypatch):
    """The driver's end of two GPUs, for tests without one."""
    from made_up import two_gpus

    return two_gpus(monkeypatch)


@pytest.fixture
def torch():
    """torch with a GPU, for tests marked `gpu`."""
    try:
        import torch
    except ImportError as error:
        _absent(f"torch is missing ({error})")
    if not torch.cuda.is_available():
        _absent(f"torch {torch.__version__} sees no GPU")
    return torch


@pytest.fixture
def jax():
    """JAX with a GPU, for tests marked `gpu`."""
    jax = pytest.importorskip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU ({error})")
    return jax


# Every variant with whole sequences; and, of those that a large GPU uses, with sequences cut as
# often as they can be: where there is no cut the segment before goes on, or they are joined, one by
# one or two at a time.
KERNELS = [(variant, (0,)) for variant in plan.variants()]
KERNELS += [
    (variant, segments)
    for variant in plan.variants()
    if variant.shared_bytes > 99 * 1024
    for segments in ((64,), (64, 1, 1), (64, 2, 2))
]


def _kernel_name(kernel):
    variant, segments = kernel
    return f"{variant}-{'-'.join(map(str, segments))}"


@pytest.fixture(params=KERNELS, ids=_kernel_name)
def variant(request, monkeypatch, cupy):
    """The test runs once for each variant of the kernel, whatever the plan would choose."""
    gpu = jit.gpu()
    found, segments = request.param
    if found.shared_bytes > gpu.max_shared_bytes:
        pytest.skip(f"a block of this GPU has no more than {gpu.max_shared_bytes} shared bytes")
    if found.wgmma and not gpu.has_wgmma:
        pytest.skip("this GPU has no wgmma")
    hardware.force(monkeypatch.setattr, found, *segments)
    return found


@pytest.fixture
def cut_every(monkeypatch, cupy):
    """A function that makes plans cut sequences every so many tokens; 0 leaves them whole. Where
    there is no cut the segment before goes on, or they are joined: at segment first_joined, which
    is join_every unless given, and at each join_every-th after. The first segment is longer by
    first_extra. All with one variant, so that segments are what makes a difference.
    """
    found = hardware.whole_head_variant()

    def cut(length, join_every=0, first_joined=None, first_extra=0):
        first_joined = join_every if first_joined is None else first_joined
        hardware.force(monkeypatch.setattr, found, length, join_every, first_joined, first_extra)

    return cut


@pytest.fixture
def need_memory(cupy, torch):
    """A function that sees to so many GiB of free GPU memory, or ends the test: like one without a
    GPU where others have too much, or skipping it where the GPU has less. One test at a time has
    much, in whatever process.
    """
    import fcntl

    def release():
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()

    with open(Path(tempfile.gettempdir()) / "cukda-gpu-memory.lock", "w") as lock:

        def need(gib):
            # Until the file is closed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            release()
            free, total = (size / GIB for size in cupy.cuda.runtime.memGetInfo())
            if total < gib:
                pytest.skip(f"the test needs {gib} GiB of GPU memory, the GPU has {total:.0f}")
            if free < gib:
                _absent(f"the test needs {gib} GiB of GPU memory, {free:.0f} GiB are free")

        yield need
        release()
