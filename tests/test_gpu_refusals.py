"""What a call refuses on the GPU: by name, with nothing launched and no CUDA error after it."""

import hardware
import inputs
import numpy as np
import pytest
from inputs import TOKENS

pytestmark = pytest.mark.gpu

GIVEN = (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens", "out", "final_state")


@pytest.fixture(scope="module")
def case():
    return inputs.make([40, 24], 4, seed=80)


def arguments(case):
    """All arguments by name, on the GPU, with outputs full of NaN."""
    return {
        **hardware.upload(case),
        "out": hardware.nans(case["v"].shape, "bfloat16"),
        "final_state": hardware.nans(hardware.state_shape(case), "float32"),
    }


def call(given):
    import cukda

    given = dict(given)
    tokens = [given.pop(n) for n in TOKENS]
    return cukda.fwd(*tokens, **given)


def assert_refused(error, name, given):
    """The message is "name: expected ..., got ...", and the outputs are as they were."""
    text = str(error)
    assert text.startswith(f"{name}: expected ") and ", got " in text, text
    for output in "out", "final_state":
        if isinstance(given[output], type(given["q"])) and output != name:
            assert np.isnan(hardware.host(given[output]).astype(np.float32)).all()


def assert_right(case, given):
    """The exact result of contiguous arrays."""
    want = hardware.run(case)
    call(given)
    assert hardware.same_bits(given["out"], want[0])
    assert hardware.same_bits(given["final_state"], want[1])


def strided(array, layout):
    """A CuPy array of the same values in another layout, made from its bits."""
    import cupy

    bits = array.view(f"u{array.dtype.itemsize}")
    if layout == "slice of a fused projection":
        wide = cupy.full((*bits.shape[:-1], 3 * bits.shape[-1]), 1, bits.dtype)
        part = wide[..., bits.shape[-1] : 2 * bits.shape[-1]]
    elif layout == "every second row":
        # The first axis of four is that of one batch.
        axis = 1 if bits.ndim > 2 else 0
        part = cupy.full([n * (1 + (i == axis)) for i, n in enumerate(bits.shape)], 1, bits.dtype)
        part = part[:, ::2] if axis else part[::2]
    elif layout == "every second channel":
        part = cupy.full((*bits.shape[:-1], 2 * bits.shape[-1]), 1, bits.dtype)[..., ::2]
    elif layout == "last two axes swapped":
        part = cupy.full((*bits.shape[:-2], *bits.shape[:-3:-1]), 1, bits.dtype).swapaxes(-1, -2)
    elif layout == "reversed":
        part = cupy.full(bits.shape, 1, bits.dtype)[..., ::-1]
    part[...] = bits
    return part.view(array.dtype)


IN_ROWS = ("slice of a fused projection", "every second row")
NOT_IN_ROWS = ("every second channel", "last two axes swapped", "reversed")


@pytest.mark.parametrize("layout", IN_ROWS + NOT_IN_ROWS)
@pytest.mark.parametrize("name", [*TOKENS, "dt_bias", "initial_state", "out", "final_state"])
def test_strides(case, name, layout):
    """Of the last axis only beta may have others than one; after a refusal a call is as usual."""
    given = arguments(case)
    given[name] = strided(given[name], layout)
    if layout in IN_ROWS or name == "beta":
        assert_right(case, given)
        return
    with pytest.raises(ValueError) as caught:
        call(given)
    assert_refused(caught.value, name, given)
    assert_right(case, arguments(case))


@pytest.mark.parametrize("name", [*TOKENS, "dt_bias"])
def test_expanded(case, name, cupy):
    """One head's values for all heads, by a stride of 0."""
    axis = 0 if name == "dt_bias" else 2
    one = np.take(case[name], [0], axis)
    case = {**case, name: np.ascontiguousarray(np.broadcast_to(one, case[name].shape))}
    given = arguments(case)
    bits = cupy.asarray(one.view(f"u{one.dtype.itemsize}"))
    given[name] = cupy.broadcast_to(bits, case[name].shape).view(one.dtype)
    assert_right(case, given)


@pytest.mark.parametrize("shift_bytes", [2, 4, 8])
@pytest.mark.parametrize("name", [n for n in GIVEN if n != "cu_seqlens"])
def test_base_off_by_some_bytes(case, name, shift_bytes, cupy):
    """Contiguous, but not where 16-byte loads can begin."""
    given = arguments(case)
    array = given[name]
    if shift_bytes % array.dtype.itemsize:
        shift_bytes = array.dtype.itemsize
    # Where it begins is a multiple of 512.
    memory = cupy.zeros(array.nbytes + 16, np.uint8)
    shifted = memory[shift_bytes : shift_bytes + array.nbytes].view(array.dtype)
    shifted = shifted.reshape(array.shape)
    shifted.view(f"u{array.dtype.itemsize}")[...] = array.view(f"u{array.dtype.itemsize}")
    given[name] = shifted
    assert_right(case, given)


@pytest.mark.parametrize("name", GIVEN)
def test_array_on_the_cpu(case, name):
    given = arguments(case)
    given[name] = hardware.host(given[name])
    # The first array says where the call runs: with q on the CPU it is k that does not fit.
    named = "k" if name == "q" else name
    with pytest.raises(ValueError) as caught:
        call(given)
    assert_refused(caught.value, named, given)


@pytest.mark.parametrize("name", GIVEN)
def test_dtype(case, name, cupy):
    given = arguments(case)
    given[name] = cupy.zeros(given[name].shape, np.float16)
    with pytest.raises(TypeError) as caught:
        call(given)
    assert_refused(caught.value, name, given)


@pytest.mark.parametrize("name", GIVEN)
def test_kind(case, name):
    given = arguments(case)
    given[name] = "a string"
    with pytest.raises(TypeError) as caught:
        call(given)
    assert_refused(caught.value, name, given)


@pytest.mark.parametrize("name", [n for n in GIVEN if n not in ("q", "cu_seqlens")])
def test_shape(case, name, cupy):
    given = arguments(case)
    shape = (*given[name].shape[:-1], given[name].shape[-1] + 1)
    dtype = "bfloat16" if given[name].dtype == inputs.BF16 else "float32"
    given[name] = hardware.nans(shape, dtype)
    with pytest.raises(ValueError) as caught:
        call(given)
    assert_refused(caught.value, name, given)


def test_head_dim(case):
    given = arguments(case)
    given["q"] = hardware.nans((*case["q"].shape[:-1], 64), "bfloat16")
    with pytest.raises(ValueError) as caught:
        call(given)
    assert_refused(caught.value, "q", given)


def test_packed_rows_of_a_batch(cupy):
    """cu_seqlens go with a single row."""
    case = inputs.make([32], 2, seed=81, batch=2)
    given = arguments(case)
    given["cu_seqlens"] = cupy.asarray([0, 10, 32], dtype=np.int32)
    with pytest.raises(ValueError, match="^cu_seqlens: "):
        call(given)
    assert np.isnan(hardware.host(given["out"]).astype(np.float32)).all()


def test_array_on_another_gpu(case, cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    for name in GIVEN[1:]:
        given = arguments(case)
        with cupy.cuda.Device(1):
            given[name] = cupy.asarray(hardware.host(given[name]))
        with pytest.raises(ValueError) as caught:
            call(given)
        assert_refused(caught.value, name, given)
