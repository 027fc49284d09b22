"""Calls that must end, with the same bits: each in a process of its own with a time limit."""

import os
import subprocess
import sys
from pathlib import Path

import hardware
import inputs
import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve()
# Compiling included.
LIMIT_SECONDS = 60


def all_zero():
    case = inputs.make([1000], 4, seed=90, batch=2)
    for name in (*inputs.TOKENS, "A_log", "dt_bias", "initial_state"):
        case[name][:] = 0
    outputs = twice(case)
    assert not any(hardware.host(x).astype(np.float32).any() for x in outputs)


def long_tail():
    """One long sequence among many short ones, in both orders."""
    rng = np.random.default_rng(91)
    short = rng.integers(1, 51, 400).tolist()
    case = inputs.make([*short[:200], 30000, *short[200:]], 2, seed=91)
    _, final_state = twice(case)
    _, want = hardware.run(inputs.alone(case, 200))
    assert oracle.error(final_state[200:201], want) <= 2e-4
    twice(inputs.make([30000, *short], 2, "slow", seed=92))


def busy_gpu():
    """Another stream holds all SMs but one until the call has ended."""
    import cupy

    case = inputs.make([1300, 17, 547, 0, 2048], 8, seed=93)
    want = twice(case)
    given = hardware.upload(case)
    tokens = [given.pop(n) for n in inputs.TOKENS]
    out = hardware.nans(case["v"].shape, "bfloat16")
    final_state = hardware.nans(hardware.state_shape(case), "float32")
    cupy.cuda.runtime.deviceSynchronize()

    import cukda

    hold, work = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    device = cupy.cuda.Device().attributes
    flag = cupy.cuda.alloc_pinned_memory(4)
    host_flag = np.frombuffer(flag, np.int32, 1)
    host_flag[0] = 0
    # So much shared memory that no second block fits beside one.
    shared_bytes = device["MaxSharedMemoryPerBlockOptin"] - 1024
    spin = hardware.kernel("spin")
    spin.max_dynamic_shared_size_bytes = shared_bytes
    # If the call waits for the others, they end after a minute and the limit has passed.
    clocks = np.int64(60e9 * 2)
    num_blocks = device["MultiProcessorCount"] - 1
    with hold:
        spin((num_blocks,), (1,), (clocks, np.uint64(flag.ptr)), shared_mem=shared_bytes)
    with work:
        cukda.fwd(*tokens, **given, out=out, final_state=final_state)
    work.synchronize()
    assert not hold.done
    host_flag[0] = 1
    hold.synchronize()
    assert same((out, final_state), want)


def many_segments():
    """Long chains of segments, beside sequences of one."""
    twice(inputs.make([20000, *[1] * 100, 20000], 2, "half", seed=94))


def bad_bounds():
    """cu_seqlens that decrease, overlap, are all equal, or lie anywhere: few and many."""
    num_tokens = 3000
    case = inputs.make([num_tokens], 2, "half", seed=95, batch=1)
    rng = np.random.default_rng(95)
    for num_bounds in 9, 33, 34, 120:
        anywhere = rng.integers(-num_tokens, 2 * num_tokens, num_bounds)
        for bounds in (
            anywhere,
            np.sort(anywhere)[::-1].copy(),
            np.full(num_bounds, num_tokens // 2),
            np.resize([0, num_tokens], num_bounds),
            np.resize([num_tokens, 0], num_bounds),
            np.resize([0, 1900, 900, num_tokens, 1000, 64], num_bounds),
            rng.integers(-(2**63), 2**63 - 1, num_bounds),
        ):
            shape = (num_bounds - 1, *case["initial_state"].shape[1:])
            call = {**case, "cu_seqlens": bounds, "initial_state": np.ones(shape, np.float32)}
            # Where sequences overlap there is no saying what they put out.
            for _ in range(10):
                hardware.run(call)
    twice(case)


CALLS = (all_zero, long_tail, busy_gpu, many_segments, bad_bounds)
# plan.Segments, or as they are planned.
SEGMENTS = {
    "planned": None,
    "joined": (64, 1, 1),
    "joined by twos": (64, 2, 2),
    "joined behind a lead": (64, 1, 3),
}


def twice(case):
    first, second = hardware.run(case), hardware.run(case)
    assert same(first, second)
    return first


def same(got, want):
    return all(hardware.same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_ends(call, segments):
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE), call.__name__, segments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    name, segments = sys.argv[1:]
    if SEGMENTS[segments]:
        hardware.force(setattr, hardware.whole_head_variant(), *SEGMENTS[segments])
    {f.__name__: f for f in CALLS}[name]()
