"""Any library's arrays on a GPU: DLPack, `__cuda_array_interface__`, Parameters, JAX; how a process
begins.
"""

import os
import subprocess
import sys
from pathlib import Path

import decoding
import hardware
import inputs
import numpy as np
import pytest
from inputs import TOKENS
from test_arrays import header
from test_gpu_streams import CuPy
from test_interfaces import WITHOUT_ML_DTYPES

import cukda
from cukda import streams

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ("out", "final_state")
GIVEN = (*TOKENS, *OUTPUTS, "A_log", "dt_bias", "initial_state", "cu_seqlens")
# bfloat16 has no place in `__cuda_array_interface__`.
EXPORTED = ("final_state", "A_log", "dt_bias", "initial_state", "cu_seqlens")
LIMIT_SECONDS = 300


@pytest.fixture(scope="module")
def case():
    return inputs.make([300, 0, 260, 64], 4, "half", seed=90)


@pytest.fixture(scope="module")
def want(case):
    return [hardware.host(x) for x in hardware.run(case)]


def arguments(case, library="cupy"):
    """All arguments by name, with outputs full of NaN."""
    upload, nans = {
        "cupy": (hardware.upload, hardware.nans),
        "torch": (hardware.torch_case, hardware.torch_nans),
    }[library]
    state = nans(hardware.state_shape(case), "float32")
    return upload(case) | {"out": nans(case["v"].shape, "bfloat16"), "final_state": state}


def call(given, **options):
    given = dict(given)
    return cukda.fwd(*[given.pop(n) for n in TOKENS], **given, **options)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert hardware.same_bits(a, b)


class Versioned:
    """An array that has DLPack alone, and only the versioned capsule."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        if max_version is None:
            raise BufferError("only DLPack 1.0 and later")
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class Unversioned(Versioned):
    """Only the capsule of before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class ReadOnly(Versioned):
    def __dlpack__(self, *, stream=None, max_version=None):
        capsule = super().__dlpack__(stream=stream, max_version=max_version)
        header(capsule).flags |= 1
        return capsule


class Exporter:
    """An array of CuPy that has `__cuda_array_interface__` alone."""

    def __init__(self, array, stream=None, **changes):
        self.array = array
        fields = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, False),
            "stream": stream,
        }
        self.__cuda_array_interface__ = fields | changes


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("producer", [Versioned, Unversioned])
def test_dlpack_alone(producer, library, case, want, torch):
    given = arguments(case, library)
    wrapped = {n: producer(x) if n in GIVEN else x for n, x in given.items()}
    assert call(wrapped) is wrapped["out"]
    torch.cuda.synchronize()
    assert_same((given["out"], given["final_state"]), want)


@pytest.mark.parametrize("producer", [Versioned, Unversioned])
def test_dlpack_inputs_come_late_on_a_stream_of_their_own(producer, case, want, cupy):
    """The producer makes ours wait for its current stream when it is asked."""
    given = arguments(case)
    library = CuPy()
    late = {n: library.stale(given[n]) for n in TOKENS}
    theirs, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.runtime.deviceSynchronize()

    class Late(producer):
        def __dlpack__(self, **arguments):
            with theirs:
                return super().__dlpack__(**arguments)

    with theirs:
        hardware.spin(theirs.ptr)
        for name, x in late.items():
            library.copy(x, given[name])
    with ours:
        call(given | {n: Late(x) for n, x in late.items()})
        was_done = theirs.done
    cupy.cuda.runtime.deviceSynchronize()
    assert not was_done, "the call waited for the GPU"
    assert_same((given["out"], given["final_state"]), want)


@pytest.mark.parametrize("name", OUTPUTS)
def test_read_only_outputs(name, case, cupy):
    given = arguments(case)
    given[name] = ReadOnly(given[name])
    with pytest.raises(ValueError, match=f"^{name}: expected a writable array, got a read-only on"):
        call(given)
    for output in OUTPUTS:
        array = given[output].array if output == name else given[output]
        assert np.isnan(hardware.host(array).astype(np.float32)).all()


def test_read_only_inputs(case, want):
    given = arguments(case)
    call(given | {n: ReadOnly(given[n]) for n in GIVEN if n not in OUTPUTS})
    assert_same((given["out"], given["final_state"]), want)


@pytest.mark.parametrize("name", GIVEN)
def test_dlpack_on_the_cpu_among_arrays_on_a_gpu(name, case, torch):
    given = arguments(case, "torch")
    given[name] = Versioned(given[name].cpu())
    # The first array says where the call runs.
    named = "k" if name == "q" else name
    with pytest.raises(ValueError, match=f"^{named}: expected device "):
        call(given)


def test_interface_alone(case, want):
    given = arguments(case)
    call(given | {n: Exporter(given[n]) for n in EXPORTED})
    assert_same((given["out"], given["final_state"]), want)


def test_interface_in_place(case, want):
    given = arguments(case)
    state = given["initial_state"]
    call(given | {"initial_state": Exporter(state), "final_state": Exporter(state)})
    assert_same((given["out"], state), want)


@pytest.mark.parametrize("stream_is", ["current", "given"])
def test_interface_with_another_stream(stream_is, case, want, cupy):
    """The arrays come late on their stream, the state is read on it, and the call does not wait."""
    given = arguments(case)
    library = CuPy()
    late = {n: library.stale(given[n]) for n in EXPORTED}
    copy = library.stale(given["final_state"])
    theirs, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.runtime.deviceSynchronize()
    with theirs:
        hardware.spin(theirs.ptr)
        for name, x in late.items():
            library.copy(x, given[name])
    exported = {n: Exporter(x, theirs.ptr) for n, x in late.items()}
    if stream_is == "given":
        call(given | exported, stream=ours)
    else:
        with ours:
            call(given | exported)
    was_done = theirs.done
    with theirs:
        library.copy(copy, late["final_state"])
        for x in late.values():
            library.spoil(x)
    cupy.cuda.runtime.deviceSynchronize()
    assert not was_done, "the call waited for the GPU"
    assert_same((given["out"], copy), want)


def test_interface_of_the_legacy_and_the_threads_stream(case, want):
    given = arguments(case)
    streams = [1, 2]
    call(given | {n: Exporter(given[n], streams[i % 2]) for i, n in enumerate(EXPORTED)})
    assert_same((given["out"], given["final_state"]), want)


def test_interface_in_a_graph(case, want, cupy):
    """On the stream that is captured; another one could not be waited for."""
    given = arguments(case)
    call(given)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    exported = given | {n: Exporter(given[n], stream.ptr) for n in EXPORTED}
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        call(exported)
        with pytest.raises(ValueError, match="^stream: expected one stream for all arrays during "):
            call(exported | {"A_log": Exporter(given["A_log"], other.ptr)})
        graph = stream.end_capture()
    given["final_state"][...] = np.nan
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream=stream)
    stream.synchronize()
    assert_same((given["out"], given["final_state"]), want)


@pytest.mark.parametrize("kind", ["host", "nowhere"])
def test_interface_of_no_gpus_memory(kind, case):
    host = case["A_log"].copy()
    address = host.ctypes.data if kind == "host" else 0x10
    given = arguments(case)
    given["A_log"] = Exporter(given["A_log"], data=(address, False))
    with pytest.raises(ValueError, match="^A_log: expected memory of a CUDA device, got 0x"):
        call(given)
    assert np.isnan(hardware.host(given["final_state"])).all()


def test_interface_of_managed_and_pinned_memory(case, want, cupy):
    """Both are the GPU's to read."""
    given = arguments(case)
    host = case["A_log"]
    pinned = cupy.cuda.alloc_pinned_memory(host.nbytes)
    np.frombuffer(pinned, np.float32, host.size)[...] = host
    managed = cupy.ndarray(host.shape, host.dtype, cupy.cuda.malloc_managed(host.nbytes))
    managed[...] = given["A_log"]
    for address in pinned.ptr, managed.data.ptr:
        call(given | {"A_log": Exporter(given["A_log"], data=(address, False))})
        assert_same((given["out"], given["final_state"]), want)


def test_interface_on_another_gpu(case, cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    given = arguments(case)
    with cupy.cuda.Device(1):
        given["A_log"] = Exporter(cupy.asarray(case["A_log"]))
    with pytest.raises(ValueError, match="^A_log: expected device cuda:0, got cuda:1$"):
        call(given)


@pytest.mark.parametrize("typestr, dtype", [("<u2", "uint16"), ("|V2", r"\|V2")])
def test_interface_has_no_bfloat16(typestr, dtype, case, want):
    """But its memory can be CuPy's by a view."""
    import cupy

    given = arguments(case)
    bits = Exporter(given["q"].view(np.uint16), typestr=typestr)
    with pytest.raises(TypeError, match=f"^q: expected dtype bfloat16, got {dtype}$"):
        call(given | {"q": bits})
    if typestr == "<u2":
        call(given | {"q": cupy.asarray(bits).view(inputs.BF16)})
        assert_same((given["out"], given["final_state"]), want)


def test_sigmoid_and_step_by_the_interfaces(cupy):
    x = cupy.linspace(-5, 5, 1000, dtype=np.float32)
    out = cupy.empty_like(x)
    exported = Exporter(out)
    assert cukda.sigmoid(Exporter(x), exported) is exported
    assert hardware.same_bits(out, cukda.sigmoid(x))

    wanted, given = (hardware.upload(decoding.make(3, 2, 2)) for _ in range(2))
    want = cukda.step(**wanted)
    pool = given["state"]
    lent = {n: Unversioned(given[n]) for n in TOKENS} | {"state": Exporter(pool)}
    out = hardware.nans(want.shape, "bfloat16")
    cukda.step(**given | lent, out=Versioned(out))
    assert_same((out, pool), (want, wanted["state"]))


def test_parameters_and_tensors_that_require_a_gradient(case, want, torch):
    given = arguments(case, "torch")
    for name in GIVEN:
        x = given[name]
        if x.is_floating_point() and name not in OUTPUTS:
            given[name] = torch.nn.Parameter(x) if name in ("A_log", "dt_bias", "k") else x
            given[name].requires_grad_()
    # One that has a history.
    given["q"] = given["q"] * 1
    versions = {n: given[n]._version for n in GIVEN if n not in OUTPUTS}
    out = call(given)
    assert out is given["out"] and not out.requires_grad and out.grad_fn is None
    assert_same((out, given["final_state"]), want)
    new = call({n: x for n, x in given.items() if n not in OUTPUTS})
    assert type(new) is torch.Tensor and not new.requires_grad
    assert hardware.same_bits(new, want[0])
    assert versions == {n: given[n]._version for n in versions}


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_jax(on_a_stream, case, want, jax, cupy):
    """What JAX computes next sees the result, though nothing has waited for it."""
    device = jax.devices("gpu")[0]
    given = {n: jax.device_put(case[n], device) for n in GIVEN if n not in OUTPUTS}
    given |= {"scale": case["scale"], "lower_bound": case["lower_bound"]}
    final_state = hardware.nans(hardware.state_shape(case), "float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    # Twice, since JAX compiles in the first.
    for _ in range(2):
        cupy.cuda.runtime.deviceSynchronize()
        hardware.spin(stream.ptr)
        if on_a_stream:
            out = call(given, final_state=final_state, stream=stream)
        else:
            with stream:
                out = call(given, final_state=final_state)
        was_done = stream.done
    assert not was_done, "the call waited for the GPU"
    assert isinstance(out, jax.Array)
    assert np.array_equal(np.asarray(out * 1).view(np.uint16), want[0].view(np.uint16))
    stream.synchronize()
    assert hardware.same_bits(final_state, want[1])
    for name in OUTPUTS:
        immutable = {name: jax.numpy.asarray(want[OUTPUTS.index(name)])}
        with pytest.raises(ValueError, match=f"^{name}: expected a writable array, got one of JAX"):
            call(given, **immutable)


def run_python(code, cwd, **environment):
    """In a new process that finds no CUDA toolkit by its environment."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)])
    kept = {n: x for n, x in os.environ.items() if n not in ("CUDA_HOME", "CUDA_PATH")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": path} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Reads a call that torch has saved, makes it, and saves what came out.
TORCH_CALL = """
import torch
def run(into):
    given = torch.load("given.pt", map_location="cuda")
    final_state = torch.full_like(given["initial_state"], float("nan"))
    tokens = [given.pop(n) for n in ("q", "k", "v", "g", "beta")]
    out = cukda.fwd(*tokens, **given, final_state=final_state)
    y = cukda.sigmoid(tokens[0])
    state = given["initial_state"][:1].clone()
    o = cukda.step(*(x[:, :2].contiguous() for x in tokens), state)
    torch.save([x.cpu() for x in (out, final_state, y, o, state)], into)
"""


def assert_results(folder, name, case, want, torch):
    out, final_state, y, o, state = torch.load(folder / name)
    assert_same((out, final_state), want)
    given = hardware.torch_case(case)
    assert hardware.same_bits(y, cukda.sigmoid(given["q"]))
    pool = given["initial_state"][:1].clone()
    want_o = cukda.step(*(given[n][:, :2].contiguous() for n in TOKENS), pool)
    assert_same((o, state), (want_o, pool))


@pytest.fixture
def saved(case, torch, tmp_path):
    """The folder where the call lies for another process."""
    torch.save(
        {n: x.cpu() if hasattr(x, "cpu") else x for n, x in hardware.torch_case(case).items()},
        tmp_path / "given.pt",
    )
    return tmp_path


def test_torch_without_ml_dtypes(case, want, saved, torch):
    code = f"{WITHOUT_ML_DTYPES}\nimport cukda\n{TORCH_CALL}\nrun('results.pt')\n"
    run_python(code, saved)
    assert_results(saved, "results.pt", case, want, torch)


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, cupy, cukda",
        "import torch, cukda",
        "import cupy, torch, cukda",
        "import cupy, cukda, torch",
        "import cukda, cupy, torch",
        "import cukda, torch, cupy",
    ],
)
def test_order_of_imports(imports, case, want, saved, torch):
    run_python(imports + TORCH_CALL + "run('results.pt')", saved)
    assert_results(saved, "results.pt", case, want, torch)


@pytest.mark.parametrize("imports", ["import cukda", "import torch, cukda", "import cupy, cukda"])
def test_fork_after_the_import(imports, case, want, saved, torch):
    """The child uses the GPU, and then so does the parent."""
    code = (
        "import os\n"
        f"{imports}\n"
        f"{TORCH_CALL}\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    run('child.pt')\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "run('parent.pt')\n"
    )
    run_python(code, saved)
    for name in "child.pt", "parent.pt":
        assert_results(saved, name, case, want, torch)


def test_nothing_is_held_after_the_work(case, cupy):
    """Memory of other libraries is let go of by a later call."""
    given = arguments(case)
    # Without what a first call does, the second is launched before the spin ends.
    call(given | {n: Exporter(given[n]) for n in EXPORTED})
    cupy.cuda.runtime.deviceSynchronize()
    streams._in_use.clear()
    hardware.spin(cupy.cuda.get_current_stream().ptr)
    call(given | {n: Exporter(given[n]) for n in EXPORTED})
    assert streams._in_use
    cupy.cuda.runtime.deviceSynchronize()
    call(given | {"A_log": Exporter(given["A_log"])})
    cupy.cuda.runtime.deviceSynchronize()
    call(given | {"A_log": Exporter(given["A_log"])})
    assert len(streams._in_use) <= 1
