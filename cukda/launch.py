"""A checked call of `fwd` -> its launches: the kernels' parameters, and memory of their own."""

import struct
from dataclasses import replace
from typing import NamedTuple

from cukda import arrays, jit, plan, streams
from cukda.overlap import Apart
from cukda.workspace import Workspace

# The kernels' parameters in their order: pointers (P), floats, ints (i) and unsigned ones (I); and
# strides, for those that take them.
PARAMETERS = struct.Struct("@PPPPP f PPP f Pi Pi Pii I i i i I PP PPP P II")
CUTS_PARAMETERS = struct.Struct("@PPPP PP f Pii I i i i I ii PPP")
STRIDED_PARAMETERS = struct.Struct(f"{PARAMETERS.format} {plan.STRIDES_FORMAT}")
STRIDED_CUTS_PARAMETERS = struct.Struct(f"{CUTS_PARAMETERS.format} {plan.STRIDES_FORMAT}")
# The kernel's StateKind.
_STATE_KINDS = {None: 0, "bfloat16": 1, "float32": 2}
_BOUND_BYTES = {None: 0, "int32": 4, "int64": 8}
# Places among a call's arrays.
OUT, INITIAL, FINAL, _NUM_ARRAYS = 5, 8, 9, 11
_MOST_KEPT = 1024


class Call(NamedTuple):
    """The checked arguments of `fwd`, the number of sequences, and what tells overlaps."""

    q: arrays.Array
    k: arrays.Array
    v: arrays.Array
    g: arrays.Array
    beta: arrays.Array
    out: arrays.Array
    A_log: arrays.Array | None
    dt_bias: arrays.Array | None
    initial_state: arrays.Array | None
    final_state: arrays.Array | None
    cu_seqlens: arrays.Array | None
    scale: float
    lower_bound: float
    num_sequences: int
    apart: Apart

    @property
    def arrays(self) -> tuple[arrays.Array | None, ...]:
        return self[:_NUM_ARRAYS]


class Kept:
    """A launch that calls whose arrays have one signature (signature.py) share."""

    __slots__ = ("_apart", "device", "library")

    def __init__(self, call):
        libraries = {array.library for array in call.arrays if array is not None}
        # Of all arrays; None of several, whose streams have to wait for each other.
        self.library = libraries.pop() if len(libraries) == 1 else None
        self.device = call.q.device
        self._apart = call.apart

    @property
    def is_for_others(self) -> bool:
        """Whether more calls than the one that it was made of can use it, if `fits` says so."""
        return self.library is not None and self._apart.is_usable

    def fits(self, pointers: list[int]) -> bool:
        """Whether arrays at these addresses are apart, and the device is the current one."""
        return self._apart(pointers) and streams.is_current(self.device)


def keep(launches: dict, key: tuple | None, launch: Kept) -> None:
    """Keep a launch for calls with its signature, if there is one and they can share it."""
    if key is not None and launch.is_for_others:
        if len(launches) >= _MOST_KEPT:
            launches.clear()
        launches[key] = launch


def launch_again(
    launch: Kept, pointers: list[int], q: object, out: object, scale: float, lower_bound: float
) -> object:
    """Launch a kept one for a call with its signature that it fits. Returns out, or a new one; None
    if a new one lies where the kernels that are kept do not take it.
    """
    if out is None:
        out = arrays.empty_like(arrays.view("q", q))
        # It begins where its allocator says; inside torch's FakeTensorMode nowhere.
        begin = arrays.view("out", out).pointer
        if begin == 0 or begin % plan.ROW_ALIGNMENT:
            return None
        # Others than those that `fits` remembers.
        pointers = [*pointers]
        pointers[OUT] = begin
    launch(streams.current_stream(launch.library, launch.device), pointers, scale, lower_bound)
    return out


class Launch(Kept):
    """What calls of `fwd` launch on the current device. What they may differ in comes with each:
    addresses, in the order of Call.arrays and 0 for None; two numbers.
    """

    __slots__ = (
        "_cuts",
        "_cuts_parameters",
        "_final_kind",
        "_initial",
        "_initial_kind",
        "_parameters",
        "_plan",
        "_scan",
        "_sequences",
        "_strides",
        "_strides_of_copy",
    )

    def __init__(self, call: Call):
        super().__init__(call)
        packed = call.cu_seqlens is not None
        _, num_tokens, num_heads, _ = call.q.shape
        shape = plan.Shape(call.num_sequences, num_tokens, num_heads, packed)
        self._plan = planned = plan.plan(shape, jit.gpu())
        layout, segments = _layout(call), planned.segments
        scan, cuts = (plan.with_layout(each, layout) for each in (planned.variant, plan.CUTS))
        # Before the first launch: a kernel that cannot be had leaves none behind.
        self._scan = _kernel(scan)
        self._cuts = _kernel(cuts) if segments.length else None
        self._parameters, self._cuts_parameters = PARAMETERS, CUTS_PARAMETERS
        self._strides = self._strides_of_copy = ()
        initial = call.initial_state
        # What copying it takes, without its owner, which would stay in memory.
        self._initial = None
        if initial is not None and segments.length:
            self._initial = replace(initial, owner=None)
        if layout != plan.CONTIGUOUS:
            self._parameters, self._cuts_parameters = STRIDED_PARAMETERS, STRIDED_CUTS_PARAMETERS
            self._strides = self._strides_of_copy = _strides(call)
            if initial is not None:
                copied = call._replace(initial_state=replace(initial, strides=None))
                self._strides_of_copy = _strides(copied)
        self._initial_kind = _STATE_KINDS[_dtype(initial)]
        self._final_kind = _STATE_KINDS[_dtype(call.final_state)]
        self._sequences = (
            _BOUND_BYTES[_dtype(call.cu_seqlens)],
            call.num_sequences,
            num_tokens,
            num_heads,
            segments.length,
            segments.first_extra,
            planned.num_slots,
        )

    def __call__(
        self, stream_pointer: int, pointers: list[int], scale: float, lower_bound: float
    ) -> None:
        end = self._plan.offsets.end
        if end == 0:
            self._launch(stream_pointer, pointers, scale, lower_bound, self._strides)
            return
        initial, strides = pointers[INITIAL], self._strides
        # A last segment may write its final state before the first has read the initial one.
        is_copied = initial != 0 and initial == pointers[FINAL]
        copy_bytes = self._initial.num_bytes if is_copied else 0
        with Workspace(end + copy_bytes, stream_pointer) as workspace:
            if is_copied:
                pointers = [*pointers]
                pointers[INITIAL] = workspace.pointer + end
                workspace.copy(pointers[INITIAL], initial, self._initial)
                strides = self._strides_of_copy
            self._launch(stream_pointer, pointers, scale, lower_bound, strides, workspace.pointer)

    def _launch(self, stream_pointer, pointers, scale, lower_bound, strides, own=0) -> None:
        """own: where the memory begins that Plan.offsets are of."""
        q, k, v, g, beta, out, A_log, dt_bias, initial, final, cu_seqlens = pointers
        planned, at, segments = self._plan, self._plan.offsets, self._plan.segments
        begins, counts = own + at.begins, own + at.counts
        ready = own + at.ready if segments.join_every else 0
        if self._cuts is not None:
            self._cuts(
                planned.cuts_grid,
                plan.CUTS.num_threads,
                plan.CUTS.shared_bytes,
                stream_pointer,
                self._cuts_parameters,
                q,
                k,
                v,
                g,
                A_log,
                dt_bias,
                lower_bound,
                cu_seqlens,
                *self._sequences,
                segments.first_joined,
                segments.join_every,
                begins,
                counts,
                ready,
                *strides,
            )
        self._scan(
            planned.grid,
            planned.variant.num_threads,
            planned.variant.shared_bytes,
            stream_pointer,
            self._parameters,
            q,
            k,
            v,
            g,
            beta,
            scale,
            out,
            A_log,
            dt_bias,
            lower_bound,
            initial,
            self._initial_kind,
            final,
            self._final_kind,
            cu_seqlens,
            *self._sequences,
            begins,
            counts,
            own + at.locals,
            own + at.transfers,
            own + at.partials,
            ready,
            *planned.runs,
            *strides,
        )


def _kernel(variant: plan.Variant | plan.Helper) -> jit.Kernel:
    return jit.kernel(variant.source, variant.entry, variant.defines, variant.shared_bytes)


def _dtype(array: arrays.Array | None) -> str | None:
    return None if array is None else array.dtype


def _layout(call: Call) -> int:
    """Which of plan.LAYOUTS the call's arrays have."""
    tokens = call.q, call.k, call.v, call.g, call.out
    for array in (*tokens, call.initial_state, call.final_state):
        if array is not None and not arrays.are_rows_at(array, plan.ROW_ALIGNMENT):
            return plan.UNALIGNED
    if all(array is None or arrays.is_contiguous(array) for array in call.arrays):
        return plan.CONTIGUOUS
    for array in tokens:
        if array.shape[1] > 1 and abs(arrays.strides_of(array)[1]) > plan.MOST_STEP:
            return plan.UNALIGNED
    return plan.STRIDED


def _strides(call: Call) -> tuple[int, ...]:
    """In elements, in the order of plan.STRIDED_ARRAYS; 0 of what is not given."""
    of_heads = dict(zip(("A_log", "dt_bias"), head_strides(call.A_log, call.dt_bias), strict=True))
    found = []
    for name, num_axes in plan.STRIDED_ARRAYS.items():
        array = getattr(call, name)
        if name in of_heads:
            found.append(of_heads[name])
        elif array is None:
            found += [0] * num_axes
        else:
            found += arrays.strides_of(array)[:num_axes]
    return tuple(found)


def head_strides(A_log: arrays.Array | None, dt_bias: arrays.Array | None) -> tuple[int, int]:
    """From head to head, in elements; 0 of what is not given."""
    of_A_log = 0 if A_log is None else arrays.strides_of(A_log)[0]
    if dt_bias is None:
        return of_A_log, 0
    # A flat one is in rows too.
    return of_A_log, arrays.strides_of(dt_bias)[0] if len(dt_bias.shape) == 2 else plan.HEAD_DIM
