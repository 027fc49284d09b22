"""cukda.torch without a GPU: the bits of cukda's own functions, also compiled; the gradient."""

import subprocess
import sys
from pathlib import Path

import decoding
import inputs
import numpy as np
import pytest

import cukda

torch = pytest.importorskip("torch")

import cukda.torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("eager", "aot_eager")
# Greatest |got − want| of a gradient with weights up to 2. y is rounded, then y (1 − y), by half a
# last place of what is below 1 and 1/4: 2.5 · 2⁻¹² for float16, 2.5 · 2⁻⁹ for bfloat16.
GRADIENT_TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def tensors(case):
    """The same call with CPU tensors of their own memory."""

    def tensor(x):
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == inputs.BF16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())

    return {name: tensor(x) for name, x in case.items()}


def fwd_call(states="apart", cu_dtype=np.int32):
    """Arguments of fwd. states: none, apart, in place (one tensor), or views (two of one memory).
    cu_dtype: of cu_seqlens, or None for a batch.
    """
    case = inputs.make([40], 2, seed=1, batch=2) if cu_dtype is None else inputs.make([33, 0, 9], 2)
    if cu_dtype is not None:
        case["cu_seqlens"] = case["cu_seqlens"].astype(cu_dtype)
    call = tensors(case)
    initial = call["initial_state"]
    if states == "none":
        return call | {"initial_state": None}
    final = {"apart": torch.zeros_like(initial), "in place": initial, "views": initial[:]}
    return call | {"final_state": final[states]}


def step_call(with_indices=True):
    call = tensors(decoding.make(3, 2, 2))
    return call if with_indices else call | {"state_indices": None}


def same_bits(got, want):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    return got.dtype == want.dtype and torch.equal(got.view(integers), want.view(integers))


def assert_same(function, plain, make):
    """function does to one call's tensors what plain does to another's of the same values."""
    got_call, want_call = make(), make()
    got, want = function(**got_call), plain(**want_call)
    assert same_bits(got, want) and not got.requires_grad
    for name, x in want_call.items():
        if isinstance(x, torch.Tensor):
            assert same_bits(got_call[name], x), name


CALLS = {
    "fwd, no state": ("fwd", lambda: fwd_call("none")),
    "fwd, states apart": ("fwd", lambda: fwd_call("apart")),
    "fwd, state in place": ("fwd", lambda: fwd_call("in place")),
    "fwd, state in place by views": ("fwd", lambda: fwd_call("views")),
    "fwd, int64 bounds": ("fwd", lambda: fwd_call("in place", np.int64)),
    "fwd, a batch": ("fwd", lambda: fwd_call("in place", None)),
    "step, indices": ("step", step_call),
    "step, no indices": ("step", lambda: step_call(False)),
    "sigmoid": ("sigmoid", lambda: {"x": torch.linspace(-9, 9, 77)}),
    "sigmoid, bfloat16": ("sigmoid", lambda: {"x": torch.linspace(-9, 9, 78).bfloat16()}),
}


@pytest.fixture(params=CALLS)
def call(request):
    """(ours, cukda's own, a function that makes a call's arguments by name)."""
    name, make = CALLS[request.param]
    return getattr(cukda.torch, name), getattr(cukda, name), make


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def test_importing_cukda_leaves_torch_out():
    code = (
        "import sys, cukda; print('torch' in sys.modules); import cukda.torch; print(cukda.torch)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split()[0] == "False", done.stderr
    assert done.returncode == 0, done.stderr


def test_same_bits_as_cukda(call):
    assert_same(*call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_a_graph_break(call, backend):
    ours, plain, make = call
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    # Twice, since the first call compiles.
    for _ in range(2):
        assert_same(compiled, plain, make)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_between_other_operations(backend):
    """Tensors that the compiled code makes itself, a state among them."""

    def model(fwd, call):
        state = call["initial_state"] * 2
        out = fwd(**call | {"v": call["v"] + 1, "initial_state": state, "final_state": state})
        return out * 2, state + 1

    call = fwd_call()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = compiled(cukda.torch.fwd, call), model(cukda.fwd, call)
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_shapes_and_numbers_after_the_first(backend):
    compiled = torch.compile(cukda.torch.fwd, fullgraph=True, backend=backend)
    for num_tokens, scale in (5, 0.1), (17, 0.2), (33, 0.3):
        case = inputs.make([num_tokens], 2, batch=1) | {"scale": scale}
        assert_same(compiled, cukda.fwd, lambda case=case: tensors(case))


@pytest.mark.parametrize("name", ["fwd", "step"])
def test_out_is_the_one_given(name):
    call = {"fwd": fwd_call, "step": step_call}[name]()
    out = torch.full_like(call["v"], float("nan"))
    version = out._version
    assert getattr(cukda.torch, name)(**call, out=out) is out
    assert not out.isnan().any() and out._version > version


@pytest.mark.parametrize(("function", "written"), [("fwd", "final_state"), ("step", "state")])
def test_backward_refuses_what_was_written_since(function, written):
    call = {"fwd": fwd_call, "step": step_call}[function]()
    factor = torch.ones((), requires_grad=True)
    loss = (call[written] * factor).sum()
    getattr(cukda.torch, function)(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("name", ["fwd", "step"])
def test_inputs_that_require_a_gradient(name, backend):
    """Beside a result that has one."""
    make = {"fwd": lambda: fwd_call("in place"), "step": step_call}[name]
    call, want_call = make(), make()
    for given in call.values():
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            given.requires_grad_()

    def function(call):
        return getattr(cukda.torch, name)(**call), (call["v"] * 3).sum()

    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend)
    out, loss = function(call)
    assert same_bits(out, getattr(cukda, name)(**want_call)) and not out.requires_grad
    state = "initial_state" if name == "fwd" else "state"
    assert same_bits(call[state].detach(), want_call[state])
    loss.backward()
    assert (call["v"].grad == 3).all() and call["q"].grad is None


class Layer(torch.nn.Module):
    """States in place, and a sigmoid of what comes out."""

    def forward(self, q, k, v, g, beta, state, cu_seqlens):
        out = cukda.torch.fwd(
            q, k, v, g, beta, initial_state=state, final_state=state, cu_seqlens=cu_seqlens
        )
        return cukda.torch.sigmoid(out)


@pytest.mark.parametrize("decomposed", [False, True])
def test_export(decomposed):
    def arguments():
        call = fwd_call()
        return tuple(call[n] for n in (*inputs.TOKENS, "initial_state", "cu_seqlens"))

    program = torch.export.export(Layer(), arguments())
    if decomposed:
        program = program.run_decompositions({})
    got, want = arguments(), arguments()
    out = program.module()(*got)
    *tokens, state, cu_seqlens = want
    plain = cukda.fwd(*tokens, initial_state=state, final_state=state, cu_seqlens=cu_seqlens)
    assert same_bits(out, cukda.sigmoid(plain))
    assert same_bits(got[-2], state)


def operator_calls():
    for states in "none", "apart", "in place":
        call = {"final_state": None} | fwd_call(states)
        in_place = states == "in place"
        names = ("A_log", "dt_bias", "lower_bound", "initial_state", "final_state", "cu_seqlens")
        rest = [call[n] for n in names]
        rest[3] = None if in_place else rest[3]
        tokens = [call[n] for n in inputs.TOKENS]
        arguments = (*tokens, call["scale"], torch.empty_like(call["v"]), *rest, in_place)
        yield f"kda_fwd-{states}", torch.ops.cukda.kda_fwd.default, arguments
    call = step_call()
    tokens, out = [call[n] for n in inputs.TOKENS], torch.empty_like(call["v"])
    arguments = (*tokens, call["state"], call["state_indices"], None, out, None, None, -5.0)
    yield "step", torch.ops.cukda.step.default, arguments
    for dtype in torch.float32, torch.bfloat16, torch.float16:
        x = torch.linspace(-5, 5, 12, dtype=dtype).reshape(3, 4).requires_grad_()
        yield f"sigmoid-{dtype}", torch.ops.cukda.sigmoid.default, (x,)


OPERATOR_CALLS = {name: (operator, arguments) for name, operator, arguments in operator_calls()}


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_torch_finds_the_operator_sound(name):
    torch.library.opcheck(*OPERATOR_CALLS[name])


@pytest.mark.parametrize("name", ["fwd", "step"])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_one_meta_tensor_among_others_is_refused(name, backend):
    """As a weight that was never loaded is; what is written stays as it was."""
    call = {"fwd": fwd_call, "step": step_call}[name]()
    call["A_log"] = call["A_log"].to("meta")
    state = call["final_state" if name == "fwd" else "state"]
    before = state.clone()
    function = getattr(cukda.torch, name)
    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="A_log: expected device cpu, got meta"):
        function(**call)
    assert same_bits(state, before)


def test_meta_tensors_compute_nothing():
    call = {n: x.to("meta") if hasattr(x, "to") else x for n, x in fwd_call("in place").items()}
    out = cukda.torch.fwd(**call)
    assert out.is_meta and out.shape == call["v"].shape and out.dtype == torch.bfloat16


WRONG = [
    ("fwd", "lower_bound", lambda x: -6.0, ValueError, r"expected a number in \[-5, 0\], got -6"),
    (
        "fwd",
        "k",
        lambda x: x.mT.contiguous().mT,
        ValueError,
        "expected a contiguous last axis",
    ),
    ("step", "g", lambda x: x.float(), TypeError, "expected dtype bfloat16, got float32"),
    ("sigmoid", "x", lambda x: x.double(), TypeError, "expected dtype float32 or .*, got float64"),
]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(("function", "name", "wrong", "error", "message"), WRONG)
def test_errors_are_those_of_cukda(function, name, wrong, error, message, backend):
    ours = getattr(cukda.torch, function)
    if backend is not None:
        ours = torch.compile(ours, fullgraph=True, backend=backend)
    call = {"fwd": fwd_call, "step": step_call, "sigmoid": lambda: {"x": torch.ones(3)}}[function]()
    with pytest.raises(error, match=f"^{name}: {message}"):
        ours(**call | {name: wrong(call[name])})
    # torch's "eager" backend does not leave torch.no_grad where the code inside raises.
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCE)
def test_gradient_of_the_sigmoid(dtype, backend):
    """Against float64, at points that the dtype holds. tanh is exact here, but for rounding."""
    x = torch.linspace(-8, 8, 501).to(getattr(torch, dtype)).requires_grad_()
    weights = torch.linspace(-2, 2, 501).to(x.dtype)
    sigmoid = cukda.torch.sigmoid
    if backend is not None:
        sigmoid = torch.compile(sigmoid, fullgraph=True, backend=backend)
    sigmoid(x).backward(weights)
    y = torch.sigmoid(x.detach().double())
    want = weights.double() * y * (1 - y)
    assert x.grad.dtype == x.dtype
    assert (x.grad.double() - want).abs().max() <= GRADIENT_TOLERANCE[dtype]


def test_gradient_is_of_the_rounded_result():
    x = torch.linspace(-8, 8, 501).bfloat16().requires_grad_()
    y = cukda.torch.sigmoid(x)
    y.sum().backward()
    rounded = y.detach().float()
    assert same_bits(x.grad, (rounded * (1 - rounded)).bfloat16())


def test_gradients_of_the_sigmoid_by_differences():
    """Of a step h = 1e-2 the differences are off by h²/6 · max|σ'''| = 2e-6, and by the rounding of
    y: two halves of 2⁻²⁴ over 2 h, 3e-6, and two or three times that of tanh's last bits.
    """
    x = torch.linspace(-4, 4, 9).requires_grad_()
    options = {"eps": 1e-2, "atol": 2e-5, "rtol": 0}
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(cukda.torch.sigmoid, x, **options)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradgradcheck(cukda.torch.sigmoid, x, **options)
