"""From shapes to a launch: pure arithmetic, no GPU, no arrays.

A block of `cuda_src/kda_fwd.cu` works on one segment after another, each of one sequence and head,
or on a part of its V rows. The sizes stated here are checked by static_asserts there.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_DIM = 128

# Bytes of struct Stage, RawChunk, SolverScratch, Item, of a barrier, and of what scouts exchange.
_STAGE_BYTES = 18_176
_RAW_BYTES = 13_056
_SCRATCH_BYTES = 1_344
_ITEM_BYTES = 40
_BARRIER_BYTES = 8
_LEFT_BYTES = 16
_ALIGNMENT = 128

# Raw chunks beyond those in stages.
_RAW_AHEAD = 2
_NUM_ITEM_SLOTS = 8

# Four stages keep all warps busy; two fit where a block has no more than 99 KB.
_NUM_STAGES = (4, 2)


class _Warps(NamedTuple):
    """Of a block: factor warps; and registers a thread, where consumers take over others'."""

    num_factor_warps: int
    producer_registers: int = 0
    consumer_registers: int = 0


# By whether the consumers' products are wgmma (Hopper) or mma.sync, and rows of V a block.
_WARPS = {
    (True, 128): _Warps(4, 112, 144),
    (True, 64): _Warps(8, 120, 152),
    (False, 128): _Warps(4),
    (False, 64): _Warps(4),
    (False, 32): _Warps(4),
}
# Clock cycles that a token of an item takes, by the same; measured on an H200 (docs/log.md).
_TOKEN_CYCLES = {
    (True, 128): 158,
    (True, 64): 128,
    (False, 128): 172,
    (False, 64): 139,
    (False, 32): 136,
}
# ... and that pass before a block's first item, and for each item, whatever its length.
_START_CYCLES = 26_000
_ITEM_CYCLES = 11_500
# A segment begins with the tokens before it that make its state: 32 or 48 where the gate is fast.
_WARM_UP = 40
# Segments are made of pairs of chunks, so that few lengths are thought of; and at least so long.
_UNIT = 32
_SHORTEST_SEGMENT = 64
# Of T so many leading bits decide.
_TOKEN_BITS = 5
# Cuts pay where the gate is fast, and the same launch must do where it is slow and there are none:
# the device sees to that, head by head. Fast gates count this many times.
_FAST_WEIGHT = 3


class Gpu(NamedTuple):
    """What a plan needs to know of a GPU. max_shared_bytes: the most that a block may ask for."""

    num_sms: int
    max_shared_bytes: int
    has_wgmma: bool


@dataclass(frozen=True)
class Variant:
    """One compiled form of the kernel."""

    v_rows: int
    num_stages: int
    wgmma: bool = False

    source = "kda_fwd.cu"
    entry = "kda_fwd"

    @property
    def num_parts(self) -> int:
        return HEAD_DIM // self.v_rows

    @functools.cached_property
    def num_threads(self) -> int:
        """Of the factor warps, the solvers, and a consumer warp for each 16 rows."""
        return 32 * (self._warps.num_factor_warps + self._num_solvers + self.v_rows // 16)

    @property
    def token_cycles(self) -> int:
        return _TOKEN_CYCLES[self.wgmma, self.v_rows]

    @property
    def _warps(self) -> _Warps:
        return _WARPS[self.wgmma, self.v_rows]

    @property
    def _num_solvers(self) -> int:
        return self.num_stages

    @functools.cached_property
    def shared_bytes(self) -> int:
        num_raw = self.num_stages + _RAW_AHEAD
        num_barriers = num_raw + 3 * self.num_stages + 2 * _NUM_ITEM_SLOTS
        used = (
            self.num_stages * _STAGE_BYTES
            + num_raw * _RAW_BYTES
            + self._num_solvers * _SCRATCH_BYTES
            + num_barriers * _BARRIER_BYTES
            + _NUM_ITEM_SLOTS * _ITEM_BYTES
            + _LEFT_BYTES
        )
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @functools.cached_property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("V_ROWS", self.v_rows),
            ("WGMMA", int(self.wgmma)),
            ("NUM_FACTOR_WARPS", self._warps.num_factor_warps),
            ("PRODUCER_REGISTERS", self._warps.producer_registers),
            ("CONSUMER_REGISTERS", self._warps.consumer_registers),
            ("NUM_STAGES", self.num_stages),
            ("NUM_THREADS", self.num_threads),
            ("SHARED_BYTES", self.shared_bytes),
        )


class Shape(NamedTuple):
    """Of a call: N sequences, of T tokens each, or packed into T."""

    num_sequences: int
    num_tokens: int
    num_heads: int
    packed: bool
    in_place: bool = False  # the final state takes the initial one's place


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: variant, blocks, threads a block, dynamic shared bytes a block; tokens from one
    place where a sequence may be cut to the next (0: it is not), and the slots for its segments.
    """

    variant: Variant
    grid: int
    block: int
    shared_bytes: int
    segment: int
    num_slots: int


def variants() -> tuple[Variant, ...]:
    """Every variant that a plan may ask for."""
    hopper = tuple(Variant(rows, _NUM_STAGES[0], True) for wgmma, rows in _WARPS if wgmma)
    return hopper + tuple(
        Variant(rows, stages) for stages in _NUM_STAGES for wgmma, rows in _WARPS if not wgmma
    )


def plan(shape: Shape, gpu: Gpu) -> Plan:
    """The launch for a call, from its shapes alone: how V is split over blocks, and where sequences
    may be cut.

    Both repeat work: a part the factors of its chunks, a segment the tokens that make its state. So
    they pay while multiprocessors would be idle. Where no variant fits it is the smallest one's
    launch: such a GPU is too old, and `jit` says so.
    """
    # T may differ from call to call; that which it decides need not.
    shift = max(0, shape.num_tokens.bit_length() - _TOKEN_BITS)
    rounded = shape._replace(num_tokens=-(-shape.num_tokens >> shift) << shift)
    return launch(*_choice(rounded, gpu), shape, gpu)


@functools.lru_cache(maxsize=1024)
def _choice(shape: Shape, gpu: Gpu) -> tuple[Variant, int]:
    """The variant, and the segment that `launch` takes."""
    usable = [v for v in variants() if v.shared_bytes <= gpu.max_shared_bytes] or variants()[-1:]
    if gpu.has_wgmma:
        usable = [v for v in usable if v.wgmma] or usable
    else:
        usable = [v for v in usable if not v.wgmma] or usable
    usable = [v for v in usable if v.num_stages == usable[0].num_stages]
    return min(
        ((v, segment) for v in usable for segment in _segments(v, shape, gpu)),
        key=lambda choice: _cost(*choice, shape, gpu),
    )


def launch(variant: Variant, segment: int, shape: Shape, gpu: Gpu) -> Plan:
    """The launch of a variant, with sequences cut every `segment` tokens, or not (0).

    A final state in the initial one's place rules cuts out: a last segment would write it before a
    first one, of another block, has read it.
    """
    if shape.in_place or segment >= shape.num_tokens:
        segment = 0
    if segment == 0:
        num_slots = shape.num_sequences
    elif shape.packed:
        num_slots = shape.num_tokens // segment + shape.num_sequences
    else:
        num_slots = shape.num_sequences * -(-shape.num_tokens // segment)
    grid = min(num_slots * shape.num_heads * variant.num_parts, gpu.num_sms)
    return Plan(variant, grid, variant.num_threads, variant.shared_bytes, segment, num_slots)


def _segments(variant: Variant, shape: Shape, gpu: Gpu) -> Iterator[int]:
    """Lengths worth a thought: none; of packed sequences, whose lengths are not known, one that
    cuts what is longer than a multiprocessor's share of the whole; and those that make one, two,
    ... items a multiprocessor of sequences of equal length.
    """
    num_items = shape.num_sequences * shape.num_heads * variant.num_parts
    if num_items == 0 or shape.in_place:
        yield 0
        return
    length = _mean_length(shape)
    share = max(length * num_items / gpu.num_sms, 2 * length, _SHORTEST_SEGMENT)
    yield math.ceil(share / _UNIT) * _UNIT if _is_uneven(shape) else 0
    for num_rounds in range(1, 17):
        num_segments = num_rounds * gpu.num_sms // num_items
        if num_segments > 1:
            segment = math.ceil(length / num_segments / _UNIT) * _UNIT
            if segment < length:
                yield max(segment, _SHORTEST_SEGMENT)


def _cost(variant: Variant, segment: int, shape: Shape, gpu: Gpu) -> float:
    """Cycles from first to last, of gates that are fast and of gates that are slow."""
    length = _mean_length(shape)
    num_items = shape.num_sequences * shape.num_heads * variant.num_parts
    # Of packed sequences the lengths are not known; long and short ones are dealt out evenly.
    num_rounds = num_items / gpu.num_sms
    dealt = max(1, num_rounds) if _is_uneven(shape) else math.ceil(num_rounds)
    whole = _cycles(variant, dealt, length)
    if segment == 0 or segment >= length:
        return (_FAST_WEIGHT + 1) * whole
    num_segments = math.ceil(length / segment)
    num_rounds = math.ceil(num_items * num_segments / gpu.num_sms)
    return _FAST_WEIGHT * _cycles(variant, num_rounds, length / num_segments + _WARM_UP) + whole


def _cycles(variant: Variant, num_rounds: float, length: float) -> float:
    """Of a multiprocessor that works on so many items of that length."""
    return _START_CYCLES + num_rounds * (_ITEM_CYCLES + length * variant.token_cycles)


def _is_uneven(shape: Shape) -> bool:
    return shape.packed and shape.num_sequences > 1


def _mean_length(shape: Shape) -> float:
    if not shape.packed:
        return shape.num_tokens
    return shape.num_tokens / max(1, shape.num_sequences)
