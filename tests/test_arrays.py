"""Callers' arrays as `cukda.arrays` sees them: views, checks, scalars, new arrays.

NumPy, torch and DLPack are the real ones, on the CPU. CuPy arrays are real objects over host
memory.
"""

import ctypes
import gc
import math
import sys
import types
import unittest.mock
import weakref

import ml_dtypes
import numpy as np
import pytest
from test_jit import CUDARuntimeError, FakeCuPy

import cukda
from cukda import arrays, dlpack, jit, streams

torch = pytest.importorskip("torch")

BF16 = np.dtype(ml_dtypes.bfloat16)


class Producer:
    """An array of no library that cukda knows: only DLPack, in the version asked for."""

    def __init__(self, array, versioned=True, device=None):
        self.array = array
        self.versioned = versioned
        self.device = device
        self.asked = []

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if not self.versioned and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(
            **{key: value for key, value in arguments.items() if key != "stream"}
        )


def array(**fields):
    """An Array as a launch has it."""
    defaults = {
        "name": "q",
        "pointer": 4096,
        "shape": (2, 3),
        "strides": (3, 1),
        "dtype": "float32",
        "device": 0,
        "library": "cupy",
        "writable": True,
        "owner": None,
    }
    return arrays.Array(**(defaults | fields))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("route", ["numpy", "torch", "versioned", "unversioned"])
def test_view_reads_every_field(route, dtype):
    source = torch.zeros(4, 5, 6, dtype=getattr(torch, dtype))[1:, ::2].transpose(0, 1)
    address = source.data_ptr()
    if route == "numpy":
        numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        source = np.zeros((4, 5, 6), numpy_dtype)[1:, ::2].swapaxes(0, 1)
        address = source.ctypes.data
    elif route != "torch":
        source = Producer(source, versioned=route == "versioned")
    got = arrays.view("x", source)
    assert got.name == "x"
    assert got.pointer == address
    assert (got.shape, got.strides) == ((3, 3, 6), (12, 30, 1))
    assert isinstance(got.shape, tuple) and type(got.strides) is tuple
    assert (got.dtype, got.device, got.writable) == (dtype, arrays.CPU, True)
    assert got.library == {"numpy": "numpy", "torch": "torch"}.get(route, "dlpack")
    assert got.size == 54
    with pytest.raises(ValueError, match="^x: expected a contiguous array, got strides"):
        arrays.check(got, (dtype,), got.shape, arrays.CPU, alignment=1)


def test_contiguous_tensors_have_no_strides():
    tensor = torch.zeros(2, 3)
    for contiguous in tensor, tensor[:1].T, tensor[:0, ::2], tensor[0, 0]:
        got = arrays.view("x", contiguous)
        assert got.strides is None and got.shape == contiguous.shape
        arrays.check(got, ("float32",), got.shape, arrays.CPU, alignment=4)
        assert arrays.to_numpy(got).shape == got.shape
    assert arrays.view("x", tensor.T).strides == (1, 3)


def test_view_reads_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    host = np.zeros(48, np.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 3)
    source = cupy.ndarray((4, 6), BF16, memptr=cupy.cuda.MemoryPointer(memory, 0))
    got = arrays.view("q", source[1:, ::2].T)
    assert got.pointer == host.ctypes.data + 12
    assert (got.shape, got.strides) == ((3, 3), (2, 6))
    assert (got.dtype, got.device, got.library) == ("bfloat16", 3, "cupy")
    assert got.owner.data.mem is memory


def test_view_takes_parameters_and_tensors_that_require_grad():
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert arrays.view("A_log", parameter).pointer == parameter.data_ptr()
    computed = parameter * 2
    assert computed.requires_grad
    assert arrays.view("A_log", computed).pointer == computed.data_ptr()


@pytest.mark.parametrize("wrong", [None, [1.0], 3, "q", object()])
def test_view_refuses_what_is_no_array(wrong):
    expected = r"an array \(torch, CuPy, NumPy, DLPack or __cuda_array_interface__\)"
    expected = rf"^q: expected {expected}, got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=expected):
        arrays.view("q", wrong)


def test_view_refuses_tensors_without_plain_memory():
    with pytest.raises(TypeError, match=r"^q: expected a strided tensor, got layout torch.sparse"):
        arrays.view("q", torch.eye(3).to_sparse())
    ragged = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(4, 2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^q: expected a strided tensor, got layout torch.jagged"):
        arrays.view("q", ragged)
    with pytest.raises(ValueError, match="^q: expected a CPU or CUDA device, got meta$"):
        arrays.view("q", torch.empty(3, device="meta"))
    negated = torch.zeros(3, dtype=torch.complex64).conj().imag
    with pytest.raises(
        TypeError, match="^q: expected a tensor with its values in memory, got a la"
    ):
        arrays.view("q", negated)
    batched = []
    torch.func.vmap(lambda x: batched.append(x) or x)(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="^q: expected a tensor with plain memory, got Tensor"):
        arrays.view("q", batched[0])


def without_memory(kind, shape=(3,)):
    """A float32 tensor that has a shape and no memory."""
    if kind == "fake":
        fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake_tensor.FakeTensorMode():
            return torch.zeros(shape)
    begin = 1 if kind == "freed, offset" else 0
    tensor = torch.zeros(begin + math.prod(shape))[begin:].view(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", ["freed", "freed, offset", "fake"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused(kind):
    message = ": expected an array with memory, got a null pointer$"
    tensor = without_memory(kind)
    viewed = arrays.view("A_log", tensor)
    assert (viewed.pointer, viewed.shape) == (0, (3,))
    with pytest.raises(ValueError, match="^A_log" + message):
        arrays.check(viewed, ("float32",), (3,), arrays.CPU, alignment=4)
    with pytest.raises(ValueError, match="^scale" + message):
        arrays.real("scale", without_memory(kind, ()))
    empty = arrays.view("q", without_memory(kind, (0, 3)))
    arrays.check(empty, ("float32",), (0, 3), arrays.CPU, alignment=4)


def test_view_tells_a_foreign_byte_order_and_odd_strides():
    assert arrays.view("q", np.zeros(3, ">f4")).dtype == ">f4"
    packed = np.zeros(3, np.dtype([("a", "f4"), ("b", "u1")]))
    with pytest.raises(ValueError, match="^q: expected strides that are multiples of 4 bytes, got"):
        arrays.view("q", packed["a"])


def test_view_sees_read_only_memory():
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    assert not arrays.view("out", frozen).writable
    assert not arrays.view("out", Producer(frozen)).writable


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_view_works_while_another_thread_imports(monkeypatch, library):
    """A module is among the others before its names are in it."""
    monkeypatch.setitem(sys.modules, library, types.ModuleType(library))
    assert arrays.view("q", np.zeros(3)).library == "numpy"


def test_view_works_where_a_mock_stands_in_for_a_library(monkeypatch):
    for library in "torch", "cupy":
        monkeypatch.setitem(sys.modules, library, unittest.mock.MagicMock())
    assert arrays.view("q", np.zeros(3)).library == "numpy"


def test_proxies_are_what_they_can_export():
    """Whatever they say that they are, and whatever came before them."""
    torch = pytest.importorskip("torch")
    source, tensor = np.zeros(3, np.float32), torch.zeros(3)
    for _ in range(2):
        assert arrays.view("q", weakref.proxy(tensor)).pointer == tensor.data_ptr()
        assert arrays.view("q", weakref.proxy(source)).pointer == source.ctypes.data
        assert arrays.view("q", tensor).library == "torch"
    for wrong in unittest.mock.Mock(spec=np.ndarray), unittest.mock.MagicMock(spec=torch.Tensor):
        with pytest.raises(TypeError, match="^q: expected an array"):
            arrays.view("q", wrong)
    gone = weakref.proxy(source)
    del source
    for call in cukda.sigmoid, lambda x: arrays.view("x", x):
        with pytest.raises(TypeError, match="^x: expected an array .*ReferenceError"):
            call(gone)


def test_parameter_without_memory():
    torch = pytest.importorskip("torch")
    message = "^q: expected a tensor with plain memory, got UninitializedParameter"
    parameter = torch.nn.parameter.UninitializedParameter(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=message):
        arrays.view("q", parameter)
    for call in lambda: cukda.fwd(*[parameter] * 5), lambda: cukda.step(*[parameter] * 6):
        with pytest.raises(TypeError, match=message):
            call()


def test_view_works_without_torch_and_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert arrays.view("q", np.zeros(3, np.float32)).library == "numpy"
    assert arrays.view("q", Producer(np.zeros(3, np.float32))).library == "dlpack"


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_memory_lives_as_long_as_the_view(versioned):
    source = np.arange(5, dtype=np.float32)
    alive = weakref.ref(source)
    got = arrays.view("x", Producer(source, versioned))
    got.owner.producer = None
    del source
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(arrays.to_numpy(got), np.arange(5))
    del got
    gc.collect()
    assert alive() is None


def test_dlpack_asks_for_a_version_first_and_passes_no_stream_on_the_cpu():
    producer = Producer(np.zeros(3, np.float32), versioned=False)
    arrays.view("x", producer)
    assert producer.asked == [{"max_version": (1, 0)}, {}]


def test_dlpack_capsule_is_used_once():
    capsule = np.zeros(3, np.float32).__dlpack__(max_version=(1, 0))
    loan = dlpack.Loan("x", None, capsule)
    expected = "^x: expected a fresh DLPack capsule, got "
    with pytest.raises(TypeError, match=f"{expected}one that is used up$"):
        dlpack.Loan("x", None, capsule)
    assert loan.shape == (3,)

    class Mute:
        __repr__ = boom

    for other in None, Mute():
        with pytest.raises(TypeError, match=f"{expected}{type(other).__name__}$"):
            dlpack.Loan("x", None, other)


def test_dlpack_without_strides_is_row_major(monkeypatch):
    capsule = np.zeros((2, 3, 4), np.float32).__dlpack__(max_version=(1, 0))
    header(capsule).tensor.strides = None
    assert dlpack.Loan("x", None, capsule).strides == (12, 4, 1)


def test_dlpack_byte_offset_and_lanes():
    source = np.zeros(8, np.float32)
    capsule = source.__dlpack__(max_version=(1, 0))
    header(capsule).tensor.byte_offset = 8
    header(capsule).tensor.dtype.lanes = 4
    loan = dlpack.Loan("x", None, capsule)
    assert loan.pointer == source.ctypes.data + 8
    assert loan.dtype == "float32x4"


def test_dlpack_offset_from_null_is_null():
    capsule = np.zeros(8, np.float32).__dlpack__(max_version=(1, 0))
    tensor = header(capsule).tensor
    data, tensor.data, tensor.byte_offset = tensor.data, None, 8
    assert dlpack.Loan("x", None, capsule).pointer == 0
    tensor.data = data


@pytest.mark.parametrize(
    "field, value, error, message",
    [
        ("major", 2, TypeError, r"^x: expected DLPack version 1, got 2\.\d$"),
        ("flags", 2, ValueError, "^x: expected the array's own memory, got a copy"),
    ],
)
def test_dlpack_refusal_gives_the_memory_back(field, value, error, message):
    source = np.zeros(3, np.float32)
    alive = weakref.ref(source)
    capsule = source.__dlpack__(max_version=(1, 0))
    setattr(header(capsule), field, value)
    with pytest.raises(error, match=message):
        dlpack.Loan("x", None, capsule)
    del source, capsule
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("ndim, shape", [(-1, "a"), (-1, "no"), (1, "no")])
def test_dlpack_refuses_a_capsule_without_a_shape(ndim, shape):
    class Shapeless(Producer):
        def __dlpack__(self, *, max_version):
            capsule = self.array.__dlpack__(max_version=max_version)
            tensor = header(capsule).tensor
            tensor.ndim = ndim
            if shape == "no":
                tensor.shape = None
            return capsule

    message = f"^k: expected a DLPack capsule with ndim ≥ 0 and a shape, got ndim = {ndim} and "
    with pytest.raises(TypeError, match=f"{message}{shape} shape$"):
        arrays.view("k", Shapeless(np.zeros(3, np.float32)))


@pytest.mark.parametrize("call", [cukda.sigmoid, lambda x: arrays.view("x", x)])
def test_dlpack_refuses_sizes_below_zero(call):
    class Negative(Producer):
        def __dlpack__(self, *, max_version):
            capsule = self.array.__dlpack__(max_version=max_version)
            header(capsule).tensor.shape[1] = -3
            return capsule

    message = r"^x: expected sizes of at least 0, got shape \(2, -3\)$"
    with pytest.raises(ValueError, match=message):
        call(Negative(np.zeros((2, 3), np.float32)))


def test_dlpack_addresses_are_of_64_bits():
    source = np.zeros(8, np.float32)
    capsule = source.__dlpack__(max_version=(1, 0))
    header(capsule).tensor.byte_offset = 2**64 - 4
    assert dlpack.Loan("x", None, capsule).pointer == source.ctypes.data - 4


def test_dlpack_of_no_dimensions_needs_no_shape():
    capsule = np.zeros((), np.float32).__dlpack__(max_version=(1, 0))
    header(capsule).tensor.shape = None
    assert dlpack.Loan("x", None, capsule).shape == ()


def test_dlpack_refuses_other_devices_and_failing_producers():
    metal = Producer(np.zeros(3, np.float32), device=(8, 0))
    with pytest.raises(
        ValueError, match="^x: expected a CPU or CUDA device, got DLPack device typ"
    ):
        arrays.view("x", metal)
    expected = r"^x: expected an array that DLPack can export, got Producer \(BufferError: "
    with pytest.raises(TypeError, match=expected):
        arrays.view("x", Producer(np.zeros(3, "M8[s]"), device=(1, 0)))


@pytest.mark.parametrize("device", [("a", 0), (2, "zz"), (2.0, 0), (2,), None], ids=repr)
def test_dlpack_refuses_what_is_no_device(device):
    producer = Producer(np.zeros(3, np.float32))
    producer.__class__ = type("Producer", (Producer,), {"__dlpack_device__": lambda self: device})
    expected = r"^k: expected an array that DLPack can export, got Producer \((Typ|Valu)eError: "
    with pytest.raises(TypeError, match=expected):
        arrays.view("k", producer)


@pytest.mark.parametrize("lie", [(2, 0), (4, 0), (8, 1)])
def test_dlpack_refuses_memory_that_is_elsewhere(lie):
    class Liar:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, *, max_version):
            capsule = np.zeros(3, np.float32).__dlpack__(max_version=max_version)
            tensor = header(capsule).tensor
            tensor.device_type, tensor.device_id = lie
            return capsule

    message = (
        f"^k: expected memory on the CPU, as it says, got some on number {lie[1]} of DLPack dev"
    )
    with pytest.raises(ValueError, match=message):
        arrays.view("k", Liar())


@pytest.mark.parametrize("attribute", ["__dlpack__", "__dlpack_device__"])
def test_dlpack_refuses_producers_that_raise_when_asked(attribute):
    def fail(self):
        raise RuntimeError("boom")

    producer = type("Producer", (Producer,), {attribute: property(fail)})(np.zeros(3))
    message = r"^k: expected an array that DLPack can export, got Producer \(RuntimeError: boom\)$"
    with pytest.raises(TypeError, match=message):
        arrays.view("k", producer)


@pytest.mark.parametrize("ordinal", [-1, 2, 2**70])
def test_dlpack_refuses_devices_that_are_not_there(monkeypatch, ordinal):
    fake = FakeCuPy()
    fake.cuda.runtime.getDeviceCount = lambda: 2
    monkeypatch.setattr(arrays, "import_cupy", lambda: fake)
    message = f"^k: expected an array on one of 2 CUDA devices, got one on number {ordinal}$"
    with pytest.raises(ValueError, match=message):
        arrays.view("k", Producer(np.zeros(3, np.float32), device=(2, ordinal)))


@pytest.mark.parametrize(
    "call",
    [
        lambda producer: arrays.view("q", producer),
        lambda producer: arrays.view("q", producer, 33),
        lambda producer: arrays.real("scale", producer),
        cukda.sigmoid,
    ],
    ids=["view", "view, stream", "real", "sigmoid"],
)
def test_dlpack_on_a_gpu_without_a_driver(monkeypatch, call):
    def fail(*_device):
        raise CUDARuntimeError("driver version is insufficient")

    fake = FakeCuPy()
    fake.cuda.Device = fake.cuda.get_current_stream = fake.cuda.runtime.getDeviceCount = fail
    fake.cuda.runtime.driverGetVersion = lambda: 0
    for module in arrays, jit, streams:
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    message = "^cukda: no usable GPU: no driver, .*: no NVIDIA driver is installed$"
    with pytest.raises(RuntimeError, match=message):
        call(Producer(np.zeros((), np.float32), device=(2, 0)))


def header(capsule):
    """The versioned structure in a capsule that is still fresh."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return dlpack._ManagedVersioned.from_address(get_pointer(capsule, b"dltensor_versioned"))


def check(checked, **changes):
    expected = {"dtypes": ("float32",), "shape": (2, 3), "device": 0}
    arrays.check(checked, **(expected | changes))


def test_check_accepts():
    check(array(), dtypes=("bfloat16", "float32"), alignment=16, written=True)
    check(array(writable=False, pointer=4098), alignment=2)
    check(array(shape=(1, 3), strides=(77, 1)), shape=(1, 3))
    check(array(shape=(0, 3), strides=(5, 5), pointer=1), shape=(0, 3), alignment=16)
    check(array(shape=(), strides=()), shape=())
    check(array(shape=(0, 3), pointer=0), shape=(0, 3))


@pytest.mark.parametrize(
    "fields, expected, error, message",
    [
        ({}, {"dtypes": ("bfloat16",)}, TypeError, "q: expected dtype bfloat16, got float32"),
        (
            {"dtype": "int32"},
            {"dtypes": ("bfloat16", "float32")},
            TypeError,
            "q: expected dtype bfloat16 or float32, got int32",
        ),
        ({}, {"shape": (3, 2)}, ValueError, "q: expected shape (3, 2), got (2, 3)"),
        ({"device": 1}, {}, ValueError, "q: expected device cuda:0, got cuda:1"),
        ({"device": arrays.CPU}, {}, ValueError, "q: expected device cuda:0, got cpu"),
        (
            {"strides": (1, 2)},
            {},
            ValueError,
            "q: expected a contiguous array, got strides (1, 2), in elements, for shape (2, 3)",
        ),
        (
            {"strides": (0, 1)},
            {},
            ValueError,
            "q: expected a contiguous array, got strides (0, 1), in elements, for shape (2, 3)",
        ),
        (
            {"pointer": 4104},
            {"alignment": 16},
            ValueError,
            "q: expected an address divisible by 16, got 0x1008, 8 past one",
        ),
        (
            {"pointer": 0},
            {"alignment": 16},
            ValueError,
            "q: expected an array with memory, got a null pointer",
        ),
        (
            {"writable": False},
            {"written": True},
            ValueError,
            "q: expected a writable array, got a read-only one",
        ),
    ],
)
def test_check_says_what_is_wrong(fields, expected, error, message):
    with pytest.raises(error) as caught:
        check(array(**fields), **expected)
    assert str(caught.value) == message


def test_check_goes_from_kind_to_detail():
    wrong = {"dtype": "int8", "shape": (9,), "strides": (2,), "device": 1, "pointer": 1}
    order = [
        ("dtype", "float32", "dtype"),
        ("shape", (2, 3), "shape"),
        ("device", 0, "device"),
        ("strides", (3, 1), "contiguous"),
        ("pointer", 4096, "address"),
        ("writable", True, "writable"),
    ]
    wrong["writable"] = False
    for field, right, word in order:
        with pytest.raises((TypeError, ValueError), match=word):
            check(array(**wrong), alignment=16, written=True)
        wrong[field] = right
        if field == "shape":
            wrong["strides"] = (1, 2)
    check(array(**wrong), alignment=16, written=True)


def test_num_bytes():
    assert array(dtype="bfloat16").num_bytes == 12
    assert array(dtype="int64", shape=(5,)).num_bytes == 40
    assert array(shape=(0, 3)).num_bytes == 0


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.float16(0.5),
        ml_dtypes.bfloat16(0.5),
        np.array(0.5, np.float32),
        np.array(0.5, BF16),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor(0.5, requires_grad=True),
        Producer(np.array(0.5)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_real_of_every_kind(value, recwarn):
    got = arrays.real("scale", value)
    assert type(got) is float and got == 0.5
    assert not recwarn.list


@pytest.mark.parametrize("value", [-3, np.int8(-3), np.array(-3), torch.tensor(-3)])
def test_real_takes_integers(value):
    got = arrays.real("scale", value)
    assert type(got) is float and got == -3.0


@pytest.mark.parametrize("value", [np.ma.masked, np.ma.array(-1.0, mask=True)])
def test_real_is_not_masked(value):
    with pytest.raises(TypeError, match="^scale: expected a real number, got Masked"):
        arrays.real("scale", value)


def test_real_leaves_range_to_its_caller():
    assert math.isnan(arrays.real("scale", np.float32("nan")))
    assert arrays.real("scale", -math.inf) == -math.inf


@pytest.mark.parametrize(
    "value, got",
    [
        (True, "bool"),
        (np.True_, "bool"),
        (torch.tensor(True), "bool"),
        ("0.5", "str"),
        (None, "NoneType"),
        ([0.5], "list"),
        (0.5j, "complex"),
        (np.complex64(1), "complex64"),
        (np.timedelta64(1, "s"), r"timedelta64\[s\]"),
        (np.ones(1), r"an array of shape \(1,\)"),
        (torch.ones(1, 1), r"an array of shape \(1, 1\)"),
    ],
)
def test_real_refuses(value, got):
    with pytest.raises(TypeError, match=f"^scale: expected a real number, got {got}$"):
        arrays.real("scale", value)


@pytest.mark.parametrize("dtype", ["float8", "uint7", "uint0", "float32x2", "bfloat32"])
def test_real_refuses_a_dtype_that_only_dlpack_has(monkeypatch, dtype):
    viewed = arrays.view("scale", Producer(np.zeros((), np.float32)))
    viewed.dtype = dtype
    monkeypatch.setattr(arrays, "view", lambda *_: viewed)
    with pytest.raises(TypeError, match=f"^scale: expected a real number, got {dtype}$"):
        arrays.real("scale", viewed.owner.producer)


class Int(int):
    pass


@pytest.mark.parametrize("kind", [int, Int])
def test_real_beyond_the_range_of_float(kind):
    message = "^scale: expected a number in float's range, got an int of 20001 bits$"
    with pytest.raises(ValueError, match=message):
        arrays.real("scale", kind(-(2**20_000)))


def boom(self):
    raise RuntimeError("boom")


def mute(self):
    class Mute(Exception):
        __str__ = boom

    raise Mute


@pytest.mark.parametrize("base", [int, float, np.float64])
@pytest.mark.parametrize(
    "to_float, why",
    [
        (boom, "RuntimeError: boom"),
        (lambda self: "1", r"TypeError: .*returned non-float.*"),
        (mute, r".*Mute: .*"),
    ],
)
def test_real_refuses_what_no_float_can_be_made_of(base, to_float, why):
    value = type("Odd", (base,), {"__float__": to_float})(1)
    with pytest.raises(TypeError, match=rf"^scale: expected a real number, got Odd \({why}\)$"):
        arrays.real("scale", value)


def test_real_refuses_what_raises_when_asked_for_dlpack():
    value = type("Odd", (), {"__dlpack__": property(boom)})()
    message = r"^scale: expected an array that DLPack can export, got Odd \(RuntimeError: boom\)$"
    with pytest.raises(TypeError, match=message):
        arrays.real("scale", value)


def test_real_refuses_half_a_dlpack_producer():
    value = type("Odd", (), {"__dlpack__": lambda self: None})()
    with pytest.raises(TypeError, match="^scale: expected a real number, got Odd$"):
        arrays.real("scale", value)


def test_real_does_not_read_a_gpu():
    cupy = pytest.importorskip("cupy")
    host = np.zeros(1)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    scalar = cupy.ndarray((), np.float64, memptr=cupy.cuda.MemoryPointer(memory, 0))
    expected = "^scale: expected a real number on the CPU, got a 0-d array on cuda:0, .*synchronis"
    with pytest.raises(TypeError, match=expected):
        arrays.real("scale", scalar)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_empty_like_stays_in_the_library(dtype):
    source = torch.nn.Parameter(torch.zeros(3, 2, dtype=getattr(torch, dtype)).t())
    new = arrays.empty_like(arrays.view("x", source))
    assert type(new) is torch.Tensor and new.is_contiguous() and not new.requires_grad
    assert (new.shape, new.dtype) == (source.shape, source.dtype)
    source = np.zeros((3, 2), getattr(ml_dtypes, dtype, dtype)).T
    new = arrays.empty_like(arrays.view("x", source))
    assert type(new) is np.ndarray and new.flags.c_contiguous
    assert (new.shape, new.dtype) == (source.shape, source.dtype)


def test_empty_like_goes_by_the_dtype_of_the_view():
    viewed = arrays.view("x", torch.zeros(3, dtype=torch.bfloat16))
    viewed.dtype = "float32"
    assert arrays.empty_like(viewed).dtype is torch.float32


def test_empty_like_through_the_array_api():
    producer = Producer(np.zeros((2, 3), np.float32))
    viewed = arrays.view("v", producer)
    with pytest.raises(
        ValueError, match=r"^out: expected an array, got None, and Producer \(v\) ha"
    ):
        arrays.empty_like(viewed)
    producer.__array_namespace__ = lambda: np
    producer.device = "cpu"
    new = arrays.empty_like(viewed)
    assert (new.shape, new.dtype) == ((2, 3), np.float32)


def with_array_api(empty):
    """The view of a producer whose library makes arrays like this."""
    producer = Producer(np.zeros((2, 3), np.float32))
    viewed = arrays.view("v", producer)
    library = types.SimpleNamespace(float32="float32", empty=empty)
    producer.__array_namespace__ = lambda: library
    producer.device = "here"
    return viewed


@pytest.mark.parametrize("broken", ["namespace", "empty", "dtype", "device"])
def test_empty_like_without_an_array_api_that_works(broken):
    def fail():
        raise KeyError("boom")

    viewed = with_array_api(None)
    producer = viewed.owner.producer
    if broken == "namespace":
        producer.__array_namespace__ = fail
    elif broken == "device":
        del producer.device
    else:
        delattr(producer.__array_namespace__(), "float32" if broken == "dtype" else broken)
    message = (
        r"^out: expected an array, got None, and Producer \(v\) has no array API to make one of "
    )
    with pytest.raises(ValueError, match=message):
        arrays.empty_like(viewed)


@pytest.mark.parametrize("error", [MemoryError, TypeError, ValueError])
def test_empty_like_passes_on_what_the_array_api_raises(error):
    raised = error("boom")

    def empty(shape, dtype, device):
        raise raised

    with pytest.raises(error) as caught:
        arrays.empty_like(with_array_api(empty))
    assert caught.value is raised


@pytest.mark.parametrize(
    "new, error, message",
    [
        (np.zeros((2, 3), np.int32), TypeError, "dtype float32, got int32"),
        (np.zeros((3, 2), np.float32), ValueError, r"shape \(2, 3\), got \(3, 2\)"),
        (np.zeros((3, 2), np.float32).T, ValueError, "a contiguous array, got strides"),
        (torch.zeros(2, 3, device="meta"), ValueError, "a CPU or CUDA device, got meta"),
        (None, TypeError, "an array .*, got NoneType"),
    ],
    ids=["dtype", "shape", "layout", "device", "none"],
)
def test_empty_like_refuses_another_array_of_the_array_api(new, error, message):
    with pytest.raises(error, match=f"^out: expected {message}"):
        arrays.empty_like(with_array_api(lambda shape, dtype, device: new))


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda v: v.mT, "expected shape .*, got .*128, 2"),
        (lambda v: v, "expected memory of its own, got an array that overlaps v"),
    ],
    ids=["shape", "overlap"],
)
def test_out_of_an_array_api_is_checked_as_a_callers(made, message):
    q, k, v, g = (torch.randn(1, 5, 2, 128).bfloat16() for _ in range(4))
    beta = torch.zeros(1, 5, 2, dtype=torch.bfloat16)
    producer, library = Producer(q), types.SimpleNamespace(bfloat16="bfloat16")
    library.empty = lambda shape, **_: Producer(made(v))
    producer.__array_namespace__ = lambda: library
    with pytest.raises(ValueError, match=f"^out: {message}"):
        cukda.fwd(producer, k, v, g, beta)


def test_sigmoid_of_an_array_api_is_checked_as_a_callers():
    new = np.empty(8, np.float32)
    new.flags.writeable = False
    producer = Producer(np.zeros(8, np.float32))
    library = types.SimpleNamespace(float32=np.float32, empty=lambda shape, **_: new)
    producer.__array_namespace__ = lambda: library
    for function in cukda.sigmoid, cukda.sigmoid_ext.sigmoid_tanh_fp32:
        with pytest.raises(ValueError, match="^out: expected a writable array"):
            function(producer)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sigmoid_into_memory_next_to_its_input(dtype):
    """Which may be where a library puts a new array."""
    memory = np.zeros(64, np.uint8)
    x = memory[: 8 * np.dtype(dtype).itemsize].view(dtype)
    producer = Producer(x)
    new = memory[x.nbytes : x.nbytes + 32].view(np.float32)
    library = types.SimpleNamespace(float32=np.float32, empty=lambda shape, **_: new)
    producer.__array_namespace__ = lambda: library
    assert cukda.sigmoid_ext.sigmoid_tanh_fp32(producer) is new
    assert (new == 0.5).all() and (x == 0).all()


def test_empty_like_refuses_an_array_elsewhere():
    cupy = pytest.importorskip("cupy")
    host = np.zeros((2, 3), np.float32)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 1)
    new = cupy.ndarray((2, 3), np.float32, memptr=cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(ValueError, match="^out: expected device cpu, got cuda:1$"):
        arrays.empty_like(with_array_api(lambda shape, dtype, device: new))


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, Producer], ids=["torch", "dlpack"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_to_numpy_shares_memory(wrap, dtype):
    source = torch.arange(24, dtype=getattr(torch, dtype)).reshape(2, 3, 4)[:, 1:].transpose(0, 1)
    got = arrays.to_numpy(arrays.view("x", wrap(source)))
    assert got.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    np.testing.assert_array_equal(got.astype(np.float64), source.double().numpy())
    got[...] = 7
    assert bool((source == 7).all())


def test_to_numpy_of_numpy_shares_memory():
    source = np.zeros(3)
    assert arrays.to_numpy(arrays.view("x", source)).base is source


def test_to_numpy_of_a_subclass_writes_all_elements():
    masked = np.ma.array(np.zeros(3), mask=[True, False, True])
    masked.harden_mask()
    got = arrays.to_numpy(arrays.view("out", masked))
    assert type(got) is np.ndarray
    got[...] = 7
    assert masked.data.tolist() == [7, 7, 7]


def test_to_numpy_keeps_memory_and_the_read_only_mark():
    got = arrays.to_numpy(arrays.view("x", torch.full((1000,), 3.0)))
    gc.collect()
    assert (got == 3).all()
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    assert not arrays.to_numpy(arrays.view("x", Producer(frozen))).flags.writeable


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_to_numpy_of_few_elements(shape):
    got = arrays.to_numpy(arrays.view("x", torch.ones(shape, dtype=torch.bfloat16)))
    assert got.shape == shape and got.dtype == BF16
