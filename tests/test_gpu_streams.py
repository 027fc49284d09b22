"""Order on streams, CUDA graphs, threads, the same bits every run, the current device."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import hardware
import inputs
import numpy as np
import pytest
from inputs import TOKENS

from cukda import jit, kda, plan, workspace

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve()
LIMIT_SECONDS = 120
SEGMENT = 64


def make(seed=60, seq_lens=(700, 0, 260, 64)):
    """Heads that forget, and heads that do not: with cuts and with joins."""
    return inputs.make(seq_lens, 4, "half", seed=seed)


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


@pytest.fixture(params=["planned", "joined"])
def segments(request, cut_every):
    """Calls as they are planned; and of three launches that share memory of the pool."""
    if request.param == "joined":
        cut_every(SEGMENT, 1)


@pytest.fixture
def forget_pool(monkeypatch, cupy):
    """A function after which there are no pools of CUDA memory, until a call makes one; returns
    those there are, by device.
    """
    forgotten = []

    def forget():
        pools = {}
        monkeypatch.setattr(workspace, "_memory_pools", pools)
        forgotten.append(pools)
        return pools

    yield forget
    runtime = cupy.cuda.runtime
    runtime.deviceSynchronize()
    for pools in forgotten:
        for pool in pools.values():
            runtime.memPoolDestroy(pool)


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


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("again", [False, True])
def test_producer_and_consumer(library, given_stream, again, monkeypatch):
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
    monkeypatch.setattr(kda, "_launches", {})
    if again:
        call(source, out, final_state)
        library.spoil(out)
        library.spoil(final_state)
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


@pytest.mark.usefixtures("segments")
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


@pytest.mark.usefixtures("segments")
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


@pytest.mark.usefixtures("segments")
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

    def launch(self):
        if isinstance(self.library, Torch):
            with self.library.use(self.stream):
                self.graph.replay()
        else:
            self.graph.launch(stream=self.stream)

    def replay(self):
        self.library.wait()
        self.launch()
        self.library.wait()


@pytest.mark.usefixtures("segments")
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


@pytest.mark.usefixtures("segments")
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


@pytest.mark.usefixtures("segments")
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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("join_every", [0, 1, 2])
def test_graph_without_a_pool(library, cut_every, forget_pool, join_every, in_place):
    """Kernels are there, and no pool can be made during a capture: the graph has memory of its own.
    A pool that a call makes later changes nothing for it.
    """
    cut_every(SEGMENT, join_every)
    first, second = make(72), make(73, (3, 500, 500, 21))
    want, want_of_second = expected(first), expected(second)
    pools = forget_pool()
    static = library.case(first)
    out, final_state = library.nans(first)
    if in_place:
        final_state = static["initial_state"]
    graph = Graph(library)
    library.wait()
    with graph.capture():
        call(static, out, final_state)

    def check(work, case, want_of_case):
        fill(library, static, case)
        library.spoil(out)
        if not in_place:
            library.spoil(final_state)
        work()
        assert_same((out, final_state), want_of_case)

    for case, want_of_case in (first, want), (second, want_of_second), (first, want):
        check(graph.replay, case, want_of_case)
    assert pools == {}
    # Plain calls, and graphs that are captured by then, go on beside it.
    check(lambda: call(static, out, final_state), second, want_of_second)
    assert len(pools) == 1
    other = Graph(library)
    library.wait()
    with other.capture():
        call(static, out, final_state)
    for case, want_of_case in (first, want), (second, want_of_second):
        for each in other, graph:
            check(each.replay, case, want_of_case)
    assert len(pools) == 1


@pytest.mark.parametrize("library_name", ["torch", "cupy"])
def test_first_call_of_a_process_is_captured(library_name, torch):
    """Its kernels have been compiled and loaded, but none of them has run, and there is no pool."""
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE), library_name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def capture_first(library):
    case = make(74)
    static, (out, final_state) = library.case(case), library.nans(case)
    variant = hardware.whole_head_variant()
    hardware.force(setattr, variant, SEGMENT, 1, 1)
    for kernel in variant, plan.CUTS:
        jit.kernel(kernel.source, kernel.entry, kernel.defines, kernel.shared_bytes)
    library.wait()
    graph = Graph(library)
    with graph.capture():
        call(static, out, final_state)
    assert workspace._memory_pools == {}
    graph.replay()
    got = [hardware.host(x) for x in (out, final_state)]
    assert_same(got, expected(case))
    library.spoil(out)
    graph.replay()
    assert_same((out, final_state), got)


def test_graphs_in_turns_and_at_once(library, cut_every):
    """Each has memory of its own: two of one shape, one of another, one with states in place."""
    cut_every(SEGMENT, 1)
    cases = [make(75), make(76), make(77, (300, 900)), make(78)]
    wants = [expected(case) for case in cases]
    statics = [library.case(case) for case in cases]
    outputs = [library.nans(case) for case in cases]
    in_place = 3
    outputs[in_place] = outputs[in_place][0], statics[in_place]["initial_state"]
    graphs = [Graph(library) for _ in cases]
    library.wait()
    for graph, static, results in zip(graphs, statics, outputs, strict=True):
        with graph.capture():
            call(static, *results)

    def prepare():
        fill(library, statics[in_place], cases[in_place])
        for out, final_state in outputs[:in_place]:
            library.spoil(out)
            library.spoil(final_state)
        library.wait()

    def check():
        library.wait()
        for results, want in zip(outputs, wants, strict=True):
            assert_same(results, want)

    for _ in range(3):
        prepare()
        for graph in graphs:
            graph.replay()
        check()
        # On their own streams, with plain calls on another beside them.
        prepare()
        for graph in graphs:
            graph.launch()
        plain = library.nans(cases[0])
        call(statics[0], *plain)
        check()
        assert_same(plain, wants[0])
    # What one leaves free is the others' no less.
    first = graphs.pop(0)
    del first, graph
    prepare()
    for graph in graphs:
        graph.launch()
    library.wait()
    for results, want in zip(outputs[1:], wants[1:], strict=True):
        assert_same(results, want)


def test_calls_on_two_streams_at_once(library, cut_every):
    """The first one's launches are held up while the second takes memory, and gives it back."""
    cut_every(SEGMENT, 1)
    cases = [make(79), make(80)]
    wants = [expected(case) for case in cases]
    statics = [library.case(case) for case in cases]
    for _ in range(3):
        outputs = [library.nans(case) for case in cases]
        streams = [library.stream(), library.stream()]
        library.wait()
        hardware.spin(library.pointer(streams[0]))
        for static, results, stream in zip(statics, outputs, streams, strict=True):
            for _ in range(2):
                call(static, *results, stream=stream)
        was_done = library.is_done(streams[0])
        library.wait()
        assert not was_done, "the second came too late to tell"
        for results, want in zip(outputs, wants, strict=True):
            assert_same(results, want)


@pytest.mark.parametrize("in_place", [False, True])
def test_first_call_of_a_pool_does_not_wait(library, cut_every, forget_pool, in_place):
    """Nor does one that makes the pool grow."""
    cut_every(SEGMENT, 1)
    cases = [make(81), make(82, (3000, 0, 2000, 64))]
    wants = [expected(case) for case in cases]
    statics = [library.case(case) for case in cases]
    outputs = [library.nans(case) for case in cases]
    if in_place:
        outputs = [
            (out, static["initial_state"])
            for (out, _), static in zip(outputs, statics, strict=True)
        ]
    forget_pool()
    stream = library.stream()
    library.wait()
    hardware.spin(library.pointer(stream))
    for static, results in zip(statics, outputs, strict=True):
        call(static, *results, stream=stream)
    was_done = library.is_done(stream)
    library.wait()
    assert not was_done, "the call waited for the GPU"
    for results, want in zip(outputs, wants, strict=True):
        assert_same(results, want)


def in_a_new_thread(function):
    """Run it as the first CUDA work of a thread; raises what it raises."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(function).result()


@pytest.mark.usefixtures("segments")
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


def test_threads_at_once(library, cut_every, forget_pool):
    """Each with a stream and arrays of its own, and one pool for all, which they make."""
    cut_every(SEGMENT, 1)
    cases = [make(83), make(84, (500, 500)), make(85, (1024,))]
    wants = [expected(case) for case in cases]
    statics = [library.case(case) for case in cases]
    outputs = [library.nans(case) for case in cases]
    streams = [library.stream() for _ in cases]
    pools = forget_pool()
    library.wait()

    def work(static, results, stream):
        for _ in range(20):
            call(static, *results, stream=stream)

    with concurrent.futures.ThreadPoolExecutor(max_workers=len(cases)) as pool:
        list(pool.map(work, statics, outputs, streams))
    library.wait()
    assert len(pools) == 1
    for results, want in zip(outputs, wants, strict=True):
        assert_same(results, want)


def test_first_work_of_a_thread_is_a_sigmoid(library):
    import cukda

    x = library.case(make())["beta"]
    want, out = cukda.sigmoid(x), library.stale(x)
    library.wait()
    in_a_new_thread(lambda: cukda.sigmoid(x, out))
    library.wait()
    assert_same([out], [hardware.host(want)])


@pytest.mark.usefixtures("segments")
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


@pytest.mark.usefixtures("segments")
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


if __name__ == "__main__":
    capture_first({"torch": Torch, "cupy": CuPy}[sys.argv[1]]())
