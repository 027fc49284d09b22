"""The host's half of a launch against the kernel's: the parameters' order, types and values.

The compiled binary says where each parameter lies and how large it is; a fake CuPy takes the bytes
that would have gone to the driver.
"""

import dataclasses
import re
import struct
import types

import numpy as np
import pytest
from test_jit import FakeCuPy

import cukda
from cukda import arrays, jit, kda, plan, sigmoid_ext

H200 = (132, 227 * 1024)
STREAM = 0x5EED
N, T, H, D = 3, 5, 4, 128

# In the order of the kernel's parameters: each array's address, shape and dtype.
ARRAYS = {
    "q": (0x1000_0000, (1, T, H, D), "bfloat16"),
    "k": (0x2000_0000, (1, T, H, D), "bfloat16"),
    "v": (0x3000_0000, (1, T, H, D), "bfloat16"),
    "g": (0x4000_0000, (1, T, H, D), "bfloat16"),
    "beta": (0x5000_0000, (1, T, H), "bfloat16"),
    # Above 2**32, as addresses on a GPU are.
    "out": (0x7F00_6000_0000, (1, T, H, D), "bfloat16"),
    "A_log": (0x7F00_7000_0000, (H,), "float32"),
    "dt_bias": (0x7F00_8000_0000, (H, D), "float32"),
    "initial_state": (0x7F00_9000_0000, (N, H, D, D), "float32"),
    "final_state": (0x7F00_A000_0000, (N, H, D, D), "float32"),
    "cu_seqlens": (0x7F00_B000_0000, (N + 1,), "int32"),
}


def parameters_of(cubin: bytes, entry: str) -> list[tuple[int, int]]:
    """(offset, bytes) of each parameter of a kernel, in its order.

    They stand in the section .nv.info.<entry> as records of 12 bytes, EIATTR_KPARAM_INFO: index,
    ordinal, offset, and the size above 18 bits of other things.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    header_bytes, num_headers, names_idx = struct.unpack_from("<HHH", cubin, 0x3A)

    def section(index):
        name, _, _, _, begin, size = struct.unpack_from(
            "<IIQQQQ", cubin, headers + index * header_bytes
        )
        return name, cubin[begin : begin + size]

    _, names = section(names_idx)
    wanted = names.index(b"\0.nv.info." + entry.encode() + b"\0") + 1
    (info,) = (body for name, body in map(section, range(num_headers)) if name == wanted)
    record = b"\x04\x17\x0c\x00"
    found = [
        struct.unpack_from("<IHHI", info, match.end())
        for match in re.finditer(re.escape(record), info)
    ]
    return [(offset, flags >> 18) for _, _, offset, flags in sorted(found, key=lambda r: r[1])]


def parameters_in(layout: struct.Struct) -> list[tuple[int, int]]:
    """(offset, bytes) of each field of a layout."""
    fields = layout.format.removeprefix("@").replace(" ", "")
    # "0" and a type pad to that type's alignment.
    return [
        (struct.calcsize(f"@{fields[:i]}0{field}"), struct.calcsize(field))
        for i, field in enumerate(fields)
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        (plan.variants()[0], kda._PARAMETERS),
        (plan.variants()[-1], kda._PARAMETERS),
        (sigmoid_ext.VARIANTS[0], sigmoid_ext._PARAMETERS),
    ],
    ids=["kda", "kda, smallest", "sigmoid"],
)
def test_layout_is_that_of_the_binary(variant, layout, arch):
    compiled = jit.compile(variant.source, variant.defines, arch)
    assert parameters_of(compiled.cubin, variant.entry) == parameters_in(layout)
    assert layout.size == sum(parameters_in(layout)[-1])


def signature(source: str, entry: str) -> list[str]:
    """The names of a kernel's parameters, as its source has them."""
    text = (jit.source_dir() / source).read_text(encoding="utf-8")
    (parameters,) = re.findall(rf"\b{entry}\(([^)]*)\)\s*\{{", text)
    return [re.search(r"\w+$", parameter.strip())[0] for parameter in parameters.split(",")]


def enum(name: str) -> dict[str, int]:
    """An `enum class` of cuda_src/, by its names."""
    text = "".join(path.read_text(encoding="utf-8") for path in jit.source_dir().iterdir())
    (body,) = re.findall(rf"enum class {name} \{{(.*?)\}}", text, re.DOTALL)
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)}


@pytest.fixture
def fake(monkeypatch):
    """A GPU of which only the driver's end of a launch is there."""
    fake = FakeCuPy()
    fake.cuda.runtime.setDevice = lambda device: None
    fake.cuda.get_current_stream = lambda device: types.SimpleNamespace(ptr=STREAM)
    monkeypatch.setattr(jit, "import_cupy", lambda: fake)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "device_limits", lambda: H200)
    monkeypatch.setattr(arrays, "import_cupy", lambda: fake)
    monkeypatch.setattr(arrays, "view", lambda name, array, stream=None: array)
    return fake


def on_gpu(name, pointer, shape, dtype):
    """An array on a GPU as the checks see it, without any memory."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return arrays.Array(name, pointer, shape, strides, dtype, 0, "cupy", True, None)


def arguments(**dtypes):
    """A right call; dtypes by array, None for one that is not given."""
    call = {"scale": 0.25, "lower_bound": -2.5}
    for name, (pointer, shape, dtype) in ARRAYS.items():
        dtype = dtypes.get(name, dtype)
        call[name] = None if dtype is None else on_gpu(name, pointer, shape, dtype)
    return call


def launched(fake) -> tuple:
    """Of the only launch: the grid, the block, shared bytes, the stream, the packed bytes."""
    ((_, *grid, block, y, z, shared_bytes, stream, packed),) = fake.launches
    assert grid[1:] == [1, 1] and (y, z) == (1, 1)
    return grid[0], block, shared_bytes, stream, packed


STATES = [None, "bfloat16", "float32"]


@pytest.mark.parametrize("cu_seqlens", [None, "int32", "int64"])
@pytest.mark.parametrize("final_state", STATES)
@pytest.mark.parametrize("initial_state", STATES)
def test_fwd_packs_what_the_kernel_reads(fake, initial_state, final_state, cu_seqlens):
    given = {"initial_state": initial_state, "final_state": final_state, "cu_seqlens": cu_seqlens}
    call = arguments(**given)
    num_sequences = N
    if cu_seqlens is None:
        num_sequences = 1
        for name in "initial_state", "final_state":
            if given[name]:
                shape = (1, *ARRAYS[name][1][1:])
                call[name] = on_gpu(name, ARRAYS[name][0], shape, given[name])
    assert cukda.fwd(**call) is call["out"]

    kinds = enum("StateKind")
    kind_of = {None: kinds["None"], "bfloat16": kinds["BF16"], "float32": kinds["FP32"]}
    want = {name: 0 if call[name] is None else ARRAYS[name][0] for name in ARRAYS} | {
        "scale": 0.25,
        "lower_bound": -2.5,
        "initial_kind": kind_of[initial_state],
        "final_kind": kind_of[final_state],
        "cu_seqlens_bytes": {None: 0, "int32": 4, "int64": 8}[cu_seqlens],
        "num_tokens": T,
        "num_heads": H,
    }
    grid, block, shared_bytes, stream, packed = launched(fake)
    got = struct.unpack(kda._PARAMETERS.format, packed)
    assert dict(zip(signature("kda_fwd.cu", "kda_fwd"), got, strict=True)) == want
    expected = plan.plan(num_sequences, H, *H200)
    assert (grid, block, shared_bytes) == (expected.grid, expected.block, expected.shared_bytes)
    assert fake.attributes == [(1234, 8, expected.shared_bytes)]
    assert stream == STREAM


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_fwd_packs_null_for_what_is_not_given(fake, name):
    cukda.fwd(**arguments(**{name: None}))
    got = struct.unpack(kda._PARAMETERS.format, launched(fake)[-1])
    packed = dict(zip(signature("kda_fwd.cu", "kda_fwd"), got, strict=True))
    assert [n for n in ARRAYS if packed[n] == 0] == [name]


def test_fwd_packs_its_defaults(fake, monkeypatch):
    new = on_gpu("out", *ARRAYS["out"])
    monkeypatch.setattr(arrays, "empty_like", lambda array, stream: new)
    call = arguments()
    assert cukda.fwd(*(call[name] for name in ("q", "k", "v", "g", "beta"))) is new
    got = struct.unpack(kda._PARAMETERS.format, launched(fake)[-1])
    packed = dict(zip(signature("kda_fwd.cu", "kda_fwd"), got, strict=True))
    assert packed["scale"] == np.float32(128**-0.5)
    assert packed["lower_bound"] == -5
    assert packed["out"] == ARRAYS["out"][0]


@pytest.mark.parametrize("name", ["q", "cu_seqlens"])
def test_fwd_without_states_launches_nothing(fake, name):
    call = arguments(initial_state=None, final_state=None)
    if name == "q":
        call["cu_seqlens"] = None
        for other in ("q", "k", "v", "g", "beta", "out"):
            pointer, shape, dtype = ARRAYS[other]
            call[other] = on_gpu(other, pointer, (0, *shape[1:]), dtype)
    else:
        call["cu_seqlens"] = on_gpu("cu_seqlens", ARRAYS["cu_seqlens"][0], (1,), "int32")
    cukda.fwd(**call)
    assert fake.launches == []


def test_fwd_names_a_gpu_that_is_too_old(fake, monkeypatch):
    """Also one whose shared memory holds no variant."""
    fake.capability = "75"
    monkeypatch.setattr(jit, "device_limits", lambda: (40, 64 * 1024))
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or newer.*got 7\.5"):
        cukda.fwd(**arguments())
    assert fake.launches == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sigmoid_packs_what_the_kernel_reads(fake, dtype):
    size = 2**32 + 5
    x = on_gpu("x", 0x7F00_1000_0000, (size,), dtype)
    out = dataclasses.replace(x, name="out", pointer=0x7F10_2000_0000)
    assert cukda.sigmoid(x, out) is out
    grid, block, shared_bytes, stream, packed = launched(fake)
    assert struct.unpack("<QQq", packed) == (x.pointer, out.pointer, size)
    per_thread = 4 * 16 // (4 if dtype == "float32" else 2)
    assert (grid - 1) * block * per_thread < size <= grid * block * per_thread
    assert (shared_bytes, stream) == (0, STREAM)
