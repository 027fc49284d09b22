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

H200 = plan.Gpu(132, 227 * 1024, has_wgmma=True)
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


WGMMA = next(variant for variant in plan.variants() if variant.wgmma)
LARGEST = next(variant for variant in plan.variants() if not variant.wgmma)
SMALLEST = plan.variants()[-1]


@pytest.mark.parametrize(
    ("variant", "layout", "arch"),
    [
        pytest.param(WGMMA, kda._PARAMETERS, "sm_90a", id="kda, wgmma-sm_90a"),
        pytest.param(LARGEST, kda._PARAMETERS, "sm_90a", id="kda-sm_90a"),
        pytest.param(LARGEST, kda._PARAMETERS, "sm_80", id="kda-sm_80"),
        pytest.param(SMALLEST, kda._PARAMETERS, "sm_90a", id="kda, smallest-sm_90a"),
        pytest.param(SMALLEST, kda._PARAMETERS, "sm_80", id="kda, smallest-sm_80"),
        *(
            pytest.param(
                sigmoid_ext.VARIANTS[0], sigmoid_ext._PARAMETERS, arch, id=f"sigmoid-{arch}"
            )
            for arch in ("sm_90a", "sm_80")
        ),
    ],
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
    monkeypatch.setattr(jit, "gpu", lambda: H200)
    monkeypatch.setattr(arrays, "import_cupy", lambda: fake)
    monkeypatch.setattr(arrays, "view", lambda name, array, stream=None: array)
    return fake


def on_gpu(name, pointer, shape, dtype):
    """An array on a GPU as the checks see it, without any memory."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return arrays.Array(name, pointer, shape, strides, dtype, 0, "cupy", True, None)


def arguments(num_tokens=T, **dtypes):
    """A right call; dtypes by array, None for one that is not given."""
    call = {"scale": 0.25, "lower_bound": -2.5}
    for name, (pointer, shape, dtype) in ARRAYS.items():
        dtype = dtypes.get(name, dtype)
        if name in ("q", "k", "v", "g", "beta", "out"):
            shape = (1, num_tokens, *shape[2:])
        call[name] = None if dtype is None else on_gpu(name, pointer, shape, dtype)
    return call


def launched(fake) -> tuple:
    """Of the only launch: the grid, the block, shared bytes, the stream, the packed bytes."""
    ((_, *grid, block, y, z, shared_bytes, stream, packed),) = fake.launches
    assert grid[1:] == [1, 1] and (y, z) == (1, 1)
    return grid[0], block, shared_bytes, stream, packed


def unpacked(packed: bytes) -> dict:
    """What kda_fwd would read, by its parameters' names."""
    values = struct.unpack(kda._PARAMETERS.format, packed)
    return dict(zip(signature("kda_fwd.cu", "kda_fwd"), values, strict=True))


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

    expected = plan.plan(plan.Shape(num_sequences, T, H, cu_seqlens is not None), H200)
    kinds = enum("StateKind")
    kind_of = {None: kinds["None"], "bfloat16": kinds["BF16"], "float32": kinds["FP32"]}
    want = {name: 0 if call[name] is None else ARRAYS[name][0] for name in ARRAYS} | {
        "scale": 0.25,
        "lower_bound": -2.5,
        "initial_kind": kind_of[initial_state],
        "final_kind": kind_of[final_state],
        "cu_seqlens_bytes": {None: 0, "int32": 4, "int64": 8}[cu_seqlens],
        "num_sequences": num_sequences,
        "num_tokens": T,
        "num_heads": H,
        "segment": expected.segment,
        "num_slots": expected.num_slots,
    }
    grid, block, shared_bytes, stream, packed = launched(fake)
    assert unpacked(packed) == want
    assert (grid, block, shared_bytes) == (expected.grid, expected.block, expected.shared_bytes)
    assert fake.attributes == [(1234, 8, expected.shared_bytes)]
    assert stream == STREAM


@pytest.mark.parametrize("cu_seqlens", [None, "int32"])
@pytest.mark.parametrize("num_tokens", [0, T, 8192, 100_000])
def test_fwd_packs_where_sequences_may_be_cut(fake, num_tokens, cu_seqlens):
    given = {"initial_state": None, "final_state": None, "cu_seqlens": cu_seqlens}
    cukda.fwd(**arguments(num_tokens, **given))
    num_sequences = 1 if cu_seqlens is None else N
    expected = plan.plan(plan.Shape(num_sequences, num_tokens, H, cu_seqlens is not None), H200)
    assert num_tokens < 8192 or 0 < expected.segment < num_tokens
    want = {
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "segment": expected.segment,
        "num_slots": expected.num_slots,
    }
    grid, block, shared_bytes, _, packed = launched(fake)
    assert want.items() <= unpacked(packed).items()
    assert (grid, block, shared_bytes) == (expected.grid, expected.block, expected.shared_bytes)


def states(call, num_sequences, final_pointer):
    """The call with float32 states for so many sequences, the final one at that address."""
    initial_pointer, (_, *rest), dtype = ARRAYS["initial_state"]
    shape = (num_sequences, *rest)
    initial = on_gpu("initial_state", initial_pointer, shape, dtype)
    if final_pointer is None:
        return {**call, "initial_state": initial, "final_state": initial}
    final = on_gpu("final_state", final_pointer, shape, dtype)
    return {**call, "initial_state": initial, "final_state": final}


@pytest.mark.parametrize(
    ("final_pointer", "in_place"),
    [
        pytest.param(None, True, id="the same array"),
        pytest.param(ARRAYS["initial_state"][0], True, id="the same memory"),
        pytest.param(ARRAYS["final_state"][0], False, id="apart"),
    ],
)
@pytest.mark.parametrize("cu_seqlens", [None, "int32"])
@pytest.mark.parametrize("num_tokens", [8192, 100_000])
def test_fwd_cuts_nothing_where_states_are_in_place(
    fake, num_tokens, cu_seqlens, final_pointer, in_place
):
    num_sequences = 1 if cu_seqlens is None else N
    call = states(arguments(num_tokens, cu_seqlens=cu_seqlens), num_sequences, final_pointer)
    cukda.fwd(**call)
    values = unpacked(launched(fake)[-1])
    assert (values["initial_state"] == values["final_state"]) == in_place
    assert (values["segment"] == 0) == in_place
    assert (values["num_slots"] == num_sequences) == in_place


@pytest.mark.parametrize("given", ["initial_state", "final_state", None])
@pytest.mark.parametrize("cu_seqlens", [None, "int32"])
def test_a_state_alone_is_not_in_place(fake, cu_seqlens, given):
    call = arguments(8192, cu_seqlens=cu_seqlens)
    call = states(call, 1 if cu_seqlens is None else N, ARRAYS["final_state"][0])
    for name in {"initial_state", "final_state"} - {given}:
        call[name] = None
    cukda.fwd(**call)
    values = unpacked(launched(fake)[-1])
    assert values["segment"] > 0


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_fwd_packs_null_for_what_is_not_given(fake, name):
    cukda.fwd(**arguments(**{name: None}))
    values = unpacked(launched(fake)[-1])
    assert [n for n in ARRAYS if values[n] == 0] == [name]


def test_fwd_packs_its_defaults(fake, monkeypatch):
    new = on_gpu("out", *ARRAYS["out"])
    monkeypatch.setattr(arrays, "empty_like", lambda array, stream: new)
    call = arguments()
    assert cukda.fwd(*(call[name] for name in ("q", "k", "v", "g", "beta"))) is new
    values = unpacked(launched(fake)[-1])
    assert values["scale"] == np.float32(128**-0.5)
    assert values["lower_bound"] == -5
    assert values["out"] == ARRAYS["out"][0]


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
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(40, 64 * 1024, has_wgmma=False))
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
