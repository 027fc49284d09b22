"""From shapes to a launch: pure arithmetic, no GPU, no arrays.

A block of `cuda_src/kda_fwd.cu` owns one sequence of one head, or a part of its V rows. The sizes
stated here are checked by static_asserts there.
"""

import functools
from dataclasses import dataclass

HEAD_DIM = 128

# Bytes of struct Stage, RawChunk, Tokens, a solver's scratch, Item, and of a barrier.
_STAGE_BYTES = 18_176
_RAW_BYTES = 13_056
_TOKENS_BYTES = 260
_SCRATCH_BYTES = 1_280
_ITEM_BYTES = 32
_BARRIER_BYTES = 8
_ALIGNMENT = 128

_NUM_RAW = 4
_GROUP_WARPS = 4

# Rows of V a block, and groups of factor warps: as many as leave each thread 128 registers.
_NUM_GROUPS = {128: 1, 64: 2, 32: 2}
# Four stages keep all warps busy; two fit where a block has no more than 99 KB.
_NUM_STAGES = (4, 2)


@dataclass(frozen=True)
class Variant:
    """One compiled form of the kernel."""

    v_rows: int
    num_stages: int

    source = "kda_fwd.cu"
    entry = "kda_fwd"

    @property
    def num_parts(self) -> int:
        return HEAD_DIM // self.v_rows

    @property
    def num_threads(self) -> int:
        """Of the factor warps, the solvers, and a consumer warp for each 16 rows."""
        num_factor_warps = _GROUP_WARPS * _NUM_GROUPS[self.v_rows]
        return 32 * (num_factor_warps + self._num_solvers + self.v_rows // 16)

    @property
    def _num_solvers(self) -> int:
        return self.num_stages

    @property
    def shared_bytes(self) -> int:
        num_tokens_slots = 2 * self._num_solvers
        num_barriers = _NUM_RAW + num_tokens_slots + 3 * self.num_stages
        used = (
            self.num_stages * _STAGE_BYTES
            + _NUM_RAW * _RAW_BYTES
            + num_tokens_slots * _TOKENS_BYTES
            + self._num_solvers * _SCRATCH_BYTES
            + num_barriers * _BARRIER_BYTES
            + _ITEM_BYTES
        )
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @functools.cached_property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("V_ROWS", self.v_rows),
            ("NUM_GROUPS", _NUM_GROUPS[self.v_rows]),
            ("NUM_STAGES", self.num_stages),
            ("NUM_RAW", _NUM_RAW),
            ("NUM_THREADS", self.num_threads),
            ("SHARED_BYTES", self.shared_bytes),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: variant, blocks, threads a block, dynamic shared bytes a block."""

    variant: Variant
    grid: int
    block: int
    shared_bytes: int


def variants() -> tuple[Variant, ...]:
    """Every variant that a plan may ask for."""
    return tuple(Variant(rows, stages) for stages in _NUM_STAGES for rows in _NUM_GROUPS)


@functools.lru_cache(maxsize=1024)
def plan(num_sequences: int, num_heads: int, num_sms: int, max_shared_bytes: int) -> Plan:
    """The launch for num_sequences x num_heads recurrences on a GPU with num_sms multiprocessors
    and max_shared_bytes of shared memory a block.

    V is split over as many blocks as still run at once: a part repeats the factors of its chunks,
    so splitting pays only on multiprocessors that would be idle. Where no variant fits it is the
    smallest one's launch: such a GPU is too old, and `jit` says so.
    """
    num_items = num_sequences * num_heads
    fitting = [v for v in variants() if v.shared_bytes <= max_shared_bytes] or variants()[-1:]
    deepest = [v for v in fitting if v.num_stages == fitting[0].num_stages]
    at_once = [v for v in deepest if num_items * v.num_parts <= num_sms]
    variant = at_once[-1] if at_once else deepest[0]
    return Plan(variant, num_items * variant.num_parts, variant.num_threads, variant.shared_bytes)
