"""GPU tests skip where no GPU is, fail instead under CUKDA_REQUIRE_GPU=1, and leave no error."""

import functools
import os
import sys

import pytest

from cukda import jit, plan

GIB = 1 << 30


@functools.cache
def _missing_gpu():
    """Why the GPU tests cannot run, or None."""
    try:
        import cupy

        num_devices = cupy.cuda.runtime.getDeviceCount()
    # Whatever a machine without a driver, or with half of one, comes up with.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if num_devices else "no device"


def _absent(reason):
    if os.environ.get("CUKDA_REQUIRE_GPU") == "1":
        pytest.fail(f"CUKDA_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


# Before any fixture of the test, so that none of them needs to ask.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := _missing_gpu()):
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
def torch():
    """torch with a GPU, for tests marked `gpu`."""
    try:
        import torch
    except ImportError as error:
        _absent(f"torch is missing ({error})")
    if not torch.cuda.is_available():
        _absent(f"torch {torch.__version__} sees no GPU")
    return torch


@pytest.fixture(params=plan.variants(), ids=str)
def variant(request, monkeypatch, cupy):
    """The test runs once for each variant of the kernel, whatever the plan would choose."""
    _, max_shared_bytes = jit.device_limits()
    if request.param.shared_bytes > max_shared_bytes:
        pytest.skip(f"a block of this GPU has no more than {max_shared_bytes} shared bytes")
    monkeypatch.setattr(plan, "variants", lambda: (request.param,))
    plan.plan.cache_clear()
    yield request.param
    plan.plan.cache_clear()


@pytest.fixture
def need_memory(cupy, torch):
    """A function that skips the test when less GPU memory is free than asked for, in GiB."""

    def release():
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()

    def need(gib):
        release()
        free = cupy.cuda.runtime.memGetInfo()[0] / GIB
        if free < gib:
            pytest.skip(f"the test needs {gib} GiB of GPU memory, {free:.0f} GiB are free")

    yield need
    release()
