"""The sigmoid: bit for bit the contract's instruction, at any size, alignment and dtype."""

import hardware
import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.gpu

# Greatest |got − want| against float64: half of what the instruction is documented to be off by,
# which is 2⁻¹¹ of tanh, relatively.
TOLERANCE = 2.5e-4
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 255, 257, 1000, 1023, 1025]


def values(size, dtype="float32", seed=110):
    x = 4 * np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return x.astype(DTYPES[dtype])


def want(x):
    """From the float32 value by the instruction, as float32."""
    return hardware.host(hardware.sigmoid(x.astype(np.float32)))


def upload(x, library, shift=0):
    """The values at an address that is `shift` elements off a multiple of 512 bytes."""
    import cupy

    bits = x.view(f"u{x.itemsize}")
    part = slice(shift, shift + x.size)
    # Never of no size, which some libraries do not take from others.
    memory = cupy.zeros(part.stop + 1, bits.dtype)
    memory[part] = cupy.asarray(bits).ravel()
    array = memory.view(x.dtype)[part].reshape(x.shape)
    if library == "cupy":
        return array
    import torch

    # As integers, which every DLPack version carries.
    integers = torch.from_dlpack(memory.view(f"i{x.itemsize}"))[part]
    return integers.view(getattr(torch, x.dtype.name)).reshape(x.shape)


@pytest.fixture(params=["torch", "cupy"])
def library(request, torch):
    return request.param


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_and_alignments(library, dtype, shift):
    import cukda

    for size in [*SIZES, (1 << 20) + 1]:
        x = values(size, dtype)
        given = upload(x, library, shift)
        full = cukda.sigmoid_ext.sigmoid_tanh_fp32(given)
        own = cukda.sigmoid(given)
        assert type(full) is type(given) and full.shape == own.shape == given.shape
        assert own.dtype == given.dtype
        assert hardware.host(full).dtype == np.float32
        assert hardware.same_bits(full, want(x)), size
        assert hardware.same_bits(own, want(x).astype(x.dtype)), size
        assert hardware.same_bits(given, x)


@pytest.mark.parametrize("shift_in", [0, 1, 3])
@pytest.mark.parametrize("shift_out", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out(library, dtype, shift_in, shift_out):
    import cukda

    guard = 16
    for size in SIZES:
        x = values(size, dtype)
        stale = np.full(size + 2 * guard, np.nan, np.float32).astype(x.dtype)
        memory = upload(stale, library, shift_out)
        out = memory[guard : guard + size]
        assert cukda.sigmoid(upload(x, library, shift_in), out=out) is out
        assert hardware.same_bits(out, want(x).astype(x.dtype)), size
        for beside in memory[:guard], memory[guard + size :]:
            assert hardware.same_bits(beside, stale[:guard])


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2, 0, 3), (1, 1, 1, 1, 9)])
def test_shapes(library, shape):
    import cukda

    x = values(shape).reshape(shape)
    got = cukda.sigmoid_ext.sigmoid_tanh_fp32(upload(x, library))
    assert tuple(got.shape) == shape
    assert hardware.same_bits(got, want(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(library, dtype):
    import cukda

    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 3e38, -3e38, 100, -100], np.float32)
    with np.errstate(over="ignore"):
        x = x.astype(DTYPES[dtype])
    for function in cukda.sigmoid, cukda.sigmoid_ext.sigmoid_tanh_fp32:
        got = hardware.host(function(upload(x, library))).astype(np.float32)
        assert np.isnan(got[0])
        np.testing.assert_array_equal(got[1:], np.float32([1, 0, 0.5, 0.5, 0.5, 1, 0, 1, 0]))


def test_accuracy(library):
    import cukda

    x = np.linspace(-20, 20, 1 << 20, dtype=np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    got = hardware.host(cukda.sigmoid(upload(x, library)))
    assert np.abs(got - exact).max() <= TOLERANCE


def test_all_bf16_values(library):
    import cukda

    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    x = x[np.isfinite(x.astype(np.float32))]
    got = hardware.host(cukda.sigmoid_ext.sigmoid_tanh_fp32(upload(x, library)))
    assert hardware.same_bits(got, want(x))


def test_same_bits_every_run(library):
    import cukda

    x = upload(values(100_003), library)
    first = cukda.sigmoid(x)
    assert all(hardware.same_bits(cukda.sigmoid(x), first) for _ in range(5))


def test_strides(library):
    """The exact result, or an error that names the argument."""
    import cukda

    x = values(64).reshape(8, 8)
    for index in np.s_[:, ::2], np.s_[::2], np.s_[:, 3]:
        try:
            got = cukda.sigmoid(upload(x, library)[index])
        except ValueError as error:
            assert str(error).startswith("x: expected ") and ", got " in str(error)
        else:
            assert hardware.same_bits(got, want(np.ascontiguousarray(x[index])))


@pytest.mark.parametrize("given", [1.0, "a string", None, [1.0]])
def test_no_array(given):
    import cukda

    with pytest.raises(TypeError, match="^x: expected .*, got "):
        cukda.sigmoid(given)


def test_refusals(cupy):
    import cukda

    x = cupy.zeros(8, np.float32)
    for wrong in np.float64, np.int32, np.bool_:
        with pytest.raises(TypeError, match="^x: expected .*, got "):
            cukda.sigmoid(x.astype(wrong))
    with pytest.raises(TypeError, match="^out: expected .*, got "):
        cukda.sigmoid(x, out=cupy.zeros(8, np.float16))
    with pytest.raises(ValueError, match="^out: expected .*, got "):
        cukda.sigmoid(x, out=cupy.zeros(9, np.float32))
    with pytest.raises(ValueError, match="^out: expected .*, got "):
        cukda.sigmoid(x, out=np.zeros(8, np.float32))


@pytest.mark.parametrize("current", ["torch", "cupy"])
def test_stream(current, torch, cupy):
    """Ordered on the caller's stream, and the call does not wait."""
    import cukda

    x = values(1 << 16)
    expected = want(x)
    cukda.sigmoid(upload(x, current))
    source = upload(x, current)
    late, out = source * 0, source * float("nan")
    if current == "torch":
        stream = torch.cuda.Stream()
        pointer, context = stream.cuda_stream, torch.cuda.stream(stream)
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        pointer, context = stream.ptr, stream
    cupy.cuda.runtime.deviceSynchronize()
    with context:
        hardware.spin(pointer)
        late[:] = source
        cukda.sigmoid(late, out=out)
        was_done = stream.query() if current == "torch" else stream.done
        late[:] = 0
    cupy.cuda.runtime.deviceSynchronize()
    assert not was_done, "the call waited for the GPU"
    assert hardware.same_bits(out, expected)


def test_over_2_31_elements(torch, need_memory):
    import cukda

    need_memory(20)
    size = 2**31 + 5
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(size, dtype=torch.float32, device="cuda").normal_(generator=generator)
    out = torch.full_like(x, float("nan"))
    cukda.sigmoid(x, out=out)
    for begin in range(0, size, 1 << 28):
        part = slice(begin, begin + (1 << 28))
        assert torch.equal(out[part], cukda.sigmoid_ext.sigmoid_tanh_fp32(x[part])), begin
    end = hardware.host(x[-1000:])
    assert hardware.same_bits(out[-1000:], want(end))
