"""Every wrong argument of the public functions is refused by name, before anything is written.

On NumPy and torch arrays of the CPU; arrays "on a GPU" are CuPy's over host memory, which the
checks never read.
"""

import math
import re

import inputs
import ml_dtypes
import numpy as np
import pytest

import cukda

torch = pytest.importorskip("torch")

BF16 = np.dtype(ml_dtypes.bfloat16)
B, T, H, D = 2, 5, 3, 128
ROWS = (B, T, H, D)
STATES = (B, H, D, D)
SENTINEL = 3.0

# In the order of the signature: the shape for B sequences of length T, and the dtypes allowed.
ARRAYS = {
    "q": (ROWS, "bfloat16"),
    "k": (ROWS, "bfloat16"),
    "v": (ROWS, "bfloat16"),
    "g": (ROWS, "bfloat16"),
    "beta": ((B, T, H), "bfloat16"),
    "out": (ROWS, "bfloat16"),
    "A_log": ((H,), "float32"),
    "dt_bias": ((H, D), "float32"),
    "initial_state": (STATES, "bfloat16 or float32"),
    "final_state": (STATES, "bfloat16 or float32"),
    "cu_seqlens": ((B + 1,), "int32 or int64"),
}
AN_ARRAY = "an array (torch, CuPy, NumPy, DLPack or __cuda_array_interface__)"
REQUIRED = ("q", "k", "v", "g", "beta")
WRITTEN = ("out", "final_state")
NUMBERS = ("scale", "lower_bound")


class Library:
    """NumPy or torch: arrays of any dtype by name."""

    def __init__(self, name):
        self.name = name

    def full(self, shape, dtype, value=0.0):
        if self.name == "torch":
            return torch.full(shape, value, dtype=getattr(torch, dtype))
        return np.full(shape, value, getattr(ml_dtypes, dtype, dtype))

    def off_by(self, num_bytes, shape, dtype):
        """A contiguous array that starts so many bytes past a multiple of 64."""
        item_bytes = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        raw = np.zeros(math.prod(shape) * item_bytes + 128, np.uint8)
        start = -raw.ctypes.data % 64 + num_bytes
        raw = raw[start : start + math.prod(shape) * item_bytes]
        if self.name == "torch":
            storage = torch.from_numpy(raw.view(f"u{item_bytes}")).view(getattr(torch, dtype))
            return storage.reshape(shape)
        return raw.view(getattr(ml_dtypes, dtype, dtype)).reshape(shape)


@pytest.fixture(params=["numpy", "torch"])
def library(request):
    return Library(request.param)


def arguments(library, packed=False):
    """A right call: B sequences of length T, or the same tokens packed."""
    call = {
        name: library.full(shape, dtypes.split()[-1]) for name, (shape, dtypes) in ARRAYS.items()
    }
    call["cu_seqlens"] = None
    if packed:
        for name in (*REQUIRED, "out"):
            call[name] = call[name].reshape(1, B * T, *ROWS[2 : call[name].ndim])
        call["cu_seqlens"] = library.full((B + 1,), "int32", 0)
    for name in WRITTEN:
        call[name][...] = SENTINEL
    return call | {"scale": 0.5, "lower_bound": -5.0}


def refused(call, error, message):
    """fwd raises error with exactly this message, and has written nothing."""
    written = [call[name] for name in WRITTEN if hasattr(call[name], "shape")]
    before = [float(array.reshape(-1)[0]) for array in written if math.prod(array.shape)]
    with pytest.raises((TypeError, ValueError)) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == message
    assert type(caught.value) is error
    assert before == [float(array.reshape(-1)[0]) for array in written if math.prod(array.shape)]


def shape_of(name, packed=False):
    shape = ARRAYS[name][0]
    return (1, B * T, *shape[2:]) if packed and name in (*REQUIRED, "out") else shape


def on_gpu(shape, dtype, device=0):
    """A CuPy array that says it is on a GPU; its memory is the host's."""
    cupy = pytest.importorskip("cupy")
    host = np.zeros(shape, getattr(ml_dtypes, dtype, dtype))
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device)
    return cupy.ndarray(shape, host.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("packed", [False, True])
def test_the_right_call_passes(library, packed):
    call = arguments(library, packed)
    assert cukda.fwd(**call) is call["out"]


def test_optional_arguments_may_be_none(library):
    call = arguments(library)
    optional = [name for name in call if name not in REQUIRED and name != "lower_bound"]
    got = cukda.fwd(**(call | dict.fromkeys(optional)))
    assert type(got) is type(call["q"]) and tuple(got.shape) == ROWS


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    "wrong", [[1.0], "text", 1.0, object()], ids=lambda wrong: str(type(wrong))
)
def test_kind(library, name, wrong):
    call = arguments(library, packed=name == "cu_seqlens") | {name: wrong}
    got = type(wrong).__name__
    message = f"{name}: expected {AN_ARRAY}, got {got}"
    refused(call, TypeError, message)


@pytest.mark.parametrize("name", REQUIRED)
def test_required_arrays_are_not_none(library, name):
    message = f"{name}: expected {AN_ARRAY}, got NoneType"
    refused(arguments(library) | {name: None}, TypeError, message)


@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name, (_, allowed) in ARRAYS.items()
        for dtype in ("float16", "float64", "int16", "float32", "bfloat16")
        if dtype not in allowed.split()
    ],
)
def test_dtype(library, name, dtype):
    packed = name == "cu_seqlens"
    call = arguments(library, packed) | {name: library.full(shape_of(name, packed), dtype)}
    refused(call, TypeError, f"{name}: expected dtype {ARRAYS[name][1]}, got {dtype}")


def test_dtype_of_a_foreign_byte_order():
    call = arguments(Library("numpy")) | {"A_log": np.zeros(H, ">f4")}
    refused(call, TypeError, "A_log: expected dtype float32, got >f4")


def wrong_shapes(shape):
    wrong = {
        (*shape[:-1], shape[-1] + 1),
        (shape[0] - 1, *shape[1:]),
        shape[::-1],
        shape[1:],
        (*shape, 1),
        (),
    }
    return sorted(wrong - {shape})


@pytest.mark.parametrize(
    "name, packed, wrong",
    [
        (name, packed, wrong)
        for name in ARRAYS
        if name not in ("q", "cu_seqlens")
        for packed in (False, True)
        for wrong in wrong_shapes(shape_of(name, packed))
    ],
)
def test_shape(library, name, packed, wrong):
    dtype = ARRAYS[name][1].split()[-1]
    shape = shape_of(name, packed)
    expected = f"{shape} or {(H * D,)}" if name == "dt_bias" else shape
    call = arguments(library, packed) | {name: library.full(wrong, dtype)}
    refused(call, ValueError, f"{name}: expected shape {expected}, got {wrong}")


@pytest.mark.parametrize("wrong", [(T, H, D), (B, T, H, 64), (B, T, H, D, 1), (D,), ()])
def test_shape_of_q(library, wrong):
    call = arguments(library) | {"q": library.full(wrong, "bfloat16")}
    refused(call, ValueError, f"q: expected shape (B, T, H, 128), got {wrong}")


def test_dt_bias_of_either_shape(library):
    call = arguments(library)
    cukda.fwd(**(call | {"dt_bias": library.full((H * D,), "float32")}))
    for wrong in (D, H), (H * D + 1,), (), (1, H, D):
        message = f"dt_bias: expected shape {(H, D)} or {(H * D,)}, got {wrong}"
        refused(call | {"dt_bias": library.full(wrong, "float32")}, ValueError, message)


@pytest.mark.parametrize("name", ["q", "cu_seqlens"])
def test_more_states_than_a_grid_has_blocks(library, name):
    """Without tokens, so that no memory is needed either."""
    num_sequences, num_heads = 2**14, 2**17
    shape = (num_sequences if name == "q" else 1, 0, num_heads, D)
    call = {other: library.full(shape, "bfloat16") for other in ("q", "k", "v", "g")}
    call["beta"] = library.full(shape[:3], "bfloat16")
    if name == "cu_seqlens":
        call["cu_seqlens"] = library.full((num_sequences + 1,), "int32", 0)
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    got = f"N = {num_sequences}, H = {num_heads}"
    assert str(caught.value) == f"{name}: expected N · H of at most 2147483647, got {got}"


@pytest.mark.parametrize(("batch", "num_tokens"), [(2**16, 2**15), (1, 2**31), (2**31, 1)])
def test_more_rows_than_the_kernels_count(library, batch, num_tokens):
    """Without heads, so that no memory is needed."""
    shape = (batch, num_tokens, 0, D)
    call = {name: library.full(shape, "bfloat16") for name in ("q", "k", "v", "g")}
    call["beta"] = library.full(shape[:3], "bfloat16")
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    got = f"B = {batch}, T = {num_tokens}"
    assert str(caught.value) == f"q: expected B · T of at most 2147483647, got {got}"


@pytest.mark.parametrize("name", ["initial_state", "final_state"])
def test_number_of_states_follows_cu_seqlens(library, name):
    call = arguments(library, packed=True)
    for state in ("initial_state", "final_state"):
        call[state] = library.full((4, H, D, D), "float32", SENTINEL)
    call["cu_seqlens"] = library.full((5,), "int64", 0)
    cukda.fwd(**call)
    wrong = library.full((5, H, D, D), "float32", SENTINEL)
    message = f"{name}: expected shape {(4, H, D, D)}, got {(5, H, D, D)}"
    refused(call | {name: wrong}, ValueError, message)


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("wrong", [(), (1, B + 1), (B + 1, 1), (0,)])
def test_shape_of_cu_seqlens(library, wrong, with_states):
    call = arguments(library, packed=True) | {"cu_seqlens": library.full(wrong, "int32", 0)}
    if not with_states:
        call |= {"initial_state": None, "final_state": None}
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected shape \(.+\), got ") as caught:
        cukda.fwd(**call)
    assert str(caught.value).endswith(f"got {wrong}")


def test_cu_seqlens_needs_one_batch(library):
    call = arguments(library) | {"cu_seqlens": library.full((B + 1,), "int32", 0)}
    with pytest.raises(ValueError, match=rf"^cu_seqlens: expected .*B = 1.*, got .*{B}"):
        cukda.fwd(**call)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "q"])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_gpu_array_among_cpu_arrays(library, name, ordinal):
    packed = name == "cu_seqlens"
    shape, dtype = shape_of(name, packed), ARRAYS[name][1].split()[-1]
    call = arguments(library, packed) | {name: on_gpu(shape, dtype, ordinal)}
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == f"{name}: expected device cpu, got cuda:{ordinal}"


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "q"])
@pytest.mark.parametrize("got", ["cpu", "cuda:1"])
def test_other_device_among_gpu_arrays(name, got):
    packed = name == "cu_seqlens"
    call = arguments(Library("numpy"), packed)
    for other, (_, dtypes) in ARRAYS.items():
        if call[other] is not None and not (other == name and got == "cpu"):
            ordinal = 1 if other == name else 0
            call[other] = on_gpu(shape_of(other, packed), dtypes.split()[-1], ordinal)
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == f"{name}: expected device cuda:0, got {got}"


@pytest.mark.parametrize("name", ARRAYS)
def test_device_that_is_neither_cpu_nor_cuda(name):
    packed = name == "cu_seqlens"
    shape, dtype = shape_of(name, packed), ARRAYS[name][1].split()[-1]
    meta = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    call = arguments(Library("torch"), packed) | {name: meta}
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == f"{name}: expected a CPU or CUDA device, got meta"


@pytest.mark.parametrize("name", ARRAYS)
def test_sparse_tensor(name):
    shape, dtype = ARRAYS[name][0], ARRAYS[name][1].split()[-1]
    sparse = torch.zeros(shape, dtype=getattr(torch, dtype)).to_sparse()
    call = arguments(Library("torch"), packed=name == "cu_seqlens") | {name: sparse}
    with pytest.raises(TypeError) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == f"{name}: expected a strided tensor, got layout torch.sparse_coo"


@pytest.mark.parametrize("name", ARRAYS)
def test_tensor_without_memory(name):
    packed = name == "cu_seqlens"
    call = arguments(Library("torch"), packed)
    call[name] = call[name].clone()
    call[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    assert str(caught.value) == f"{name}: expected an array with memory, got a null pointer"


def values_of_a_call(packed):
    """A right call of NumPy arrays with other values everywhere; outputs full of SENTINEL."""
    case = inputs.make([2, 8], H) if packed else inputs.make([T], H, batch=B)
    out = np.full(case["q"].shape, SENTINEL, BF16)
    final_state = np.full(case["initial_state"].shape, SENTINEL, np.float32)
    return {**case, "out": out, "final_state": final_state}


def gap(shape, before, behind):
    wide = (*shape[:-1], shape[-1] + before + behind)
    return wide, lambda memory: memory[..., before : before + shape[-1]]


def swapped(shape):
    """All axes but the last in reverse."""
    order = (*reversed(range(len(shape) - 1)), len(shape) - 1)
    return [shape[axis] for axis in order], lambda memory: memory.transpose(order)


def last_first(shape):
    return (shape[-1], *shape[:-1]), lambda memory: memory.transpose(*range(1, len(shape)), 0)


def every_second(shape):
    return (*shape[:-1], 2 * shape[-1]), lambda memory: memory[..., ::2]


# From an array's shape: that of the memory which it is a part of, and the function that takes it.
ROW_LAYOUTS = {
    "rows at multiples of 16 bytes": lambda shape: gap(shape, 16, 8),
    "rows at any element": lambda shape: gap(shape, 1, 4),
    "axes swapped": swapped,
    "every second of the first axis": lambda shape: (
        (2 * shape[0], *shape[1:]),
        lambda memory: memory[1::2],
    ),
    "from last to first": lambda shape: (shape, lambda memory: memory[::-1]),
}
LAST_AXIS_LAYOUTS = {
    "every second of the last axis": every_second,
    "last axis first": last_first,
    "last axis reversed": lambda shape: (shape, lambda memory: memory[..., ::-1]),
}


def laid_out(library, layout, values):
    """(memory, array): the values as an array of the library in a NumPy array's memory."""
    shape, part = layout(values.shape)
    memory = np.full(shape, SENTINEL, values.dtype)
    part(memory)[...] = values
    return memory, in_library(library, part(memory), memory)


def in_library(library, array, memory):
    if library.name == "numpy":
        return array
    if any(stride < 0 for stride in array.strides):
        pytest.skip("torch has no such strides")
    item_bytes = array.itemsize
    tensor = torch.from_numpy(memory.view(f"i{item_bytes}")).view(getattr(torch, str(array.dtype)))
    offset = (array.ctypes.data - memory.ctypes.data) // item_bytes
    return tensor.as_strided(array.shape, strides_of(array), offset)


def strides_of(array):
    """In elements."""
    if isinstance(array, torch.Tensor):
        return array.stride()
    return tuple(stride // array.itemsize for stride in array.strides)


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name, layout",
    [
        (name, layout)
        for name in ARRAYS
        if name != "cu_seqlens"
        for layout in (*ROW_LAYOUTS, *(LAST_AXIS_LAYOUTS if name in ("beta", "A_log") else ()))
    ],
)
def test_any_strides_give_the_same_bits(library, name, layout, packed):
    """And what is written is in place, with nothing beside it."""
    call = values_of_a_call(packed)
    layouts = ROW_LAYOUTS | LAST_AXIS_LAYOUTS
    memory, array = laid_out(library, layouts[layout], call[name])
    given = {n: x.copy() for n, x in call.items() if isinstance(x, np.ndarray)}
    given = {n: in_library(library, x, x) for n, x in given.items()}
    before = memory.copy()
    cukda.fwd(**call)
    got = call | given | {name: array}
    assert cukda.fwd(**got) is got["out"]
    if name in WRITTEN:
        _, part = layouts[layout](call[name].shape)
        part(before)[...] = call[name]
    assert same_bits(memory, before)
    for output in WRITTEN:
        found = got[output]
        if library.name == "torch":
            found = found.contiguous().view(getattr(torch, f"int{8 * found.itemsize}")).numpy()
        assert same_bits(found, call[output])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("packed", [False, True])
def test_any_strides_of_all_arrays_at_once(packed, seed):
    """States in place too, and inputs that repeat a row of theirs."""
    rng, call = np.random.default_rng(seed), values_of_a_call(packed)
    library, got, memories = Library("numpy"), dict(call), {}
    for name in ARRAYS:
        if call[name] is None or name == "cu_seqlens":
            continue
        if name not in WRITTEN and rng.random() < 0.3:
            call[name] = np.broadcast_to(call[name][:1], call[name].shape)
            got[name] = call[name]
            continue
        layout = ROW_LAYOUTS[rng.choice(list(ROW_LAYOUTS))]
        memory, got[name] = laid_out(library, layout, call[name])
        memories[name] = memory, layout
    if seed % 2 and "initial_state" in memories:
        got["final_state"] = got["initial_state"]
        memories["final_state"] = memories.pop("initial_state")
    before = {name: memory.copy() for name, (memory, _) in memories.items()}
    call = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in call.items()}
    cukda.fwd(**call)
    cukda.fwd(**got)
    for name, (memory, layout) in memories.items():
        if name in WRITTEN:
            layout(call[name].shape)[1](before[name])[...] = call[name]
        assert same_bits(memory, before[name]), name


@pytest.mark.parametrize("layout", [*LAST_AXIS_LAYOUTS, "last axis of one"])
@pytest.mark.parametrize(
    "name", [name for name in ARRAYS if name not in ("beta", "A_log", "cu_seqlens")]
)
def test_last_axis_that_is_not_contiguous(library, name, layout):
    """But that of a flat dt_bias's heads."""
    values = np.full(*ARRAYS[name][:1], SENTINEL, call_dtype(name))
    if layout == "last axis of one":
        memory = np.full((*values.shape[:-1], 1), SENTINEL, values.dtype)
        strided = np.lib.stride_tricks.as_strided(memory, values.shape, (*memory.strides[:-1], 0))
        wrong = in_library(library, strided, memory)
    else:
        _, wrong = laid_out(library, LAST_AXIS_LAYOUTS[layout], values)
    got = f"strides {strides_of(wrong)}, in elements, for shape {values.shape}"
    message = f"{name}: expected a contiguous last axis, got {got}"
    refused(arguments(library) | {name: wrong}, ValueError, message)


def call_dtype(name):
    dtype = ARRAYS[name][1].split()[-1]
    return getattr(ml_dtypes, dtype, dtype)


@pytest.mark.parametrize("layout", ["every second of the last axis", "last axis reversed"])
def test_flat_dt_bias_that_is_not_contiguous(library, layout):
    _, wrong = laid_out(library, LAST_AXIS_LAYOUTS[layout], np.zeros(H * D, np.float32))
    got = f"strides {strides_of(wrong)}, in elements, for shape {(H * D,)}"
    message = f"dt_bias: expected a contiguous last axis, got {got}"
    refused(arguments(library) | {"dt_bias": wrong}, ValueError, message)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("layout", ["every second of the last axis", "last axis reversed"])
def test_cu_seqlens_that_are_not_contiguous(library, layout, dtype):
    _, wrong = laid_out(library, LAST_AXIS_LAYOUTS[layout], np.zeros(B + 1, dtype))
    got = f"strides {strides_of(wrong)}, in elements, for shape {(B + 1,)}"
    message = f"cu_seqlens: expected a contiguous array, got {got}"
    refused(arguments(library, packed=True) | {"cu_seqlens": wrong}, ValueError, message)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("stride", [0, 1, 64, D - 1])
def test_what_is_written_has_no_element_twice(library, name, axis, stride):
    values = np.full(ARRAYS[name][0], SENTINEL, call_dtype(name))
    strides = list(values.strides)
    strides[axis] = stride * values.itemsize
    strided = np.lib.stride_tricks.as_strided(values, values.shape, strides)
    wrong = in_library(library, strided, values)
    got = f"strides {strides_of(wrong)}, in elements, for shape {values.shape}"
    message = f"{name}: expected rows side by side, no element twice, got {got}"
    refused(arguments(library) | {name: wrong}, ValueError, message)
    # Where there is one of them a stride is of nothing.
    num = tuple(1 if i == axis else n for i, n in enumerate(values.shape))
    one = {other: x[:, :1] for other, x in arguments(library).items() if other in REQUIRED}
    if name == "out" and axis == 1:
        right = in_library(library, strided[:, :1], values)
        assert right.shape == num
        assert cukda.fwd(**one, out=right) is right


@pytest.mark.parametrize(
    "name, num_bytes",
    [
        (name, num_bytes)
        for name, (_, allowed) in ARRAYS.items()
        for num_bytes in (2, 4, 8)
        if name != "cu_seqlens" and num_bytes >= (4 if allowed == "float32" else 2)
    ],
)
def test_base_at_any_element(library, name, num_bytes):
    shape, dtype = ARRAYS[name][0], ARRAYS[name][1].split()[0]
    call = arguments(library)
    want = cukda.fwd(**(call | {name: library.full(shape, dtype)}))
    call |= {"out": library.full(ROWS, "bfloat16"), name: library.off_by(num_bytes, shape, dtype)}
    got = cukda.fwd(**call)
    assert got is call["out"] and bool((got == want).all())


@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name, (_, dtypes) in ARRAYS.items() for dtype in dtypes.split(" or ")],
)
def test_address_between_elements(library, name, dtype):
    """Which torch cannot be made to begin at, but one of NumPy's arrays among torch's can."""
    packed = name == "cu_seqlens"
    item_bytes = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    for off in {1, item_bytes // 2, item_bytes - 1, item_bytes + 1}:
        wrong = Library("numpy").off_by(off, shape_of(name, packed), dtype)
        call = arguments(library, packed)
        with pytest.raises(ValueError) as caught:
            cukda.fwd(**(call | {name: wrong}))
        expected, past = f"an address divisible by {item_bytes}", off % item_bytes
        message = rf"{name}: expected {expected}, got 0x[0-9a-f]+, {past} past one"
        assert re.fullmatch(message, str(caught.value))


def test_int32_cu_seqlens_need_four_bytes(library):
    call = arguments(library, packed=True)
    cukda.fwd(**(call | {"cu_seqlens": library.off_by(4, (B + 1,), "int32")}))


@pytest.mark.parametrize("name", WRITTEN)
def test_read_only_output(name):
    call = arguments(Library("numpy"))
    call[name].flags.writeable = False
    refused(call, ValueError, f"{name}: expected a writable array, got a read-only one")


@pytest.mark.parametrize("name", [name for name in ARRAYS if name not in WRITTEN])
def test_read_only_input_is_right(name):
    call = arguments(Library("numpy"), packed=name == "cu_seqlens")
    call[name].flags.writeable = False
    cukda.fwd(**call)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "wrong, got",
    [
        ("-1", "str"),
        (False, "bool"),
        (-1j, "complex"),
        ([-1.0], "list"),
        (np.False_, "bool"),
        (np.full(1, -1.0), "an array of shape (1,)"),
        (torch.full((1,), -1.0), "an array of shape (1,)"),
    ],
    ids=str,
)
def test_kind_of_number(name, wrong, got):
    call = arguments(Library("torch")) | {name: wrong}
    refused(call, TypeError, f"{name}: expected a real number, got {got}")


def test_lower_bound_is_not_none():
    call = arguments(Library("torch")) | {"lower_bound": None}
    refused(call, TypeError, "lower_bound: expected a real number, got NoneType")


@pytest.mark.parametrize("name", NUMBERS)
def test_number_on_a_gpu(name):
    call = arguments(Library("numpy")) | {name: on_gpu((), "float32")}
    with pytest.raises(
        TypeError, match=f"^{name}: expected a real number on the CPU, got a 0-d arr"
    ):
        cukda.fwd(**call)


@pytest.mark.parametrize("wrong", [-5.46, -5.0001, 1e-6, 1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, torch.tensor])
def test_range_of_lower_bound(wrong, kind):
    call = arguments(Library("torch")) | {"lower_bound": kind(wrong)}
    with pytest.raises(ValueError) as caught:
        cukda.fwd(**call)
    prefix = "lower_bound: expected a number in [-5, 0], got "
    assert str(caught.value).startswith(prefix)
    got = float(str(caught.value).removeprefix(prefix))
    assert got == pytest.approx(wrong, nan_ok=True)


@pytest.mark.parametrize("right", [-5, 0, -0.0, -2.5, np.float32(-5), np.int64(-5)])
def test_range_of_lower_bound_has_both_ends(right):
    cukda.fwd(**(arguments(Library("numpy")) | {"lower_bound": right}))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e39])
def test_range_of_scale(wrong):
    call = arguments(Library("numpy")) | {"scale": wrong}
    refused(call, ValueError, f"scale: expected a finite number in float32's range, got {wrong}")


@pytest.mark.parametrize("other", [*REQUIRED, "A_log", "dt_bias", "initial_state"])
def test_out_overlapping_an_input(library, other):
    shape, dtype = ARRAYS[other][0], ARRAYS[other][1].split()[-1]
    # In units of bfloat16: the input first, then out, from the row that the input ends in.
    length = math.prod(shape) * (2 if dtype == "float32" else 1)
    start = (length - 1) // D * D
    buffer = library.full((start + math.prod(ROWS),), "bfloat16")
    typed = getattr(torch if library.name == "torch" else ml_dtypes, dtype, dtype)
    call = arguments(library)
    call[other] = buffer[:length].view(typed).reshape(shape)
    call["out"] = buffer[start:].reshape(ROWS)
    message = f"out: expected memory of its own, got an array that overlaps {other}"
    refused(call, ValueError, message)


@pytest.mark.parametrize("other", ["q", "k", "v", "g"])
def test_out_is_an_input(library, other):
    call = arguments(library)
    call["out"] = call[other]
    message = f"out: expected memory of its own, got an array that overlaps {other}"
    refused(call, ValueError, message)


@pytest.mark.parametrize("other", ["q", "k", "v", "g"])
def test_out_beside_an_inputs_rows(library, other):
    """In one buffer, row by row; and no further than that."""
    values = values_of_a_call(packed=False)
    call = {n: in_library(library, x, x) for n, x in values.items() if isinstance(x, np.ndarray)}
    want = cukda.fwd(**(call | {"out": None, "final_state": None}))
    memory = np.full((*ROWS[:3], 2 * D), SENTINEL, BF16)
    memory[..., :D] = values[other]
    buffer = in_library(library, memory, memory)
    call |= {other: buffer[..., :D], "out": buffer[..., D:]}
    assert cukda.fwd(**call) is call["out"]
    assert bool((call["out"] == want).all())
    assert same_bits(memory[..., :D], values[other])
    call["out"] = buffer[..., D - 1 : -1]
    message = f"out: expected memory of its own, got an array that overlaps {other}"
    refused(call, ValueError, message)


OVER_INITIAL = (
    "final_state: expected memory of its own, or initial_state itself, got an array that overlaps "
    "initial_state"
)


def test_states_side_by_side(library):
    """In one buffer: the initial and the final ones of each sequence; and rows of both in turn."""
    call = arguments(library)
    for axis in range(1, 4):
        shape = tuple(2 * n if i == axis else n for i, n in enumerate(STATES))
        buffer, n = library.full(shape, "float32"), STATES[axis]
        first, second = (
            (slice(None),) * axis + (slice(n),),
            (slice(None),) * axis + (slice(n, None),),
        )
        cukda.fwd(**(call | {"initial_state": buffer[first], "final_state": buffer[second]}))
        second = (slice(None),) * axis + (slice(n - 1, 2 * n - 1),)
        call |= {"initial_state": buffer[first], "final_state": buffer[second]}
        refused(call, ValueError, OVER_INITIAL)


def test_final_state_may_be_initial_state_but_no_part_of_it(library):
    call = arguments(library)
    buffer = library.full((B + 1, H, D, D), "float32")
    cukda.fwd(**(call | {"initial_state": buffer[:B], "final_state": buffer[:B]}))
    call |= {"initial_state": buffer[:B], "final_state": buffer[1:]}
    refused(call, ValueError, OVER_INITIAL)


def test_final_state_in_initial_states_memory_with_another_dtype(library):
    call = arguments(library)
    narrow = torch.bfloat16 if library.name == "torch" else BF16
    state = library.full(STATES, "float32")
    call["initial_state"] = state
    call["final_state"] = state.reshape(-1).view(narrow)[: math.prod(STATES)].reshape(STATES)
    refused(call, ValueError, OVER_INITIAL)


def test_final_state_overlapping_out(library):
    call = arguments(library)
    state = library.full(STATES, "bfloat16")
    call["final_state"] = state
    call["out"] = state.reshape(-1)[: math.prod(ROWS)].reshape(ROWS)
    with pytest.raises(ValueError, match="^(out|final_state): expected memory of its own, got"):
        cukda.fwd(**call)


def test_empty_arrays_overlap_nothing(library):
    call = arguments(library)
    for name in (*REQUIRED, "out"):
        call[name] = call[name][:, :0]
    cukda.fwd(**call)


@pytest.mark.parametrize("output", WRITTEN)
def test_empty_arrays_inside_another_overlap_nothing(output):
    """An empty output in an input's memory, and an empty input in an output's."""
    call = arguments(Library("numpy"))
    for name in (*REQUIRED, "out"):
        call[name] = call[name][:, :0]
    state = call["initial_state"] if output == "out" else call["final_state"]
    # A slice of no length would begin where the state does.
    inside = np.ndarray((B, 0, H, D), BF16, state, offset=4096)
    call["out" if output == "out" else "q"] = inside
    assert cukda.fwd(**call) is call["out"]


def test_the_first_wrong_argument_is_named(library):
    names = [*REQUIRED, "scale", "out", "A_log", "dt_bias", "lower_bound"]
    names += ["initial_state", "final_state"]
    right = arguments(library)
    call = right | dict.fromkeys(names, "wrong")
    for name in names:
        with pytest.raises(TypeError, match=f"^{name}: expected .*, got str$"):
            cukda.fwd(**call)
        call[name] = right[name]
    cukda.fwd(**call)


def sigmoid_refused(error, message, *arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        cukda.sigmoid(*arguments)
    assert str(caught.value) == message
    assert type(caught.value) is error


@pytest.mark.parametrize("function", [cukda.sigmoid, cukda.sigmoid_ext.sigmoid_tanh_fp32])
def test_sigmoid_input(library, function):
    def raises(error, message, x):
        with pytest.raises(error) as caught:
            function(x)
        assert str(caught.value) == message

    for wrong in (None, [1.0], 1.0, "x"):
        got = type(wrong).__name__
        message = f"x: expected {AN_ARRAY}, got {got}"
        raises(TypeError, message, wrong)
    for dtype in ("float64", "int32", "bool"):
        with pytest.raises(TypeError, match=rf"^x: expected dtype (\w+ or )+\w+, got {dtype}$"):
            function(library.full((3,), dtype))
    raises(
        ValueError,
        "x: expected a contiguous array, got strides (2,), in elements, for shape (3,)",
        library.full((6,), "float32")[::2],
    )
    meta = torch.empty(3, device="meta")
    raises(ValueError, "x: expected a CPU or CUDA device, got meta", meta)


def test_sigmoid_output(library):
    x = library.full((4, 3), "float32")
    message = f"out: expected {AN_ARRAY}, got list"
    sigmoid_refused(TypeError, message, x, [0.0])
    message = "out: expected dtype float32, got bfloat16"
    sigmoid_refused(TypeError, message, x, library.full((4, 3), "bfloat16"))
    message = "out: expected shape (4, 3), got (3, 4)"
    sigmoid_refused(ValueError, message, x, library.full((3, 4), "float32"))
    message = "out: expected a contiguous array, got strides (6, 2), in elements, for shape (4, 3)"
    sigmoid_refused(ValueError, message, x, library.full((4, 6), "float32")[:, ::2])


def test_sigmoid_output_that_overlaps(library):
    buffer = library.full((8,), "float32")
    with pytest.raises(ValueError, match="^out: expected .*, got"):
        cukda.sigmoid(buffer[:6], buffer[2:])
    assert cukda.sigmoid(buffer, buffer) is buffer
    cukda.sigmoid(buffer[:4], buffer[4:])


def test_sigmoid_output_on_another_device(library):
    x = library.full((3,), "float32")
    sigmoid_refused(ValueError, "out: expected device cpu, got cuda:0", x, on_gpu((3,), "float32"))
    sigmoid_refused(ValueError, "out: expected device cuda:0, got cpu", on_gpu((3,), "float32"), x)


def test_sigmoid_output_that_is_read_only():
    x = np.zeros(3, np.float32)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    message = "out: expected a writable array, got a read-only one"
    sigmoid_refused(ValueError, message, x, frozen)
    sigmoid_refused(ValueError, message, x, OnlyDlpack(frozen))
    assert (frozen == 0).all()


def test_sigmoid_of_a_library_that_cannot_allocate():
    x = OnlyDlpack(np.zeros(3, np.float32))
    with pytest.raises(
        ValueError, match=r"^out: expected an array, got None, and OnlyDlpack \(x\)"
    ):
        cukda.sigmoid(x)
    out = np.full(3, 9, np.float32)
    assert cukda.sigmoid(x, out) is out
    assert (out == 0.5).all()


class OnlyDlpack:
    """An array of a library that has no more than the DLPack protocol."""

    def __init__(self, array):
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__
