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


WHOLE = plan.Segments()
# In each way that they may be joined.
JOINS = [(), (1, 1), (2, 2), (2, 1), (1, 3)]


def variant(v_rows, num_stages, wgmma=False):
    wanted = (v_rows, num_stages, wgmma)
    (found,) = (v for v in plan.variants() if (v.v_rows, v.num_stages, v.wgmma) == wanted)
    return found


def whole(num_sequences, num_heads):
    """Sequences too short to be cut."""
    return plan.Shape(num_sequences, 32, num_heads, packed=False)


def num_items(launch, shape):
    """The most that blocks may count (cuda_src/items.cuh): joined segments are two each."""
    each = 2 if launch.segments.join_every else 1
    return each * launch.num_slots * shape.num_heads * launch.variant.num_parts


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
        assert launch.segments == WHOLE
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
    )
]


@every_gpu
def test_every_launch_is_one_that_the_gpu_can_run(gpu):
    for shape in SHAPES:
        launch = plan.plan(shape, gpu)
        check_grids(launch, shape, gpu)
        assert launch.variant.shared_bytes <= gpu.max_shared_bytes
        assert launch.variant.num_stages == (DEEP if gpu.max_shared_bytes > 99 * KB else SHALLOW)
        assert launch.variant.wgmma == gpu.has_wgmma, shape
        check_segments(launch.segments, shape)


def check_segments(segments, shape):
    """That there are such, and that some sequence may be as long as they say. Where a first segment
    is longer, which is by less than a tile, runs between joins are whole chunks.
    """
    length, join_every, first_joined, first_extra = segments
    if length == 0:
        assert segments == WHOLE, shape
        return
    assert length >= 64 and length + first_extra < shape.num_tokens, shape
    if join_every == 0:
        assert first_joined == 0, shape
    else:
        first_run = first_joined * length + first_extra
        assert join_every > 0 and 0 < first_run < shape.num_tokens, shape
    assert 0 <= first_extra <= 64, shape
    if first_extra or length % 16:
        assert not (shape.packed and shape.num_sequences > 1), shape
        assert join_every * length % 16 == 0, "partials begin with a chunk"
        assert (first_joined * length + first_extra) % 16 == 0, shape


def check_grids(launch, shape, gpu):
    """A block of CUTS for each slot and head, and of the variant for each item, but no more than
    run at once. Tiles, of 96 tokens, in runs: none where there is nothing to join.
    """
    segments = launch.segments
    assert launch.cuts_grid == (launch.num_slots * shape.num_heads if segments.length else 0)
    assert launch.grid == min(num_items(launch, shape), gpu.num_sms), shape
    if not segments.join_every:
        assert launch.runs == (0, 0)
        return
    num_chains = 128 // 16 * shape.num_sequences * shape.num_heads
    num_joined = -(-launch.num_slots * shape.num_heads // segments.join_every)
    item_tiles = -(-segments.join_every * segments.length // 96)
    num_tiles = num_joined * item_tiles
    # Runs of one length that cover an item: of one tile where the groups of eight warps beside the
    # chains then have no more than two, and else no fewer than two for each group.
    run_tiles, item_runs = launch.runs
    assert (item_runs - 1) * run_tiles < item_tiles <= item_runs * run_tiles
    num_groups = launch.variant.num_threads // 256 * gpu.num_sms
    assert run_tiles == 1 or num_tiles > 2 * (num_groups - num_chains)
    assert run_tiles == 1 or run_tiles * 2 * num_groups <= num_tiles


def check_workspace(launch, shape):
    """Each part is as large as what it is for, and where loads of 16 bytes, or of 4, want it."""
    segments, at = launch.segments, launch.offsets
    num_states = launch.num_slots * shape.num_heads if segments.length else 0
    num_joined = num_states if segments.join_every else 0
    wanted = {
        "locals": 4 * 128 * 128 * num_joined,
        "transfers": 4 * 128 * 128 * num_joined,
        "partials": 2 * 4 * 128 * 16 * -(-segments.length // 16) * num_joined,
        "counts": 4 * 4 if num_states else 0,
        "ready": 4 * num_joined,
        "begins": -(-num_states // 4) * 4,  # read four at a time
    }
    assert at._fields == (*wanted, "end") and at.locals == 0
    for (name, num_bytes), (begin, end) in zip(wanted.items(), itertools.pairwise(at), strict=True):
        assert num_bytes <= end - begin <= num_bytes + 16, (name, shape)
        if num_bytes == 0:
            assert begin == end, (name, shape)
        alignment = {"counts": 4, "ready": 4, "begins": 4}.get(name, 16)
        assert begin % alignment == 0, (name, shape)
    assert at.end % 16 == 0, f"states are copied there: {shape}"


def most_bytes(shape, gpu):
    """1 GiB, or as much as q, k, v, g and out take; no more than an eighth of the GPU's memory."""
    num_rows = shape.num_tokens * (1 if shape.packed else shape.num_sequences)
    tokens = 5 * 2 * 128 * num_rows * shape.num_heads
    return min(max(2**30, tokens), gpu.memory_bytes // 8)


def num_bytes_beside(launch, shape):
    """That a call takes, if it is in place."""
    num_states = shape.num_sequences * shape.num_heads if launch.segments.length else 0
    return launch.offsets.end + 4 * 128 * 128 * num_states


@every_gpu
def test_helpers_and_workspace_are_what_segments_need(gpu):
    for shape in SHAPES:
        launch = plan.plan(shape, gpu)
        check_grids(launch, shape, gpu)
        check_workspace(launch, shape)


@pytest.mark.parametrize("num_tokens", [24_577, 25_600, 30_721, 31_744, 31_745, 32_768])
def test_memory_is_of_the_tokens_that_there_are(num_tokens):
    """Not of as many as they are rounded to."""
    gpu = plan.Gpu(188, 99 * KB, False, 96 * 2**30)
    for num_heads in range(30, 45):
        shape = plan.Shape(3, num_tokens, num_heads, True)
        assert num_bytes_beside(plan.plan(shape, gpu), shape) <= most_bytes(shape, gpu)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 1000])
def test_what_is_asked_for_is_launched(num_tokens, packed):
    """Where some sequence is longer than a segment."""
    for num_sequences, num_heads in itertools.product((1, 3, 33), (1, 2, 7)):
        shape = plan.Shape(num_sequences, num_tokens, num_heads, packed)
        lengths = (64, 0), (96, 0), (72, 24)
        for each, (length, extra), joins in itertools.product(plan.variants(), lengths, JOINS):
            segments = plan.Segments(length, *joins)._replace(first_extra=extra)
            launch = plan.launch(each, segments, shape, H200)
            assert launch.variant == each
            assert launch.segments == (segments if length + extra < num_tokens else WHOLE)
            check_grids(launch, shape, H200)
            check_workspace(launch, shape)


@pytest.mark.parametrize("packed", [False, True])
def test_how_segments_are_joined_changes_no_slot(packed):
    shape = plan.Shape(3, 1000, 2, packed)
    for each, joins in itertools.product(plan.variants(), JOINS):
        launch = plan.launch(each, plan.Segments(64, *joins), shape, H200)
        apart = plan.launch(each, plan.Segments(64), shape, H200)
        for same in "variant", "num_slots", "cuts_grid":
            assert getattr(launch, same) == getattr(apart, same)


@every_gpu
@pytest.mark.parametrize(("num_sequences", "num_heads"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_do_is_no_block(num_sequences, num_heads, gpu):
    for num_tokens, packed in itertools.product((0, 8192), (False, True)):
        launch = plan.plan(plan.Shape(num_sequences, num_tokens, num_heads, packed), gpu)
        assert (launch.grid, launch.cuts_grid) == (0, 0)
        assert not any(launch.offsets)


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
    """And joined, of one head or of some."""
    for num_heads in 1, 4, 12, 16, 32:
        if num_heads < gpu.num_sms:
            launch = plan.plan(plan.Shape(1, num_tokens, num_heads, packed), gpu)
            assert 0 < launch.segments.length < num_tokens
            assert 2 * launch.grid > gpu.num_sms
            assert launch.segments.join_every > 0 or num_heads > 4


@every_gpu
def test_sequences_that_fill_a_gpu_are_whole(gpu):
    """As many as it runs at once, or some times as many: no cut makes them shorter."""
    for num_rounds, num_tokens in itertools.product((1, 2, 4), (1024, 8192)):
        for shape in (
            plan.Shape(1, num_tokens, num_rounds * gpu.num_sms, packed=False),
            plan.Shape(num_rounds * gpu.num_sms, num_tokens, 1, packed=False),
        ):
            assert plan.plan(shape, gpu).segments == WHOLE, shape


@every_gpu
@pytest.mark.parametrize("num_heads", [1, 8, 96])
def test_many_sequences_are_not_cut(num_heads, gpu):
    """Of packed ones, none that is not much longer than the others."""
    batched = plan.plan(plan.Shape(768, 1024, num_heads, packed=False), gpu)
    packed = plan.plan(plan.Shape(768, 768 * 1024, num_heads, packed=True), gpu)
    assert (batched.segments, batched.num_slots) == (WHOLE, 768)
    assert packed.segments == WHOLE or packed.segments.length >= 2 * 1024
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
        assert longest >= num_tokens and launch.segments == WHOLE, "as large as all: no cut"
    else:
        assert 0 < launch.segments.length <= longest


@every_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_no_sequence_is_cut_that_is_as_short_as_a_segment(packed, gpu):
    for num_tokens in range(65):
        assert plan.plan(plan.Shape(1, num_tokens, 1, packed), gpu).segments == WHOLE


MANY = st.one_of(st.integers(1, 200), st.integers(1, 2**24))
TOKENS = st.one_of(st.integers(0, 300), st.integers(0, 2**20), st.integers(0, 2**28))


@given(
    shape=st.builds(plan.Shape, MANY, TOKENS, st.integers(1, 128), st.booleans()),
    gpu=st.sampled_from(list(GPUS.values())),
)
@example(plan.Shape(2**24, 2**28, 128, packed=True), H200)
@example(plan.Shape(1, 2**28, 128, packed=False), H200)
@example(plan.Shape(1, 2**28, 1, packed=False), H200)
@example(plan.Shape(33, 2**28, 128, packed=True), H200)
@settings(max_examples=500, deadline=None)
def test_any_plan_can_be_launched(shape, gpu):
    launch = plan.plan(shape, gpu)
    assert num_bytes_beside(launch, shape) <= most_bytes(shape, gpu)
    assert launch.grid == min(num_items(launch, shape), gpu.num_sms)
    check_segments(launch.segments, shape)
    check_grids(launch, shape, gpu)
    check_workspace(launch, shape)
    if launch.segments.length:
        assert num_items(launch, shape) < 2**31
        assert launch.cuts_grid < 2**31


@every_gpu
def test_little_memory_is_taken_of_usual_shapes(gpu):
    found = set()
    for num_sequences, num_tokens, num_heads, packed in itertools.product(
        (1, 2, 4, 8, 31, 40, 130, 1000), (512, 2048, 8192, 2**16, 2**20), (1, 4, 12, 32, 66, 128),
        (False, True),
    ):  # fmt: skip
        shape = plan.Shape(num_sequences, num_tokens, num_heads, packed)
        launch = plan.plan(shape, gpu)
        assert num_bytes_beside(launch, shape) <= most_bytes(shape, gpu), shape
        found.add((launch.segments.length > 0, launch.segments.join_every > 0))
    all_kinds = {(False, False), (True, False), (True, True)}
    assert found == (all_kinds if gpu.num_sms > 1 else all_kinds & found)


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_ITEMS"])
def test_what_does_not_fit_is_not_planned(monkeypatch, limit):
    """The bounds are kept to the byte and to the item, and a plan that one rules out gives way to
    another: in the end to whole sequences, which need not fit.
    """
    shape = plan.Shape(1, 8192, 12, packed=False)
    joined = plan.plan(shape, H200)
    assert joined.segments.join_every > 0
    used = {
        "_MOST_BYTES": num_bytes_beside(joined, shape),
        "_MOST_ITEMS": num_items(joined, shape),
    }[limit]
    chosen = joined.variant, joined.segments
    monkeypatch.setattr(plan, "_TOKEN_BYTES", 0)

    def choice(most):
        monkeypatch.setattr(plan, limit, most)
        return plan._choice.__wrapped__(shape, H200)

    assert choice(used) == chosen
    assert choice(used - 1) != chosen
    assert choice(0)[1] == WHOLE


def test_without_memory_pools_nothing_is_split():
    """Splitting wants memory that a stream alone can free."""
    without = H200._replace(memory_bytes=0)
    for shape in SHAPES:
        launch = plan.plan(shape, without)
        assert (launch.segments, launch.offsets.end) == (WHOLE, 0)
        assert launch.variant in plan.variants()


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
@pytest.mark.parametrize(("segment", "extra"), [(64, 0), (96, 0), (64, 1), (72, 24)])
def test_batched_sequences_have_as_many_slots_as_segments(segment, extra, num_tokens):
    shape = plan.Shape(3, num_tokens, 2, packed=False)
    segments = plan.Segments(segment, first_extra=extra)
    launch = plan.launch(plan.variants()[0], segments, shape, H200)
    assert launch.num_slots == 3 * max(1, len(range(extra, num_tokens, segment)))
    assert launch.segments == (segments if segment + extra < num_tokens else WHOLE)


def slots(bounds, segment, extra):
    """Of each sequence, the first slot and the one behind the last: struct Work of
    cuda_src/work.cuh. In which order a warp's lanes of sequences come does not matter here.
    """
    if segment == 0:
        return [(n, n + 1) for n in range(len(bounds) - 1)]
    ends = itertools.pairwise(bounds)
    counts = [max(1, len(range(begin + extra, end, segment))) for begin, end in ends]
    if len(counts) < 32:
        firsts = itertools.accumulate(counts, initial=0)
    else:
        firsts = (begin // segment + sequence for sequence, begin in enumerate(bounds))
    return [(first, first + count) for first, count in zip(firsts, counts, strict=False)]


def check_slots_of(launch, bounds):
    """Of the segments that the kernel makes of the launch's arguments."""
    ends = [0]
    for first, end in slots(bounds, launch.segments.length, launch.segments.first_extra):
        assert first >= ends[-1]
        ends.append(end)
    assert ends[-1] <= launch.num_slots, (launch, bounds)


def check_slots(lengths, segment, before=0, behind=0):
    """before, behind: rows of no sequence."""
    bounds = (before + np.cumsum([0, *lengths])).tolist()
    num_tokens = bounds[-1] + behind
    shape = plan.Shape(len(lengths), num_tokens, 2, packed=True)
    launch = plan.launch(plan.variants()[0], plan.Segments(segment), shape, H200)
    assert launch.segments.length == (segment if segment < num_tokens else 0)
    check_slots_of(launch, bounds)


@pytest.mark.parametrize("most_sequences", [31, 80])
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


@pytest.mark.parametrize("num_sequences", [1, 2, 31, 32, 33, 80])
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

    chosen, segments = plan._choice(shape._replace(num_tokens=alike[-1]), gpu)
    for num_tokens, launch in zip(alike, launches, strict=True):
        assert launch.variant == chosen
        length, extra = segments.length, segments.first_extra
        assert launch.segments == (segments if length + extra < num_tokens else WHOLE)
        if launch.segments == WHOLE:
            assert launch.num_slots == num_sequences
        elif packed:
            assert launch.num_slots == num_tokens // length + num_sequences
        else:
            assert launch.num_slots == num_sequences * len(range(extra, num_tokens, length))


@every_gpu
def test_what_a_plan_cuts_has_slots(gpu):
    """Of the true T, not of the one that is decided by; also where a segment is as long."""
    rng = np.random.default_rng(0)
    for num_tokens in (1, 64, 65, 96, 97, 127, 1025, 1057, 8193, 16_385, 65_537, 100_000):
        for num_sequences, num_heads in itertools.product((1, 2, 33, 80), (1, 4, 45, 130)):
            shape = plan.Shape(num_sequences, num_tokens, num_heads, packed=True)
            launch = plan.plan(shape, gpu)
            check_segments(launch.segments, shape)
            first = [0] + [num_tokens] * num_sequences
            last = [0] * num_sequences + [num_tokens]
            anywhere = [0, *sorted(rng.integers(0, num_tokens + 1, num_sequences - 1).tolist())]
            for bounds in first, last, [*anywhere, num_tokens]:
                check_slots_of(launch, bounds)


@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_segment_of_the_rounded_count_that_is_all_of_the_true_one_is_none(
    monkeypatch, packed, joins
):
    """Whatever lengths are worth a thought: 16,385 tokens are planned as 17,408."""
    length = 16_416
    segments = plan.Segments(length, *joins)
    monkeypatch.setattr(plan, "_choice", lambda shape, gpu: (variant(128, DEEP), segments))
    for num_tokens in 16_385, length - 1, length, length + 1:
        shape = plan.Shape(40, num_tokens, 130, packed)
        launch = plan.plan.__wrapped__(shape, H200)
        if num_tokens <= length:
            assert (launch.segments, launch.num_slots) == (WHOLE, 40)
        else:
            assert launch.segments == segments
        check_grids(launch, shape, H200)
        check_workspace(launch, shape)


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
                assert max(launch.segments.length, launch.cuts_grid) < 2**31, shape


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
            "LAYOUT": plan.CONTIGUOUS,
        }
        assert stated.items() <= dict(each.defines).items()
        # A solver's raw chunks are its own, and it is never more than the stages behind.
        assert 0 < num_solvers <= each.num_stages and num_raw % num_solvers == 0
        # What a block may have, and what its struct is aligned to.
        assert each.num_threads <= 1024 and each.num_threads % 32 == 0
        assert each.shared_bytes % 128 == 0


@pytest.mark.parametrize("kernel", [*plan.variants(), plan.CUTS], ids=str)
def test_a_layout_changes_nothing_but_itself(kernel):
    assert plan.with_layout(kernel, plan.CONTIGUOUS) == kernel
    for layout in plan.LAYOUTS:
        other = plan.with_layout(kernel, layout)
        assert dict(other.defines) == {**dict(kernel.defines), "LAYOUT": layout}
        for name in "source", "entry", "num_threads", "shared_bytes":
            assert getattr(other, name) == getattr(kernel, name)
        assert plan.with_layout(kernel, layout) is other


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
        for each, segments in itertools.product(
            plan.variants(), (WHOLE, *(plan.Segments(64, *joins) for joins in JOINS))
        ):
            hardware.force(patch.setattr, each, *segments)
            for shape in shapes:
                launch = plan.plan(shape, H200)
                assert (launch.variant, launch.segments) == (each, segments)
    assert plan.plan is before
