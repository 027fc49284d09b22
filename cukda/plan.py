"""From shapes to a launch: pure arithmetic, no GPU, no arrays.

A block of `cuda_src/kda_fwd.cu` owns one sequence of one head, or a part of its V rows. The sizes
stated here are checked by static_asserts there.
"""

import functools
from dataclasses import dataclass

HEAD_DIM = 128
CHUNK = 16
PRODUCER_THREADS = 256

# Bytes of struct Stage, of struct Group, of struct Item, and of a stage's two barriers.
_STAGE_BYTES = 14_080
_GROUP_BYTES = 32_128
_ITEM_BYTES = 32
_BARRIER_BYTES = 16
_NUM_GROUPS = 2
_ALIGNMENT = 128

_V_ROWS = (128, 64, 32)
# Four stages keep both groups busy; two fit where a block has no more than 99 KB.
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
        """Producers, and a consumer warp for each 16 rows."""
        return PRODUCER_THREADS + 32 * (self.v_rows // 16)

    @property
    def shared_bytes(self) -> int:
        used = (
            self.num_stages * (_STAGE_BYTES + _BARRIER_BYTES)
            + _NUM_GROUPS * _GROUP_BYTES
            + _ITEM_BYTES
        )
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @functools.cached_property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return (
            ("V_ROWS", self.v_rows),
            ("NUM_STAGES", self.num_stages),
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
    return tuple(Variant(rows, stages) for stages in _NUM_STAGES for rows in _V_ROWS)


@functools.lru_cache(maxsize=1024)
def plan(num_sequences: int, num_heads: int, num_sms: int, max_shared_bytes: int) -> Plan:
    """The launch for num_sequences x num_heads recurrences on a GPU with num_sms multiprocessors
    and max_shared_bytes of shared memory a block.

    V is split over as many blocks as still run at once: a part repeats the factors of its chunks,
    so splitting pays only on multiprocessors that would be idle.
    """
    num_items = num_sequences * num_heads
    fitting = [v for v in variants() if v.shared_bytes <= max_shared_bytes]
    deepest = [v for v in fitting if v.num_stages == fitting[0].num_stages]
    at_once = [v for v in deepest if num_items * v.num_parts <= num_sms]
    variant = at_once[-1] if at_once else deepest[0]
    return Plan(variant, num_items * variant.num_parts, variant.num_threads, variant.shared_bytes)
