"""`cukda.fla` beside flash-linear-attention's own kernels, and in its registry."""

import hardware
import inputs
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.gpu

# Greatest ‖got − want‖ / ‖want‖ of out and of final_state, over few rows; of fla, whose tiles and
# roundings are its own, only to show that both compute the same thing.
TOLERANCE = (1e-2, 1e-2)
FLA_TOLERANCE = (3e-2, 3e-2)
# fla's kernels take long to compile: few heads, and one length.
H, T = 2, 130


@pytest.fixture
def theirs(torch, monkeypatch):
    """fla.ops.kda, computing by its own kernels."""
    module = pytest.importorskip("fla.ops.kda")
    monkeypatch.setenv("FLA_CUKDA", "0")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    return module


def make(packed, gate="rand"):
    """A case of T rows. Packed, with an empty sequence, and the last rows of none."""
    if not packed:
        return inputs.make([T], H, gate, 60, batch=1)
    case = inputs.make([65, 0, 45, 20], H, gate, 60)
    cut = {"cu_seqlens": case["cu_seqlens"][:-1].astype(np.int64)}
    return case | cut | {"initial_state": case["initial_state"][:-1].copy()}


def asked(case, v_first):
    """The call of chunk_kda, with torch tensors on the GPU."""
    call = hardware.torch_case(case)
    if not v_first:
        call["initial_state"] = call["initial_state"].transpose(-1, -2).contiguous()
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    options = dict.fromkeys((*flags, "safe_gate", "output_final_state"), True)
    return call | options | {"state_v_first": v_first}


def on_host(result, v_first):
    """(out, final_state) as NumPy arrays, the state [V, K]."""
    out, final_state = map(hardware.host, result)
    return out, final_state if v_first else np.ascontiguousarray(final_state.swapaxes(-1, -2))


def same(got, want):
    return all(hardware.same_bits(a, b) for a, b in zip(got, want, strict=True))


def assert_close(got, want, tolerance):
    errors = [oracle.error(a, b) for a, b in zip(got, want, strict=True)]
    assert errors[0] <= tolerance[0] and errors[1] <= tolerance[1], errors


@pytest.mark.parametrize("gate", ["rand", "slow"])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_against_fla_and_the_recurrence(packed, v_first, gate, torch, theirs):
    from cukda import fla

    case = make(packed, gate)
    call = asked(case, v_first)
    with torch.inference_mode():
        ours = on_host(fla.chunk_kda(**call), v_first)
        flas = on_host(theirs.chunk_kda(**call), v_first)
    want = [hardware.host(x) for x in hardware.want(case)]
    assert_close(ours, want, TOLERANCE)
    assert_close(flas, want, FLA_TOLERANCE)
    assert_close(ours, [x.astype(np.float64) for x in flas], FLA_TOLERANCE)
    if packed:
        # Rows of no sequence.
        end = case["cu_seqlens"][-1]
        assert end < T and not ours[0][:, end:].any() and not flas[0][:, end:].any()


@pytest.mark.parametrize("safe_gate", [True, False])
def test_the_bound_is_kept_whatever_safe_gate_says(safe_gate, torch, theirs):
    """In fla too, lower_bound alone decides which gate it is; and A_log may be left out."""
    from cukda import fla

    case = make(False) | {"A_log": None, "lower_bound": -2.5}
    call = asked(case, True) | {"safe_gate": safe_gate}
    with torch.inference_mode():
        ours = on_host(fla.chunk_kda(**call), True)
        flas = on_host(theirs.chunk_kda(**call), True)
    want = [hardware.host(x) for x in hardware.want(case)]
    assert_close(ours, want, TOLERANCE)
    assert_close(flas, want, FLA_TOLERANCE)


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_the_bits_are_those_of_fwd(packed, v_first, torch):
    from cukda import fla

    case = make(packed)
    out, final_state = (hardware.host(x) for x in hardware.run(case))
    if packed:
        out[:, case["cu_seqlens"][-1] :] = 0
    assert same(on_host(fla.chunk_kda(**asked(case, v_first)), v_first), (out, final_state))


@pytest.mark.parametrize("v_first", [True, False])
def test_registered(v_first, torch, theirs, monkeypatch):
    from cukda import fla, kda

    call = asked(make(True), v_first)
    want = on_host(fla.chunk_kda(**call), v_first)
    fla.register()
    fla.register()
    calls, fwd = [], kda.fwd

    def watched(*arguments, **keywords):
        calls.append(arguments)
        return fwd(*arguments, **keywords)

    monkeypatch.setattr(kda, "fwd", watched)
    monkeypatch.delenv("FLA_CUKDA")
    with torch.inference_mode():
        assert same(on_host(theirs.chunk_kda(**call), v_first), want)
    assert len(calls) == 1

    # fla's own kernels: gradients are enabled, cukda does not serve the call, it is turned off.
    with torch.enable_grad():
        theirs.chunk_kda(**call)
    with torch.inference_mode():
        theirs.chunk_kda(**call | {"g": call["g"].float()})
        monkeypatch.setenv("FLA_CUKDA", "0")
        got = on_host(theirs.chunk_kda(**call), v_first)
    assert len(calls) == 1
    assert_close(got, [x.astype(np.float64) for x in want], FLA_TOLERANCE)


@pytest.mark.parametrize("v_first", [True, False])
def test_in_a_graph(v_first, torch):
    """A replay follows cu_seqlens and the states, which are copied where they are [K, V]."""
    from cukda import fla

    call = asked(make(True), v_first) | {"use_graph": True, "max_num_seqs": 3}
    fla.chunk_kda(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fla.chunk_kda(**call)
    call["cu_seqlens"].copy_(torch.tensor([0, 30, 100, 100]))
    call["initial_state"].mul_(-3)
    graph.replay()
    torch.cuda.synchronize()
    assert same(on_host(captured, v_first), on_host(fla.chunk_kda(**call), v_first))


def test_a_gpu_that_is_too_old_is_left_to_fla(torch, monkeypatch):
    from cukda import fla

    call = asked(make(False), True)
    with torch.inference_mode():
        assert fla._verify(**call) == (True, None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        why = "cukda: q: expected a GPU of compute capability 8.0 or newer, got 7.5"
        assert fla._verify(**call) == (False, why)
