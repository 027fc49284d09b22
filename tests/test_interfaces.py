"""Arrays of libraries that cukda knows by an interface: `__cuda_array_interface__`, JAX, Numba.

CUDA is a fake that writes down its calls. JAX and Numba's simulator are the real ones, on the CPU,
where they are installed.
"""

import gc
import importlib.util
import sys
import types
import weakref

import decoding
import inputs
import ml_dtypes
import numpy as np
import pytest
from inputs import TOKENS
from test_arrays import Producer
from test_jit import CUDARuntimeError, FakeCuPy, run_python
from test_streams import FakeCuda

import cukda
from cukda import arrays, jit, streams

# As where it is not installed: CuPy takes a module that is None for one.
WITHOUT_ML_DTYPES = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "ml_dtypes":
            raise ModuleNotFoundError("No module named 'ml_dtypes'", name=name)
sys.meta_path.insert(0, Finder)
"""

ADDRESS = 0x7F00_0000_1000
UNKNOWN = 0x1234_0000


@pytest.fixture
def cuda(monkeypatch):
    """Addresses are memory of device 1, but for UNKNOWN."""
    fake = FakeCuda()
    runtime = fake.cuda.runtime
    runtime.CUDARuntimeError = CUDARuntimeError
    runtime.memoryTypeUnregistered = 0
    runtime.pointerGetAttributes = lambda pointer: types.SimpleNamespace(
        type=0 if pointer == UNKNOWN else 2, device=-2 if pointer == UNKNOWN else 1
    )
    for module in arrays, streams:
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(streams, "_in_use", type(streams._in_use)())
    return fake


class Exporter:
    """An array on a GPU that has only `__cuda_array_interface__`."""

    def __init__(self, **changes):
        defaults = {
            "version": 3,
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (ADDRESS, False),
            "stream": None,
        }
        fields = defaults | changes
        self.__cuda_array_interface__ = {n: x for n, x in fields.items() if x is not ...}


@pytest.mark.parametrize(
    "typestr, dtype",
    [
        ("<f4", "float32"),
        ("<f2", "float16"),
        ("<i4", "int32"),
        ("<i8", "int64"),
        (">f4", ">f4"),
        ("|b1", "bool"),
        ("<u2", "uint16"),
        ("<V2", "|V2"),
    ],
)
def test_view_reads_every_field(cuda, typestr, dtype):
    exporter = Exporter(typestr=typestr)
    got = arrays.view("A_log", exporter)
    assert (got.name, got.pointer, got.shape, got.strides) == ("A_log", ADDRESS, (2, 3), None)
    assert (got.dtype, got.device, got.writable) == (dtype, 1, True)
    assert (got.library, got.owner.producer) == ("cuda_array_interface", exporter)


def test_view_reads_strides_and_the_read_only_mark(cuda):
    got = arrays.view("x", Exporter(strides=(4, 8), data=(ADDRESS, True)))
    assert got.strides == (1, 2) and not got.writable
    with pytest.raises(ValueError, match="^x: expected a contiguous array, got strides"):
        arrays.check(got, ("float32",), (2, 3), 1)
    with pytest.raises(ValueError, match="^x: expected strides that are multiples of 4 bytes, got"):
        arrays.view("x", Exporter(strides=(12, 5)))
    contiguous = arrays.view("x", Exporter(strides=(12, 4), data=(ADDRESS, True)))
    with pytest.raises(ValueError, match="^x: expected a writable array, got a read-only one$"):
        arrays.check(contiguous, ("float32",), (2, 3), 1, written=True)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_older_versions_have_fewer_fields(cuda, version):
    got = arrays.view("x", Exporter(version=version, stream=...))
    assert got.pointer == ADDRESS and got.owner.stream is None


@pytest.mark.parametrize("stream, pointer", [(None, None), (1, 0), (2, 2), (0x7F00, 0x7F00)])
def test_streams_have_cudas_numbers(cuda, stream, pointer):
    assert arrays.view("x", Exporter(stream=stream)).owner.stream == pointer


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"stream": 0}, ValueError, "a stream of None, 1, 2 or a pointer, got 0x0$"),
        ({"stream": -1}, ValueError, "a stream of None, 1, 2 or a pointer, got -0x1$"),
        ({"stream": 2**63}, ValueError, "a stream of None, 1, 2 or a pointer, got 0x8000000000"),
        ({"stream": "main"}, TypeError, r"an array with __cuda_array_interface__, got Exporter \("),
        ({"mask": object()}, ValueError, "an array without a mask, got a masked one$"),
        ({"version": 4}, TypeError, "version 3 of __cuda_array_interface__, or .*, got 4$"),
        ({"version": ...}, TypeError, r"an array with .*, got Exporter \(KeyError: 'version'\)$"),
        ({"data": ...}, TypeError, r"an array with .*, got Exporter \(KeyError: 'data'\)$"),
        ({"data": None}, TypeError, r"an array with .*, got Exporter \(TypeError: "),
        ({"data": (-8, False)}, ValueError, "an address, got -0x8$"),
        ({"data": (2**64, False)}, ValueError, "an address, got 0x10000000000000000$"),
        ({"data": (UNKNOWN, False)}, ValueError, "memory of a CUDA device, got 0x12340000$"),
        ({"shape": (2, -3)}, ValueError, r"sizes of at least 0, got shape \(2, -3\)$"),
        ({"shape": 6}, TypeError, r"an array with .*, got Exporter \(TypeError: "),
        ({"shape": (2.0, 3)}, TypeError, r"an array with .*, got Exporter \(TypeError: "),
        ({"strides": (4,)}, ValueError, r"a stride for each axis, got \(4,\) for shape \(2, 3\)$"),
        ({"strides": (2**63, 4)}, ValueError, rf"strides of 64 bits, got \({2**63}, 4\)$"),
        ({"strides": (12, -(2**70))}, ValueError, rf"strides of 64 bits, got \(12, {-(2**70)}\)$"),
        (
            {"typestr": None},
            TypeError,
            r"an array with .*, got Exporter \(TypeError: typestr is",
        ),
        ({"typestr": "<x9"}, TypeError, r"an array with .*, got Exporter \(TypeError: "),
    ],
)
def test_view_refuses_by_name(cuda, changes, error, message):
    with pytest.raises(error, match=f"^k: expected {message}"):
        arrays.view("k", Exporter(**changes))


def test_view_refuses_what_raises_when_asked():
    def fail(self):
        raise RuntimeError("boom")

    odd = type("Odd", (), {"__cuda_array_interface__": property(fail)})()
    message = r"^k: expected an array with __cuda_array_interface__, got Odd \(RuntimeError: boom\)"
    with pytest.raises(TypeError, match=message):
        arrays.view("k", odd)


def test_only_empty_arrays_have_no_address(cuda):
    cuda.device = 1
    empty = arrays.view("x", Exporter(shape=(0, 3), data=(0, False)))
    arrays.check(empty, ("float32",), (0, 3), 1)
    null = arrays.view("x", Exporter(data=(0, False)))
    with pytest.raises(ValueError, match="^x: expected an array with memory, got a null pointer$"):
        arrays.check(null, ("float32",), (2, 3), 1)


@pytest.mark.parametrize("typestr, dtype", [("<u2", "uint16"), ("|V2", r"\|V2")])
def test_two_bytes_are_not_taken_for_bfloat16(cuda, typestr, dtype):
    q = Exporter(shape=(1, 5, 2, 128), typestr=typestr)
    with pytest.raises(TypeError, match=f"^q: expected dtype bfloat16, got {dtype}$"):
        cukda.fwd(q, q, q, q, q)


def test_dlpack_comes_first():
    both = Producer(np.zeros(3, np.float32))
    both.__cuda_array_interface__ = None
    assert arrays.view("x", both).library == "dlpack"


def test_a_new_array_has_to_be_given(cuda):
    message = r"^out: expected an array, got None, and Exporter \(x\) has no array API"
    with pytest.raises(ValueError, match=message):
        cukda.sigmoid(Exporter())


def test_without_cupy_or_a_driver(monkeypatch):
    def fail(*_arguments):
        raise CUDARuntimeError("driver version is insufficient")

    fake = FakeCuPy()
    fake.cuda.runtime.getDevice = fake.cuda.runtime.pointerGetAttributes = fail
    fake.cuda.runtime.driverGetVersion = lambda: 0
    for module in arrays, jit:
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    with pytest.raises(RuntimeError, match="^cukda: no usable GPU: no driver, "):
        arrays.view("x", Exporter())


def lent(stream, **changes):
    return arrays.view("x", Exporter(stream=stream, **changes))


def test_launch_waits_for_the_stream_of_the_memory_and_it_for_ours(cuda):
    cuda.cupy_stream = 22
    with streams.launch_on([lent(33), lent(33), lent(None), lent(22)]) as pointer:
        assert pointer == 22
        assert [call for call in cuda.calls if call[0] == "wait"] == [("wait", 22, 33)]
    waits = [call for call in cuda.calls if call[0] == "wait"]
    assert waits == [("wait", 22, 33), ("wait", 33, 22)]


def test_launch_on_a_stream_given_waits_too(cuda):
    cuda.cupy_stream = 22
    with streams.launch_on([lent(33)], 44):
        pass
    waits = [call for call in cuda.calls if call[0] == "wait"]
    assert waits == [("wait", 44, 33), ("wait", 33, 44)]


@pytest.mark.parametrize("stream", [None, 1])
def test_launch_waits_for_nothing_where_the_stream_is_ours(cuda, stream):
    with streams.launch_on([lent(stream)]) as pointer:
        assert pointer == 0
    assert not [call for call in cuda.calls if call[0] == "wait"]


def test_launch_waits_for_nothing_outside_a_capture(cuda):
    cuda.cupy_stream = 22
    cuda.capturing = {22}
    with streams.launch_on([lent(22), lent(None)]):
        pass
    with pytest.raises(ValueError, match="^stream: expected one stream for all arrays during capt"):
        with streams.launch_on([lent(33)]):
            pass
    assert not [call for call in cuda.calls if call[0] == "wait"]


def test_launch_keeps_the_memory_until_the_work_is_done(cuda):
    exporter = Exporter()
    alive = weakref.ref(exporter)
    with streams.launch_on([arrays.view("x", exporter)]):
        pass
    del exporter
    gc.collect()
    assert alive() is not None
    cuda.done = True
    with streams.launch_on([lent(None)]):
        pass
    gc.collect()
    assert alive() is None


class FakeJaxArray(Producer):
    """A jax.Array, as far as cukda looks."""

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def fake_jax(monkeypatch):
    """`handed` has what JAX was given, and the device that was current then."""
    fake = types.SimpleNamespace(Array=FakeJaxArray, handed=[], device=lambda: None)
    fake.numpy = types.SimpleNamespace(
        from_dlpack=lambda new: fake.handed.append((new, fake.device())) or "handed over"
    )
    monkeypatch.setitem(sys.modules, "jax", fake)
    return fake


@pytest.mark.parametrize("stream, waits", [(None, []), (22, []), (33, [("wait", 22, 33)])])
def test_jax_takes_a_new_array_over_behind_the_work_on_it(cuda, fake_jax, stream, waits):
    """from_dlpack tells CuPy of a stream of JAX's, which waits for CuPy's current one."""
    cuda.cupy_stream = 22
    fake_jax.device = lambda: cuda.device
    like = arrays.Array("q", ADDRESS, (2, 3), None, "float32", 1, "jax", False, None)
    new = object()
    assert arrays.hand_over(new, like, stream) == "handed over"
    assert fake_jax.handed == [(new, 1)]
    assert cuda.calls == waits
    assert cuda.device == 0


def test_jax_arrays_on_a_gpu_get_memory_of_cupy(cuda, fake_jax):
    like = arrays.Array("q", ADDRESS, (2, 3), None, "float32", 1, "jax", False, None)
    cuda.empty = lambda shape, dtype: (shape, dtype, cuda.device)
    assert arrays.empty_like(like) == ((2, 3), np.float32, 1)


def test_other_libraries_keep_what_empty_like_made(cuda):
    for library in "torch", "cupy", "numpy", "dlpack", "cuda_array_interface":
        like = arrays.Array("q", ADDRESS, (2, 3), None, "float32", 1, library, True, None)
        new = object()
        assert arrays.hand_over(new, like, 33) is new
    assert cuda.calls == []


def fake_jax_arrays(case):
    """Those of the case on the CPU; through torch, since NumPy exports no bfloat16."""
    torch = pytest.importorskip("torch")
    given = {}
    for name, x in case.items():
        if hasattr(x, "shape"):
            is_bf16 = x.dtype == inputs.BF16
            tensor = torch.from_numpy(x.view(np.int16) if is_bf16 else x)
            x = FakeJaxArray(tensor.view(torch.bfloat16) if is_bf16 else tensor)
            x.device = "cpu:0"
        given[name] = x
    return given


def step_of(case):
    given = fake_jax_arrays(case)
    return cukda.step(**given | {"state": given["state"].array})


RESULTS = {
    "fwd": (lambda: inputs.make((20,), 2), lambda case: cukda.fwd(**fake_jax_arrays(case))),
    "step": (lambda: decoding.make(2, 2, 1), step_of),
    "sigmoid": (
        lambda: {"x": inputs.make((20,), 2)["beta"]},
        lambda case: cukda.sigmoid(**fake_jax_arrays(case)),
    ),
    "sigmoid_tanh_fp32": (
        lambda: {"x": inputs.make((20,), 2)["beta"]},
        lambda case: cukda.sigmoid_ext.sigmoid_tanh_fp32(**fake_jax_arrays(case)),
    ),
}


@pytest.mark.parametrize("name", ["fwd", "step", "sigmoid", "sigmoid_tanh_fp32"])
def test_a_new_result_is_handed_over(fake_jax, name):
    make, call = RESULTS[name]
    fake_jax.numpy.asarray = lambda new, device: (new, device)
    new, device = call(make())
    case = make()
    function = cukda.sigmoid_ext if name.startswith("sigmoid") else cukda
    want = getattr(function, name)(**case)
    assert device == "cpu:0"
    assert np.array_equal(bits(new), bits(want))


def test_a_result_given_is_not_handed_over(fake_jax):
    fake_jax.numpy.asarray = None
    case = inputs.make((20,), 2)
    for function, given in (
        (cukda.fwd, fake_jax_arrays(case)),
        (cukda.sigmoid, {"x": fake_jax_arrays(case)["q"]}),
    ):
        out = np.empty_like(case["q"])
        assert function(**given, out=out) is out


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def on_jax(jax, case):
    return {n: jax.numpy.asarray(x) if hasattr(x, "shape") else x for n, x in case.items()}


def bits(array):
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_view_of_jax(jax, dtype):
    source = jax.numpy.ones((2, 3), dtype)
    got = arrays.view("x", source)
    assert (got.pointer, got.shape) == (source.unsafe_buffer_pointer(), (2, 3))
    assert (got.dtype, got.device, got.library) == (dtype, arrays.CPU, "jax")
    assert not got.writable


def test_fwd_of_jax_has_the_bits_of_numpy(jax):
    case = inputs.make((33, 0, 20), 2)
    final_state = np.empty((3, 2, 128, 128), np.float32)
    want_state = np.empty_like(final_state)
    want = cukda.fwd(*[case[n] for n in TOKENS], **rest(case), final_state=want_state)
    given = on_jax(jax, case)
    got = cukda.fwd(*[given[n] for n in TOKENS], **rest(given), final_state=final_state)
    assert np.array_equal(bits(got), bits(want)) and np.array_equal(final_state, want_state)
    assert all(np.array_equal(bits(given[n]), bits(case[n])) for n in TOKENS)


def rest(case):
    return {n: x for n, x in case.items() if n not in TOKENS}


def test_step_of_jax_has_the_bits_of_numpy(jax):
    case = decoding.make(3, 2, 2)
    want = cukda.step(**case)
    state = decoding.make(3, 2, 2)["state"]
    got = cukda.step(**on_jax(jax, decoding.make(3, 2, 2)) | {"state": state})
    assert isinstance(got, jax.Array)
    assert np.array_equal(state, case["state"])
    assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sigmoid_of_jax(jax, dtype, shape):
    x = jax.numpy.ones(shape, dtype)
    for function, out_dtype in (
        (cukda.sigmoid, dtype),
        (cukda.sigmoid_ext.sigmoid_tanh_fp32, "float32"),
    ):
        y, want = function(x), function(np.asarray(x))
        assert isinstance(y, jax.Array)
        assert (y.shape, y.dtype, y.device) == (shape, out_dtype, x.device)
        assert np.array_equal(bits(y), bits(want))


def test_sigmoid_into_an_array_of_another_library():
    torch = pytest.importorskip("torch")
    x, out = torch.zeros(3, 5), np.empty((3, 5), np.float32)
    assert cukda.sigmoid(x, out) is out
    assert (out == 0.5).all()


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_jax_arrays_are_not_written(jax, name):
    case = inputs.make((20,), 2)
    given = {"out": case["v"], "final_state": case["initial_state"]}[name]
    given = jax.numpy.array(given)
    before = bits(given).copy()
    got = "one of JAX, which nobody may write"
    with pytest.raises(ValueError, match=f"^{name}: expected a writable array, got {got}$"):
        cukda.fwd(*[case[n] for n in TOKENS], **{name: given})
    case = decoding.make(2, 2, 1)
    with pytest.raises(ValueError, match=f"^state: expected a writable array, got {got}$"):
        cukda.step(**case | {"state": jax.numpy.array(case["state"])})
    assert np.array_equal(bits(given), before)


def test_jax_traces_no_call(jax):
    with pytest.raises(TypeError, match=r"^x: expected an array .*, got .*Tracer: inside jax\.jit"):
        jax.jit(cukda.sigmoid)(jax.numpy.ones(3))


def test_numbas_simulator_is_an_array_on_the_cpu():
    """Its arrays hand on NumPy's DLPack."""
    if importlib.util.find_spec("numba") is None:
        pytest.skip("Numba is not installed")
    code = (
        "import cukda, numpy as np\n"
        "from numba import cuda\n"
        "x, out = cuda.to_device(np.zeros(3, np.float32)), cuda.device_array(3, np.float32)\n"
        "cukda.sigmoid(x, out)\n"
        "print(out.copy_to_host().tolist())\n"
    )
    assert run_python(code, NUMBA_ENABLE_CUDASIM="1").strip() == "[0.5, 0.5, 0.5]"


def test_torch_needs_no_ml_dtypes_before_a_launch():
    """What a call on a GPU looks at: tensors of bfloat16, numbers in tensors, a new tensor."""
    pytest.importorskip("torch")
    code = (
        f"{WITHOUT_ML_DTYPES}\n"
        "import torch, cukda\n"
        "from cukda import arrays\n"
        "q = arrays.view('q', torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)))\n"
        "arrays.check(q, ('bfloat16',), (2, 3), arrays.CPU, 2)\n"
        "new = arrays.empty_like(q)\n"
        "scales = [torch.tensor(0.5, dtype=d) for d in (torch.float32, torch.float64)]\n"
        "print(new.dtype, [arrays.real('scale', scale) for scale in scales])\n"
    )
    assert run_python(code).strip() == "torch.bfloat16 [0.5, 0.5]"


def test_bfloat16_has_one_numpy_dtype():
    assert arrays._numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
