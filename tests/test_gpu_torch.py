"""cukda.torch on a GPU: the bits of cukda's own functions, compiled too; streams, CUDA graphs."""

import decoding
import hardware
import inputs
import pytest

pytestmark = pytest.mark.gpu

SEGMENT = 64
# Greatest |got − want| of y (1 − y) against float64. The instruction is off by 2.5e-4 in y, and
# bfloat16 by 2⁻⁹, and by a quarter of it once more in the result.
GRADIENT_TOLERANCE = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 3e-3}


@pytest.fixture(params=["planned", "joined"])
def segments(request, cut_every):
    """Calls as they are planned; and of launches that need memory, states in place a copy."""
    if request.param == "joined":
        cut_every(SEGMENT, 1)


@pytest.fixture(params=["as it is", "aot_eager", "inductor"])
def prepare(request, torch):
    """A function that gives a function as it is, or compiled without a graph break."""
    torch.compiler.reset()
    if request.param == "as it is":
        return lambda function: function
    if request.param == "inductor":
        try:
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device="cuda"))
        except Exception as error:
            pytest.skip(f"Triton does not compile here ({type(error).__name__})")
    return lambda function: torch.compile(function, fullgraph=True, backend=request.param)


def fwd_case(seed=120):
    """Heads that forget, and heads that do not: with cuts and with joins."""
    return inputs.make((300, 0, 260, 64), 2, "half", seed)


def fwd_call(case, states):
    """Arguments of fwd as CUDA tensors. states: apart, in place or none."""
    call = hardware.torch_case(case)
    if states == "none":
        return call | {"initial_state": None}
    if states == "in place":
        return call | {"final_state": call["initial_state"]}
    return call | {"final_state": hardware.torch_nans(hardware.state_shape(case), "float32")}


CALLS = {
    "fwd, no state": ("fwd", lambda: fwd_call(fwd_case(), "none")),
    "fwd, states apart": ("fwd", lambda: fwd_call(fwd_case(), "apart")),
    "fwd, state in place": ("fwd", lambda: fwd_call(fwd_case(), "in place")),
    "step": ("step", lambda: hardware.torch_case(decoding.make(5, 2, 3))),
    "sigmoid": ("sigmoid", lambda: {"x": hardware.torch_case(fwd_case())["beta"]}),
}


def assert_same_tensors(got_call, want_call):
    for name, x in want_call.items():
        if hasattr(x, "shape"):
            assert hardware.same_bits(got_call[name], x), name


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("name", CALLS)
def test_same_bits_as_cukda(name, prepare):
    import cukda.torch

    function, make = CALLS[name]
    ours = prepare(getattr(cukda.torch, function))
    # Twice, since the first call compiles.
    for _ in range(2):
        got_call, want_call = make(), make()
        got, want = ours(**got_call), getattr(cukda, function)(**want_call)
        assert got.is_cuda and hardware.same_bits(got, want)
        assert_same_tensors(got_call, want_call)


def test_between_other_operations(prepare):
    """On tensors that the compiled code makes itself, a state among them."""
    import cukda.torch

    def model(fwd, call):
        state = call["initial_state"] * 2
        out = fwd(**call | {"v": call["v"] * 2, "initial_state": state, "final_state": state})
        return out * 2, state * 2

    call = fwd_call(fwd_case(), "apart")
    got, want = prepare(model)(cukda.torch.fwd, call), model(cukda.fwd, call)
    assert all(map(hardware.same_bits, got, want))


@pytest.mark.parametrize("name", ["fwd, state in place", "step"])
def test_inputs_that_require_a_gradient(name, prepare):
    import cukda.torch

    function, make = CALLS[name]
    call, want_call = make(), make()
    for tensor in call.values():
        if hasattr(tensor, "is_floating_point") and tensor.is_floating_point():
            tensor.requires_grad_()
    out = prepare(getattr(cukda.torch, function))(**call)
    assert not out.requires_grad
    assert hardware.same_bits(out, getattr(cukda, function)(**want_call))
    assert_same_tensors(call, want_call)


@pytest.mark.usefixtures("segments")
def test_side_stream(prepare, torch):
    """Inputs come late on the current stream, the results are read on it, and nothing waits."""
    import cukda.torch

    case = fwd_case()
    want_out, want_state = map(hardware.host, hardware.run(case))
    source = fwd_call(case, "in place")
    ours = prepare(cukda.torch.fwd)
    late = {n: torch.zeros_like(x) if hasattr(x, "shape") else x for n, x in source.items()}
    late["final_state"] = late["initial_state"]
    out = torch.zeros_like(source["v"])
    copies = torch.zeros_like(out), torch.zeros_like(source["initial_state"])
    # Compiles whatever the call below needs.
    ours(**late, out=out)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hardware.spin(stream.cuda_stream)
        for name, x in source.items():
            if hasattr(x, "shape"):
                late[name].copy_(x)
        ours(**late, out=out)
        was_done = stream.query()
        copies[0].copy_(out)
        copies[1].copy_(late["final_state"])
        for x in (out, *late.values()):
            if hasattr(x, "fill_"):
                x.zero_()
    torch.cuda.synchronize()
    assert not was_done, "the call waited for the GPU"
    assert hardware.same_bits(copies[0], want_out) and hardware.same_bits(copies[1], want_state)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("name", ["fwd, states apart", "fwd, state in place", "step", "sigmoid"])
def test_cuda_graph(name, prepare, torch):
    """Replays go on from the state that the one before has left, and leave out where it was."""
    import cukda.torch

    function, make = CALLS[name]
    call, want_call = make(), make()
    ours, plain = prepare(getattr(cukda.torch, function)), getattr(cukda, function)
    # Compiles, and makes the pool that the calls take memory from.
    ours(**make())
    ours(**call)
    plain(**want_call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(**call)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert hardware.same_bits(out, plain(**want_call))
        assert_same_tensors(call, want_call)


@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCE)
def test_gradient_of_the_sigmoid(dtype, prepare, torch):
    import cukda.torch

    x = torch.linspace(-12, 12, 4099, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    prepare(cukda.torch.sigmoid)(x).sum().backward()
    y = torch.sigmoid(x.detach().double())
    assert x.grad.dtype == x.dtype
    assert (x.grad.double() - y * (1 - y)).abs().max() <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["fwd", "step", "sigmoid"])
def test_torch_finds_the_operator_sound(name, torch):
    import cukda.torch  # noqa: F401

    if name == "sigmoid":
        x = torch.linspace(-5, 5, 12, device="cuda").requires_grad_()
        torch.library.opcheck(torch.ops.cukda.sigmoid.default, (x,))
        return
    if name == "fwd":
        call = fwd_call(fwd_case(), "in place")
        states = (None, call["final_state"], call["cu_seqlens"], True)
        arguments = (*_tokens(call), 0.1, torch.zeros_like(call["v"]), None, None, -5.0, *states)
        torch.library.opcheck(torch.ops.cukda.kda_fwd.default, arguments)
        return
    call = hardware.torch_case(decoding.make(5, 2, 3))
    states, out = (call["state"], call["state_indices"]), torch.zeros_like(call["v"])
    arguments = (*_tokens(call), *states, 0.1, out, None, None, -5.0)
    torch.library.opcheck(torch.ops.cukda.step.default, arguments)


def _tokens(call):
    return [call[name] for name in inputs.TOKENS]
