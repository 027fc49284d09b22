"""compute-sanitizer's memcheck, racecheck and synccheck on a small problem of every kernel variant.

    python scripts/sanitize.py [--tool TOOL] ...

Prints a row a run, also where the GPU cannot run the variant; exit status 1 when a run is not
clean, or did not run. Needs a GPU, CuPy and compute-sanitizer (of the CUDA toolkit) on the PATH.
"""

import argparse
import concurrent.futures
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import decoding  # noqa: E402
import inputs  # noqa: E402

from cukda import jit, plan  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
# Whole sequences; and with places where they may be cut, as many as can be: the segment before goes
# on where there is no cut, or they are joined at each place, or at each second.
SEGMENT = 64
SEGMENTS = (
    plan.Segments(),
    plan.Segments(SEGMENT),
    plan.Segments(SEGMENT, 1, 1),
    plan.Segments(SEGMENT, 2, 2),
)
# Several chunks, an empty sequence, tails, several cuts; with one block for all of it, enough for
# every slot of every ring to come round.
SEQ_LENS, HEADS, NUM_SMS = (40, 0, 330), 6, 1
# Heads whose gates never forget, and not from the first place of the last sequence to the second.
SLOW_HEAD, HEAD_SLOW_AT_ONE = 2, 1
# Elements from a multiple of 16 bytes to rows, by the kernels' layout; None is without gaps.
SHIFTS = {plan.CONTIGUOUS: None, plan.STRIDED: 0, plan.UNALIGNED: 1}
LEFT_OUT = "left out"
LIMIT_SECONDS = 300
# The time is the host's.
NUM_AT_ONCE = max(4, (os.cpu_count() or 0) - 2)


def kernels() -> dict[str, tuple[plan.Variant, plan.Segments]]:
    """The kernel's variants by name, each with whole sequences, with cut ones, and with segments
    that are joined; those for strides with one of these, which has all of the others in it.
    """
    return {
        f"{variant} {_described(segments)}": (variant, segments)
        for layout in plan.LAYOUTS
        for variant in (plan.with_layout(each, layout) for each in plan.variants())
        for segments in (SEGMENTS if layout == plan.CONTIGUOUS else SEGMENTS[-1:])
    }


def _described(segments: plan.Segments) -> str:
    joined = f" join_every={segments.join_every}" if segments.join_every else ""
    return f"segment={segments.length}{joined}"


def names() -> list[str]:
    """What a run may be of: the kernels, and step and the sigmoid with all of their variants."""
    return [*kernels(), "step", "sigmoid"]


def problem() -> dict:
    """A call's inputs. Of the last sequence one head is cut at all places, one at none, and one at
    all but the second.
    """
    case = inputs.make(SEQ_LENS, HEADS)
    case["dt_bias"][SLOW_HEAD] = -9
    begin = sum(SEQ_LENS[:-1])
    case["g"][:, begin + SEGMENT : begin + 2 * SEGMENT, HEAD_SLOW_AT_ONE] = -40
    return case


def why_not(variant: plan.Variant, gpu: plan.Gpu) -> str | None:
    """What the GPU lacks for a variant, or None."""
    if variant.wgmma and not gpu.has_wgmma:
        return "no wgmma"
    if variant.shared_bytes > gpu.max_shared_bytes:
        return f"a block has no more than {gpu.max_shared_bytes} shared bytes"
    return None


def compute(name: str) -> None:
    """The work under the sanitizer: one call, whatever the plan would choose."""
    import cupy
    import hardware
    import numpy as np

    import cukda

    if name == "sigmoid":
        bits = cupy.arange(10_001, dtype=cupy.uint32)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), inputs.BF16):
            x = bits.astype(f"u{dtype.itemsize}").view(dtype)
            # On 16-byte boundaries, and off them by different distances.
            for given, out in (x, cupy.empty_like(x)), (x[3:], cupy.empty_like(x)[1:-2]):
                cukda.sigmoid(given, out)
                cukda.sigmoid_ext.sigmoid_tanh_fp32(given)
    elif name == "step":
        for state, num_tokens in itertools.product(("float32", "bfloat16"), (1, 6, 16)):
            case = decoding.make(3, num_tokens, 2, state=state)
            case["state_indices"][1] = -1
            # Rows that begin a byte pair off 16 bytes, and every second head.
            for token in inputs.TOKENS[:4]:
                wide = np.zeros((*case[token].shape[:2], 4, 136), inputs.BF16)
                wide[:, :, ::2, 1:129] = case[token]
                case[token] = cupy.asarray(wide)[:, :, ::2, 1:129]
            cukda.step(**hardware.upload(case))
    else:
        variant, segments = kernels()[name]
        gpu = jit.gpu()
        if reason := why_not(variant, gpu):
            print(f"{LEFT_OUT}: {reason}")
        else:
            jit.gpu = lambda: gpu._replace(num_sms=NUM_SMS)
            hardware.force(setattr, plan.with_layout(variant, plan.CONTIGUOUS), *segments)
            hardware.run(problem(), shift=SHIFTS[variant.layout])
    cupy.cuda.runtime.deviceSynchronize()


def verdict(returncode: int, output: str) -> str:
    """The sanitizer's summary line; or why there is none, or nothing that it could be of."""
    left_out = re.search(rf"^{LEFT_OUT}: .*$", output, re.MULTILINE)
    if left_out and not returncode:
        return left_out[0]
    summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.MULTILINE)
    if returncode or not summaries:
        lines = output.strip().splitlines()
        tail = summaries or lines[-1:]
        return f"exit status {returncode}: {tail[-1] if tail else 'no output'}"
    return summaries[-1]


def is_clean(line: str) -> bool:
    clean = rf"({LEFT_OUT}: .*|ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards .*)"
    return bool(re.fullmatch(clean, line))


def run(tool: str, name: str) -> str:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, str(Path(__file__).resolve()), "--compute", name]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return verdict(done.returncode, done.stdout)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    repeated = {"action": "append", "help": "only this; may be repeated"}
    parser.add_argument("--tool", choices=TOOLS, **repeated)
    parser.add_argument("--compute", choices=names(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compute:
        compute(options.compute)
        return 0

    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer, of the CUDA toolkit, is not on the PATH", file=sys.stderr)
        return 1
    runs = [(tool, name) for tool in options.tool or TOOLS for name in names()]
    lines = []
    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        results = pool.map(lambda each: run(*each), runs)
        for (tool, name), line in zip(runs, results, strict=True):
            print(f"{tool:10} {name:80} {line}", flush=True)
            lines.append(line)
    return 0 if all(map(is_clean, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
