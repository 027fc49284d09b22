"""compute-sanitizer's memcheck, racecheck and synccheck on a small problem of every kernel variant.

    python scripts/sanitize.py [--tool TOOL ...]

Prints a row a run; exit status 1 when a run is not clean, or did not run. Needs a GPU, CuPy and
compute-sanitizer (of the CUDA toolkit) on the PATH.
"""

import argparse
import concurrent.futures
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cukda import plan  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
# Several chunks, an empty sequence, tails; enough for every slot of every ring to come round.
SEQ_LENS, HEADS = (40, 0, 150), 2
LIMIT_SECONDS = 300
# Each holds a CUDA context and a sanitizer's shadow memory; the time is the host's.
NUM_AT_ONCE = 4


def variants() -> list[str]:
    """What a run may be of: the kernel's variants, and the sigmoid with all of its own."""
    return [*(str(variant) for variant in plan.variants()), "sigmoid"]


def compute(name: str) -> None:
    """The work under the sanitizer: one call, whatever the plan would choose."""
    import cupy
    import hardware
    import inputs
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
    else:
        (variant,) = (v for v in plan.variants() if str(v) == name)
        plan.variants = lambda: (variant,)
        hardware.run(inputs.make(SEQ_LENS, HEADS))
    cupy.cuda.runtime.deviceSynchronize()


def verdict(returncode: int, output: str) -> str:
    """The sanitizer's summary line; or why there is none."""
    summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.MULTILINE)
    if returncode or not summaries:
        lines = output.strip().splitlines()
        tail = summaries or lines[-1:]
        return f"exit status {returncode}: {tail[-1] if tail else 'no output'}"
    return summaries[-1]


def is_clean(line: str) -> bool:
    return bool(re.fullmatch(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards .*)", line))


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
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this")
    parser.add_argument("--compute", choices=variants(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compute:
        compute(options.compute)
        return 0

    runs = [(tool, name) for tool in options.tool or TOOLS for name in variants()]
    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        lines = list(pool.map(lambda each: run(*each), runs))
    for (tool, name), line in zip(runs, lines, strict=True):
        print(f"{tool:10} {name:40} {line}")
    return 0 if all(map(is_clean, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
