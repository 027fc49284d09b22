"""Order on streams, CUDA graphs, the same bits every run, the current device."""

import concurrent.futures
import contextlib

import hardware
import inputs
import numpy as np
import pytest
from inputs import TOKENS

pytestmark = pytest.mark.gpu


def make(seed=60, seq_lens=(700, 0, 260, 64)):
    return inputs.make(seq_lens, 4, seed=seed)


def call(case, out, final_state, **options):
    import cukda

    case = dict(case)
    tokens = [case.pop(n) for n in TOKENS]
    cukda.fwd(*tokens, **case, out=out, final_state=final_state, **options)


def expected(case):
    """Also compiles what the test then uses."""
    return [hardware.host(x) for x in hardware.run(case)]


def arrays(case):
    return {n: x for n, x in case.items() if hasattr(x, "shape")}


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert hardware.same_bits(a, b)


def fill(library, static, case):
    """Give the arrays of a call the values of another of the same shapes."""
    for name, array in arrays(library.case(case)).items():
        library.copy(static[name], array)
    library.wait()


class Torch:
    """What the tests below ask of a library."""

    def __init__(self):
        import torch

        self.torch = torch

    def case(self, case):
        return hardware.torch_case(case)

    def nans(self, case):
        return (
            hardware.torch_nans(case["v"].shape),
            hardware.torch_nans(hardware.state_shape(case), "float32"),
        )

    def stream(self):
        return self.torch.cuda.Stream()

    def use(self, stream):
        return self.torch.cuda.stream(stream)

    def pointer(self, stream):
        return stream.cuda_stream

    def is_done(self, stream):
        return stream.query()

    def wait(self):
        self.torch.cuda.synchronize()

    def stale(self, array):
        """An array like it with values that would show."""
        return self.torch.zeros_like(array)

    def copy(self, target, source):
        target.copy_(source)

    def spoil(self, array):
        array.fill_(float("nan") if array.is_floating_point() else -1)


class CuPy:
    def __init__(self):
        import cupy

        self.cupy = cupy

    def case(self, case):
        return hardware.upload(case)

    def nans(self, case):
        return (
            hardware.nans(case["v"].shape, "bfloat16"),
            hardware.nans(hardware.state_shape(case), "float32"),
        )

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def use(self, stream):
        return stream

    def pointer(self, stream):
        return stream.ptr

    def is_done(self, stream):
        return stream.done

    def wait(self):
        self.cupy.cuda.runtime.deviceSynchronize()

    def stale(self, array):
        return self.cupy.zeros(array.shape, array.dtype)

    def copy(self, target, source):
        self.cupy.cuda.runtime.memcpyAsync(
            target.data.ptr,
            source.data.ptr,
            source.nbytes,
            self.cupy.cuda.runtime.memcpyDeviceToDevice,
            self.cupy.cuda.get_current_stream().ptr,
        )

    def spoil(self, array):
        self.cupy.cuda.runtime.memsetAsync(
            array.data.ptr, 0xFF, array.nbytes, self.cupy.cuda.get_current_stream().ptr
        )


@pytest.fixture(params=[Torch, CuPy], ids=["torch", "cupy"])
def library(request, cupy, torch):
    return request.param()


@pytest.fixture(params=["current", "pointer", "torch", "cupy"])
def given_stream(request, library, torch, cupy):
    """A side stream, and how a call is told of it: (stream, context manager, options)."""
    stream = library.stream()
    pointer = library.pointer(stream)
    if request.param == "current":
        return stream, library.use(stream), {}
    other = {
        "pointer": pointer,
        "torch": torch.cuda.ExternalStream(pointer),
        "cupy": cupy.cuda.Stream.from_external(hardware.Stream(pointer)),
    }[request.param]
    return stream, contextlib.nullcontext(), {"stream": other}


def test_producer_and_consumer(library, given_stream):
    """Inputs come late on the caller's stream, the result is read on it, and the call returns
    before any of it has happened.
    """
    case = make()
    want = expected(case)
    source = library.case(case)
    late = {n: library.stale(x) if hasattr(x, "shape") else x for n, x in source.items()}
    out, final_state = library.nans(case)
    copies = library.nans(case)
    stream, current, options = given_stream
    library.wait()

    with library.use(stream):
        hardware.spin(library.pointer(stream))
        for name, array in arrays(source).items():
            library.copy(late[name], array)
    with current:
        call(late, out, final_state, **options)
    was_done = library.is_done(stream)
    with library.use(stream):
        for copy, result in zip(copies, (out, final_state), strict=True):
            library.copy(copy, result)
            library.spoil(result)
        for array in arrays(late).values():
            library.spoil(array)
    library.wait()
    assert not was_done, "the call waited for the GPU"
    assert_same(copies, want)


def test_inputs_freed_after_the_call(library):
    """The call's stream is far behind when the inputs' memory goes to other arrays."""
    case = make()
    want = expected(case)
    stream = library.stream()
    library.wait()
    with library.use(stream):
        out, final_state = library.nans(case)
        source = library.case(case)
        given = {n: library.stale(x) if hasattr(x, "shape") else x for n, x in source.items()}
        fill(library, given, case)
        hardware.spin(library.pointer(stream))
        call(given, out, final_state)
        del given
        others = [library.stale(x) for x in arrays(source).values() for _ in range(2)]
        for array in others:
            library.spoil(array)
    library.wait()
    assert_same((out, final_state), want)


def test_inputs_freed_after_a_call_on_another_stream(library):
    """The allocators give memory back to their own stream, where nothing waits for the call."""
    case = make()
    want = expected(case)
    out, final_state = library.nans(case)
    source = library.case(case)
    given = {n: library.stale(x) if hasattr(x, "shape") else x for n, x in source.items()}
    fill(library, given, case)
    stream = library.stream()
    library.wait()
    hardware.spin(library.pointer(stream))
    call(given, out, final_state, stream=stream)
    del given
    others = [library.stale(x) for x in arrays(source).values() for _ in range(2)]
    for array in others:
        library.spoil(array)
    was_done = library.is_done(stream)
    library.wait()
    assert not was_done, "the other arrays came too late to tell"
    assert_same((out, final_state), want)


def test_torch_inputs_and_cupy_outputs(torch, cupy):
    """Each library's current stream: the inputs come late on one, the other reads the result."""
    case = make()
    want = expected(case)
    torch_side, cupy_side = Torch(), CuPy()
    source = torch_side.case(case)
    late = {n: torch.zeros_like(x) if hasattr(x, "shape") else x for n, x in source.items()}
    out, final_state = cupy_side.nans(case)
    copies = cupy_side.nans(case)
    ours, theirs = torch_side.stream(), cupy_side.stream()
    torch_side.wait()
    with torch.cuda.stream(ours), theirs:
        hardware.spin(ours.cuda_stream)
        for name, array in arrays(source).items():
            late[name].copy_(array)
        call(late, out, final_state)
        for copy, result in zip(copies, (out, final_state), strict=True):
            cupy_side.copy(copy, result)
            cupy_side.spoil(result)
    torch_side.wait()
    assert_same(copies, want)


class Graph:
    """A capture with either library, and its replay."""

    def __init__(self, library):
        self.library = library
        self.stream = library.stream()

    @contextlib.contextmanager
    def capture(self):
        if isinstance(self.library, Torch):
            self.graph = self.library.torch.cuda.CUDAGraph()
            with self.library.torch.cuda.graph(self.graph, stream=self.stream):
                yield
        else:
            with self.stream:
                self.stream.begin_capture()
                yield
                self.graph = self.stream.end_capture()

    def replay(self):
        self.library.wait()
        if isinstance(self.library, Torch):
            self.graph.replay()
        else:
            self.graph.launch(stream=self.stream)
        self.library.wait()


def test_graph_follows_its_inputs(library):
    """New values in every input, cu_seqlens too, and the same N and T."""
    first, second = make(61), make(62, (3, 500, 500, 21))
    third = {**make(63), "cu_seqlens": np.array([0, 0, 0, 1024, 1024], np.int32)}
    static = library.case(first)
    out, final_state = library.nans(first)
    call(static, out, final_state)
    library.wait()
    graph = Graph(library)
    with graph.capture():
        call(static, out, final_state)
    for case in second, third, first:
        fill(library, static, case)
        library.spoil(out)
        library.spoil(final_state)
        graph.replay()
        assert_same((out, final_state), expected(case))


def test_graph_of_two_calls(library):
    """The second call goes on from the state that the first leaves, in place."""
    first, second = make(64), make(65)
    static = library.case(first), library.case(second)
    state = static[0]["initial_state"]
    static[1]["initial_state"] = state
    outs = [library.nans(case)[0] for case in (first, second)]
    for case, out in zip(static, outs, strict=True):
        call(case, out, state)
    library.wait()
    graph = Graph(library)
    with graph.capture():
        for case, out in zip(static, outs, strict=True):
            call(case, out, state)
    fill(library, {"initial_state": state}, {"initial_state": first["initial_state"]})
    carried = first["initial_state"]
    for _ in range(2):
        for out in outs:
            library.spoil(out)
        graph.replay()
        for case, out in zip((first, second), outs, strict=True):
            want_out, carried = expected({**case, "initial_state": carried})
            assert hardware.same_bits(out, want_out)
        assert hardware.same_bits(state, carried)


def test_graph_that_allocates_its_out(torch):
    """With torch, whose graphs own a memory pool."""
    import cukda

    library = Torch()
    first, second = make(66), make(67)
    static = library.case(first)
    tokens = [static[n] for n in TOKENS]
    options = {n: x for n, x in static.items() if n not in TOKENS}
    cukda.fwd(*tokens, **options)
    graph = Graph(library)
    with graph.capture():
        out = cukda.fwd(*tokens, **options)
    fill(library, static, second)
    library.spoil(out)
    graph.replay()
    assert hardware.same_bits(out, hardware.run(second, state=None)[0])


def in_a_new_thread(function):
    """Run it as the first CUDA work of a thread; raises what it raises."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(function).result()


def test_first_work_of_a_thread(library):
    """The thread has no context yet, and everything is compiled and allocated."""
    case = make()
    want = expected(case)
    static = library.case(case)
    out, final_state = library.nans(case)
    library.wait()
    in_a_new_thread(lambda: call(static, out, final_state))
    library.wait()
    assert_same((out, final_state), want)


def test_first_work_of_a_thread_is_a_sigmoid(library):
    import cukda

    x = library.case(make())["beta"]
    want, out = cukda.sigmoid(x), library.stale(x)
    library.wait()
    in_a_new_thread(lambda: cukda.sigmoid(x, out))
    library.wait()
    assert_same([out], [hardware.host(want)])


@pytest.mark.parametrize("kind", ["batch", "mixed", "short", "many heads"])
def test_same_bits_every_run(kind, cupy):
    case = {
        "batch": lambda: inputs.make([500], 4, seed=68, batch=2),
        "mixed": lambda: inputs.make([1300, 547, 17, 0, 963], 4, "slow", seed=69),
        "short": lambda: inputs.make([17] * 200, 2, seed=70),
        "many heads": lambda: inputs.make([200, 300], 96, seed=71),
    }[kind]()
    want = expected(case)
    given = hardware.upload(case)
    other = cupy.cuda.Stream(non_blocking=True)
    for i in range(20):
        out, final_state = CuPy().nans(case)
        # Half of the runs beside other work, so that blocks come and go in another order.
        if i % 2:
            hardware.spin(other.ptr, clocks=1_000_000)
        call(given, out, final_state)
        assert_same((out, final_state), want)


def test_current_device_is_kept(library, cupy, torch):
    devices = range(cupy.cuda.runtime.getDeviceCount())
    case = make()
    want = expected(case)
    try:
        for home in devices:
            # The libraries share the runtime's current device.
            torch.cuda.set_device(home)
            given, (out, final_state) = library.case(case), library.nans(case)
            for current in devices:
                torch.cuda.set_device(current)
                call(given, out, final_state)
                assert cupy.cuda.runtime.getDevice() == current
                assert torch.cuda.current_device() == current
                with pytest.raises(ValueError, match="^lower_bound: "):
                    call({**given, "lower_bound": 1}, out, final_state)
                assert cupy.cuda.runtime.getDevice() == current
                assert torch.cuda.current_device() == current
            assert_same((out, final_state), want)
    finally:
        torch.cuda.set_device(0)
