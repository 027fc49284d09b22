"""From shapes to a launch: which variant, how many blocks, how large. Needs no GPU."""

import dataclasses

import pytest

from cukda import plan

KB = 1024
# The most shared memory that a block may have, and multiprocessors.
H200 = (132, 227 * KB)
A100 = (108, 163 * KB)
CARD_99_KB = (46, 99 * KB)
TURING = (40, 64 * KB)
# Stages: of cards with much shared memory, and of those with 99 KB a block.
DEEP, SHALLOW = 4, 2
# Threads by stages and rows of V: a solver for each stage, four or eight factor warps, a consumer
# for each 16 rows.
NUM_THREADS = {
    (DEEP, 128): 512,
    (DEEP, 64): 512,
    (DEEP, 32): 448,
    (SHALLOW, 128): 448,
    (SHALLOW, 64): 448,
    (SHALLOW, 32): 384,
}


def variant(v_rows, num_stages):
    (found,) = (v for v in plan.variants() if (v.v_rows, v.num_stages) == (v_rows, num_stages))
    return found


@pytest.mark.parametrize(
    ("num_sequences", "num_heads", "gpu", "v_rows", "num_stages"),
    [
        (1, 1, H200, 32, DEEP),
        (1, 33, H200, 32, DEEP),
        (3, 11, H200, 32, DEEP),
        (1, 34, H200, 64, DEEP),
        (1, 66, H200, 64, DEEP),
        (1, 67, H200, 128, DEEP),
        (1, 96, H200, 128, DEEP),
        (6, 96, H200, 128, DEEP),
        (2**15, 2**16 - 1, H200, 128, DEEP),
        (1, 27, A100, 32, DEEP),
        (1, 28, A100, 64, DEEP),
        (54, 1, A100, 64, DEEP),
        (55, 1, A100, 128, DEEP),
        (1, 11, CARD_99_KB, 32, SHALLOW),
        (1, 12, CARD_99_KB, 64, SHALLOW),
        (1, 23, CARD_99_KB, 64, SHALLOW),
        (1, 24, CARD_99_KB, 128, SHALLOW),
    ],
)
def test_variant(num_sequences, num_heads, gpu, v_rows, num_stages):
    """V is split as long as all parts run at once, the last multiprocessor included."""
    launch = plan.plan(num_sequences, num_heads, *gpu)
    assert launch.variant == variant(v_rows, num_stages)
    assert launch.grid == num_sequences * num_heads * (128 // v_rows)
    assert launch.block == NUM_THREADS[num_stages, v_rows]
    assert launch.shared_bytes == launch.variant.shared_bytes


@pytest.mark.parametrize("gpu", [H200, A100, CARD_99_KB, (1, 99 * KB)])
def test_blocks_of_a_split_all_run_at_once(gpu):
    num_sms, max_shared_bytes = gpu
    for num_heads in range(1, 2 * num_sms + 2):
        launch = plan.plan(1, num_heads, *gpu)
        assert launch.shared_bytes <= max_shared_bytes
        assert launch.grid % num_heads == 0
        if launch.variant.num_parts > 1:
            assert launch.grid <= num_sms
        if launch.variant.num_parts < 4:
            assert 2 * launch.grid > num_sms, "twice as many blocks would still run at once"


@pytest.mark.parametrize(("num_sequences", "num_heads"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_do_is_no_block(num_sequences, num_heads):
    assert plan.plan(num_sequences, num_heads, *H200).grid == 0


def test_stages_follow_shared_memory_to_the_byte():
    deep, shallow = variant(128, DEEP), variant(128, SHALLOW)
    assert 99 * KB < deep.shared_bytes <= 163 * KB
    assert shallow.shared_bytes <= 99 * KB
    assert plan.plan(1, 200, 132, deep.shared_bytes).variant == deep
    assert plan.plan(1, 200, 132, deep.shared_bytes - 1).variant == shallow
    assert plan.plan(1, 200, 132, shallow.shared_bytes).variant == shallow


@pytest.mark.parametrize("max_shared_bytes", [TURING[1], 48 * KB, 0])
def test_too_little_shared_memory_plans_the_smallest(max_shared_bytes):
    """What then refuses the GPU is `jit`, which knows its name: tests/test_launch.py."""
    smallest = min(plan.variants(), key=lambda v: (v.shared_bytes, v.num_threads))
    launch = plan.plan(1, 1, TURING[0], max_shared_bytes)
    assert launch.variant == smallest
    assert launch.shared_bytes > max_shared_bytes


def test_variants_state_all_that_is_compiled():
    variants = plan.variants()
    assert len(set(variants)) == len({v.defines for v in variants}) == len(variants)
    for each in variants:
        stated = {
            "V_ROWS": each.v_rows,
            "NUM_STAGES": each.num_stages,
            "NUM_THREADS": each.num_threads,
            "SHARED_BYTES": each.shared_bytes,
        }
        assert stated.items() <= dict(each.defines).items()
        # What a block may have, and what its struct is aligned to.
        assert each.num_threads <= 1024 and each.num_threads % 32 == 0
        assert each.shared_bytes % 128 == 0


def test_plans_are_pure_and_frozen():
    plan.plan.cache_clear()
    first = plan.plan(2, 48, *H200)
    plan.plan.cache_clear()
    assert plan.plan(2, 48, *H200) == first
    assert plan.plan(2, 48, *H200) is plan.plan(2, 48, *H200)
    for frozen in first, first.variant:
        for field in dataclasses.fields(frozen):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(frozen, field.name, 1)
