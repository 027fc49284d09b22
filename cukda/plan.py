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

# Bytes of struct Stage, RawChunk, SolverScratch, Item, HeadInputs, of a barrier, and of a warp's
# sequences.
_STAGE_BYTES = 18_176
_RAW_BYTES = 13_056
_SCRATCH_BYTES = 1_376
_ITEM_BYTES = 56
_HEAD_INPUTS_BYTES = 528
_BARRIER_BYTES = 8
_SEQUENCES_BYTES = 32 * 24
_ALIGNMENT = 128

_MOST_SOLVERS = 4

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
    (True, 128): 148,
    (True, 64): 118,
    (False, 128): 172,
    (False, 64): 139,
    (False, 32): 136,
}
# ... and that pass before a block's first item, and for each item, whatever its length.
_START_CYCLES = 9_000
_ITEM_CYCLES = 7_000
# ... for CUTS, for a launch with nothing to do, and for a step of CHAIN.
_CUTS_CYCLES = 13_000
_LAUNCH_CYCLES = 6_500
_CHAIN_CYCLES = 4_000
# A segment begins with the tokens before it that make its state: 32 or 48 where the gate is fast.
_WARM_UP = 40
# Segments are made of pairs of chunks, so that few lengths are thought of; and at least so long.
_UNIT = 32
_SHORTEST_SEGMENT = 64
# A sequence that is longer by no more than this is let be.
_MUCH_LONGER = 1.5
# Of T so many leading bits decide.
_TOKEN_BITS = 5
# Cuts pay where the gate is fast, and the same launch must do where it is slow and there are none:
# the device sees to that, head by head. Fast gates count this many times.
_FAST_WEIGHT = 3
# Whether segments may be joined where there is no cut; and the most states that a call keeps for
# that, a multiprocessor: 64 KB each, 270 MB on 132 multiprocessors.
_JOINED = (False, True)
_MOST_STATES = 32
# Of a grid.
_MOST_BLOCKS = 2**31 - 1


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
        return min(self.num_stages, _MOST_SOLVERS)

    @property
    def _num_raw(self) -> int:
        """Twice as many chunks as solvers where there is room beside so many stages."""
        return self._num_solvers * (2 if self.wgmma or self.num_stages == _NUM_STAGES[1] else 1)

    @functools.cached_property
    def shared_bytes(self) -> int:
        num_items = self.num_stages + self._num_raw + self._num_solvers
        num_barriers = self._num_raw + 3 * self.num_stages + 2 * num_items
        used = (
            self.num_stages * _STAGE_BYTES
            + self._num_raw * _RAW_BYTES
            + self._num_solvers * _SCRATCH_BYTES
            + num_barriers * _BARRIER_BYTES
            + num_items * (_ITEM_BYTES + _HEAD_INPUTS_BYTES)
            + _SEQUENCES_BYTES
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
            ("NUM_SOLVERS", self._num_solvers),
            ("NUM_STAGES", self.num_stages),
            ("NUM_RAW", self._num_raw),
            ("NUM_THREADS", self.num_threads),
            ("SHARED_BYTES", self.shared_bytes),
        )


class Helper(NamedTuple):
    """A small kernel beside the main one, on a grid that `Plan` has."""

    source: str
    entry: str
    num_threads: int
    # Headers want the sizes of some variant.
    defines: tuple[tuple[str, int], ...] = Variant(128, 4).defines


# Finds where sequences may be cut; and joins segments where they are not.
CUTS = Helper("cuts.cu", "kda_cuts", 128)
CHAIN = Helper("chain.cu", "kda_chain", 512)
_CHAIN_ROWS = 16


class Shape(NamedTuple):
    """Of a call: N sequences, of T tokens each, or packed into T."""

    num_sequences: int
    num_tokens: int
    num_heads: int
    packed: bool
    in_place: bool = False  # the final state takes the initial one's place


@dataclass(frozen=True, slots=True)
class Plan:
    """A call's launches: the kernel's variant and its blocks; tokens from one place where a
    sequence may be cut to the next (0: it is not), the slots for its segments, and the blocks of
    CUTS; whether segments run side by side also where there is no cut, and if so the blocks that
    work out their ends, and those of CHAIN.
    """

    variant: Variant
    grid: int
    segment: int
    num_slots: int
    cuts_grid: int
    is_joined: bool
    ends_grid: int
    chain_grid: int


def variants() -> tuple[Variant, ...]:
    """Every variant that a plan may ask for."""
    hopper = tuple(Variant(rows, _NUM_STAGES[0], True) for wgmma, rows in _WARPS if wgmma)
    return hopper + tuple(
        Variant(rows, stages) for stages in _NUM_STAGES for wgmma, rows in _WARPS if not wgmma
    )


# Shapes repeat from call to call; looking a plan up takes 0.2 us where making it anew takes 3.
@functools.lru_cache(maxsize=1024)
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
    variant, segment, is_joined = _choice(rounded, gpu)
    return launch(variant, segment, is_joined, shape, gpu)


@functools.lru_cache(maxsize=1024)
def _choice(shape: Shape, gpu: Gpu) -> tuple[Variant, int, bool]:
    """The variant, the segment and is_joined that `launch` takes."""
    usable = [v for v in variants() if v.shared_bytes <= gpu.max_shared_bytes] or variants()[-1:]
    usable = [v for v in usable if v.wgmma == gpu.has_wgmma] or usable
    usable = [v for v in usable if v.num_stages == usable[0].num_stages]
    choices = [
        (variant, segment, is_joined)
        for variant in usable
        for segment in _segments(variant, shape, gpu)
        for is_joined in _JOINED
        if _states_beside(segment, is_joined, shape) <= _MOST_STATES * gpu.num_sms
        and _num_slots(segment, shape) * shape.num_heads <= _MOST_BLOCKS
    ]
    choices = choices or [(variant, 0, False) for variant in usable]
    return min(choices, key=lambda choice: _cost(*choice, shape, gpu))


def launch(variant: Variant, segment: int, is_joined: bool, shape: Shape, gpu: Gpu) -> Plan:
    """The launches of a variant, with sequences cut every `segment` tokens, or not (0)."""
    if segment >= shape.num_tokens:
        segment = 0
    num_slots = _num_slots(segment, shape)
    num_items = num_slots * shape.num_heads * variant.num_parts
    num_states = shape.num_sequences * shape.num_heads
    is_joined = is_joined and segment > 0
    return Plan(
        variant=variant,
        grid=min(num_items, gpu.num_sms),
        segment=segment,
        num_slots=num_slots,
        cuts_grid=num_slots * shape.num_heads if segment else 0,
        is_joined=is_joined,
        ends_grid=min(2 * num_items, gpu.num_sms) if is_joined else 0,
        chain_grid=num_states * HEAD_DIM // _CHAIN_ROWS if is_joined else 0,
    )


def _segments(variant: Variant, shape: Shape, gpu: Gpu) -> Iterator[int]:
    """Lengths worth a thought: none; of packed sequences, whose lengths are not known, one that
    cuts what is much longer than a multiprocessor's share of the whole, if that can be; and those
    that make one, two, ... items a multiprocessor of sequences of equal length.
    """
    num_items = shape.num_sequences * shape.num_heads * variant.num_parts
    if num_items == 0:
        yield 0
        return
    length = _mean_length(shape)
    share = max(length * num_items / gpu.num_sms, 2 * length, _SHORTEST_SEGMENT)
    may_be_long = _is_uneven(shape) and shape.num_tokens > _MUCH_LONGER * share
    yield math.ceil(share / _UNIT) * _UNIT if may_be_long else 0
    for num_rounds in range(1, 17):
        num_segments = num_rounds * gpu.num_sms // num_items
        if num_segments > 1:
            segment = math.ceil(length / num_segments / _UNIT) * _UNIT
            if segment < length:
                yield max(segment, _SHORTEST_SEGMENT)


def _states_beside(segment: int, is_joined: bool, shape: Shape) -> int:
    """States that a call keeps in memory besides the caller's."""
    if segment == 0:
        return 0
    num_slots = _num_slots(segment, shape) if is_joined else 0
    num_copies = shape.num_sequences if shape.in_place else 0
    return (2 * num_slots + num_copies) * shape.num_heads


def _cost(variant: Variant, segment: int, is_joined: bool, shape: Shape, gpu: Gpu) -> float:
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
    fast = _CUTS_CYCLES + _cycles(variant, num_rounds, segment + _WARM_UP)
    if not is_joined:
        return _FAST_WEIGHT * fast + _CUTS_CYCLES + whole
    # Of each segment but the last its local state, and of all but the first of these a transfer.
    num_ends = math.ceil(num_items * (2 * num_segments - 3) / gpu.num_sms)
    ends = _cycles(variant, num_ends, segment)
    chain = _LAUNCH_CYCLES + num_segments * _CHAIN_CYCLES
    forward = _cycles(variant, num_rounds, segment)
    fast += 2 * _LAUNCH_CYCLES
    return _FAST_WEIGHT * fast + _CUTS_CYCLES + ends + chain + forward


def _cycles(variant: Variant, num_rounds: float, length: float) -> float:
    """Of a multiprocessor that works on so many items of that length."""
    return _START_CYCLES + num_rounds * (_ITEM_CYCLES + length * variant.token_cycles)


def _num_slots(segment: int, shape: Shape) -> int:
    """Enough for every segment, however long the sequences are."""
    if segment == 0:
        return shape.num_sequences
    if shape.packed:
        return shape.num_tokens // segment + shape.num_sequences
    return shape.num_sequences * -(-shape.num_tokens // segment)


def _is_uneven(shape: Shape) -> bool:
    return shape.packed and shape.num_sequences > 1


def _mean_length(shape: Shape) -> float:
    if not shape.packed:
        return shape.num_tokens
    return shape.num_tokens / max(1, shape.num_sequences)
