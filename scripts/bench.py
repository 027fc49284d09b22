"""Times cukda.fwd on the cases of cases_h200.json, each checked before it is timed.

    python scripts/bench.py [--case NAME] ... [--out FOLDER] [--no-check] [--no-live]

Prints a Markdown table; `--out` writes bench.md, bench.json and bench.png. Exit status 1 when a
result is wrong. Checked means: against the float64 recurrence of tests/oracle.py, on the GPU, on
a few heads. States are bf16, as FlashKDA was timed, with a non-zero initial state and the final
state written. Arrays are torch's when torch sees the GPU (its callers pay the host cost that
`host_us` states), else CuPy's. `fla` and `flash_kda` are timed beside when they import, unless
`--no-live` leaves them out.
"""

import argparse
import functools
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The tree's own package and oracle are measured, never an installed copy of another version.
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import figures  # noqa: E402

# Of cukda.__main__.installed(), what a time depends on.
MACHINE = ("card", "driver", "cuda", "cupy", "nvrtc", "torch", "python")
STATE = "bfloat16"
NUM_HEADS_CHECKED = 4
NUM_REPLAYS = 30
# Short enough not to fill the launch queue.
ROW_CALLS = 20
MIN_CALLS_PER_GRAPH = 16
MAX_INPUT_SETS = 32
ACCURACY_SHAPE = ([2048], 8)
# A few heads scatter round the mean of all heads, which the contract's limits are for.
FEW_HEADS = 1.15
# Relative error of rounding a normal distribution to bf16: what a bf16 final state adds.
BF16_ROUNDING = 1.66e-3
# Processes timed after the one that compiles.
NUM_STARTS = 3
SIGMOID_GIB = 1
# Sequences and heads of a step.
DECODE = tuple(itertools.product((1, 8, 64, 256, 1024), (4, 32, 96)))
# As many of its states as a step's inputs and fla's trial take at most.
NUM_DECODE_STATES = 5
NUM_TURNS = 3
STRIDES_CASES = ("h96_fixed_8192", "h64_mixed", "h12_2048", "h12_2048_slow")
MMA_SYNC_CASES = ("h96_fixed_8192", "h96_fixed_8192_slow", "h64_fixed_8192")
# Packed, so with cu_seqlens; of four heads.
TINY_SHAPE = [8, 8]
NUM_TINY_ROWS = 100
NUM_HOST_PROCESSES = 5
# What a new process does to have a result; it prints the clock then.
FIRST_RESULT = """
import time, cupy, cukda, ml_dtypes
shapes = [(1, 64, 4, 128)] * 4 + [(1, 64, 4)]
q, k, v, g, beta = (cupy.zeros(s, cupy.uint16).view(ml_dtypes.bfloat16) for s in shapes)
cukda.fwd(q, k, v, g, beta)
cupy.cuda.runtime.deviceSynchronize()
print(time.time())
"""
# A peer that is further off than this was called wrongly, and its time means nothing.
PEER_LIMIT = 0.05


def run(names: list[str], cases: dict, check: bool, result: dict, live: bool = True) -> None:
    """Measure the named cases, with the contract's accuracy inputs before them.

    live: whether peers that import are timed beside, which compile for minutes.
    Fills `result` as it goes, so that whoever catches an exception has what came before it.
    `result["wrong"]` names what was beyond its limit; what is wrong is not timed.
    """
    import cupy

    from cukda import jit
    from cukda.__main__ import copy_bandwidth, installed

    torch = _torch_with_gpu()
    found = installed()
    cupy.cuda.Device(found["best_gpu"]).use()
    result.update(
        machine={key: found[key] for key in MACHINE},
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        wgmma=jit.gpu().has_wgmma,
        arrays="torch" if torch else "CuPy",
        state=STATE,
        accuracy={},
        bench={},
        live={peer: {} for peer in (_live_peers(torch) if live else ())},
        wrong=[],
    )
    result["copy_tb_per_s"] = copy_bandwidth() / 1e12
    for name in _progress([*(figures.ACCURACY_LIMITS if check else ()), *names]):
        if name in figures.ACCURACY_LIMITS:
            _check_accuracy(name, torch, result)
        else:
            _measure(name, cases[name], torch, check, result)
        cupy.get_default_memory_pool().free_all_blocks()


def run_extras(result: dict) -> None:
    """Measure what is no case: how soon a new process has a result, what a call costs the host, the
    sigmoid, a token of many sequences, beside fla where it imports, and a few cases with strides,
    and by mma.sync where the plan has wgmma.

    Fills result's start_s, host_us, sigmoid, decode, strides_ms, mma_sync_ms and, with fla's
    version, fla.
    """
    cold, *warm = _start_seconds(1 + NUM_STARTS)
    result["start_s"] = {"cold": round(cold, 2), "warm": round(statistics.median(warm), 2)}
    torch = _torch_with_gpu()
    result["host_us"] = _host_us_by_process()
    result["sigmoid"] = {"ms": round(_sigmoid_ms(), 4), "gib": SIGMOID_GIB}
    if torch and _imports("fla.ops.kda"):
        import fla
        import triton

        result["fla"] = f"flash-linear-attention {fla.__version__}, Triton {triton.__version__}"
    rows = (_decode_row(n, heads, torch, "fla" in result) for n, heads in DECODE)
    result["decode"] = [row for row in rows if row]
    cases = figures.load_cases()
    result["strides_ms"] = {name: _strides_ms(cases[name]) for name in STRIDES_CASES}
    result["mma_sync_ms"] = _mma_sync_ms()


def _start_seconds(count: int) -> list[float]:
    """Of processes one after the other on one cache, empty at first: from Python's start to the
    first result.
    """
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONPATH": path}
        for _ in range(count):
            start = time.time()
            done = subprocess.run(
                [sys.executable, "-c", FIRST_RESULT],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            seconds.append(float(done.stdout) - start)
    return seconds


def _strides_ms(case) -> dict[str, float]:
    """Device time of a case without gaps between rows, and of one whose rows all have gaps: where
    they begin at multiples of 16 bytes, and where they begin one element behind.
    """
    import cupy

    calls = {}
    data = _inputs(case.seq_lens, case.heads, case.gate, STATE)
    for kind, shift in ("contiguous", None), ("aligned", 0), ("unaligned", 1):
        call, outputs = _call(data, STATE, None, shift)
        others = [_call(copy, STATE, None, shift)[0] for copy in _copies(data, outputs)]
        calls[kind] = [call, *others]
    times = _in_turn({kind: (of, None) for kind, of in calls.items()})
    del data, call, outputs, others, calls
    cupy.get_default_memory_pool().free_all_blocks()
    return times


def _mma_sync_ms() -> dict[str, float]:
    """Of MMA_SYNC_CASES, in a process without wgmma."""
    from cukda import jit

    if not jit.gpu().has_wgmma:
        return {}
    names = [word for name in MMA_SYNC_CASES for word in ("--case", name)]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-check", "--no-live", *names, "--out", folder]
        subprocess.run(
            [sys.executable, __file__, *options],
            env={**os.environ, "CUKDA_WGMMA": "0"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        result = json.loads((Path(folder) / "bench.json").read_text(encoding="utf-8"))
    if result["wgmma"]:
        raise RuntimeError("CUKDA_WGMMA=0: expected a run by mma.sync, got one by wgmma")
    return {name: result["bench"][name]["ms"] for name in MMA_SYNC_CASES}


def _host_us_by_process() -> dict[str, list[dict[str, float]]]:
    """By library, tiny_host_us of some processes that do nothing else, one after the other: a host
    whose processor others share is slow for seconds at a time.
    """
    path = os.pathsep.join([str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    by_library = {}
    for _ in range(NUM_HOST_PROCESSES):
        done = subprocess.run(
            [sys.executable, "-c", "import bench, json; print(json.dumps(bench.tiny_host_us()))"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for library, medians in json.loads(done.stdout).items():
            by_library.setdefault(library, []).append(medians)
    return by_library


def tiny_host_us() -> dict[str, dict[str, float]]:
    """By library, the median times that a warm call keeps the host, of a problem that takes the GPU
    next to none, over many calls; and that a loop of Python takes, in turn with them, by which to
    tell a slow host from a slow call.
    """
    medians = {}
    torch = _torch_with_gpu()
    for library in [torch, None] if torch else [None]:
        call, _ = _call(_inputs(TINY_SHAPE, 4, "rand", "float32"), "float32", library)
        call()
        of_call, of_loop = [], []
        for _ in range(NUM_TINY_ROWS):
            of_call += _host_seconds([call], 1)
            of_loop += _host_seconds([_loop], 1)
        medians["torch" if library else "CuPy"] = {
            "us": round(1e6 * statistics.median(of_call), 2),
            "loop_us": round(1e6 * statistics.median(of_loop), 2),
        }
    return medians


def _loop() -> None:
    for _ in range(figures.HOST_LOOP_LENGTH):
        pass


def _sigmoid_ms() -> float:
    """Median device time of the float32 sigmoid of SIGMOID_GIB."""
    import cupy

    import cukda

    x = cupy.linspace(-9, 9, SIGMOID_GIB * 2**28, dtype=cupy.float32)
    out = cupy.empty_like(x)
    # CuPy arrays, so captured on CuPy's stream.
    return _device_ms([functools.partial(cukda.sigmoid, x, out)], None)


def _check_accuracy(gate: str, torch, result: dict) -> None:
    """All heads of the contract's accuracy inputs, with float32 states."""
    data = _inputs(*ACCURACY_SHAPE, gate, "float32")
    call, outputs = _call(data, "float32", torch)
    call()
    want = _oracle(data, slice(None))
    _judge(gate, outputs, want, slice(None), figures.ACCURACY_LIMITS[gate], result)


def _measure(name: str, case, torch, check: bool, result: dict) -> None:
    data = _inputs(case.seq_lens, case.heads, case.gate, STATE)
    call, outputs = _call(data, STATE, torch)
    call()
    want = heads = None
    if check:
        step = max(1, case.heads // NUM_HEADS_CHECKED)
        heads = slice((case.heads - 1) % step, None, step)
        want = _oracle(data, heads)
        out_limit, state_limit = figures.ACCURACY_LIMITS[case.gate]
        limits = (FEW_HEADS * out_limit, FEW_HEADS * math.hypot(state_limit, BF16_ROUNDING))
        if not _judge(name, outputs, want, heads, limits, result):
            return
    calls = [call, *(_call(copy, STATE, torch)[0] for copy in _copies(data, outputs))]
    result["bench"][name] = {
        "ms": round(_device_ms(calls, torch), 5),
        "ms_call": round(_call_ms(calls), 5),
        "host_us": round(1e6 * statistics.median(_host_seconds(calls, NUM_REPLAYS)), 2),
    }
    del calls
    for peer, times in result["live"].items():
        try:
            times[name] = _peer_ms(_live_peers(torch)[peer], data, want, heads, torch)
        except Exception as error:
            times[name] = _in_a_line(error)


def _decode_row(num_sequences: int, heads: int, torch, beside_fla: bool) -> dict | None:
    """Device time of cukda.step for a token of each sequence, float32 states; and of fla's, in turn
    with ours. None where the GPU has no room.
    """
    import cupy

    import cukda

    cupy.get_default_memory_pool().free_all_blocks()
    num_bytes = figures.state_bytes(num_sequences, heads)
    if NUM_DECODE_STATES * num_bytes > cupy.cuda.runtime.memGetInfo()[0]:
        return None
    case = _inputs([1] * num_sequences, heads, "rand", "float32")
    tokens = {
        name: case[name].reshape(num_sequences, 1, *case[name].shape[2:])
        for name in ("q", "k", "v", "g", "beta")
    }
    state = {
        "state": case["initial_state"],
        "state_indices": cupy.arange(num_sequences, dtype="i4"),
    }
    data = tokens | state | {name: case[name] for name in ("A_log", "dt_bias")}
    sets = [data, *_copies(data, {"out": tokens["q"]})]
    # CuPy arrays, so captured on CuPy's stream.
    ours = [functools.partial(cukda.step, **x, out=cupy.empty_like(x["q"])) for x in sets]
    calls, row = {"ms": (ours, None)}, {"sequences": num_sequences, "heads": heads}
    if beside_fla:
        try:
            return row | _in_turn(calls | {"fla_ms": (_fla_steps(sets, torch), torch)})
        except Exception as error:
            row["fla_ms"] = _in_a_line(error)
    return row | _in_turn(calls)


def _inputs(seq_lens, heads: int, gate: str, state: str) -> dict:
    """The arguments of a call as CuPy arrays; one sequence is fixed, several are packed."""
    import cupy
    import inputs

    batch = 1 if len(seq_lens) == 1 else None
    data = inputs.make(seq_lens, heads, gate, xp=cupy, batch=batch, rng=_gpu_generator())
    if state == STATE:
        data["initial_state"] = inputs.bf16(data["initial_state"])
    return data


@functools.cache
def _gpu_generator():
    """CuPy's random generator; None where CuPy finds no cuRAND."""
    import cupy

    try:
        return cupy.random.default_rng(0)
    except ImportError:
        return None


def _oracle(data: dict, heads: slice):
    """(out, final state) of these heads in float64, gates through the hardware's sigmoid."""
    import cupy
    import hardware
    import oracle

    def of_heads(name, axis):
        array = data[name]
        return array[(slice(None),) * axis + (heads,)]

    return oracle.recurrence(
        *(of_heads(name, 2) for name in ("q", "k", "v", "g", "beta")),
        data["scale"],
        of_heads("A_log", 0),
        of_heads("dt_bias", 0),
        data["lower_bound"],
        of_heads("initial_state", 1),
        data["cu_seqlens"],
        xp=cupy,
        sigmoid=hardware.sigmoid,
    )


def _judge(name, outputs, want, heads, limits, result) -> bool:
    import oracle

    got = outputs["out"][:, :, heads], outputs["final_state"][:, heads]
    try:
        errors = [oracle.error(g, w) for g, w in zip(got, want, strict=True)]
    except ValueError as error:
        result["wrong"].append(f"{name}: {error}")
        return False
    result["accuracy"][name] = dict(zip(("out", "state"), map(_significant, errors), strict=True))
    for what, error, limit in zip(("out", "state"), errors, limits, strict=True):
        if error > limit:
            result["wrong"].append(f"{name}: {what} is off by {error:.2e}, allowed {limit:.2e}")
    return errors[0] <= limits[0] and errors[1] <= limits[1]


def _call(data: dict, state: str, torch, shift: int | None = None):
    """A call of cukda.fwd without arguments, and the CuPy arrays that it writes, full of NaN; with
    a shift all are hardware.spread.
    """
    import hardware

    import cukda

    outputs = {
        "out": hardware.nans(data["v"].shape, "bfloat16"),
        "final_state": hardware.nans(hardware.state_shape(data), state),
    }
    if shift is not None:
        data, outputs = hardware.spread_all(data, shift), hardware.spread_all(outputs, shift)
    positional = [data[name] for name in ("q", "k", "v", "g", "beta", "scale")]
    positional += [outputs["out"]]
    positional += [data[name] for name in ("A_log", "dt_bias", "lower_bound", "initial_state")]
    positional += [outputs["final_state"], data["cu_seqlens"]]
    return functools.partial(cukda.fwd, *(_for_caller(a, torch) for a in positional)), outputs


def _copies(data: dict, outputs: dict):
    """More sets of the same inputs, so that a call finds little of its own in the L2 cache."""
    import cupy

    l2_bytes = cupy.cuda.Device().attributes["L2CacheSize"]
    arrays = [a for a in (*data.values(), *outputs.values()) if isinstance(a, cupy.ndarray)]
    set_bytes = sum(array.nbytes for array in arrays)
    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    num_sets = min(MAX_INPUT_SETS, 1 + 3 * l2_bytes // set_bytes, 1 + free_bytes // 2 // set_bytes)
    for _ in range(num_sets - 1):
        yield {k: a.copy() if isinstance(a, cupy.ndarray) else a for k, a in data.items()}


def _device_ms(calls: list, torch) -> float:
    """Median over replays of a graph of calls, one after the other, per call."""
    for call in calls:
        call()
    repeats = -(-MIN_CALLS_PER_GRAPH // len(calls))
    replay = _captured(calls * repeats, torch)
    for _ in range(3):
        replay()
    return statistics.median(_elapsed_ms(replay, NUM_REPLAYS)) / (len(calls) * repeats)


def _in_turn(calls: dict[str, tuple]) -> dict[str, float]:
    """_device_ms of each of several, the median of a few turns: what they differ by is less than
    what clocks and heat do to one of them.
    """
    turns = [{kind: _device_ms(*of) for kind, of in calls.items()} for _ in range(NUM_TURNS)]
    return {kind: round(statistics.median(turn[kind] for turn in turns), 5) for kind in calls}


def _elapsed_ms(work: Callable, count: int) -> list[float]:
    """Device times of some work that is queued so many times, one after the other."""
    import cupy

    # All are queued before the first is waited for: the device never waits for the host.
    events = [cupy.cuda.Event() for _ in range(count + 1)]
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    events[-1].synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events)]


def _captured(calls: list, torch):
    """Capture the calls in one CUDA graph; what is returned launches it on the current stream."""
    import cupy

    if torch:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return graph.launch


def _call_ms(calls: list) -> float:
    """Median of one plain call between two events on an idle device."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for call in itertools.islice(itertools.cycle(calls), NUM_REPLAYS):
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)


def _host_seconds(calls: list, num_rows: int) -> list[float]:
    """Times that warm calls keep the host, in rows of calls."""
    import cupy

    times = []
    for _ in range(num_rows):
        cupy.cuda.runtime.deviceSynchronize()
        for call in itertools.islice(itertools.cycle(calls), ROW_CALLS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    cupy.cuda.runtime.deviceSynchronize()
    return times


def _live_peers(torch) -> dict:
    """{name: function of the data that returns a call, which returns (out, final state)}."""
    # Without this, fla hands the problem to flash_kda when that is installed.
    os.environ["FLA_FLASH_KDA"] = "0"
    makers = {"fla.ops.kda": _fla, "flash_kda": _flash_kda}
    return {name.split(".")[0]: make for name, make in makers.items() if torch and _imports(name)}


def _fla(data: dict, torch):
    from fla.ops.kda import chunk_kda

    data = {name: _for_caller(value, torch) for name, value in data.items()}
    if data["cu_seqlens"] is not None:
        data["cu_seqlens"] = data["cu_seqlens"].long()
    data["initial_state"] = data["initial_state"].float()
    options = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "state_v_first": True,
    }
    return functools.partial(torch.inference_mode()(chunk_kda), **data, **options)


def _flash_kda(data: dict, torch):
    import flash_kda

    data = {name: _for_caller(value, torch) for name, value in data.items()}
    if data["cu_seqlens"] is not None:
        data["cu_seqlens"] = data["cu_seqlens"].long()
    out, final_state = torch.empty_like(data["v"]), torch.empty_like(data["initial_state"])
    fwd = functools.partial(flash_kda.fwd, out=out, final_state=final_state, **data)

    def call():
        fwd()
        return out, final_state

    return call


def _fla_steps(sets: list[dict], torch) -> list:
    """Calls of what fla's fused_recurrent_kda launches, in its fastest form: on states in place,
    and without allocating its output. Its first result is looked at as _peer_ms does, and that it
    is where it was wanted, since what its version does not know it ignores.
    """
    import oracle
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    import cukda

    options = {
        "inplace_final_state": True,
        "state_v_first": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
    }

    def make(data):
        given = {n: _for_caller(x, torch) for n, x in data.items() if n != "state_indices"}
        state, out = given.pop("state"), torch.empty_like(given["v"])
        # Its states are the sequences' in their order.
        return functools.partial(
            fused_recurrent_kda_fwd, **given, **options, initial_state=state, out=out
        )

    ours, theirs = (sets[0] | {"state": sets[0]["state"].copy()} for _ in range(2))
    want, call = cukda.step(**ours), make(theirs)
    got = call()
    expected = call.keywords["out"], call.keywords["initial_state"]
    if [x.data_ptr() for x in got] != [x.data_ptr() for x in expected]:
        raise ValueError("not in place")
    for x, w in zip(got, (want, ours["state"]), strict=True):
        error = oracle.error(_from_torch(x, torch), w)
        if error > PEER_LIMIT:
            raise ValueError(f"wrong result, off by {error:.1e}")
    return [make(data) for data in sets]


def _in_a_line(error: Exception) -> str:
    """Why there is no time, for a cell of a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:80].replace("|", "/")


def _peer_ms(make, data, want, heads, torch) -> float:
    """A peer's device time, after a look at its result that tells a wrong call from a right one."""
    import oracle

    call = make(data, torch)
    out, _ = call()
    if want is not None:
        error = oracle.error(_from_torch(out, torch)[:, :, heads], want[0])
        if error > PEER_LIMIT:
            raise ValueError(f"wrong result, off by {error:.1e}")
    return round(_device_ms([call], torch), 5)


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    # A package that is broken in whatever way is a package that is not there.
    except Exception:
        return False
    return True


@functools.cache
def _torch_with_gpu():
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _for_caller(value, torch):
    """A CuPy array as a torch tensor on the same memory, when torch is the caller's library."""
    import cupy

    if not torch or not isinstance(value, cupy.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_dlpack(value.view(cupy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(value)


def _from_torch(tensor, torch):
    import cupy

    return cupy.from_dlpack(tensor.float().contiguous())


def _significant(error: float) -> float:
    return float(f"{error:.3e}")


def _progress(names: list[str]):
    """Yield the names: under a bar or a line that is rewritten on a terminal, else a line each."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(names, unit="case") as bar:
                for name in bar:
                    bar.set_postfix_str(name)
                    yield name
            return
    start, end = ("\r", "\033[K") if sys.stderr.isatty() else ("", "\n")
    for number, name in enumerate(names, 1):
        line = f"{start}[{number}/{len(names)}] {name}"
        print(line, end=end, file=sys.stderr, flush=True)
        yield name
    if start:
        print(file=sys.stderr)


def why_not() -> str | None:
    """Why nothing can be measured on this machine, if so."""
    from cukda import jit

    return jit.why_no_gpu()


def write(result: dict, cases: dict, folder: Path) -> None:
    """bench.json, bench.md and, with matplotlib, bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(markdown(result, cases), encoding="utf-8")
    if not result["bench"]:
        return
    try:
        figures.plot(result, cases, folder / "bench.png")
    except ImportError as error:
        print(f"no plot ({error}): pip install 'cukda[bench]'", file=sys.stderr)


def markdown(result: dict, cases: dict) -> str:
    """The tables under their caption."""
    parts = [figures.caption(result)]
    if result["bench"]:
        parts += [figures.bench_table(result, cases), figures.standing(result, cases)]
    if result["accuracy"]:
        parts.append(figures.accuracy_table(result, cases))
    parts += [f"WRONG: {line}" for line in result.get("wrong", ())]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    cases = figures.load_cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    repeated = {"action": "append", "help": "only this; may be repeated"}
    parser.add_argument("--case", choices=cases, metavar="NAME", **repeated)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write bench.md, .json, .png")
    parser.add_argument("--no-check", action="store_true", help="time without checking")
    parser.add_argument("--no-live", action="store_true", help="no peers, which compile long")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"the benchmark needs an NVIDIA GPU and CuPy ({reason})", file=sys.stderr)
        return 1
    result = {}
    try:
        names = options.case or list(cases)
        run(names, cases, not options.no_check, result, not options.no_live)
    finally:
        # Also what was measured before something broke.
        if "copy_tb_per_s" in result:
            print(markdown(result, cases), end="")
            if options.out:
                write(result, cases, options.out)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
