"""python -m cukda: what is installed, and a run of real size, checked and timed.

The run is on the best GPU there is, or on the CPU without one. It is checked against the float64
recurrence `recurrence` below, token by token, on a few heads, and on a GPU its time is compared
with the time in which the same GPU copies the bytes of q, k, v, g and out. Exit status 1 when the
run fails, its result is wrong or the report cannot be written.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np

import cukda
from cukda import jit

HEAD_DIM = 128
GPU_SHAPE = (8192, 96)  # tokens, heads
CPU_SHAPE = (2048, 8)
NUM_HEADS_CHECKED = 2
# Random numbers are made on the host, since CuPy's need a library beyond NVRTC; so few of them.
NUM_DISTINCT_HEADS = 8
HEAD_AXIS = {"A_log": 0, "dt_bias": 0, "initial_state": 1}  # of all others, 2
# The contract's limits for such inputs, widened because two heads scatter round the mean of all.
OUT_LIMIT, STATE_LIMIT = 5e-3, 3.5e-3
COPY_BYTES = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    """Print the report; 0 when the run's result is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m cukda", description=_first_line())
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    # A path may have letters that the terminal has not.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")

    report = {}
    try:
        report["installed"] = installed()
        if not options.json:
            print(_installed_text(report["installed"]), flush=True)
        if report["installed"]["card"]:
            report["run"] = _run_on_gpu(report["installed"]["best_gpu"])
        else:
            report["run"] = _run_on_cpu()
    except BrokenPipeError:
        raise
    # Whatever else goes wrong is what this command is there to tell.
    except Exception as error:
        report["run"] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report, indent=1) if options.json else _run_text(report["run"]))
    return 0 if report["run"]["ok"] else 1


def _first_line() -> str:
    """Of what this module says of itself; python -OO strips that."""
    return (__doc__ or "").partition("\n")[0]


def installed() -> dict:
    """Versions, GPUs, driver and cache folder; None for what is not there."""
    found = {
        "cukda": cukda.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": _version("ml_dtypes"),
        "torch": _version("torch"),
        "cupy": None,
        "nvrtc": None,
        "driver": None,
        "cuda": None,
        "gpus": [],
        "best_gpu": None,
        "card": None,
        "cache": jit.cache_folder(),
        "no_gpu_because": None,
        "no_nvrtc_because": None,
    }
    found["driver"] = _driver_version()
    try:
        cupy = jit.import_cupy()
    except ImportError as error:
        found["no_gpu_because"] = f"CuPy does not import ({error.__cause__})"
        if found["driver"]:
            found["no_gpu_because"] += ": pip install 'cukda[cuda12]', or cukda[cuda13] for CUDA 13"
        return found
    found["cupy"] = cupy.__version__
    try:
        found["nvrtc"] = jit.nvrtc_version()
    except RuntimeError as error:
        found["no_nvrtc_because"] = str(error)
    if reason := jit.why_no_gpu():
        found["no_gpu_because"] = reason
        return found
    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    found["cuda"] = _dotted(runtime.driverGetVersion())
    for ordinal in range(count):
        properties = runtime.getDeviceProperties(ordinal)
        found["gpus"].append(
            {
                "name": properties["name"].decode(),
                "arch": f"sm_{properties['major']}{properties['minor']}",
                "capability": [properties["major"], properties["minor"]],
                "sms": properties["multiProcessorCount"],
                "memory_gib": round(properties["totalGlobalMem"] / 2**30),
            }
        )
    best = max(
        range(count), key=lambda i: (found["gpus"][i]["capability"], found["gpus"][i]["sms"])
    )
    found["best_gpu"], found["card"] = best, found["gpus"][best]["name"]
    return found


def recurrence(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, state, sigmoid):
    """The formula of `cukda.fwd` in float64, one token after the other: (out, final state).

    q, k, v, g: [T, H, 128], beta: [T, H], A_log: [H], dt_bias: [H, 128], state: [H, V, K].
    sigmoid: float32 array -> float array.
    """
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    q /= np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
    k /= np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    gate = np.exp(A_log.astype(np.float64))[:, None] * (g + dt_bias)
    decay = np.exp(lower_bound * sigmoid(gate.astype(np.float32)).astype(np.float64))
    beta = sigmoid(beta.astype(np.float32)).astype(np.float64)
    out = np.empty_like(v)
    for t in range(len(q)):
        state *= decay[t][:, None, :]
        correction = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state += correction[:, :, None] * k[t][:, None, :]
        out[t] = scale * np.einsum("hvk,hk->hv", state, q[t])
    return out, state


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a large copy on the current GPU."""
    import cupy

    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    source = cupy.zeros(min(COPY_BYTES, free_bytes // 4), dtype=cupy.uint8)
    target = cupy.zeros_like(source)
    milliseconds = _gpu_ms(functools.partial(cupy.copyto, target, source))
    return 2 * source.nbytes / milliseconds * 1e3


def _run_on_gpu(ordinal: int) -> dict:
    import cupy

    tokens, heads = GPU_SHAPE
    with cupy.cuda.Device(ordinal):
        # Inputs, outputs and as much again for the copies made on the way.
        free_bytes = cupy.cuda.runtime.memGetInfo()[0]
        heads = max(NUM_HEADS_CHECKED, min(heads, free_bytes // (3 * _num_bytes(tokens, 1))))
        data = _inputs(tokens, min(heads, NUM_DISTINCT_HEADS))
        arrays = {
            name: _to_gpu(value, heads, HEAD_AXIS.get(name, 2)) if np.ndim(value) else value
            for name, value in data.items()
        }
        out = _to_gpu(np.full((1, tokens, 1, HEAD_DIM), np.nan, ml_dtypes.bfloat16), heads, 2)
        final_state = cupy.full((1, heads, HEAD_DIM, HEAD_DIM), np.nan, dtype=np.float32)
        call = functools.partial(cukda.fwd, **arrays, out=out, final_state=final_state)
        with _progress("first call, compiling if the cache has no binary"):
            start = time.perf_counter()
            call()
            cupy.cuda.runtime.deviceSynchronize()
            first_seconds = time.perf_counter() - start
        milliseconds, bandwidth = _gpu_ms(call), copy_bandwidth()

        def sigmoid(x):
            return cupy.asnumpy(cukda.sigmoid_ext.sigmoid_tanh_fp32(cupy.asarray(x)))

        checked = slice(0, NUM_HEADS_CHECKED)
        got = cupy.asnumpy(out[:, :, checked].view(np.int16)).view(ml_dtypes.bfloat16)
        with _progress("checking against float64"):
            errors = _errors(data, checked, got, cupy.asnumpy(final_state[:, checked]), sigmoid)
    return _run_report(f"cuda:{ordinal}", tokens, heads, milliseconds, errors) | {
        "first_call_s": first_seconds,
        "copy_tb_per_s": bandwidth / 1e12,
        "copy_share": _num_bytes(tokens, heads) / bandwidth * 1e3 / milliseconds,
    }


def _run_on_cpu() -> dict:
    tokens, heads = CPU_SHAPE
    data = _inputs(tokens, heads)
    out = np.full_like(data["v"], np.nan)
    final_state = np.full_like(data["initial_state"], np.nan)
    with _progress("running on the CPU"):
        start = time.perf_counter()
        cukda.fwd(**data, out=out, final_state=final_state)
        seconds = time.perf_counter() - start
    checked = slice(0, NUM_HEADS_CHECKED)
    with _progress("checking against float64"):
        errors = _errors(data, checked, out[:, :, checked], final_state[:, checked], _sigmoid)
    return _run_report("cpu", tokens, heads, 1e3 * seconds, errors)


def _run_report(where, tokens, heads, milliseconds, errors) -> dict:
    out_error, state_error = errors
    return {
        "where": where,
        "tokens": tokens,
        "heads": heads,
        "ms": milliseconds,
        "out_error": out_error,
        "state_error": state_error,
        "ok": _within(out_error, OUT_LIMIT) and _within(state_error, STATE_LIMIT),
    }


def _num_bytes(tokens: int, heads: int) -> int:
    """Bytes of q, k, v, g and out."""
    return 5 * 2 * HEAD_DIM * tokens * heads


def _inputs(tokens: int, heads: int) -> dict:
    """Random arguments of one sequence, on the CPU."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape, dtype=np.float32)

    q, k, v, g = (normal(1, tokens, heads, HEAD_DIM).astype(ml_dtypes.bfloat16) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": normal(1, tokens, heads).astype(ml_dtypes.bfloat16),
        "scale": HEAD_DIM**-0.5,
        "A_log": random.random(heads, dtype=np.float32),
        "dt_bias": random.random((heads, HEAD_DIM), dtype=np.float32),
        "lower_bound": -5.0,
        "initial_state": 0.1 * normal(1, heads, HEAD_DIM, HEAD_DIM),
    }


def _to_gpu(array, heads: int, axis: int):
    """The array on the GPU, its heads, which lie along axis, repeated until there are `heads`."""
    import cupy

    index = np.arange(heads) % array.shape[axis]
    # Integers of the same size: not every CuPy can gather bf16.
    bits = array.view({2: np.int16, 4: np.int32}[array.itemsize])
    return cupy.take(cupy.asarray(bits), cupy.asarray(index), axis=axis).view(array.dtype)


def _errors(data: dict, heads: slice, out, final_state, sigmoid) -> tuple:
    """Relative errors of out and final state on these heads."""
    want_out, want_state = recurrence(
        *(data[name][0][:, heads] for name in ("q", "k", "v", "g", "beta")),
        data["scale"],
        data["A_log"][heads],
        data["dt_bias"][heads],
        data["lower_bound"],
        data["initial_state"][0][heads],
        sigmoid,
    )
    return _error(out[0], want_out), _error(final_state[0], want_state)


def _error(got, want) -> float | None:
    """‖got − want‖ / ‖want‖, None when that is not a finite number."""
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else None


def _within(error: float | None, limit: float) -> bool:
    return error is not None and error <= limit


def _sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def _gpu_ms(call, num_calls: int = 20) -> float:
    """Median device time of a warm call."""
    import cupy

    for _ in range(3):
        call()
    pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(num_calls)]
    for start, stop in pairs:
        start.record()
        call()
        stop.record()
    stop.synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in pairs)


@contextlib.contextmanager
def _progress(what: str):
    """A line on stderr while the body runs; on a terminal it counts seconds and then goes."""
    if sys.stderr is None or not sys.stderr.isatty():
        _say(f"{what} ...\n")
        yield
        return
    done = threading.Event()

    def count():
        start = time.perf_counter()
        while True:
            seconds = time.perf_counter() - start
            _say(f"\r{what} ... {seconds:.0f} s")
            if done.wait(1):
                return

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield
    finally:
        done.set()
        counter.join()
        _say("\r\033[K")


def _say(text: str) -> None:
    """On stderr, which may be closed, full or gone: no run hangs on that."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The kernel driver's version, from nvidia-smi: CuPy knows only the CUDA version it offers."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _installed_text(found: dict) -> str:
    def packages(*names):
        return ", ".join(f"{name} {found[name] or 'missing'}" for name in names)

    lines = [f"cukda {found['cukda']}, {packages('python', 'numpy', 'ml_dtypes', 'torch')}"]
    cache = f", kernel cache {found['cache'] or 'nowhere'}" if found["cupy"] else ""
    lines.append(packages("cupy", "nvrtc") + cache)
    if found["no_nvrtc_because"]:
        lines.append(found["no_nvrtc_because"])
    for ordinal, gpu in enumerate(found["gpus"]):
        lines.append(
            f"cuda:{ordinal} {gpu['name']}, {gpu['arch']}, {gpu['sms']} SMs, "
            f"{gpu['memory_gib']} GiB, driver {found['driver']} (CUDA {found['cuda']})"
        )
    if not found["gpus"]:
        lines.append(f"no GPU: {found['no_gpu_because']}. Running on the CPU instead.")
    return "\n".join(lines)


def _run_text(run: dict) -> str:
    if "error" in run:
        return f"FAILED: {run['error']}"
    rows = [
        ("KDA forward", f"{run['where']}, T={run['tokens']}, H={run['heads']}, D={HEAD_DIM}"),
        ("time", f"{run['ms']:.3f} ms"),
    ]
    if run["where"] != "cpu":
        copy = f"{run['copy_share']:.1%} used of {run['copy_tb_per_s']:.3g} TB/s measured"
        rows += [("first call", f"{run['first_call_s']:.2f} s"), ("copy bandwidth", copy)]
    rows += [
        ("error of out", _error_text(run["out_error"], OUT_LIMIT)),
        ("error of state", _error_text(run["state_error"], STATE_LIMIT)),
        ("check", "ok" if run["ok"] else "WRONG"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _error_text(error: float | None, limit: float) -> str:
    return f"{'not finite' if error is None else f'{error:.2e}'} (at most {limit:.1e})"


if __name__ == "__main__":
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # The interpreter is not to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Who reads may have gone, as `head` does.
        if not isinstance(error, BrokenPipeError):
            _say(f"the report cannot be written ({error})\n")
        status = 1
    sys.exit(status)
