"""Signatures of torch tensors: equal where only values and places differ."""

import contextlib

import hardware
import inputs
import numpy as np
import pytest

import cukda
from cukda import signature

torch = pytest.importorskip("torch")

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class OnGpu(torch.Tensor):
    """On the CPU, of which it says that it is a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self):
        return 0


class OnAnotherGpu(OnGpu):
    def get_device(self):
        return 1


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch):
    kinds = {torch.Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter, OnGpu, OnAnotherGpu}
    monkeypatch.setattr(signature, "torch_types", kinds)
    if request.param == "cpu":
        # Memory of a CPU may lie low.
        monkeypatch.setattr(signature, "MOST_OFFSET", 4096)
    return request.param


def seen_as(tensor, device):
    return tensor.to("cuda") if device == "cuda" else tensor.as_subclass(OnGpu)


def tensors(device, heads=4):
    """As a call of fwd has them."""
    rows = (1, 16, heads, 128)
    shapes = [(rows, torch.bfloat16)] * 4 + [(rows[:-1], torch.bfloat16), (rows, torch.bfloat16)]
    shapes += [((heads,), torch.float32), ((heads, 128), torch.float32)]
    shapes += [((2, heads, 128, 128), torch.float32)] * 2 + [((3,), torch.int32)]
    return [seen_as(torch.zeros(shape, dtype=dtype), device) for shape, dtype in shapes]


def test_tensors_that_are_alike_have_one_key(device):
    start = tensors(device)
    key, pointers = signature.signature(start)
    assert pointers == [x.data_ptr() for x in start]
    x = start[0]
    same = [
        x.clone(),
        x.clone().requires_grad_(),
        # Where an axis has length 1, any stride is right.
        x.as_strided(x.shape, (2**20, *x.stride()[1:])),
        torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)[8:].view(x.shape),
    ]
    for other in same:
        given = [seen_as(other, device), *start[1:]]
        assert signature.signature(given) == (key, [other.data_ptr(), *pointers[1:]])


def test_one_thing_that_differs_is_in_the_key(device):
    start = tensors(device)
    x = start[0]
    one_off = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    wide = torch.zeros((*x.shape[:-1], 256), dtype=x.dtype, device=x.device)
    misfits = [
        (0, x.float()),
        (0, x.half()),
        (0, x[:, :1]),
        (0, x.reshape(x.shape[1:])),
        (0, x.transpose(1, 2)),
        (0, wide[..., :128]),
        (0, wide[..., 1:129]),
        (0, x[:, :, :1].expand(x.shape)),
        (0, one_off),
        (10, start[10].long()),
        (10, start[10][:2]),
        (0, None),
        (6, None),
        (7, None),
        (8, None),
        (9, None),
    ]
    keys = [signature.signature(start)[0]]
    for at, other in misfits:
        given = list(start)
        given[at] = None if other is None else seen_as(other, device)
        key, pointers = signature.signature(given)
        assert pointers == [0 if y is None else y.data_ptr() for y in given]
        keys.append(key)
    assert None not in keys and len({*keys}) == len(misfits) + 1


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_another_gpu_is_in_the_key(device):
    start = tensors(device)
    elsewhere = [start[0].as_subclass(OnAnotherGpu), *start[1:]]
    keys = [signature.signature(given)[0] for given in (start, elsewhere)]
    assert None not in keys and keys[0] != keys[1]


def test_what_may_be_refused_has_none(device):
    start = tensors(device)
    x = start[0]
    refused = [
        seen_as(x._neg_view(), device),
        x.cpu().as_subclass(torch.Tensor),
        torch.zeros(x.shape, device="meta"),
        torch.nn.UninitializedParameter(device=x.device),
        seen_as(torch.zeros(0), device),
        torch.sparse_coo_tensor(size=x.shape, device=x.device),
        torch.nested.nested_tensor([x[0, 0], x[0, 1, :2]]),
        x.cpu().float().numpy(),
        [1.0],
        "x",
    ]
    # Of memory that is gone torch says where in it a tensor would begin.
    for begin in 0, 8:
        memory = torch.zeros(x.numel() + begin, dtype=x.dtype, device=x.device)
        without = seen_as(memory[begin:].view(x.shape), device)
        without.untyped_storage().resize_(0)
        refused.append(without)
    for at in 0, 5, 10:
        for other in refused:
            given = [other if i == at else y for i, y in enumerate(start)]
            assert signature.signature(given) == (None, [])


def variants_of(call):
    """Calls that differ in one thing each, whose results differ, or which are refused."""
    q = call["q"]
    apart = torch.empty((*q.shape[:-1], 256), dtype=q.dtype, device="cuda")[..., :128]
    one_off = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    states = call["initial_state"]
    return [
        call,
        call | {"q": apart.copy_(q)},
        call | {"q": one_off.copy_(q)},
        call | {"q": call["k"]},
        call | {"q": q._neg_view()},
        call | {"q": torch.nn.Parameter(q)},
        call | {"q": q.float()},
        call | {"A_log": None},
        call | {"dt_bias": None},
        call | {"initial_state": None},
        call | {"initial_state": states.transpose(2, 3)},
        call | {"initial_state": states.bfloat16()},
        call | {"initial_state": states[:1]},
        call | {"cu_seqlens": call["cu_seqlens"].long()},
        call | {"cu_seqlens": None, "initial_state": states[:1].contiguous()},
    ]


def result_of(call, **options):
    out = hardware.torch_nans(call["q"].shape)
    try:
        cukda.fwd(**call, out=out, **options)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return hardware.bits(out).tobytes()


@pytest.mark.gpu
def test_calls_in_turn_are_what_each_is_alone():
    case = hardware.torch_case(inputs.make([40, 0, 24], 4, "half", seed=97))
    calls = variants_of(case)
    stream = torch.cuda.current_stream()
    # A stream that is given takes the long way.
    wants = [result_of(call, stream=stream) for call in calls]
    assert len({*wants}) > 10 and sum(isinstance(want, tuple) for want in wants) == 4
    modes = contextlib.nullcontext, torch.no_grad, torch.inference_mode
    rng = np.random.default_rng(98)
    for _ in range(200):
        at = int(rng.integers(len(calls)))
        with modes[rng.integers(len(modes))]():
            assert result_of(calls[at]) == wants[at], at
