"""What the tests of cukda.step share, with a GPU and without: a call's arrays, and its results."""

import hardware
import inputs
import numpy as np
import oracle
from inputs import BF16, TOKENS

# More states than sequences, which have theirs in no order.
SPARE = 3
GATES = ("A_log", "dt_bias")


def make(num_sequences, num_tokens, heads, seed=0, state="float32", gate="rand"):
    """A call by argument name, as NumPy arrays: each sequence with a state of its own in a pool."""
    case = inputs.make([num_tokens], heads, gate, seed, batch=num_sequences)
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((num_sequences + SPARE, heads, 128, 128), dtype=np.float32)
    indices = rng.permutation(len(pool))[:num_sequences].astype(np.int32)
    kept = {name: case[name] for name in (*TOKENS, *GATES, "scale", "lower_bound")}
    dtype = BF16 if state == "bfloat16" else np.float32
    return kept | {"state": pool.astype(dtype), "state_indices": indices}


def want(case, recurrence=oracle.recurrence, **options):
    """(out, pool) of the float64 recurrence, out zero where a sequence has no state."""
    pool = case["state"].astype(np.float64)
    indices = case["state_indices"]
    indices = np.arange(len(case["q"])) if indices is None else indices
    there = np.flatnonzero((indices >= 0) & (indices < len(pool)))
    slots = indices[there]
    out = np.zeros(case["q"].shape)
    given = {name: case[name][there] for name in TOKENS}
    given |= {name: case[name] for name in (*GATES, "scale", "lower_bound")}
    out[there], pool[slots] = recurrence(**given, initial_state=pool[slots], **options)
    return out, pool


def strided(x, axes):
    """The same values where axes lie in that order, each row with a gap behind it; and the last
    axis contiguous.
    """
    order = (*axes, x.ndim - 1)
    shape = [x.shape[axis] for axis in order]
    wide = np.zeros((*shape[:-1], shape[-1] + 64), x.dtype)
    wide[..., : shape[-1]] = x.transpose(order)
    return wide[..., : shape[-1]].transpose(np.argsort(order))


# State indices that are none, of a pool of eight.
PADDING = (-1, -(2**31), 8, 2**31 - 1)


def check_padding(run, padding):
    """Rows of sequences without a state are not written, nor states of none; others are as without
    any. run: a call as NumPy arrays -> (out, pool), out full of NaN before.
    """
    case = make(5, 3, 2)
    whole_out, whole_pool = run(case)
    case["state_indices"][[1, 4]] = padding
    out, pool = run(case)
    assert np.isnan(out[[1, 4]].astype(np.float32)).all()
    kept, slots = [0, 2, 3], case["state_indices"][[0, 2, 3]]
    assert hardware.same_bits(out[kept], whole_out[kept])
    assert hardware.same_bits(pool[slots], whole_pool[slots])
    others = np.setdiff1d(np.arange(len(pool)), slots)
    assert hardware.same_bits(pool[others], case["state"][others])
