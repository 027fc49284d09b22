"""`cukda.fla`: what it computes, what it refuses, and how it sits in fla's registry.

On the CPU and without fla, for whose registry a stub stands in; test_gpu_fla.py has the real one.
"""

import inspect
import os
import subprocess
import sys
import types

import hardware
import inputs
import numpy as np
import pytest

import cukda
from cukda import kda

torch = pytest.importorskip("torch")
from cukda import fla  # noqa: E402

H, D = 3, 128
# Of fla-core 0.6.0, in fla/ops/kda/chunk.py.
SIGNATURE = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), inspect.Parameter.empty),
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
}
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def tensor(array):
    if array.dtype == inputs.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def make(batch=None, gate="rand"):
    """A call of cukda.fwd, as torch tensors on the CPU."""
    case = inputs.make([20, 0, 37] if batch is None else [29], H, gate, seed=3, batch=batch)
    return {n: tensor(x) if isinstance(x, np.ndarray) else x for n, x in case.items()}


def transposed(state):
    return state.transpose(-1, -2).contiguous()


def asked(case, v_first=True, **options):
    """The same call of chunk_kda."""
    call = case | dict.fromkeys(FLAGS, True) | {"safe_gate": True, "output_final_state": True}
    if not v_first and case["initial_state"] is not None:
        call["initial_state"] = transposed(case["initial_state"])
    return call | {"state_v_first": v_first} | options


def want(case):
    """(out, final_state) of cukda.fwd, out zero where it is not written."""
    num_states = len(case["q"]) if case["cu_seqlens"] is None else len(case["cu_seqlens"]) - 1
    out, final_state = torch.zeros_like(case["v"]), torch.empty(num_states, H, D, D)
    cukda.fwd(**case, out=out, final_state=final_state)
    return out, final_state


def same(got, wanted):
    return all(hardware.same_bits(a, b) for a, b in zip(got, wanted, strict=True))


def at_odd_address(x):
    """The same values, one element past where they could start."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    memory.copy_(x)
    assert memory.data_ptr() % 16
    return memory


def test_the_signature_is_flas():
    parameters = dict(inspect.signature(fla.chunk_kda).parameters)
    assert parameters.pop("kwargs").kind is inspect.Parameter.VAR_KEYWORD
    assert {name: p.default for name, p in parameters.items()} == SIGNATURE
    assert list(parameters) == list(SIGNATURE)
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_importing_brings_in_no_fla():
    code = (
        "import sys, cukda; assert 'cukda.fla' not in sys.modules\n"
        "import cukda.fla; assert 'fla' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("batch", [None, 2])
def test_the_bits_are_those_of_fwd(batch, v_first, initial, gate):
    case = make(batch, gate)
    if not initial:
        case["initial_state"] = None
    out, final_state = fla.chunk_kda(**asked(case, v_first))
    assert final_state.dtype == torch.float32 and final_state.is_contiguous()
    assert same((out, final_state if v_first else transposed(final_state)), want(case))
    out, final_state = fla.chunk_kda(**asked(case, v_first, output_final_state=False))
    assert final_state is None and same([out], want(case)[:1])


def test_positional_arguments_in_flas_order():
    case = make()
    call = asked(case, lower_bound=-2.0, scale=0.3)
    arguments = [call.get(name, default) for name, default in SIGNATURE.items()]
    got = fla.chunk_kda(*arguments, A_log=case["A_log"], dt_bias=case["dt_bias"])
    assert same(got, want(case | {"lower_bound": -2.0, "scale": 0.3}))


def test_rows_of_no_sequence_are_zero():
    case = make()
    case["cu_seqlens"] = torch.tensor([2, 20, 20, 50])
    out, final_state = fla.chunk_kda(**asked(case))
    assert same((out, final_state), want(case))
    assert not out[0, :2].any() and not out[0, 50:].any() and out[0, 2:50].any()


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_of_other_kinds(name):
    """None, half precision, and other shapes of as many elements."""
    case = make()
    for dtype in torch.bfloat16, torch.float16:
        half = case[name].to(dtype)
        assert same(fla.chunk_kda(**asked(case | {name: half})), want(case | {name: half.float()}))
    for other in case[name].reshape(-1), case[name].view(1, 1, *case[name].shape, 1):
        assert same(fla.chunk_kda(**asked(case | {name: other})), want(case))
    call = asked(case)
    del call[name]
    assert same(fla.chunk_kda(**call), want(case | {name: None}))


@pytest.mark.parametrize("v_first", [True, False])
def test_inputs_anywhere_in_memory(v_first):
    case = make()
    call = asked(case, v_first)
    names = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
    wide = {name: torch.stack([call[name]] * 2, -1)[..., 0] for name in names}
    assert not any(x.is_contiguous() for x in wide.values())
    odd = {name: at_odd_address(call[name]) for name in names}
    for moved in wide, odd:
        before = {name: x.clone() for name, x in moved.items()}
        out, final_state = fla.chunk_kda(**call | moved)
        assert same((out, final_state if v_first else transposed(final_state)), want(case))
        assert same(moved.values(), before.values())


@pytest.mark.parametrize(
    "options",
    [
        {"safe_gate": False},
        {"disable_recompute": True},
        {"cu_seqlens_cpu": torch.tensor([0, 20, 20, 57])},
        {"cu_seqlens": torch.tensor([0, 20, 20, 57])},
        {"use_graph": True},
        {"use_graph": True, "max_num_seqs": 3},
        {"max_num_seqs": 9},
        {"chunk_size": 32},
        {"scale": None},
    ],
    ids=str,
)
def test_options_that_change_no_result(options):
    case = make()
    with torch.inference_mode():
        assert fla._verify(**asked(case, **options)) == (True, None)
        assert same(fla.chunk_kda(**asked(case, **options)), want(case))


@pytest.mark.parametrize("batch", [None, 2])
def test_no_lower_bound_but_zero(batch):
    case = make(batch) | {"lower_bound": 0}
    assert same(fla.chunk_kda(**asked(case, safe_gate=False)), want(case))


# The argument that is wrong, the error, and the wrong value, or what makes it of the right one.
REFUSED = [
    ("q", TypeError, None),
    ("q", TypeError, lambda x: x.float()),
    ("q", TypeError, lambda x: x.to(torch.float16)),
    ("q", TypeError, lambda x: x.float().numpy()),
    ("q", ValueError, lambda x: x[0]),
    ("q", ValueError, lambda x: x[..., :64]),
    ("q", ValueError, lambda x: x.to("meta")),
    ("k", TypeError, lambda x: x.float()),
    ("k", ValueError, lambda x: x[:, :-1]),
    ("v", TypeError, lambda x: x.float()),
    ("v", ValueError, lambda x: torch.cat([x, x], 2)),
    ("v", ValueError, lambda x: torch.cat([x, x], 3)),
    ("g", TypeError, lambda x: x.float()),
    ("g", ValueError, lambda x: x[..., :1]),
    ("beta", TypeError, lambda x: x.float()),
    ("beta", ValueError, lambda x: x[..., None]),
    ("scale", TypeError, "1"),
    ("scale", ValueError, float("nan")),
    ("initial_state", TypeError, lambda x: x.to(torch.bfloat16)),
    ("initial_state", ValueError, lambda x: x[:1]),
    *((name, NotImplementedError, False) for name in FLAGS),
    ("allow_neg_eigval", NotImplementedError, True),
    ("return_intermediate_states", NotImplementedError, True),
    ("cp_context", NotImplementedError, object()),
    ("lower_bound", NotImplementedError, None),
    ("lower_bound", ValueError, -5.5),
    ("lower_bound", ValueError, 0.5),
    ("lower_bound", ValueError, 0),
    ("cu_seqlens", TypeError, [0, 57]),
    ("cu_seqlens", TypeError, lambda x: x.float()),
    ("cu_seqlens", ValueError, lambda x: x[:0]),
    ("cu_seqlens", ValueError, lambda x: x.to("meta")),
    ("A_log", TypeError, lambda x: x.double()),
    ("A_log", ValueError, lambda x: x[:1]),
    ("dt_bias", TypeError, 0.5),
    ("dt_bias", ValueError, lambda x: x[:1]),
    ("chunk_size", ValueError, 128),
    ("transpose_state_layout", TypeError, True),
    ("A_Log", TypeError, 1.0),
]
# Wrong only beside another argument: the one to be named, what is changed, the batch.
REFUSED_TOGETHER = [
    ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 1, 2])}, 2),
    ("max_num_seqs", {"use_graph": True, "max_num_seqs": 4}, None),
    ("initial_state", {"cu_seqlens": torch.tensor([0, 9])}, None),
]


def refused(call, name, error):
    """By chunk_kda with an error that names the argument, and by the verifier with its words."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        fla.chunk_kda(**call)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{name}: expected ") and ", got " in str(caught.value)
    with torch.inference_mode():
        assert fla._verify(**call) == (False, f"cukda: {caught.value}")


@pytest.mark.parametrize("name, error, wrong", REFUSED)
def test_refusals_name_the_argument(name, error, wrong):
    call = asked(make())
    refused(call | {name: wrong(call[name]) if callable(wrong) else wrong}, name, error)


@pytest.mark.parametrize("name, changes, batch", REFUSED_TOGETHER)
def test_refusals_of_what_does_not_go_together(name, changes, batch):
    refused(asked(make(batch), **changes), name, ValueError)


@pytest.mark.parametrize("name", ["q", "beta", "initial_state", "A_log", "dt_bias"])
def test_gradients(name):
    case = make()
    wanted = want(case)
    case[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: expected .* gradient"):
        fla.chunk_kda(**asked(case))
    assert not fla._verify(**asked(case))[0]
    for off in torch.no_grad, torch.inference_mode:
        with off():
            assert fla._verify(**asked(case)) == (True, None)
            assert same(fla.chunk_kda(**asked(case)), wanted)


@pytest.mark.parametrize("mistake", [{}, {"scale": 1.0}])
def test_the_verifier_of_arguments_that_do_not_fit(mistake):
    """Too few, or one given twice: for fla's own function to say."""
    with torch.inference_mode():
        accepted, why = fla._verify(*[None] * (6 if mistake else 1), **mistake)
    assert not accepted and "argument" in why


class Backend:
    """What cukda uses of fla's BaseBackend."""

    priority, env_var = 5, None

    def is_enabled(self):
        return os.environ.get(self.env_var, "1" if self.default_enable else "0") != "0"


class Registry:
    """fla.backends in short: backends by type, tried by priority; else the function itself."""

    BaseBackend = Backend

    def __init__(self):
        self.backends = {}
        # Who computed each call.
        self.used = []

    def register(self, entry_point):
        assert entry_point == self.chunk_kda

        def decorate(backend):
            self.backends[backend.backend_type] = backend()
            return backend

        return decorate

    def chunk_kda(self, *args, **kwargs):
        for backend in sorted(self.backends.values(), key=lambda backend: backend.priority):
            if backend.is_enabled() and backend.chunk_kda_verifier(*args, **kwargs)[0]:
                self.used.append(backend.backend_type)
                return backend.chunk_kda(*args, **kwargs)
        self.used.append("fla")
        return None


@pytest.fixture
def registry(monkeypatch):
    """A stub of fla, of the modules that register() imports."""
    found = Registry()
    modules = {
        "fla": types.SimpleNamespace(__path__=[]),
        "fla.backends": found,
        "fla.ops": types.SimpleNamespace(__path__=[]),
        "fla.ops.kda": types.SimpleNamespace(chunk_kda=found.chunk_kda),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("FLA_CUKDA", raising=False)
    return found


def test_registered_it_computes_what_it_serves(registry, monkeypatch):
    fla.register()
    fla.register()
    assert list(registry.backends) == ["cukda"]
    case = make()
    call = asked(case)
    tokens = [call.pop(name) for name in inputs.TOKENS]
    with torch.inference_mode():
        assert same(registry.chunk_kda(*tokens, **call), want(case))
        registry.chunk_kda(*tokens, **call | {"cp_context": object()})
        monkeypatch.setenv("FLA_CUKDA", "0")
        registry.chunk_kda(*tokens, **call)
        monkeypatch.setenv("FLA_CUKDA", "1")
        registry.chunk_kda(*tokens, **call)
    registry.chunk_kda(*tokens, **call)
    assert registry.used == ["cukda", "fla", "fla", "cukda", "fla"]


def test_registered_it_comes_before_flash_kda(registry):
    class FlashKDA(Backend):
        backend_type, priority, env_var, default_enable = "flash_kda", 3, "FLA_FLASH_KDA", True
        chunk_kda_verifier = staticmethod(lambda *args, **kwargs: (True, None))
        chunk_kda = staticmethod(lambda *args, **kwargs: None)

    registry.register(registry.chunk_kda)(FlashKDA)
    fla.register()
    with torch.inference_mode():
        registry.chunk_kda(**asked(make()))
        registry.chunk_kda(**asked(make(), lower_bound=None))
    assert registry.used == ["cukda", "flash_kda"]


def test_what_is_registered(registry):
    fla.register()
    backend = registry.backends["cukda"]
    assert isinstance(backend, Backend)
    assert (backend.package_name, backend.env_var) == ("cukda", "FLA_CUKDA")
    assert backend.default_enable is True and backend.priority < 3


@pytest.mark.parametrize("missing", ["fla.backends", "fla.ops.kda"])
def test_without_fla(registry, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match="pip install fla-core"):
        fla.register()


def test_a_call_goes_through_fwd(monkeypatch):
    """What the GPU tests watch to see who computes."""
    seen = []
    monkeypatch.setattr(kda, "fwd", lambda *args: seen.append(len(args)))
    assert fla.chunk_kda(**asked(make(), output_final_state=False)) == (None, None)
    assert seen == [13]
