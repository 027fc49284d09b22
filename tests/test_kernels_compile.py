"""Every kernel variant through NVRTC for every architecture, without a GPU."""

import functools
import time

import pytest

from cukda import jit, plan, sigmoid_ext

# The most shared memory that a block may have: CUDA C++ Programming Guide, compute capabilities.
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
REGISTERS_PER_BLOCK = 65536
# A warp's registers come in pieces of 256, so a thread's in pieces of 8.
REGISTER_UNIT = 8
MAX_SECONDS = 10

VARIANTS = (*plan.variants(), *sigmoid_ext.VARIANTS)


def name(variant) -> str:
    return "-".join([variant.entry, *(f"{key}={value}" for key, value in variant.defines)])


@functools.cache
def planned(arch: str) -> set:
    """The variants that the plan asks for on GPUs of this architecture."""
    num_works = {*range(1, 65), *(2**i + j for i in range(6, 17) for j in (-1, 0, 1))}
    return {
        plan.plan(num_work, 1, num_sms, SHARED_BYTES[arch]).variant
        for num_work in num_works
        for num_sms in (16, 46, 82, 108, 132, 148, 188)
    }


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_no_spills_and_fits(variant, arch):
    start = time.perf_counter()
    compiled = jit.compile(variant.source, variant.defines, arch)
    seconds = time.perf_counter() - start

    found = compiled.resources[variant.entry]
    assert found.spill_stores == found.spill_loads == 0
    assert found.stack_bytes == 0
    num_threads = dict(variant.defines)["NUM_THREADS"]
    allocated = -(-found.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert allocated * num_threads <= REGISTERS_PER_BLOCK
    if variant in planned(arch) or variant in sigmoid_ext.VARIANTS:
        dynamic_bytes = dict(variant.defines).get("SHARED_BYTES", 0)
        assert found.shared_bytes + dynamic_bytes <= SHARED_BYTES[arch]
    assert seconds < MAX_SECONDS


def test_every_variant_is_planned_somewhere():
    assert set().union(*(planned(arch) for arch in SHARED_BYTES)) == set(plan.variants())


def test_binary_is_for_the_architecture_asked_for():
    variant = sigmoid_ext.VARIANTS[0]
    compiled = jit.compile(variant.source, variant.defines, "sm_90a")
    assert "for 'sm_90a'" in compiled.log
    assert compiled.cubin.startswith(b"\x7fELF")
