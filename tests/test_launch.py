"""The host's half of a launch against the kernel's: the parameters' order, types and values.

The compiled binary says where each parameter lies and how large it is; a fake CuPy takes the bytes
that would have gone to the driver, and hands out addresses where nothing is.
"""

import dataclasses
import functools
import itertools
import re
import struct
import types

import hardware
import numpy as np
import pytest
from test_jit import CUDARuntimeError, FakeCuPy

import cukda
from cukda import arrays, decode, jit, plan, sigmoid_ext, streams, workspace
from cukda.launch import CUTS_PARAMETERS, PARAMETERS
from cukda.overlap import Apart

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

    Records of EIATTR_KPARAM_INFO: index, ordinal, offset, and the size above 18 bits of other
    things.
    """
    found = records_of(cubin, entry, kind=0x17, layout="<IHHI")
    return [(offset, flags >> 18) for _, _, offset, flags in sorted(found, key=lambda r: r[1])]


def most_threads_of(cubin: bytes, entry: str) -> int:
    """The most that a block of a kernel may have: EIATTR_MAX_THREADS."""
    ((x, y, z),) = records_of(cubin, entry, kind=0x05, layout="<III")
    return x * y * z


def records_of(cubin: bytes, entry: str, kind: int, layout: str) -> list[tuple]:
    """What the section .nv.info.<entry> has of that kind, in records of 12 bytes."""
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
    record = bytes((0x04, kind, 0x0C, 0x00))
    return [
        struct.unpack_from(layout, info, match.end())
        for match in re.finditer(re.escape(record), info)
    ]


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
        pytest.param(WGMMA, PARAMETERS, "sm_90a", id="kda, wgmma-sm_90a"),
        pytest.param(LARGEST, PARAMETERS, "sm_90a", id="kda-sm_90a"),
        pytest.param(LARGEST, PARAMETERS, "sm_80", id="kda-sm_80"),
        pytest.param(SMALLEST, PARAMETERS, "sm_90a", id="kda, smallest-sm_90a"),
        pytest.param(SMALLEST, PARAMETERS, "sm_80", id="kda, smallest-sm_80"),
        pytest.param(plan.CUTS, CUTS_PARAMETERS, "sm_90a", id="cuts-sm_90a"),
        pytest.param(plan.CUTS, CUTS_PARAMETERS, "sm_80", id="cuts-sm_80"),
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


@pytest.mark.parametrize(
    ("variant", "contiguous", "layout", "arch"),
    [
        pytest.param(WGMMA, PARAMETERS, plan.STRIDED, "sm_90a", id="kda, wgmma-sm_90a"),
        pytest.param(SMALLEST, PARAMETERS, plan.UNALIGNED, "sm_80", id="kda-sm_80"),
        pytest.param(plan.CUTS, CUTS_PARAMETERS, plan.STRIDED, "sm_80", id="cuts-sm_80"),
        pytest.param(plan.CUTS, CUTS_PARAMETERS, plan.UNALIGNED, "sm_90a", id="cuts-sm_90a"),
    ],
)
def test_strides_are_the_last_parameter(variant, contiguous, layout, arch):
    variant = plan.with_layout(variant, layout)
    compiled = jit.compile(variant.source, variant.defines, arch)
    strides = struct.calcsize(f"{contiguous.format}0q"), struct.calcsize(plan.STRIDES_FORMAT)
    want = [*parameters_in(contiguous), strides]
    assert parameters_of(compiled.cubin, variant.entry) == want


def test_strides_are_in_the_order_of_the_source():
    text = (jit.source_dir() / "strides.cuh").read_text(encoding="utf-8")

    def fields(name):
        """(type, name) of each field of a struct."""
        (body,) = re.findall(rf"struct {name} \{{(.*?)\n\}}", text, re.DOTALL)
        found = re.findall(r"^ {4}(\w+) (\w+(?:, \w+)*);", body, re.MULTILINE)
        return [(kind, field) for kind, names in found for field in names.split(", ")]

    counts = {"i64": 1} | {name: len(fields(name)) for name in ("TokenStrides", "StateStrides")}
    assert fields("TokenStrides") == [("i64", axis) for axis in ("batch", "token", "head")]
    assert fields("StateStrides") == [("i64", axis) for axis in ("sequence", "head", "row")]
    want = [(name, counts[kind]) for kind, name in fields("Strides")]
    assert list(plan.STRIDED_ARRAYS.items()) == want


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("variant", decode.VARIANTS, ids=lambda variant: str(variant.defines[1]))
def test_layout_of_step_is_that_of_the_binary(variant, arch):
    """Whose rows are structs: a pointer and strides."""
    compiled = jit.compile(variant.source, variant.defines, arch)
    fields = decode._FIELDS
    starts = [struct.calcsize("@" + "".join(fields[:i]) + "0" + fields[i][0]) for i in range(15)]
    sizes = [struct.calcsize("@" + field) for field in fields]
    want = list(zip(starts, sizes, strict=True))
    assert parameters_of(compiled.cubin, variant.entry) == want
    assert decode._PARAMETERS.size == sum(want[-1])


@pytest.mark.parametrize("kernel", [WGMMA, SMALLEST, plan.CUTS], ids=str)
def test_blocks_are_as_large_as_the_binary_is_for(kernel):
    compiled = jit.compile(kernel.source, kernel.defines, "sm_90a")
    assert most_threads_of(compiled.cubin, kernel.entry) == kernel.num_threads


def signature(source: str, entry: str) -> list[str]:
    """The names of a kernel's parameters, as its source has them for contiguous arrays."""
    text = (jit.source_dir() / source).read_text(encoding="utf-8")
    text = text.replace(" STRIDES_PARAMETER)", ")")
    (parameters,) = re.findall(rf"\b{entry}\(([^)]*)\)\s*\{{", text)
    return [re.search(r"\w+$", parameter.strip())[0] for parameter in parameters.split(",")]


def enum(name: str) -> dict[str, int]:
    """An `enum class` of cuda_src/, by its names."""
    (body,) = re.findall(rf"enum class {name} \{{(.*?)\}}", sources(), re.DOTALL)
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)}


@functools.cache
def sources() -> str:
    """All of cuda_src/."""
    paths = sorted(jit.source_dir().iterdir())
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def constant(name: str) -> str:
    """What a `constexpr` of cuda_src/ is said to be."""
    (value,) = re.findall(rf"\b{name} = ([^,;]+)[,;]", sources())
    return value


def counts_bytes() -> int:
    (num_bytes,) = re.findall(r"\bsizeof\(Counts\) == (\d+)", sources())
    return int(num_bytes)


def test_counts_have_room():
    assert counts_bytes() <= plan._COUNTS_BYTES


def test_a_chain_has_as_many_parts_as_the_source_says():
    (rows,) = re.findall(r"head_dim / (\d+)", constant("num_chain_parts"))
    assert int(constant("head_dim")) // int(rows) == plan._NUM_CHAIN_PARTS


def test_begins_are_bytes_that_no_cut_is_taken_for():
    assert re.search(r"\busing Begin = unsigned char;", sources())
    goes_on, most_cut = int(constant("goes_on")), int(constant("most_cut"))
    is_first, is_joined = int(constant("is_first")), int(constant("is_joined"))
    assert goes_on == 0 < most_cut < is_first < is_joined < 256
    # A segment has the tokens before the next one's cut, which make its state.
    assert most_cut * int(constant("chunk")) == 2 * plan._SHORTEST_SEGMENT


def test_segments_are_whole_chunks():
    """So that what transfers put out has room for each: struct Work."""
    assert plan._UNIT % int(constant("chunk")) == plan._SHORTEST_SEGMENT % plan._UNIT == 0


LAYOUTS = {
    "kda_fwd": ("kda_fwd.cu", PARAMETERS),
    "kda_cuts": ("cuts.cu", CUTS_PARAMETERS),
}
STATE_BYTES = 4 * D * D
FIRST_POOL = 0x900_1


@dataclasses.dataclass
class Launch:
    """Of a kernel, as the driver has it."""

    entry: str
    grid: int
    block: int
    shared_bytes: int
    stream: int
    packed: bytes

    @property
    def values(self) -> dict:
        """What the kernel would read, by its parameters' names."""
        source, layout = LAYOUTS[self.entry]
        values = struct.unpack(layout.format, self.packed)
        return dict(zip(signature(source, self.entry), values, strict=True))


@dataclasses.dataclass
class Memory:
    """Stream-ordered: from `taken` to `freed`, places in what the stream is given to do. pool: None
    where the device's own has it.
    """

    pointer: int
    num_bytes: int
    pool: int | None
    stream: int
    taken: int
    freed: int | None = None


class FakeGpu(FakeCuPy):
    """A GPU of which only the driver's end is there. `work` has what streams are given, in order:
    launches and (to, from, bytes, stream) of copies; `pools` what each was made with, `settings`
    what they were told.
    """

    def __init__(self):
        super().__init__()
        self.entries, self.work, self.memory, self.pools, self.settings = [], [], [], [], []
        self.out_of_memory = self.is_capturing = False
        runtime = self.cuda.runtime
        runtime.setDevice = lambda device: None
        runtime.cudaMemPoolAttrReleaseThreshold = 4
        runtime.memcpyDeviceToDevice = 3
        runtime.MemPoolProps = lambda *fields: fields
        runtime.memPoolCreate = self._make_pool
        runtime.memPoolSetAttribute = lambda *setting: self.settings.append(setting)
        runtime.mallocFromPoolAsync = self._take_from_pool
        runtime.mallocAsync = lambda num_bytes, stream: self._take(num_bytes, None, stream)
        runtime.streamIsCapturing = self._is_capturing
        runtime.freeAsync = self._free
        runtime.memcpyAsync = self._copy
        self.cuda.get_current_stream = lambda device: types.SimpleNamespace(ptr=STREAM)

    @property
    def launches_of(self) -> list[Launch]:
        return [each for each in self.work if isinstance(each, Launch)]

    def _function(self, entry):
        self.entries.append(entry)
        return types.SimpleNamespace(ptr=len(self.entries) - 1)

    def _launch(self, function, *sizes_and_stream):
        super()._launch(function, *sizes_and_stream)
        _, *grid, block, y, z, shared_bytes, stream, packed = self.launches[-1]
        assert grid[1:] == [1, 1] and (y, z) == (1, 1)
        entry = self.entries[function]
        self.work.append(Launch(entry, grid[0], block, shared_bytes, stream, packed))

    def _is_capturing(self, stream):
        assert stream == STREAM
        return self.is_capturing

    def _make_pool(self, props):
        assert not self.is_capturing, "CUDA would refuse"
        self.pools.append(props)
        return FIRST_POOL + len(self.pools) - 1

    def _take_from_pool(self, num_bytes, pool, stream):
        assert pool - FIRST_POOL in range(len(self.pools))
        return self._take(num_bytes, pool, stream)

    def _take(self, num_bytes, pool, stream):
        if self.out_of_memory:
            raise OutOfMemory
        pointer = 0x7F80_0000_0000 + len(self.memory) * 2**40
        self.memory.append(Memory(pointer, num_bytes, pool, stream, len(self.work)))
        return pointer

    def _free(self, pointer, stream):
        (memory,) = (m for m in self.memory if m.pointer == pointer and m.freed is None)
        assert stream == memory.stream
        memory.freed = len(self.work)

    def _copy(self, to, begin, num_bytes, kind, stream):
        assert kind == self.cuda.runtime.memcpyDeviceToDevice
        self.work.append((to, begin, num_bytes, stream))


class OutOfMemory(CUDARuntimeError):
    status = 2


@pytest.fixture
def fake(monkeypatch):
    fake = FakeGpu()
    for module in arrays, jit, streams, workspace:
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "gpu", lambda: H200)
    monkeypatch.setattr(arrays, "view", lambda name, array, stream=None: array)
    monkeypatch.setattr(workspace, "_memory_pools", {})
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


def launched(fake) -> Launch:
    """The only launch, with no memory taken beside."""
    (launch,) = fake.work
    assert fake.memory == []
    return launch


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
    nothing = ("begins", "counts", "locals", "transfers", "partials", "ready")
    nothing += ("first_extra", "run_tiles", "item_runs")
    want = (
        {name: 0 if call[name] is None else ARRAYS[name][0] for name in ARRAYS}
        | dict.fromkeys(nothing, 0)
        | {
            "scale": 0.25,
            "lower_bound": -2.5,
            "initial_kind": kind_of[initial_state],
            "final_kind": kind_of[final_state],
            "cu_seqlens_bytes": {None: 0, "int32": 4, "int64": 8}[cu_seqlens],
            "num_sequences": num_sequences,
            "num_tokens": T,
            "num_heads": H,
            "segment": 0,
            "num_slots": num_sequences,
        }
    )
    launch, variant = launched(fake), expected.variant
    assert launch.values == want
    sizes = launch.grid, launch.block, launch.shared_bytes
    assert sizes == (expected.grid, variant.num_threads, variant.shared_bytes)
    assert fake.attributes == [(fake.entries.index("kda_fwd"), 8, variant.shared_bytes)]
    assert launch.stream == STREAM


def planned(num_sequences, num_tokens, cu_seqlens) -> plan.Plan:
    return plan.plan(plan.Shape(num_sequences, num_tokens, H, cu_seqlens is not None), H200)


# What is launched where there are segments, joined or not.
SPLIT = ["kda_cuts", "kda_fwd"]


def order(segments: plan.Segments) -> list[str]:
    return SPLIT if segments.length else ["kda_fwd"]


@pytest.mark.parametrize("cu_seqlens", [None, "int32"])
@pytest.mark.parametrize("num_tokens", [0, T, 4096, 8192, 100_000])
def test_fwd_launches_what_is_planned(fake, num_tokens, cu_seqlens):
    given = {"initial_state": None, "final_state": None, "cu_seqlens": cu_seqlens}
    cukda.fwd(**arguments(num_tokens, **given))
    num_sequences = 1 if cu_seqlens is None else N
    expected = planned(num_sequences, num_tokens, cu_seqlens)
    assert (expected.segments.length > 0) == (num_tokens >= 4096)
    assert [each.entry for each in fake.work] == order(expected.segments)

    kernels = {
        "kda_cuts": (expected.cuts_grid, plan.CUTS),
        "kda_fwd": (expected.grid, expected.variant),
    }
    want = {
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "num_heads": H,
        "segment": expected.segments.length,
        "first_extra": expected.segments.first_extra,
        "num_slots": expected.num_slots,
    }
    for launch in fake.work:
        assert want.items() <= launch.values.items()
        grid, kernel = kernels[launch.entry]
        assert (launch.grid, launch.stream) == (grid, STREAM)
        assert (launch.block, launch.shared_bytes) == (kernel.num_threads, kernel.shared_bytes)
        # More than 48 KB have to be asked for.
        asked_for = fake.entries.index(launch.entry), 8, kernel.shared_bytes
        assert launch.shared_bytes <= 48 * 1024 or asked_for in fake.attributes


def test_there_are_plans_of_all_kinds(fake):
    """Whole, with cuts, and joined, so that the tests above and below are of each."""
    found = set()
    for num_tokens in T, 1024, 8192:
        for cu_seqlens, num_sequences in (None, 1), ("int32", N), ("int32", 8):
            segments = planned(num_sequences, num_tokens, cu_seqlens).segments
            found.add((segments.length > 0, segments.join_every > 0))
    assert found == {(False, False), (True, False), (True, True)}


def with_states(call, num_sequences, final_state, dtype="float32"):
    """The call with states for so many sequences. final_state: "apart", "the same array", or
    another one of "the same memory".
    """
    shape = (num_sequences, *ARRAYS["initial_state"][1][1:])
    initial = on_gpu("initial_state", ARRAYS["initial_state"][0], shape, dtype)
    at = ARRAYS["final_state" if final_state == "apart" else "initial_state"][0]
    final = on_gpu("final_state", at, shape, dtype)
    if final_state == "the same array":
        final = initial
    return {**call, "initial_state": initial, "final_state": final}


# Of 1000 tokens.
SEGMENTS = [
    plan.Segments(*segments)
    for segments in ((0,), (64,), (64, 1, 1), (96, 1, 1), (72, 2, 1, 24), (64, 3, 5, 8))
]


@pytest.fixture(params=SEGMENTS, ids=str)
def segments(request, monkeypatch):
    """Every plan has these, whatever it would choose."""
    hardware.force(monkeypatch.setattr, LARGEST, *request.param)
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("final_state", ["apart", "the same array", "the same memory"])
@pytest.mark.parametrize("cu_seqlens", [None, "int64"])
def test_launches_of_a_call_belong_together(fake, segments, cu_seqlens, final_state, dtype):
    """One description of the work, and one workspace, in which each has what it wants."""
    length, join_every, first_joined, first_extra = segments
    num_sequences, num_tokens = 1 if cu_seqlens is None else N, 1000
    call = arguments(num_tokens, cu_seqlens=cu_seqlens)
    call = with_states(call, num_sequences, final_state, dtype)
    cukda.fwd(**call)
    launches = fake.launches_of
    assert [each.entry for each in launches] == order(segments)
    assert {each.stream for each in launches} == {STREAM}
    is_copied = final_state != "apart" and length > 0
    copies = [each for each in fake.work if each not in launches]
    assert len(copies) == is_copied and fake.work[: len(copies)] == copies, "it comes first"

    expected = planned(num_sequences, num_tokens, cu_seqlens)
    of_entry = {each.entry: each.values for each in launches}
    scan = of_entry["kda_fwd"]
    found = {name: scan[name] for name in ("begins", "counts")}
    joined = {name: scan[name] for name in ("locals", "transfers", "partials")}
    shared = found | {
        "cu_seqlens": 0 if cu_seqlens is None else ARRAYS["cu_seqlens"][0],
        "cu_seqlens_bytes": 0 if cu_seqlens is None else 8,
        "num_sequences": num_sequences,
        "num_tokens": num_tokens,
        "num_heads": H,
        "segment": length,
        "first_extra": first_extra,
        "num_slots": expected.num_slots,
    }
    rows = {n: ARRAYS[n][0] for n in ("q", "k", "v", "g", "A_log", "dt_bias")}
    rows |= {"lower_bound": -2.5}
    # Where the caller's states are.
    initial, final = (ARRAYS[name][0] for name in ("initial_state", "final_state"))
    if final_state != "apart":
        final = initial
    if is_copied:
        ((to, *copied),) = copies
        assert copied == [initial, call["initial_state"].num_bytes, STREAM]
        initial = to
    kind = enum("StateKind")[{"bfloat16": "BF16", "float32": "FP32"}[dtype]]
    final = {"final_state": final, "final_kind": kind}
    ready = scan["ready"]
    assert (ready != 0) == (join_every > 0)
    written = {"scale": 0.25, "out": ARRAYS["out"][0]} | final
    joins = {"join_every": join_every, "first_joined": first_joined}
    runs = {"run_tiles": expected.runs.num_tiles, "item_runs": expected.runs.per_item}
    want = {
        "kda_cuts": rows | shared | joins | {"ready": ready},
        "kda_fwd": {"beta": ARRAYS["beta"][0]}
        | rows
        | shared
        | joined
        | written
        | {"initial_state": initial, "initial_kind": kind, "ready": ready}
        | runs,
    }
    assert of_entry == {entry: want[entry] for entry in order(segments)}

    if length == 0:
        assert fake.memory == [] and not any((found | joined).values())
        return
    num_states = expected.num_slots * H
    places = {
        "counts": (found["counts"], counts_bytes()),
        "begins": (found["begins"], -(-num_states // 4) * 4),
    }
    if join_every:
        places |= {
            "locals": (joined["locals"], num_states * STATE_BYTES),
            "transfers": (joined["transfers"], num_states * STATE_BYTES),
            "partials": (joined["partials"], 2 * num_states * 16 * -(-length // 16) * 4 * D),
            "ready": (ready, num_states * 4),
        }
    if is_copied:
        places["initial_state"] = initial, call["initial_state"].num_bytes
    (memory,) = fake.memory
    for name, (pointer, _) in places.items():
        # Loads are of up to 16 bytes.
        assert pointer % {"counts": 4, "ready": 4, "begins": 4}.get(name, 16) == 0, name
    in_order = sorted(places.values())
    assert memory.pointer <= in_order[0][0]
    for (pointer, num_bytes), (following, _) in itertools.pairwise(in_order):
        assert pointer + num_bytes <= following
    assert sum(in_order[-1]) <= memory.pointer + memory.num_bytes
    used = sum(num_bytes for _, num_bytes in places.values())
    assert memory.num_bytes <= used + 16 * len(places), "little more than is used"
    assert memory.stream == STREAM
    assert (memory.taken, memory.freed) == (0, len(fake.work)), "around all of it"


def test_copied_states_are_aligned_as_those_of_callers(fake, segments):
    """Whatever lies before them."""
    for num_sequences, num_heads in itertools.product((1, 2, 3, 33), (1, 3, 4, 7)):
        call = arguments(4000, cu_seqlens=None, A_log=None, dt_bias=None)
        for name in "q", "k", "v", "g", "beta", "out":
            array = call[name]
            shape = (num_sequences, 4000, num_heads, *array.shape[3:])
            call[name] = on_gpu(name, array.pointer, shape, array.dtype)
        at, shape = ARRAYS["initial_state"][0], (num_sequences, num_heads, D, D)
        call["final_state"] = call["initial_state"] = on_gpu("state", at, shape, "float32")
        fake.work.clear()
        cukda.fwd(**call)
        (scan,) = (each.values for each in fake.launches_of if each.entry == "kda_fwd")
        assert (scan["initial_state"] == at) == (segments.length == 0)
        assert scan["initial_state"] % 16 == 0, (num_sequences, num_heads)


@pytest.mark.parametrize("given", ["initial_state", "final_state", None])
@pytest.mark.parametrize("cu_seqlens", [None, "int32"])
def test_a_state_alone_is_not_in_place(fake, segments, cu_seqlens, given):
    call = arguments(1000, cu_seqlens=cu_seqlens)
    call = with_states(call, 1 if cu_seqlens is None else N, "apart")
    for name in {"initial_state", "final_state"} - {given}:
        call[name] = None
    cukda.fwd(**call)
    assert fake.work == fake.launches_of, "nothing is copied"
    for scan in fake.launches_of:
        if scan.entry == "kda_fwd":
            for name in "initial_state", "final_state":
                assert scan.values[name] == (ARRAYS[name][0] if name == given else 0)


@pytest.mark.parametrize("final_state", ["apart", "the same array"])
@pytest.mark.parametrize("failing", range(len(SPLIT) + 2))
def test_memory_is_freed_when_a_launch_fails(fake, monkeypatch, failing, final_state):
    """On the stream that has what was launched before; and the device is what it was."""
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    real_launch, real_copy = fake.cuda.driver.launchKernel, fake.cuda.runtime.memcpyAsync
    num_left = failing

    def fail_at(real):
        def do(*args):
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise RuntimeError("no such luck")
            real(*args)

        return do

    fake.cuda.driver.launchKernel = fail_at(real_launch)
    fake.cuda.runtime.memcpyAsync = fail_at(real_copy)
    call = with_states(arguments(1000), N, final_state)
    num_steps = len(SPLIT) + (final_state != "apart")
    if failing >= num_steps:
        cukda.fwd(**call)
    else:
        with pytest.raises(RuntimeError, match="no such luck"):
            cukda.fwd(**call)
    assert len(fake.work) == min(failing, num_steps)
    (memory,) = fake.memory
    assert (memory.freed, memory.stream) == (len(fake.work), STREAM)


def test_memory_is_freed_when_a_kernel_does_not_compile(fake):
    fake.fail_with = fake.cuda.compiler.CompileException("no such type")
    with pytest.raises(RuntimeError, match="does not compile"):
        cukda.fwd(**arguments(8192))
    assert fake.work == []
    assert [memory.freed for memory in fake.memory] == [0] * len(fake.memory)


@pytest.mark.parametrize("failing", SPLIT)
def test_nothing_is_launched_when_one_kernel_does_not_compile(fake, monkeypatch, failing):
    load = jit._load

    def load_others(source, entry, defines):
        if entry == failing:
            raise RuntimeError("no such luck")
        return load(source, entry, defines)

    monkeypatch.setattr(jit, "_load", load_others)
    hardware.force(monkeypatch.setattr, LARGEST, 64)
    with pytest.raises(RuntimeError, match="no such luck"):
        cukda.fwd(**arguments(8192))
    assert fake.work == []


@pytest.mark.parametrize("is_capturing", [False, True])
def test_no_memory_is_an_error_that_names_it(fake, monkeypatch, is_capturing):
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    fake.out_of_memory, fake.is_capturing = True, is_capturing
    with pytest.raises(
        MemoryError, match=r"^cukda: the GPU has no \d+ bytes for what segments put aside$"
    ):
        cukda.fwd(**arguments(1000))
    assert fake.work == []
    fake.out_of_memory = False
    cukda.fwd(**arguments(1000))
    assert [each.entry for each in fake.work] == SPLIT


@pytest.mark.parametrize("is_capturing", [False, True])
def test_another_error_of_the_allocation_is_passed_on(fake, monkeypatch, is_capturing):
    class Broken(CUDARuntimeError):
        status = 999

    def broken(*_):
        raise Broken

    fake.is_capturing = is_capturing
    fake.cuda.runtime.mallocFromPoolAsync = fake.cuda.runtime.mallocAsync = broken
    hardware.force(monkeypatch.setattr, LARGEST, 64)
    with pytest.raises(Broken):
        cukda.fwd(**arguments(1000))
    assert fake.work == []


def test_a_device_has_one_pool_that_keeps_what_it_has_had(fake, monkeypatch):
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    cukda.fwd(**arguments())
    assert fake.pools == [], "nothing is cut"
    for _ in range(3):
        cukda.fwd(**arguments(1000))
    fake.device = 1
    cukda.fwd(**arguments(1000))
    # cudaMemAllocationTypePinned, cudaMemHandleTypeNone, cudaMemLocationTypeDevice, the device.
    assert fake.pools == [(1, 0, 1, 0), (1, 0, 1, 1)]
    first, second = FIRST_POOL, FIRST_POOL + 1
    keep = fake.cuda.runtime.cudaMemPoolAttrReleaseThreshold, 2**30
    assert fake.settings == [(first, *keep), (second, *keep)]
    assert [memory.pool for memory in fake.memory] == [first, first, first, second]
    num_steps = len(SPLIT)
    assert [memory.freed for memory in fake.memory] == [1 + i * num_steps for i in range(1, 5)]


def test_a_capture_before_there_is_a_pool_makes_none(fake, monkeypatch):
    """The graph's memory is the graph's; the first call outside of a capture makes the pool."""
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    num_steps = len(SPLIT)
    for device in 0, 1:
        fake.device, pool = device, FIRST_POOL + device
        fake.memory.clear()
        fake.work.clear()
        # In graphs, outside of them, and in graphs that are captured once there is a pool.
        for is_capturing in True, True, False, False, True:
            fake.is_capturing = is_capturing
            num_pools = len(fake.pools)
            cukda.fwd(**arguments(1000))
            is_made = num_pools == device and not is_capturing
            assert len(fake.pools) == len(fake.settings) == num_pools + is_made
        assert [memory.pool for memory in fake.memory] == [None, None, pool, pool, pool]
        for i, memory in enumerate(fake.memory):
            assert (memory.taken, memory.freed) == (i * num_steps, (i + 1) * num_steps)
            assert memory.stream == STREAM
    assert fake.pools == [(1, 0, 1, 0), (1, 0, 1, 1)]


def test_threads_that_make_a_pool_at_once_use_one(fake, monkeypatch):
    """The first to have made one: a call from within that of another stands for a thread here."""
    hardware.force(monkeypatch.setattr, LARGEST, 64, 1, 1)
    make_pool = fake.cuda.runtime.memPoolCreate

    def make_pool_late(props):
        if not fake.memory:
            fake.cuda.runtime.memPoolCreate = make_pool
            cukda.fwd(**arguments(1000))
        return make_pool(props)

    fake.cuda.runtime.memPoolCreate = make_pool_late
    for _ in range(2):
        cukda.fwd(**arguments(1000))
    assert {memory.pool for memory in fake.memory} == {FIRST_POOL} and len(fake.memory) == 3
    assert {pool for pool, *_ in fake.settings} == {FIRST_POOL}


@pytest.mark.parametrize("num_tokens", [0, T])
def test_one_look_at_all_arrays_misses_no_overlap(fake, monkeypatch, num_tokens):
    """Two arrays at a time are put where others begin or end, or by a few bytes beside."""

    def outcome(call):
        try:
            cukda.fwd(**call)
        except ValueError as error:
            return str(error)
        return None

    rng, outcomes = np.random.default_rng(5), []
    for _ in range(2000):
        states = {name: rng.choice(STATES) for name in ("initial_state", "final_state")}
        call = arguments(num_tokens, **states)
        given = [name for name in ARRAYS if call[name] is not None]
        for moved, other in rng.choice(given, (2, 2)):
            end = call[other].num_bytes * int(rng.integers(0, 2))
            shift = 16 * int(rng.integers(-1, 2))
            call[moved].pointer = call[other].pointer + end + shift
        outcomes.append(outcome(call))
        with monkeypatch.context() as patch:
            patch.setattr(Apart, "__call__", lambda *_: False)
            assert outcome(call) == outcomes[-1]
    assert 0 < outcomes.count(None) < len(outcomes)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_fwd_packs_null_for_what_is_not_given(fake, name):
    cukda.fwd(**arguments(**{name: None}))
    values = launched(fake).values
    assert [n for n in ARRAYS if values[n] == 0] == [name]


def test_fwd_packs_its_defaults(fake, monkeypatch):
    new = on_gpu("out", *ARRAYS["out"])
    monkeypatch.setattr(arrays, "empty_like", lambda array, stream: new)
    call = arguments()
    assert cukda.fwd(*(call[name] for name in ("q", "k", "v", "g", "beta"))) is new
    values = launched(fake).values
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
    assert fake.work == fake.memory == []


def test_fwd_names_a_gpu_that_is_too_old(fake, monkeypatch):
    """Also one whose shared memory holds no variant."""
    fake.capability = "75"
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(40, 64 * 1024, has_wgmma=False))
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or newer.*got 7\.5"):
        cukda.fwd(**arguments())
    assert fake.work == fake.memory == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sigmoid_packs_what_the_kernel_reads(fake, dtype):
    size = 2**32 + 5
    x = on_gpu("x", 0x7F00_1000_0000, (size,), dtype)
    out = dataclasses.replace(x, name="out", pointer=0x7F10_2000_0000)
    assert cukda.sigmoid(x, out) is out
    launch = launched(fake)
    assert struct.unpack("<QQq", launch.packed) == (x.pointer, out.pointer, size)
    grid, block = launch.grid, launch.block
    per_thread = 4 * 16 // (4 if dtype == "float32" else 2)
    assert (grid - 1) * block * per_thread < size <= grid * block * per_thread
    assert (launch.shared_bytes, launch.stream) == (0, STREAM)
