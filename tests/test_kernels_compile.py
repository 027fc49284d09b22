"""Every kernel variant through NVRTC for every architecture, without a GPU."""

import functools
import itertools
import re
import time

import pytest
import resources

from cukda import decode, jit, plan, sigmoid_ext

# The most shared memory that a block may have: CUDA C++ Programming Guide, compute capabilities.
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
# Of a multiprocessor; a block may have no more.
REGISTERS = 65536
# A warp's registers come in pieces of 256, so a thread's in pieces of 8.
REGISTER_UNIT = 8
MAX_SECONDS = 10

HELPERS = (plan.CUTS,)
VARIANTS = (*plan.variants(), *HELPERS, *sigmoid_ext.VARIANTS, *decode.VARIANTS)
# wgmma is an instruction of Hopper's alone.
COMPILED = [
    (variant, arch)
    for variant, arch in itertools.product(VARIANTS, SHARED_BYTES)
    if arch == "sm_90a" or not dict(variant.defines).get("WGMMA")
]


def usual(arch: str) -> list:
    """The variants that plans ask for, Hopper's both with wgmma and without."""
    fitting = [v for v in plan.variants() if v.shared_bytes <= SHARED_BYTES[arch]]
    fitting = [v for v in fitting if arch == "sm_90a" or not v.wgmma]
    return [v for v in fitting if v.num_stages == fitting[0].num_stages]


# For arrays with strides only these: all would take the tests minutes.
COMPILED += [
    (plan.with_layout(variant, layout), arch)
    for arch in SHARED_BYTES
    for variant in (*usual(arch), *HELPERS)
    for layout in (plan.STRIDED, plan.UNALIGNED)
]


def name(variant) -> str:
    return "-".join([variant.entry, *(f"{key}={value}" for key, value in variant.defines)])


@functools.cache
def planned(arch: str) -> set:
    """The variants that the plan asks for on GPUs of this architecture, Hopper's both with wgmma
    and without.
    """
    num_works = {*range(1, 65), *(2**i + j for i in range(6, 17) for j in (-1, 0, 1))}
    return {
        plan.plan(
            plan.Shape(num_work, num_tokens, 1, packed=False),
            plan.Gpu(num_sms, SHARED_BYTES[arch], has_wgmma),
        ).variant
        for num_work in num_works
        for num_tokens in (32, 8192)
        for num_sms in (16, 46, 82, 108, 132, 148, 188)
        for has_wgmma in {False, arch == "sm_90a"}
    }


def fits(variant, arch: str, static_bytes: int) -> bool:
    """Whether a GPU of this architecture can have a block of the variant."""
    return static_bytes + getattr(variant, "shared_bytes", 0) <= SHARED_BYTES[arch]


def check_registers(allocated: int, variant) -> None:
    """Of a thread at the launch, and once the consumers have what the others give up."""
    defines = dict(variant.defines)
    is_helper = isinstance(variant, plan.Helper)
    num_threads = variant.num_threads if is_helper else defines["NUM_THREADS"]
    assert allocated * num_threads <= REGISTERS
    if defines.get("WGMMA"):
        num_consumers = defines["V_ROWS"] // 16
        num_producers = num_threads // 32 - num_consumers
        fewer, more = defines["PRODUCER_REGISTERS"], defines["CONSUMER_REGISTERS"]
        assert fewer % REGISTER_UNIT == more % REGISTER_UNIT == 0
        assert fewer <= allocated <= more
        assert 32 * (num_producers * fewer + num_consumers * more) <= allocated * num_threads


@pytest.mark.parametrize(
    ("variant", "arch"), COMPILED, ids=[f"{name(variant)}-{arch}" for variant, arch in COMPILED]
)
def test_no_spills_and_fits(variant, arch):
    start = time.perf_counter()
    compiled = jit.compile(variant.source, variant.defines, arch)
    seconds = time.perf_counter() - start

    found = compiled.resources[variant.entry]
    # What no GPU of the architecture can launch only has to compile.
    if fits(variant, arch, found.shared_bytes):
        assert found.spill_stores == found.spill_loads == 0
        assert found.stack_bytes == 0
    else:
        assert variant in plan.variants() and variant not in planned(arch)
    allocated = -(-found.registers // REGISTER_UNIT) * REGISTER_UNIT
    check_registers(allocated, variant)
    # As of wgmma instructions that wait for each other.
    assert not re.findall(r".*(?:Performance Loss|wgmma.*serialized).*", compiled.log)
    assert seconds < MAX_SECONDS


def test_the_log_says_when_wgmma_is_serialized():
    """As where its registers do not suffice."""
    variant = plan.variants()[0]
    defines = {**dict(variant.defines), "PRODUCER_REGISTERS": 96, "CONSUMER_REGISTERS": 96}
    compiled = jit.compile(variant.source, tuple(defines.items()), "sm_90a")
    assert re.search(r"Performance Loss.*wgmma.*serialized", compiled.log)


def test_every_variant_is_planned_somewhere():
    assert set().union(*(planned(arch) for arch in SHARED_BYTES)) == set(plan.variants())


def test_binary_is_for_the_architecture_asked_for():
    variant = sigmoid_ext.VARIANTS[0]
    compiled = jit.compile(variant.source, variant.defines, "sm_90a")
    assert "for 'sm_90a'" in compiled.log
    assert compiled.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ["x", "sm_", "90", "compute_90", "sm_75", "sm_9"])
def test_the_resource_report_refuses_what_kernels_cannot_be_compiled_for(capsys, arch):
    with pytest.raises(SystemExit):
        resources.main(["--arch", "sm_80", arch])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"--arch: expected sm_80 or newer, as in sm_90a, got {arch}")


def test_the_resource_report_of_an_architecture_that_nvrtc_does_not_know():
    with pytest.raises(SystemExit) as caught:
        resources.main(["--arch", "sm_99"])
    (line,) = caught.value.code.splitlines()
    assert "does not compile for sm_99" in line and "invalid value for --gpu-architecture" in line


def test_the_resource_report_says_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        resources.main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"as in sm_90a (default {' '.join(resources.ARCHITECTURES)})" in words
