"""From shapes to a launch: which variant, cut where, how many blocks, how large. Needs no GPU."""

import dataclasses
import itertools
import math

import hardware
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cukda import plan

KB = 1024
H200 = plan.Gpu(132, 227 * KB, has_wgmma=True)
H200_WITHOUT = H200._replace(has_wgmma=False)
A100 = plan.Gpu(108, 163 * KB, has_wgmma=False)
CARD_99_KB = plan.Gpu(46, 99 * KB, has_wgmma=False)
# As no GPU is: the instructions are there, and no room for the variants that use them.
WGMMA_WITHOUT_ROOM = (H200._replace(max_shared_bytes=163 * KB), CARD_99_KB._replace(has_wgmma=True))
ONE_SM = plan.Gpu(1, 99 * KB, has_wgmma=False)
TURING = plan.Gpu(40, 64 * KB, has_wgmma=False)
GPUS = {
    "H200": H200,
    "H200 without wgmma": H200_WITHOUT,
    "A100": A100,
    "99 KB": CARD_99_KB,
    "one SM": ONE_SM,
}
# Stages: of cards with much shared memory, and of those with 99 KB a block.
DEEP, SHALLOW = 4, 2
# Threads by wgmma, stages and rows of V: a solver for each stage, four or eight factor warps, a
# consumer for each 16 rows.
NUM_THREADS = {
    (True, DEEP, 128): 512,
    (True, DEEP, 64): 512,
    (False, DEEP, 128): 512,
    (False, DEEP, 64): 384,
    (False, DEEP, 32): 320,
    (False, SHALLOW, 128): 448,
    (False, SHALLOW, 64): 320,
    (False, SHALLOW, 32): 256,
}

every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)


def variant(v_rows, num_stages, wgmma=False):
    wanted = (v_rows, num_stages, wgmma)
    (found,) = (v for v in plan.variants() if (v.v_rows, v.num_stages, v.wgmma) == wanted)
    return found


def whole(num_sequences, num_heads):
    """Sequences too short to be cut."""
    return plan.Shape(num_sequences, 32, num_heads, packed=False)


def num_items(launch, shape):
    """As struct Work of cuda_src/work.cuh counts them."""
    return launch.num_slots * shape.num_heads * launch.variant.num_parts


@pytest.mark.parametrize(
    ("num_sequences", "num_heads", "gpu", "v_rows", "num_stages"),
    [
        (1, 1, H200, 64, DEEP),
        (1, 66, H200, 64, DEEP),
        (6, 11, H200, 64, DEEP),
        (1, 67, H200, 128, DEEP),
        (6, 96, H200, 128, DEEP),
        (2**15, 2**16 - 1, H200, 128, DEEP),
        (1, 33, H200_WITHOUT, 32, DEEP),
        (3, 11, H200_WITHOUT, 32, DEEP),
        (1, 34, H200_WITHOUT, 64, DEEP),
        (1, 66, H200_WITHOUT, 64, DEEP),
        (1, 67, H200_WITHOUT, 128, DEEP),
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
    launch = plan.plan(whole(num_sequences, num_heads), gpu)
    assert launch.variant == variant(v_rows, num_stages, gpu.has_wgmma)
    assert launch.num_slots == num_sequences
    assert launch.grid == min(num_sequences * num_heads * (128 // v_rows), gpu.num_sms)
    assert launch.variant.num_threads == NUM_THREADS[gpu.has_wgmma, num_stages, v_rows]


@every_gpu
def test_blocks_of_a_split_all_run_at_once(gpu):
    most_parts = 2 if gpu.has_wgmma else 4
    for num_heads in range(1, 2 * gpu.num_sms + 2):
        shape = whole(1, num_heads)
        launch = plan.plan(shape, gpu)
        assert launch.segment == 0
        if launch.variant.num_parts > 1:
            assert launch.grid == num_items(launch, shape)
        if launch.variant.num_parts < most_parts:
            assert 2 * num_items(launch, shape) > gpu.num_sms, "twice as many would run at once"


SHAPES = [
    plan.Shape(*shape)
    for shape in itertools.product(
        (0, 1, 2, 7, 64, 768),
        (0, 1, 31, 64, 65, 100, 1024, 8192, 131_072),
        (0, 1, 3, 12, 96),
        (False, True),
        (False, True),
    )
]


@every_gpu
def test_every_launch_is_one_that_the_gpu_can_run(gpu):
    for shape in SHAPES:
        launch = plan.plan(shape, gpu)
        assert launch.grid == min(num_items(launch, shape), gpu.num_sms), shape
        assert launch.variant.shared_bytes <= gpu.max_shared_bytes
        assert launch.variant.num_stages == (DEEP if gpu.max_shared_bytes > 99 * KB else SHALLOW)
        assert launch.variant.wgmma == gpu.has_wgmma, shape
        assert launch.segment == 0 or 64 <= launch.segment < shape.num_tokens, shape
        assert launch.segment % 32 == 0, shape


@every_gpu
def test_grids_of_the_helpers_are_of_all_that_they_have_to_do(gpu):
    """A block of CUTS for each slot and head, and of CHAIN for each few rows of a state; none where
    there is nothing to cut or to join.
    """
    assert 128 % plan._CHAIN_ROWS == 0
    for shape in SHAPES:
        launch = plan.plan(shape, gpu)
        slots_and_heads = launch.num_slots * shape.num_heads
        assert launch.cuts_grid == (slots_and_heads if launch.segment else 0), shape
        if launch.is_joined:
            assert launch.segment > 0, shape
            assert launch.ends_grid == min(2 * num_items(launch, shape), gpu.num_sms), shape
            num_rows = 128 * shape.num_sequences * shape.num_heads
            assert launch.chain_grid * plan._CHAIN_ROWS == num_rows, shape
        else:
            assert launch.ends_grid == launch.chain_grid == 0, shape


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 1000])
def test_only_segments_are_joined(num_tokens, packed, in_place):
    shape = plan.Shape(3, num_tokens, 2, packed, in_place)
    for each, segment in itertools.product(plan.variants(), (0, 64, 96)):
        launch = plan.launch(each, segment, True, shape, H200)
        assert launch.is_joined == (0 < segment < num_tokens)
        assert (launch.ends_grid > 0) == (launch.chain_grid > 0) == launch.is_joined
        apart = plan.launch(each, segment, False, shape, H200)
        assert not apart.is_joined and apart.ends_grid == apart.chain_grid == 0
        for same in "variant", "grid", "segment", "num_slots", "cuts_grid":
            assert getattr(launch, same) == getattr(apart, same)


@every_gpu
@pytest.mark.parametrize(("num_sequences", "num_heads"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_do_is_no_block(num_sequences, num_heads, gpu):
    for num_tokens, *rest in itertools.product((0, 8192), (False, True), (False, True)):
        launch = plan.plan(plan.Shape(num_sequences, num_tokens, num_heads, *rest), gpu)
        grids = launch.grid, launch.cuts_grid, launch.ends_grid, launch.chain_grid
        assert grids == (0, 0, 0, 0)


@every_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_sequences_without_tokens_have_an_item_each(packed, gpu):
    """In which the initial state becomes the final one."""
    shape = plan.Shape(3, 0, 5, packed)
    launch = plan.plan(shape, gpu)
    assert launch.num_slots == 3
    assert num_items(launch, shape) == 15 * launch.variant.num_parts


@every_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [8192, 131_072])
def test_few_heads_with_many_tokens_are_cut(num_tokens, packed, gpu):
    """States in place or not; of one head they are also joined."""
    for num_heads, in_place in itertools.product((1, 4, 12, 16, 32), (False, True)):
        if num_heads < gpu.num_sms:
            launch = plan.plan(plan.Shape(1, num_tokens, num_heads, packed, in_place), gpu)
            assert 0 < launch.segment < num_tokens
            assert 2 * launch.grid > gpu.num_sms
            assert launch.is_joined or num_heads > 1


@every_gpu
@pytest.mark.parametrize("num_heads", [1, 8, 96])
def test_many_sequences_are_not_cut(num_heads, gpu):
    """Of packed ones, none that is not much longer than the others."""
    batched = plan.plan(plan.Shape(768, 1024, num_heads, packed=False), gpu)
    packed = plan.plan(plan.Shape(768, 768 * 1024, num_heads, packed=True), gpu)
    assert (batched.segment, batched.num_slots) == (0, 768)
    assert packed.segment == 0 or packed.segment >= 2 * 1024
    assert batched.variant.v_rows == packed.variant.v_rows == 128


@every_gpu
@pytest.mark.parametrize("num_heads", [1, 4, 16])
@pytest.mark.parametrize("num_sequences", [2, 6, 40])
def test_a_long_sequence_among_short_ones_is_cut(num_sequences, num_heads, gpu):
    """Where it is longer than a multiprocessor's share of all, and than two of mean length."""
    num_tokens = 65_536
    launch = plan.plan(plan.Shape(num_sequences, num_tokens, num_heads, packed=True), gpu)
    share = num_tokens * num_heads * launch.variant.num_parts / gpu.num_sms
    longest = 32 * math.ceil(max(share, 2 * num_tokens / num_sequences) / 32)
    if gpu.num_sms == 1:
        assert longest >= num_tokens and launch.segment == 0, "a share as large as all is no cut"
    else:
        assert 0 < launch.segment <= longest


@every_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_no_sequence_is_cut_that_is_as_short_as_a_segment(packed, gpu):
    for num_tokens in range(65):
        assert plan.plan(plan.Shape(1, num_tokens, 1, packed), gpu).segment == 0


def num_states_beside(launch, shape):
    """States that a call keeps in memory: as `_launch` of cukda/kda.py takes them."""
    if launch.segment == 0:
        return 0
    num_ends = 2 * launch.num_slots * shape.num_heads if launch.is_joined else 0
    return num_ends + (shape.num_sequences * shape.num_heads if shape.in_place else 0)


MANY = st.one_of(st.integers(1, 200), st.integers(1, 2**24))
TOKENS = st.one_of(st.integers(0, 300), st.integers(0, 2**20), st.integers(0, 2**28))


@given(
    shape=st.builds(plan.Shape, MANY, TOKENS, st.integers(1, 128), st.booleans(), st.booleans()),
    gpu=st.sampled_from(list(GPUS.values())),
)
@example(plan.Shape(2**24, 2**28, 128, packed=True, in_place=True), H200)
@example(plan.Shape(2**24, 2**28, 128, packed=True), H200)
@example(plan.Shape(1, 2**28, 128, packed=False), H200)
@example(plan.Shape(33, 2**28, 128, packed=True, in_place=True), H200)
@settings(max_examples=500, deadline=None)
def test_few_states_are_kept_in_memory(shape, gpu):
    """32 for each multiprocessor, 64 KB each: 270 MB on an H200."""
    launch = plan.plan(shape, gpu)
    assert num_states_beside(launch, shape) <= 32 * gpu.num_sms
    assert launch.segment > 0 or not launch.is_joined


@every_gpu
def test_few_states_are_kept_in_memory_of_usual_shapes(gpu):
    some_joined = False
    for num_sequences, num_tokens, num_heads, packed, in_place in itertools.product(
        (1, 2, 4, 8, 31, 40, 130, 1000), (512, 2048, 8192, 2**16, 2**20), (1, 4, 12, 32, 66, 128),
        (False, True), (False, True),
    ):  # fmt: skip
        shape = plan.Shape(num_sequences, num_tokens, num_heads, packed, in_place)
        launch = plan.plan(shape, gpu)
        assert num_states_beside(launch, shape) <= plan._MOST_STATES * gpu.num_sms, shape
        some_joined |= launch.is_joined
    assert some_joined or gpu.num_sms == 1


def test_a_state_more_than_there_may_be_is_not_kept(monkeypatch):
    """The bound is kept to the state, and a plan that it rules out gives way to another."""
    shape = plan.Shape(1, 8192, 12, packed=False, in_place=True)
    joined = plan.plan(shape, H200)
    assert joined.is_joined
    used = num_states_beside(joined, shape)
    one_sm = H200._replace(num_sms=1)
    for most, may_be_kept in (used, True), (used - 1, False):
        monkeypatch.setattr(plan, "_MOST_STATES", most / H200.num_sms)
        assert (plan._choice.__wrapped__(shape, H200)[1:] == (joined.segment, True)) == may_be_kept
    monkeypatch.setattr(plan, "_MOST_STATES", 0)
    assert plan._choice.__wrapped__(shape, H200)[1:] == (0, False)
    assert plan._choice.__wrapped__(shape, one_sm)[1:] == (0, False)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("segment", [0, 64, 96])
@pytest.mark.parametrize("packed", [False, True])
def test_a_launch_in_place_is_that_of_states_apart(packed, segment, is_joined):
    """The initial states are copied first, so a last segment may write where a first one reads."""
    shape = plan.Shape(3, 1000, 2, packed)
    for each in plan.variants():
        apart = plan.launch(each, segment, is_joined, shape, H200)
        assert plan.launch(each, segment, is_joined, shape._replace(in_place=True), H200) == apart
        assert apart.segment == segment


def test_states_are_not_in_place_unless_said():
    assert not plan.Shape(1, 8192, 1, packed=False).in_place
    for num_tokens, packed in itertools.product((8192, 65_536), (False, True)):
        shape = plan.Shape(1, num_tokens, 4, packed)
        assert plan.plan(shape, H200).segment > 0
        assert plan.plan(shape._replace(in_place=True), H200).segment > 0


def test_stages_follow_shared_memory_to_the_byte():
    deep, shallow, hopper = variant(128, DEEP), variant(128, SHALLOW), variant(128, DEEP, True)
    assert shallow.shared_bytes <= 99 * KB < deep.shared_bytes
    assert deep.shared_bytes <= 163 * KB < hopper.shared_bytes <= 227 * KB

    def planned(max_shared_bytes, has_wgmma=False):
        return plan.plan(whole(1, 200), plan.Gpu(132, max_shared_bytes, has_wgmma)).variant

    assert planned(deep.shared_bytes) == deep
    assert planned(deep.shared_bytes - 1) == shallow
    assert planned(shallow.shared_bytes) == shallow
    assert planned(hopper.shared_bytes) == deep
    assert planned(hopper.shared_bytes, has_wgmma=True) == hopper
    assert planned(hopper.shared_bytes - 1, has_wgmma=True) == deep
    assert planned(deep.shared_bytes, has_wgmma=True) == deep
    assert planned(deep.shared_bytes - 1, has_wgmma=True) == shallow


@pytest.mark.parametrize("gpu", WGMMA_WITHOUT_ROOM, ids=str)
def test_without_room_for_wgmma_plans_are_those_without_it(gpu):
    for shape in SHAPES:
        launch = plan.plan(shape, gpu)
        assert not launch.variant.wgmma and launch.variant.shared_bytes <= gpu.max_shared_bytes
        assert launch == plan.plan(shape, gpu._replace(has_wgmma=False)), shape


@pytest.mark.parametrize("has_wgmma", [False, True])
@pytest.mark.parametrize("max_shared_bytes", [TURING.max_shared_bytes, 48 * KB, 0])
def test_too_little_shared_memory_plans_the_smallest(max_shared_bytes, has_wgmma):
    """What then refuses the GPU is `jit`, which knows its name: tests/test_launch.py."""
    smallest = min(plan.variants(), key=lambda v: (v.shared_bytes, v.num_threads))
    launch = plan.plan(whole(1, 1), plan.Gpu(TURING.num_sms, max_shared_bytes, has_wgmma))
    assert launch.variant == smallest
    assert launch.variant.shared_bytes > max_shared_bytes


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 95, 96, 97, 128, 1000])
@pytest.mark.parametrize("segment", [64, 96])
def test_batched_sequences_have_as_many_slots_as_segments(segment, num_tokens):
    shape = plan.Shape(3, num_tokens, 2, packed=False)
    launch = plan.launch(plan.variants()[0], segment, False, shape, H200)
    assert launch.num_slots == 3 * max(1, len(range(0, num_tokens, segment)))
    assert launch.segment == (segment if segment < num_tokens else 0)


def slots(bounds, segment):
    """Of each sequence, the first slot and the one behind the last: struct Work of
    cuda_src/work.cuh. In which order a warp's lanes of sequences come does not matter here.
    """
    if segment == 0:
        return [(n, n + 1) for n in range(len(bounds) - 1)]
    counts = [max(1, len(range(*ends, segment))) for ends in itertools.pairwise(bounds)]
    if len(counts) <= 32:
        firsts = itertools.accumulate(counts, initial=0)
    else:
        firsts = (begin // segment + sequence for sequence, begin in enumerate(bounds))
    return [(first, first + count) for first, count in zip(firsts, counts, strict=False)]


def check_slots_of(launch, bounds):
    """Of the segments that the kernel makes of the launch's arguments."""
    ends = [0]
    for first, end in slots(bounds, launch.segment):
        assert first >= ends[-1]
        ends.append(end)
    assert ends[-1] <= launch.num_slots, (launch, bounds)


def check_slots(lengths, segment, before=0, behind=0):
    """before, behind: rows of no sequence."""
    bounds = (before + np.cumsum([0, *lengths])).tolist()
    num_tokens = bounds[-1] + behind
    shape = plan.Shape(len(lengths), num_tokens, 2, packed=True)
    launch = plan.launch(plan.variants()[0], segment, False, shape, H200)
    assert launch.segment == (segment if segment < num_tokens else 0)
    check_slots_of(launch, bounds)


@pytest.mark.parametrize("most_sequences", [32, 80])
@pytest.mark.parametrize("segment", [64, 96, 4000])
def test_packed_segments_have_slots_of_their_own(segment, most_sequences):
    rng = np.random.default_rng(segment)
    for _ in range(1000):
        size = rng.integers(1, most_sequences + 1)
        near_cuts = segment * rng.integers(0, 4, size) + rng.integers(-1, 2, size)
        anywhere = rng.integers(0, 4 * segment, size)
        lengths = np.where(rng.random(size) < 0.5, near_cuts, anywhere).clip(0)
        lengths *= rng.random(size) < rng.random()
        around = rng.choice([0, 0, 1, segment - 1, segment, 5 * segment // 2], 2)
        check_slots(lengths, segment, *around)


@pytest.mark.parametrize("num_sequences", [1, 2, 32, 33, 80])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 95, 96, 97, 127, 128, 129])
@pytest.mark.parametrize("segment", [64, 96, 128])
def test_empty_sequences_have_slots(segment, num_tokens, num_sequences):
    """Before and behind the one that has all the tokens, also where those are one segment."""
    for index in {0, num_sequences // 2, num_sequences - 1}:
        lengths = [0] * num_sequences
        lengths[index] = num_tokens
        check_slots(lengths, segment)
        check_slots([0] * num_sequences, segment, before=num_tokens)


# Those that round to 5 leading bits alike, and the last one below.
ALIKE = [
    (8192, (8193, 8194, 8447, 8703, 8704)),
    (1024, (1025, 1056, 1087, 1088)),
    (30 * 4096, (30 * 4096 + 1, 31 * 4096 - 1, 31 * 4096)),
    (31 * 4096, (31 * 4096 + 1, 2**17 - 1, 2**17)),
]


def forget_plans():
    plan.plan.cache_clear()
    plan._choice.cache_clear()


@every_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("num_sequences", "num_heads"), [(1, 1), (1, 4), (2, 3), (40, 2)])
@pytest.mark.parametrize(("below", "alike"), ALIKE)
def test_token_counts_that_round_alike_share_a_choice(
    below, alike, num_sequences, num_heads, packed, gpu
):
    """And have each the slots that it needs."""
    shape = plan.Shape(num_sequences, alike[0], num_heads, packed)
    forget_plans()
    launches = [plan.plan(shape._replace(num_tokens=n), gpu) for n in alike]
    asked = plan._choice.cache_info()
    assert (asked.misses, asked.hits) == (1, len(alike) - 1)
    plan.plan(shape._replace(num_tokens=below), gpu)
    assert plan._choice.cache_info().misses == 2

    chosen, segment, is_joined = plan._choice(shape._replace(num_tokens=alike[-1]), gpu)
    for num_tokens, launch in zip(alike, launches, strict=True):
        assert launch.variant == chosen
        assert launch.segment == (segment if segment < num_tokens else 0)
        assert launch.is_joined == (is_joined and launch.segment > 0)
        if launch.segment == 0:
            assert launch.num_slots == num_sequences
        elif packed:
            assert launch.num_slots == num_tokens // segment + num_sequences
        else:
            assert launch.num_slots == num_sequences * len(range(0, num_tokens, segment))


@every_gpu
def test_what_a_plan_cuts_has_slots(gpu):
    """Of the true T, not of the one that is decided by; also where a segment is as long."""
    rng = np.random.default_rng(0)
    for num_tokens in (1, 64, 65, 96, 97, 127, 1025, 1057, 8193, 16_385, 65_537, 100_000):
        for num_sequences, num_heads in itertools.product((1, 2, 33, 80), (1, 4, 45, 130)):
            shape = plan.Shape(num_sequences, num_tokens, num_heads, packed=True)
            launch = plan.plan(shape, gpu)
            assert launch.segment == 0 or launch.segment < num_tokens
            first = [0] + [num_tokens] * num_sequences
            last = [0] * num_sequences + [num_tokens]
            anywhere = [0, *sorted(rng.integers(0, num_tokens + 1, num_sequences - 1).tolist())]
            for bounds in first, last, [*anywhere, num_tokens]:
                check_slots_of(launch, bounds)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_segment_of_the_rounded_count_that_is_all_of_the_true_one_is_none(
    monkeypatch, packed, is_joined
):
    """Whatever lengths are worth a thought: 16,385 tokens are planned as 17,408."""
    segment = 16_416
    chosen = variant(128, DEEP), segment, is_joined
    monkeypatch.setattr(plan, "_choice", lambda shape, gpu: chosen)
    for num_tokens in 16_385, segment - 1, segment, segment + 1:
        launch = plan.plan.__wrapped__(plan.Shape(40, num_tokens, 130, packed), H200)
        if num_tokens <= segment:
            assert (launch.segment, launch.num_slots, launch.is_joined) == (0, 40, False)
            assert launch.cuts_grid == launch.ends_grid == launch.chain_grid == 0
        else:
            assert (launch.segment, launch.is_joined) == (segment, is_joined)


@every_gpu
def test_the_kernel_counts_in_32_bits(gpu):
    """Its items, and one step of a grid beyond; the tokens of a segment, with a sign, and so the
    blocks of a grid. Of shapes that a GPU's memory holds.
    """
    works = [(2**31 - 1, 1), (1, 2**31 - 1), (2**15, 2**16 - 1), (2**30, 1), (1, 2**30 + 1), (1, 1)]
    for num_sequences, num_heads in works:
        for num_tokens, packed in itertools.product((0, 1, 64, 8192, 2**28), (False, True)):
            num_rows = num_tokens * (1 if packed else num_sequences)
            if num_rows * num_heads <= 2**28:
                shape = plan.Shape(num_sequences, num_tokens, num_heads, packed)
                launch = plan.plan(shape, gpu)
                assert num_items(launch, shape) + launch.grid <= 2**32, shape
                assert 2 * num_items(launch, shape) < 2**32 or not launch.is_joined, shape
                assert max(launch.segment, launch.cuts_grid, launch.chain_grid) < 2**31, shape


def test_variants_state_all_that_is_compiled():
    variants = plan.variants()
    assert len(set(variants)) == len({v.defines for v in variants}) == len(variants)
    for each in variants:
        num_solvers, num_raw = each._num_solvers, each._num_raw
        stated = {
            "NUM_SOLVERS": num_solvers,
            "NUM_RAW": num_raw,
            "V_ROWS": each.v_rows,
            "NUM_STAGES": each.num_stages,
            "WGMMA": int(each.wgmma),
            "NUM_THREADS": each.num_threads,
            "SHARED_BYTES": each.shared_bytes,
        }
        assert stated.items() <= dict(each.defines).items()
        # A solver's raw chunks are its own, and it is never more than the stages behind.
        assert 0 < num_solvers <= each.num_stages and num_raw % num_solvers == 0
        # What a block may have, and what its struct is aligned to.
        assert each.num_threads <= 1024 and each.num_threads % 32 == 0
        assert each.shared_bytes % 128 == 0


def test_there_are_variants_of_both_instructions():
    found = {(v.wgmma, v.num_stages, v.v_rows): v.num_threads for v in plan.variants()}
    assert found == NUM_THREADS


def test_warps_of_wgmma_variants_come_in_fours():
    """wgmma is an instruction of four warps, and so is the one that moves registers."""
    for each in plan.variants():
        if each.wgmma:
            num_consumers = each.v_rows // 16
            assert num_consumers % 4 == (each.num_threads // 32 - num_consumers) % 4 == 0


def test_plans_are_pure_and_frozen():
    shape = plan.Shape(2, 8192, 48, packed=True)
    forget_plans()
    first = plan.plan(shape, H200)
    assert plan.plan(plan.Shape(*shape), plan.Gpu(*H200)) == first
    assert plan._choice.cache_info().misses == 1
    forget_plans()
    assert plan.plan(shape, H200) == first
    for frozen in first, first.variant:
        for field in dataclasses.fields(frozen):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(frozen, field.name, 1)


def test_a_forced_choice_is_that_of_every_plan(monkeypatch):
    """What GPU tests and scripts/sanitize.py rest on; and nothing is left of it."""
    before = plan.plan
    shapes = [shape for shape in SHAPES if shape.num_tokens > 64]
    with monkeypatch.context() as patch:
        for each, segments in itertools.product(plan.variants(), ((0,), (64,), (64, True))):
            hardware.force(patch.setattr, each, *segments)
            for shape in shapes:
                launch = plan.plan(shape, H200)
                found = launch.variant, launch.segment, launch.is_joined
                assert found == (each, segments[0], len(segments) == 2)
    assert plan.plan is before
