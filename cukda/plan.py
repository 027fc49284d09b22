"""From shapes to a launch: pure arithmetic, no GPU, no arrays.

A block of `cuda_src/kda_fwd.cu` works on one item after another: segments of one sequence and head,
and a part of its V rows. The sizes stated here are checked by static_asserts there.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_DIM = 128
# The kernels move rows in pieces of up to 16 bytes.
ROW_ALIGNMENT = 16

# Of a kernel: all arrays are contiguous; or they have strides, all rows begin at multiples of
# ROW_ALIGNMENT, and a token's is at most MOST_STEP elements from the next one's; or they have
# strides, and rows begin at any element, any number of elements apart.
CONTIGUOUS, STRIDED, UNALIGNED = LAYOUTS = (0, 1, 2)
MOST_STEP = 2**31 - 1
# The last parameter of those with strides, struct Strides: so many of each array, those of its
# leading axes, in elements. Those of an array that is not given are not read.
STRIDED_ARRAYS = {
    "q": 3,
    "k": 3,
    "v": 3,
    "g": 3,
    "out": 3,
    "beta": 3,
    "A_log": 1,
    "dt_bias": 1,
    "initial_state": 3,
    "final_state": 3,
}
STRIDES_FORMAT = "q" * sum(STRIDED_ARRAYS.values())

# Bytes of struct Stage, RawChunk, SolverScratch, Item, HeadInputs, of a barrier, and of a warp's
# sequences.
_STAGE_BYTES = 18_176
_RAW_BYTES = 12_288
_SCRATCH_BYTES = 1_328
_ITEM_BYTES = 44
_HEAD_INPUTS_BYTES = 528
_BARRIER_BYTES = 8
_SEQUENCES_BYTES = 32 * 16
_ALIGNMENT = 256

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
    (True, 128): 138,
    (True, 64): 99,
    (False, 128): 172,
    (False, 64): 139,
    (False, 32): 136,
}
# ... and that pass before a block's first item, and for it and each later one, whatever its length.
_START_CYCLES = 8_600
_ITEM_CYCLES = 6_600
_LATER_ITEM_CYCLES = 4_000
# ... for CUTS, for joins where there is something to join, and for a step of a chain.
_CUTS_CYCLES = 10_500
_JOIN_CYCLES = 11_900
_CHAIN_CYCLES = 2_280
# ... for a joined item; of its token beside another's; and tokens whose outputs are added up in a
# cycle.
_JOINED_ITEM_CYCLES = 5_500
_JOINED_COST = 1.06
_OUTPUTS_PER_CYCLE = 2.05
# A segment begins with the tokens before it that make its state: 32 or 48 where the gate is fast.
_WARM_UP = 40
_CHUNK = 16
# The first has none, so it may be longer; by more it would be what the others wait for.
_MOST_EXTRA = 4 * _CHUNK
# Segments are made of pairs of chunks, so that few lengths are thought of; and at least so long.
_UNIT = 2 * _CHUNK
_SHORTEST_SEGMENT = 64
# Items of a multiprocessor, where sequences are split.
_MOST_ROUNDS = 16
# A sequence that is longer by no more than this is let be.
_MUCH_LONGER = 1.5
# Of T and N so many leading bits decide.
_LEADING_BITS = 5
# Cuts pay where the gate is fast, and the same launch must do where it is slow and there are none:
# the device sees to that, head by head. Fast gates count this many times.
_FAST_WEIGHT = 3
# ... but not where slow ones would take so many times the least that they can, and a few cycles,
# which are much of a short call.
_MOST_SLOWER, _SLOWER_CYCLES = 1.2, 2_000
# The most memory that a call takes beside the caller's: this, or as much as q, k, v, g and out do;
# but no more than such a part of all.
_MOST_BYTES = 2**30
_MOST_OF_MEMORY = 8
_TOKEN_BYTES = 5 * 2 * HEAD_DIM
# Of a launch, whose blocks count them in 32 bits.
_MOST_ITEMS = 2**31 - 1
# Of a state and of a row in float32, the three counts, and one of ready.
_STATE_BYTES = 4 * HEAD_DIM**2
_ROW_BYTES = 4 * HEAD_DIM
_COUNTS_BYTES = 16
_READY_BYTES = 4
# Places where segments are joined: each one where they might be cut, each second, ...
_JOIN_EVERY = (1, 2, 3)


class Gpu(NamedTuple):
    """What a plan needs to know of a GPU. max_shared_bytes: the most that a block may ask for.
    memory_bytes: of all; or 0, where a call cannot have memory in the order of a stream.
    """

    num_sms: int
    max_shared_bytes: int
    has_wgmma: bool
    memory_bytes: int = 2**40


@dataclass(frozen=True)
class Variant:
    """One compiled form of the kernel."""

    v_rows: int
    num_stages: int
    wgmma: bool = False
    layout: int = CONTIGUOUS

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
    def num_groups(self) -> int:
        """Of the warps that join segments."""
        return self.num_threads // _GROUP_THREADS

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
            ("LAYOUT", self.layout),
        )


class Helper(NamedTuple):
    """A small kernel before the main one, on a grid that `Plan` has."""

    source: str
    entry: str
    num_threads: int
    shared_bytes: int
    # Headers want the sizes of some variant.
    defines: tuple[tuple[str, int], ...] = Variant(128, 4).defines


@functools.cache
def with_layout(kernel: Variant | Helper, layout: int) -> Variant | Helper:
    """The same kernel for arrays of another layout."""
    if isinstance(kernel, Variant):
        return dataclasses.replace(kernel, layout=layout)
    return kernel._replace(defines=Variant(128, 4, layout=layout).defines)


# Finds where sequences may be cut.
CUTS = Helper("cuts.cu", "kda_cuts", 128, 32_784)
# Joins are by parts of a state, by groups of so many threads of a block, and by tiles of so many
# tokens.
_NUM_CHAIN_PARTS = 8
_GROUP_THREADS = 256
_TILE_TOKENS = 96


class Shape(NamedTuple):
    """Of a call: N sequences, of T tokens each, or packed into T."""

    num_sequences: int
    num_tokens: int
    num_heads: int
    packed: bool


class Segments(NamedTuple):
    """How sequences are split. length: tokens of a segment, rounded to whole chunks at its begin,
    before each of which a sequence may be cut (0: it is whole); first_extra: so many more has the
    first one. join_every: where there is no cut, segments first_joined, first_joined + join_every,
    ... are joined to what is before (0: none is); before the others it goes on.
    """

    length: int = 0
    join_every: int = 0
    first_joined: int = 0
    first_extra: int = 0


class Offsets(NamedTuple):
    """Where the parts of a call's own memory begin, in bytes. locals, transfers: a state each for
    every slot and head; partials: O_local and Q_M; counts: four; ready: one for every slot and
    head; begins: a byte for each, read four at a time; end: all bytes.
    """

    locals: int
    transfers: int
    partials: int
    counts: int
    ready: int
    begins: int
    end: int


class Runs(NamedTuple):
    """Of the tiles of joined segments' outputs. num_tiles: of a run, which one group of warps does;
    per_item: runs that make the outputs of a joined item.
    """

    num_tiles: int = 0
    per_item: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A call's launches. grid: blocks of the variant; cuts_grid: of CUTS, none where there is
    nothing to cut. num_slots: places for segments, enough for sequences of any length; runs: of
    tiles of joined segments; offsets: of the memory that both share.
    """

    variant: Variant
    grid: int
    segments: Segments
    num_slots: int
    cuts_grid: int
    runs: Runs
    offsets: Offsets


def variants() -> tuple[Variant, ...]:
    """Every variant that a plan may ask for, all for contiguous arrays: with_layout has others."""
    hopper = tuple(Variant(rows, _NUM_STAGES[0], True) for wgmma, rows in _WARPS if wgmma)
    return hopper + tuple(
        Variant(rows, stages) for stages in _NUM_STAGES for wgmma, rows in _WARPS if not wgmma
    )


# Shapes repeat from call to call: looking a plan up takes 0.2 us, making one of a known choice 5 to
# 9, and the choice itself up to 5 ms.
@functools.lru_cache(maxsize=1024)
def plan(shape: Shape, gpu: Gpu) -> Plan:
    """The launch for a call, from its shapes alone: how V is split over blocks, and where sequences
    may be cut or joined.

    All repeat work: a part the factors of its chunks, a segment the tokens that make its state, a
    joined one all of its scan. So they pay while multiprocessors would be idle. Where no variant
    fits it is the smallest one's launch: such a GPU is too old, and `jit` says so.
    """
    # T, and N of packed sequences, may differ from call to call; what they decide need not.
    num_sequences = _leading(shape.num_sequences) if shape.packed else shape.num_sequences
    rounded = shape._replace(num_sequences=num_sequences, num_tokens=_leading(shape.num_tokens))
    return launch(*_choice(rounded, gpu), shape, gpu)


def _leading(size: int) -> int:
    """The least number of as many leading bits as decide that is not below."""
    shift = max(0, size.bit_length() - _LEADING_BITS)
    return -(-size >> shift) << shift


@functools.lru_cache(maxsize=1024)
def _choice(shape: Shape, gpu: Gpu) -> tuple[Variant, Segments]:
    """What `launch` takes."""
    usable = [v for v in variants() if v.shared_bytes <= gpu.max_shared_bytes] or variants()[-1:]
    usable = [v for v in usable if v.wgmma == gpu.has_wgmma] or usable
    usable = [v for v in usable if v.num_stages == usable[0].num_stages]
    # Many are the same.
    choices = dict.fromkeys(
        (variant, segments) for variant in usable for segments in _segments(variant, shape, gpu)
    )
    choices = [choice for choice in choices if _fits(*choice, shape, gpu)]
    choices = choices or [(variant, Segments()) for variant in usable]
    cycles = {choice: _cycles_of(*choice, shape, gpu) for choice in choices}
    least_slow = min(slow for _, slow in cycles.values())

    def cost(choice):
        fast, slow = cycles[choice]
        is_too_slow = slow > _MOST_SLOWER * least_slow + _SLOWER_CYCLES
        return is_too_slow, _FAST_WEIGHT * fast + slow

    return min(choices, key=cost)


def launch(variant: Variant, segments: Segments, shape: Shape, gpu: Gpu) -> Plan:
    """The launches of a variant, with sequences split so."""
    if segments.length + segments.first_extra >= shape.num_tokens:
        segments = Segments()
    num_slots = _num_slots(segments, shape)
    num_states = num_slots * shape.num_heads
    return Plan(
        variant=variant,
        grid=min(_num_items(variant, segments, shape), gpu.num_sms),
        segments=segments,
        num_slots=num_slots,
        cuts_grid=num_states if segments.length else 0,
        runs=_runs(variant, segments, shape, gpu) if segments.join_every else Runs(),
        offsets=_offsets(segments, shape),
    )


def _num_chains(shape: Shape) -> int:
    return shape.num_sequences * shape.num_heads * _NUM_CHAIN_PARTS


def _runs(variant: Variant, segments: Segments, shape: Shape, gpu: Gpu) -> Runs:
    """One for each tile, if no group of warps beside the chains then has more than two: those have
    fetched the first when its state is ready. Else two for each group, if there are enough.
    """
    num_items = math.ceil(_num_slots(segments, shape) * shape.num_heads / segments.join_every)
    item_tiles = math.ceil(segments.join_every * segments.length / _TILE_TOKENS)
    num_tiles = num_items * item_tiles
    num_groups = variant.num_groups * gpu.num_sms
    num_beside = num_groups - _num_chains(shape)
    run_tiles = 1
    if num_tiles > 2 * num_beside:
        run_tiles = min(max(1, num_tiles // (2 * num_groups)), item_tiles)
    return Runs(run_tiles, math.ceil(item_tiles / run_tiles))


def _segments(variant: Variant, shape: Shape, gpu: Gpu) -> Iterator[Segments]:
    """Ways that may pay: of packed sequences, whose lengths are not known, at a multiprocessor's
    share of all work, if one may be much longer; none; and lengths that make one, two, ... items a
    multiprocessor of sequences of equal length, cut alone or joined.
    """
    num_items = shape.num_sequences * shape.num_heads * variant.num_parts
    if num_items == 0:
        return
    total = _mean_length(shape)
    share = max(total * num_items / gpu.num_sms, 2 * total, _SHORTEST_SEGMENT)
    if _is_uneven(shape) and shape.num_tokens > _MUCH_LONGER * share:
        # By the mean length it costs what none costs, and first it wins: it is for longer ones.
        yield Segments(math.ceil(share / _UNIT) * _UNIT)
    yield Segments()
    for num_rounds in range(1, _MOST_ROUNDS + 1):
        num_segments = num_rounds * gpu.num_sms // num_items
        # As many that are joined make twice as many items, but for the first of a sequence.
        for wanted in (num_segments, (num_segments + 1) // 2):
            if wanted > 1:
                length = max(math.ceil(total / wanted / _UNIT) * _UNIT, _SHORTEST_SEGMENT)
                if length < total:
                    yield Segments(length)
                    yield from _joined(length, math.ceil(total / length), num_items, gpu)
                if not _is_uneven(shape):
                    yield from _joined_evenly(wanted, shape.num_tokens)


def _joined(length: int, num_segments: int, num_items: int, gpu: Gpu) -> Iterator[Segments]:
    """Joined at each place, each second, each third: from the first on, or from a lead on. A lead
    takes as long as all behind it, two items each, on the multiprocessors that are left:
    lead = 2 (num_segments - lead) num_items / (num_sms - num_items).
    """
    lead = 2 * num_segments * num_items / (num_items + gpu.num_sms)
    for every in _JOIN_EVERY:
        for first_joined in sorted({every, math.ceil(lead / every) * every}):
            if first_joined < num_segments:
                yield Segments(length, every, first_joined)


def _joined_evenly(wanted: int, num_tokens: int) -> Iterator[Segments]:
    """Up to so many segments, joined from the second on, so that runs between joins are whole
    chunks, all of one length; the first segment takes what is left.
    """
    for every in _JOIN_EVERY:
        num_segments = (wanted - 1) // every * every + 1
        unit = _CHUNK // math.gcd(_CHUNK, every)
        length = num_tokens // num_segments // unit * unit
        left = num_tokens - (num_segments - 1) * length
        extra = math.ceil(left / _CHUNK) * _CHUNK - length
        if num_segments > 1 and length >= _SHORTEST_SEGMENT and extra <= _MOST_EXTRA:
            yield Segments(length, every, 1, extra)


def _fits(variant: Variant, segments: Segments, shape: Shape, gpu: Gpu) -> bool:
    """Whether a call's own memory is not too much, and its items can be counted."""
    num_items = _num_items(variant, segments, shape)
    num_bytes = _offsets(segments, shape).end
    # Of the fewest tokens that may have been rounded to so many.
    shift = max(0, (shape.num_tokens - 1).bit_length() - _LEADING_BITS)
    fewest = shape._replace(num_tokens=max(0, shape.num_tokens - (1 << shift) + 1))
    most_bytes = max(_MOST_BYTES, _TOKEN_BYTES * _num_rows(fewest) * shape.num_heads)
    most_bytes = min(most_bytes, gpu.memory_bytes // _MOST_OF_MEMORY)
    if segments.length:
        # The initial states too, which are copied where the final ones take their place.
        num_bytes += shape.num_sequences * shape.num_heads * _STATE_BYTES
    return num_bytes <= most_bytes and num_items <= _MOST_ITEMS


def _offsets(segments: Segments, shape: Shape) -> Offsets:
    num_states = _num_slots(segments, shape) * shape.num_heads if segments.length else 0
    num_joined = num_states if segments.join_every else 0
    sizes = (
        num_joined * _STATE_BYTES,
        num_joined * _STATE_BYTES,
        2 * num_joined * -(-segments.length // _CHUNK) * _CHUNK * _ROW_BYTES,
        _COUNTS_BYTES if num_states else 0,
        num_joined * _READY_BYTES,
        num_states,
    )
    *starts, end = itertools.accumulate(sizes, initial=0)
    return Offsets(*starts, -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT)


def _cycles_of(variant: Variant, segments: Segments, shape: Shape, gpu: Gpu) -> tuple[float, float]:
    """Cycles from first to last: of gates that are fast, and of gates that are slow."""
    total = _mean_length(shape)
    num_items = shape.num_sequences * shape.num_heads * variant.num_parts
    # Of packed sequences the lengths are not known; long and short ones are dealt out evenly.
    num_rounds = num_items / gpu.num_sms
    dealt = max(1, num_rounds) if _is_uneven(shape) else math.ceil(num_rounds)
    whole = _cycles(variant, dealt, total)
    length, join_every, first_joined, first_extra = segments
    if length == 0 or length >= total:
        return whole, whole
    num_segments = math.ceil((total - first_extra) / length)
    num_rounds = math.ceil(num_items * num_segments / gpu.num_sms)
    fast = _CUTS_CYCLES + _cycles(variant, num_rounds, length + max(_WARM_UP, first_extra))
    if not join_every:
        return fast, _CUTS_CYCLES + whole
    # Of one length: the first item goes on to first_joined, and all later ones are two.
    num_joined = math.ceil((num_segments - first_joined) / join_every)
    num_rounds = (max(1, first_joined / join_every) + 2 * num_joined) * num_items / gpu.num_sms
    run, first_run = join_every * length, first_joined * length + first_extra
    busy = max(first_run, math.ceil(num_rounds) * run)
    slow = _START_CYCLES + math.ceil(busy / run) * _JOINED_ITEM_CYCLES
    slow += busy * variant.token_cycles * _JOINED_COST
    num_outputs = shape.num_sequences * shape.num_heads * (total - first_run)
    chains_at_once = max(1, _num_chains(shape) / gpu.num_sms)
    join = num_joined * _CHAIN_CYCLES * chains_at_once + num_outputs / _OUTPUTS_PER_CYCLE
    return fast, _CUTS_CYCLES + slow + join + _JOIN_CYCLES


def _cycles(variant: Variant, num_rounds: float, length: float) -> float:
    """Of a multiprocessor that works on so many items of that length."""
    items = _ITEM_CYCLES + (num_rounds - 1) * _LATER_ITEM_CYCLES
    return _START_CYCLES + items + num_rounds * length * variant.token_cycles


def _num_slots(segments: Segments, shape: Shape) -> int:
    """Enough for every segment, however long the sequences are."""
    if segments.length == 0:
        return shape.num_sequences
    if shape.packed:
        return shape.num_tokens // segments.length + shape.num_sequences
    num_behind_first = -(-(shape.num_tokens - segments.first_extra) // segments.length)
    return shape.num_sequences * max(1, num_behind_first)


def _num_items(variant: Variant, segments: Segments, shape: Shape) -> int:
    """The most that there may be."""
    each = 2 if segments.join_every else 1
    return each * _num_slots(segments, shape) * shape.num_heads * variant.num_parts


def _num_rows(shape: Shape) -> int:
    return shape.num_tokens * (1 if shape.packed else shape.num_sequences)


def _is_uneven(shape: Shape) -> bool:
    return shape.packed and shape.num_sequences > 1


def _mean_length(shape: Shape) -> float:
    if not shape.packed:
        return shape.num_tokens
    return shape.num_tokens / max(1, shape.num_sequences)
