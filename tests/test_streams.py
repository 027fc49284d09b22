"""Streams, devices, lifetimes in `cukda.streams`, with a fake CUDA that writes down its calls."""

import collections
import gc
import sys
import types
import weakref

import numpy as np
import pytest
from test_arrays import header

from cukda import arrays, streams


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


class FakeCuda:
    """CuPy's part in streams and devices. `calls` has what would have reached CUDA, in order."""

    def __init__(self):
        self.calls = []
        self.device = 0
        self.context = 1
        self.capturing = set()
        self.done = False
        self.cupy_stream = 0
        fake = self

        class Event:
            def __init__(self, disable_timing=False):
                assert disable_timing
                self.ptr = object()

            @property
            def done(self):
                fake.calls.append("query")
                return fake.done

        class Device:
            def __init__(self, device):
                self.device = device

            def __enter__(self):
                self.previous, fake.device = fake.device, self.device

            def __exit__(self, *error):
                fake.device = self.previous

        self.recorded = {}
        runtime = types.SimpleNamespace(
            getDevice=lambda: self.device,
            getDeviceCount=lambda: 2,
            setDevice=self.set_device,
            eventRecord=self.recorded.__setitem__,
            streamWaitEvent=lambda stream, event: self.calls.append(
                ("wait", stream, self.recorded[event])
            ),
            streamIsCapturing=lambda stream: stream in self.capturing,
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            driver=types.SimpleNamespace(ctxGetCurrent=lambda: self.context),
            Event=Event,
            Device=Device,
            get_current_stream=lambda device: types.SimpleNamespace(ptr=self.cupy_stream),
        )

    def set_device(self, device):
        self.calls.append(("device", device))
        self.device = device
        self.context = 1


class FakeTorch:
    """torch's part: its current stream, and the stream that record_stream is told of."""

    def __init__(self):
        self.stream = 0
        self._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self.stream)
        self.cuda = types.SimpleNamespace(ExternalStream=lambda pointer, device: (pointer, device))


class FakeTensor:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for module in arrays, streams:
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(streams, "_in_use", type(streams._in_use)())
    return fake


@pytest.fixture
def fake_torch(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_thread_without_a_context_gets_one(cuda, fake_torch):
    cuda.context = 0
    with streams.launch_on([array(library="torch")]):
        assert cuda.calls == [("device", 0)]
    with streams.launch_on([array(library="torch")]):
        pass
    assert cuda.calls == [("device", 0)]


def test_launch_takes_the_first_arrays_stream(cuda, fake_torch):
    fake_torch.stream, cuda.cupy_stream = 11, 22
    with streams.launch_on([array(library="torch")] * 3) as pointer:
        assert pointer == 11
    with streams.launch_on([array(library="cupy")]) as pointer:
        assert pointer == 22
    assert cuda.calls == []


def test_launch_runs_on_the_arrays_device_and_restores_it(cuda):
    with streams.launch_on([array(device=2)]):
        assert cuda.device == 2
    assert cuda.calls == [("device", 2), ("device", 0)]
    with pytest.raises(ZeroDivisionError), streams.launch_on([array(device=2)]):
        raise ZeroDivisionError
    assert cuda.device == 0
    with pytest.raises(TypeError, match="^stream: "), streams.launch_on([array(device=2)], "s"):
        pass
    assert cuda.device == 0


def test_launch_joins_the_streams_of_mixed_libraries(cuda, fake_torch):
    fake_torch.stream, cuda.cupy_stream = 11, 22
    mixed = [array(library="torch"), array(library="cupy"), array(library="torch")]
    with streams.launch_on(mixed):
        assert cuda.calls == [("wait", 11, 22)]
    assert cuda.calls == [("wait", 11, 22), ("wait", 22, 11)]


def test_launch_joins_nothing_when_all_are_on_one_stream(cuda, fake_torch):
    with streams.launch_on([array(library="torch"), array(library="cupy")]) as pointer:
        assert pointer == 0
    assert cuda.calls == []


def test_launch_refuses_to_join_while_capturing(cuda, fake_torch):
    fake_torch.stream = 11
    cuda.capturing = {11}
    mixed = [array(library="torch"), array(library="cupy")]
    with pytest.raises(
        ValueError, match="^stream: expected one stream .* capture, got a capturing"
    ):
        with streams.launch_on(mixed):
            pass
    assert cuda.calls == []


def test_launch_on_a_stream_given_keeps_torch_memory(cuda, fake_torch):
    fake_torch.stream = 11
    tensor = FakeTensor()
    with streams.launch_on([array(library="torch", owner=tensor, device=1)], 33) as pointer:
        assert pointer == 33
    assert tensor.streams == [(33, 1)]
    with streams.launch_on([array(library="torch", owner=tensor)], 11):
        pass
    assert len(tensor.streams) == 1
    assert not streams._in_use


@pytest.mark.parametrize("library, stream", [("cupy", 33), ("dlpack", None), ("dlpack", 33)])
def test_launch_keeps_other_memory_until_the_work_is_done(cuda, library, stream):
    owners = [FakeTensor() for _ in range(3)]
    alive = [weakref.ref(owner) for owner in owners]

    def launch():
        with streams.launch_on([array(library=library, owner=owners.pop(0))], stream):
            pass

    launch()
    launch()
    gc.collect()
    assert [ref() is None for ref in alive] == [False, False, False]
    cuda.done = True
    launch()
    gc.collect()
    assert [ref() is None for ref in alive] == [True, True, True]
    assert not streams._in_use


def test_another_thread_may_let_go_of_the_last(cuda):
    """Between a look at what is in use and taking it out."""

    class Taken(collections.deque):
        def popleft(self):
            self.clear()
            return super().popleft()

    streams._in_use = Taken()
    with streams.launch_on([array(library="dlpack")], 33):
        pass
    assert not streams._in_use


def test_launch_queries_no_event_while_capturing(cuda):
    cuda.capturing = {33}
    for library in ("cupy", "dlpack"):
        with streams.launch_on([array(library=library)], 33):
            pass
    assert cuda.calls == []
    assert not streams._in_use


def test_launch_failure_joins_nothing_more(cuda, fake_torch):
    cuda.cupy_stream = 22
    mixed = [array(library="torch"), array(library="dlpack")]
    with pytest.raises(ZeroDivisionError), streams.launch_on(mixed):
        raise ZeroDivisionError
    assert cuda.calls == [("wait", 0, 22)]
    assert not streams._in_use


class WithStream:
    def __cuda_stream__(self):
        return 0, 77


@pytest.mark.parametrize(
    "stream, pointer",
    [
        (0, 0),
        (77, 77),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 77)), 77),
        (types.SimpleNamespace(cuda_stream=77, device_index=1), 77),
        (WithStream(), 77),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 77), device_id=-1), 77),
    ],
)
def test_stream_of_every_kind(cuda, stream, pointer):
    with streams.launch_on([array(device=1)], stream) as got:
        assert got == pointer


@pytest.mark.parametrize(
    "stream, error, message",
    [
        (-1, ValueError, "^stream: expected a pointer, got -0x1"),
        (2**63, ValueError, "^stream: expected a pointer, got 0x8000000000000000"),
        (
            types.SimpleNamespace(__cuda_stream__=lambda: (0, -1)),
            ValueError,
            "^stream: expected a pointer, got -0x1",
        ),
        (True, TypeError, "^stream: expected a pointer or an object with .*, got bool"),
        ("default", TypeError, "^stream: expected a pointer or an object with .*, got str"),
        (WithStream, TypeError, "^stream: expected a pointer .*, got the class WithStream"),
        (
            types.SimpleNamespace(__cuda_stream__=lambda: None),
            TypeError,
            "^stream: expected a pointer or an object with .*, got SimpleNamespace",
        ),
        (
            types.SimpleNamespace(cuda_stream=None),
            TypeError,
            "^stream: expected a pointer or an object with .*, got SimpleNamespace",
        ),
        (
            types.SimpleNamespace(ptr=0x7F00),
            TypeError,
            "^stream: expected a pointer or an object with .*, got SimpleNamespace",
        ),
        (
            types.SimpleNamespace(cuda_stream=77, device_index=0),
            ValueError,
            "^stream: expected a stream of cuda:1, got one of cuda:0",
        ),
    ],
)
def test_stream_refused(cuda, stream, error, message):
    with pytest.raises(error, match=message), streams.launch_on([array(device=1)], stream):
        pass


@pytest.mark.parametrize("current, given, told", [(0, None, 1), (22, None, 22), (22, 33, 33)])
def test_dlpack_producer_is_told_the_stream_on_its_device(cuda, current, given, told):
    cuda.cupy_stream = current
    seen = []

    class OnGpu:
        def __dlpack_device__(self):
            return (2, 1)

        def __dlpack__(self, *, stream, max_version):
            seen.append((stream, cuda.device))
            capsule = np.zeros(3, np.float32).__dlpack__(max_version=max_version)
            tensor = header(capsule).tensor
            tensor.device_type, tensor.device_id = self.__dlpack_device__()
            return capsule

    assert arrays.view("q", OnGpu(), given).device == 1
    assert seen == [(told, 1)]
    assert cuda.device == 0


def test_new_memory_is_ordered_before_a_stream_given(cuda, fake_torch):
    fake_torch.stream = 11
    fake_torch.float32 = None
    fake_torch.empty = lambda shape, dtype, device: (shape, device)
    tensor = types.SimpleNamespace(device="cuda:1")
    source = array(library="torch", owner=tensor, device=1)
    assert arrays.empty_like(source) == ((2, 3), "cuda:1")
    assert cuda.calls == []
    arrays.empty_like(source, 33)
    assert cuda.calls == [("wait", 33, 11)]
