"""cukda's functions as operators of torch, which `torch.compile` and `torch.export` take whole.

The operators are `cukda::kda_fwd`, `cukda::step` and `cukda::sigmoid`, on the CPU and on CUDA
devices, where they run on torch's current stream. Importing this module imports torch, which has to
be 2.4 or newer; importing `cukda` does not.
"""

import torch

import cukda

# Compilers choose strides of their own, with which kernels are slower, unless they are told.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


def _operator(name, schema, implementation, fake):
    # torch.library.custom_op says the same in less, and took 60 to 100 us a call in place of 4.
    torch.library.define(name, schema, tags=_TAGS)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)


def _fwd(*arguments):
    *arguments, initial_state, final_state, cu_seqlens, in_place = arguments
    initial_state = final_state if in_place else initial_state
    cukda.fwd(*arguments, initial_state, final_state, cu_seqlens)
    _mark_as_written(arguments[6], final_state)


def _step(*arguments):
    cukda.step(*arguments)
    _mark_as_written(arguments[5], arguments[8])


def _fake_of(operator):
    """What an operator that returns nothing does with tensors without data: refuse those of several
    devices. A single one on "meta" brings torch here, not to the kernel, and what was to be written
    would come back as it was.
    """

    def check(*arguments):
        device = arguments[0].device
        schema = getattr(torch.ops.cukda, operator).default._schema
        names = [argument.name for argument in schema.arguments]
        for name, given in zip(names, arguments, strict=True):
            if isinstance(given, torch.Tensor) and given.device != device:
                raise ValueError(f"{name}: expected device {device}, got {given.device}")

    return check


def _mark_as_written(*tensors):
    """So that a backward pass refuses a tensor it has saved, where it was written since."""
    for tensor in tensors:
        if tensor is not None:
            torch.autograd.graph.increment_version(tensor)


# An operator's argument that is written may be no other argument. States in place are final_state,
# with in_place set and no initial_state. What an operator returns may have a gradient, what it
# writes has none. torch.no_grad, which is not needed then, can stay on after compiled code raises.
_operator(
    "cukda::kda_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor(a!) out, "
    "Tensor? A_log, Tensor? dt_bias, float lower_bound, Tensor? initial_state, "
    "Tensor(b!)? final_state, Tensor? cu_seqlens, bool in_place) -> ()",
    _fwd,
    fake=_fake_of("kda_fwd"),
)
_operator(
    "cukda::step",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, "
    "Tensor? state_indices, float? scale, Tensor(b!) out, Tensor? A_log, Tensor? dt_bias, "
    "float lower_bound) -> ()",
    _step,
    fake=_fake_of("step"),
)
_operator(
    "cukda::sigmoid",
    "(Tensor x) -> Tensor",
    cukda.sigmoid,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _save_y(ctx, inputs, output):
    ctx.save_for_backward(output)


def _sigmoid_backward(ctx, grad):
    (rounded,) = ctx.saved_tensors
    y = rounded.float()
    return (grad.float() * (y * (1 - y))).to(rounded.dtype)


torch.library.register_autograd("cukda::sigmoid", _sigmoid_backward, setup_context=_save_y)


def fwd(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    out=None,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
):
    """`cukda.fwd` of torch tensors, for code that is compiled or exported too.

    The arguments, bits and errors are those of `cukda.fwd`, without `stream`; torch itself refuses,
    with others, what is no tensor or number, and takes a bool for a number. For a state in place
    give one tensor twice, or views of one. Forward only: inputs may require a gradient, and a new
    out does not; what is given to be written keeps the graph that it has, and a backward pass that
    has saved it is refused. A compiled call is checked when it runs, not when it is compiled, but
    for a mix of devices; a compiler that copies what is written checks no overlap. Returns out.
    """
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    in_place = final_state is not None and final_state is initial_state
    initial_state = None if in_place else initial_state
    torch.ops.cukda.kda_fwd.default(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state,
        cu_seqlens, in_place,
    )  # fmt: skip
    return out


def step(
    q,
    k,
    v,
    g,
    beta,
    state,
    state_indices=None,
    scale=None,
    out=None,
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
):
    """`cukda.step` of torch tensors, as `fwd` above is `cukda.fwd`. Returns out."""
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    torch.ops.cukda.step.default(
        q, k, v, g, beta, state, state_indices, scale, out, A_log, dt_bias, lower_bound
    )  # fmt: skip
    return out


def sigmoid(x):
    """`cukda.sigmoid` of a torch tensor: y = 0.5 · tanh.approx(0.5 · x) + 0.5, in x's dtype.

    x:  float32, bfloat16 or float16, any shape, contiguous.

    The gradient, in reverse mode alone, is dy/dx = y (1 − y) of y as it was returned, in float32,
    rounded to x's dtype.
    Raises TypeError (kind, dtype) or ValueError (layout) that names x.
    """
    return torch.ops.cukda.sigmoid.default(x)
