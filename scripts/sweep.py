"""Times cukda.fwd over a grid of T and H and looks for cliffs; one sequence, fast and slow gates.

    python scripts/sweep.py [--gate rand|slow ...] [--heads H ...] [--out FOLDER] [--limit SECONDS]
    python scripts/sweep.py --from FOLDER/sweep.json [--gate ...] [--heads ...] [--out FOLDER]

A cliff is a jump of the time between neighbours on the grid, in T or in H, by more than 1.5 times
what a smooth model of it (`fit`) says, up or down. Prints a Markdown summary; `--out` writes
sweep.json, with every point, and sweep.png. `--from` reads such a file and needs no GPU. Exit
status 1 when there is a cliff, or when a point is missing for want of anything but memory: then it
is not known that there is none. Times are device times of bf16 states, initial and final, as
bench.py takes them, with fewer replays; the results are not checked, which is bench.py's work.

A result is a dict:

    machine        {card, driver, cuda, cupy, nvrtc, torch, python}
    date, arrays, state
    seconds        that the sweep took
    again          points that were timed twice, because they stood by a cliff at first
    times          {Point: ms, or the reason why there is none}; in the file {gate: {H: {T: ms}}}
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import bench
import figures
import numpy as np

HEAD_DIM = 128
GATES = ("rand", "slow")
HEADS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST_TOKENS = 131072
MOST_JUMP = 1.5
LIMIT_SECONDS = 150
RESULT_KEYS = {"machine", "date", "arrays", "state", "seconds", "again", "times"}
# Device time to spend on a point's replays, and a quarter of it on one; long calls take more.
POINT_MS = 20
MIN_REPLAYS, MAX_REPLAYS = 3, 15
# Tokens drawn at random; longer inputs repeat them.
NUM_DRAWN_TOKENS = 4096
# Of a call's inputs in the pool, so that arrays begin where an allocator would put them.
ROWS_ALIGNMENT = 256
# Beside a call's arrays: more sets of small ones, states between segments, graphs.
SPARE_BYTES = 2 << 30

NO_MEMORY = "more memory than is free"
NOT_REACHED = "not reached before the end"
NOT_THERE = "not in the file"

# The model's terms by name, of T and H.
TERMS = {
    "1": lambda tokens, heads: np.ones_like(tokens),
    "√T": lambda tokens, heads: np.sqrt(tokens),
    "T": lambda tokens, heads: tokens,
    "T·H": lambda tokens, heads: tokens * heads,
}


class Point(NamedTuple):
    """One sequence of so many tokens and heads."""

    gate: str
    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.gate} H={self.heads} T={self.tokens}"

    @property
    def num_bytes(self) -> int:
        """Of q, k, v, g, out and beta, and of both states."""
        return self.heads * (self.tokens * (5 * HEAD_DIM + 1) + 2 * HEAD_DIM**2) * 2

    @property
    def num_rows(self) -> int:
        """From a call's inputs in the pool to the next call's."""
        return -(-self.tokens * self.heads // ROWS_ALIGNMENT) * ROWS_ALIGNMENT


class Pair(NamedTuple):
    """Neighbours along T or H; is_bridge: points of the grid between them are missing."""

    along: str
    before: Point
    after: Point
    is_bridge: bool

    @property
    def points(self) -> tuple[Point, Point]:
        return self.before, self.after


class Jump(NamedTuple):
    """factor: by which time / model of a pair's second differs from that of its first."""

    pair: Pair
    factor: float

    @property
    def size(self) -> float:
        """The same for a jump up as for one down."""
        return max(self.factor, 1 / self.factor)


def token_counts() -> list[int]:
    """Of the grid, ascending: four an octave from 16 on, at and around multiples of a chunk."""
    counts = {1, 2, 3, 5, 8, 11, MOST_TOKENS}
    octave = 16
    while octave < MOST_TOKENS:
        counts |= {octave, octave + 1, octave * 3 // 2 - 1, octave * 7 // 4 + 1}
        octave *= 2
    return sorted(counts)


def grid(gates: Iterable[str] = GATES, heads: Iterable[int] = HEADS) -> list[Point]:
    """Few heads first, so that what there may be no time for is what takes longest."""
    return [Point(g, h, t) for h in sorted(heads) for g in gates for t in token_counts()]


def fit(times: dict[Point, float]) -> dict[str, float]:
    """The smooth model of a gate's times: {term: its factor ≥ 0, in ms}, a sum of a few of TERMS.

    Minimises Σ (model / time − 1)² over all factors ≥ 0, so that short calls count as much as long
    ones, and a point far above the others no more than 1. The least such sum is that of plain least
    squares over some of the terms, and of so few all subsets are tried.

    A launch takes a constant; one sequence that is not cut takes T; a GPU that is full takes T · H;
    and √T is what is left of T where the number of segments is chosen to suit: T / n + n is least
    at n = √T. No term falls, and none grows faster than T · H. So from neighbour to neighbour the
    model bends too little to follow a cliff.
    """
    ms = np.array(list(times.values()))
    columns = _terms(list(times)) / ms[:, None]
    best, best_error = {}, math.inf
    for size in range(1, len(TERMS) + 1):
        for chosen in itertools.combinations(range(len(TERMS)), size):
            of_chosen = columns[:, chosen]
            # Lengths of one make T · H, up to 10^7, as good as a constant.
            lengths = np.linalg.norm(of_chosen, axis=0)
            solution, *_ = np.linalg.lstsq(of_chosen / lengths, np.ones(len(ms)), rcond=None)
            factors = solution / lengths
            error = np.square(of_chosen @ factors - 1).sum()
            # A further term has to do more than fit the rounding.
            if factors.min() >= 0 and error < best_error - 1e-12:
                best = {list(TERMS)[i]: float(f) for i, f in zip(chosen, factors, strict=True)}
                best_error = error
    return best


def predict(model: dict[str, float], points: list[Point]) -> np.ndarray:
    """The model's times of the points, in ms."""
    return _terms(points) @ np.array([model.get(name, 0.0) for name in TERMS])


def _terms(points: list[Point]) -> np.ndarray:
    """[point, term]."""
    tokens = np.array([p.tokens for p in points], dtype=float)
    heads = np.array([p.heads for p in points], dtype=float)
    return np.stack([term(tokens, heads) for term in TERMS.values()], axis=1)


def measured(times: dict) -> dict[Point, float]:
    """The points that have a time."""
    return {point: ms for point, ms in times.items() if figures._is_time(ms)}


def missing(times: dict) -> dict[Point, str]:
    """Why there is no time, of the points that have none; also of those that some line has and
    another has not.
    """
    whole = itertools.chain.from_iterable(line for _, line in _lines(times))
    reasons = {point: times.get(point, NOT_THERE) for point in whole}
    return {point: why for point, why in reasons.items() if not figures._is_time(why)}


def neighbours(times: dict) -> Iterator[Pair]:
    """Points with a time, next to each other in T with the same H, or in H with the same T. Where
    points between are missing, those on both sides of the gap are next to each other.
    """
    for along, line in _lines(times):
        there = [i for i, point in enumerate(line) if figures._is_time(times.get(point))]
        for i, j in itertools.pairwise(there):
            yield Pair(along, line[i], line[j], is_bridge=j > i + 1)


def _lines(times: dict) -> Iterator[tuple[str, list[Point]]]:
    """("T" or "H", the points along it, ascending), each line as long as the longest."""
    for gate in _gates(times):
        points = [point for point in times if point.gate == gate]
        heads = sorted({point.heads for point in points})
        tokens = sorted({point.tokens for point in points})
        for h in heads:
            yield "T", [Point(gate, h, t) for t in tokens]
        for t in tokens:
            yield "H", [Point(gate, h, t) for h in heads]


def _gates(times: dict) -> list[str]:
    return list(dict.fromkeys(point.gate for point in times))


def models(times: dict) -> dict[str, dict[str, float]]:
    """{gate: its model}, of the gates that have a time."""
    found = measured(times)
    return {g: fit({p: ms for p, ms in found.items() if p.gate == g}) for g in _gates(found)}


def ratios(times: dict) -> dict[Point, float]:
    """Time / model of every point that has a time."""
    found, ratio = measured(times), {}
    for gate, model in models(times).items():
        points = [point for point in found if point.gate == gate]
        for point, model_ms in zip(points, predict(model, points), strict=True):
            ratio[point] = float(found[point] / model_ms)
    return ratio


def jumps(times: dict) -> list[Jump]:
    """Of all neighbours, the largest first."""
    ratio = ratios(times)
    found = [Jump(pair, ratio[pair.after] / ratio[pair.before]) for pair in neighbours(times)]
    return sorted(found, key=lambda jump: -jump.size)


def cliffs(times: dict) -> list[Jump]:
    """The jumps by more than MOST_JUMP, the largest first."""
    return [jump for jump in jumps(times) if jump.size > MOST_JUMP]


def is_good(times: dict) -> bool:
    """No cliff, and all points there but those that memory is too small for."""
    is_whole = set(missing(times).values()) <= {NO_MEMORY}
    return bool(measured(times)) and is_whole and not cliffs(times)


def run(points: list[Point], limit_s: float, result: dict) -> None:
    """Time the points, those that are reached within the limit.

    Fills `result` as it goes, so that whoever catches an exception has what came before it.
    """
    import cupy

    from cukda.__main__ import installed

    start = time.monotonic()
    torch = bench._torch_with_gpu()
    found = installed()
    device = cupy.cuda.Device(found["best_gpu"])
    device.use()
    # Older torch collects garbage before each capture, which would take longer than the point.
    gc.freeze()
    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    fitting = [point for point in points if point.num_bytes + SPARE_BYTES <= free_bytes]
    result.update(
        machine={key: found[key] for key in bench.MACHINE},
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        arrays="torch" if torch else "CuPy",
        state=bench.STATE,
        seconds=0.0,
        again=0,
        times=dict.fromkeys(points, NO_MEMORY) | dict.fromkeys(fitting, NOT_REACHED),
    )
    if not fitting:
        return
    pool = _Pool(fitting, device.attributes["L2CacheSize"])

    def ms_of(point):
        ms = _device_ms(pool.calls(point, torch), torch)
        cupy.get_default_memory_pool().free_all_blocks()
        return ms

    try:
        measure(fitting, ms_of, start + limit_s, result)
    finally:
        result["seconds"] = round(time.monotonic() - start, 1)


def measure(points: list[Point], ms_of: Callable, end: float, result: dict) -> None:
    """Fill result["times"] with ms_of(point) until time.monotonic() is `end`. Points beside a cliff
    are timed once more: the shorter time counts, since nothing makes a call too fast.

    Fills result["again"] with their number.
    """
    times = result["times"]
    lines = {}
    for point in points:
        lines.setdefault(f"{point.gate} H={point.heads}", []).append(point)
    for name in bench._progress(list(lines)):
        for point in lines[name]:
            if time.monotonic() < end:
                times[point] = round(ms_of(point), 6)
    by_name = {f"{point} again": point for cliff in cliffs(times) for point in cliff.pair.points}
    for name in bench._progress(list(by_name)):
        if time.monotonic() < end:
            point = by_name[name]
            times[point] = min(times[point], round(ms_of(point), 6))
            result["again"] += 1


class _Pool:
    """Inputs on the GPU from which every call takes its own part."""

    def __init__(self, points: list[Point], l2_bytes: int):
        import inputs

        self._l2_bytes = l2_bytes
        num_rows = max(self._num_sets(point) * point.num_rows for point in points)
        num_heads = max(point.heads for point in points)
        self._tokens, self._data = {}, {}
        for gate in _gates(dict.fromkeys(points)):
            data = bench._inputs([NUM_DRAWN_TOKENS], num_heads, gate, bench.STATE)
            # The gates differ in A_log and dt_bias alone.
            self._tokens = self._tokens or {
                name: _repeated(data[name], num_rows) for name in inputs.TOKENS
            }
            self._data[gate] = {n: x for n, x in data.items() if n not in inputs.TOKENS}

    def calls(self, point: Point, torch) -> list:
        """Calls of cukda.fwd without arguments, each with arrays of its own."""
        return [
            bench._call(self._inputs(point, set_idx * point.num_rows), bench.STATE, torch)[0]
            for set_idx in range(self._num_sets(point))
        ]

    def _num_sets(self, point: Point) -> int:
        """As many as bench._copies makes: a call finds little of its own in the L2 cache."""
        return min(bench.MAX_INPUT_SETS, 1 + 3 * self._l2_bytes // point.num_bytes)

    def _inputs(self, point: Point, first_row: int) -> dict:
        data = self._data[point.gate]
        rows = slice(first_row, first_row + point.tokens * point.heads)
        shape = (1, point.tokens, point.heads)
        return {
            **data,
            **{name: x[rows].reshape(*shape, *x.shape[1:]) for name, x in self._tokens.items()},
            "A_log": data["A_log"][: point.heads],
            "dt_bias": data["dt_bias"][: point.heads],
            "initial_state": data["initial_state"][:, : point.heads].copy(),
        }


def _repeated(array, num_rows: int):
    """The rows of a CuPy array [B, T, H, ...], as [num_rows, ...]: over and over where there are
    too few.
    """
    import cupy

    # As bits: not every operation knows bf16.
    drawn = array.reshape(-1, *array.shape[3:]).view(cupy.uint16)
    out = cupy.empty((num_rows, *drawn.shape[1:]), cupy.uint16)
    for begin in range(0, num_rows, len(drawn)):
        part = out[begin : begin + len(drawn)]
        part[...] = drawn[: len(part)]
    return out.view(array.dtype)


def _device_ms(calls: list, torch) -> float:
    """As bench._device_ms, with no more replays than POINT_MS has room for."""
    # The first may compile.
    for call in calls:
        call()
    rough_ms = bench._elapsed_ms(lambda: [call() for call in calls], 1)[0] / len(calls)
    num_repeats, num_replays = schedule(rough_ms, len(calls))
    replay = bench._captured(calls * num_repeats, torch)
    replay()
    return statistics.median(bench._elapsed_ms(replay, num_replays)) / (len(calls) * num_repeats)


def schedule(call_ms: float, num_calls: int) -> tuple[int, int]:
    """How often a graph repeats so many calls, and how often it is replayed."""
    once_ms = num_calls * call_ms
    most = max(1, int(POINT_MS / 4 / once_ms))
    num_repeats = min(-(-bench.MIN_CALLS_PER_GRAPH // num_calls), most)
    num_replays = int(POINT_MS / (num_repeats * once_ms))
    return num_repeats, min(max(num_replays, MIN_REPLAYS), MAX_REPLAYS)


def markdown(result: dict) -> str:
    """The verdict, the models, the cliffs, and what is missing."""
    times, machine = result["times"], result["machine"]
    found, of_gate, ratio = measured(times), models(times), ratios(times)
    parts = [
        f"{machine['card']}, driver {machine['driver']}, CuPy {machine['cupy']}, NVRTC "
        f"{machine['nvrtc']}, {result['date']}. Device time of one sequence of T tokens and H "
        f"heads, {result['state']} states, {result['arrays']} arrays; {len(found)} of "
        f"{len(found) + len(missing(times))} points in {result['seconds']:.0f} s, "
        f"{result['again']} of them timed again."
    ]
    all_jumps, over = jumps(times), cliffs(times)
    if all_jumps:
        num_bridges = sum(jump.pair.is_bridge for jump in all_jumps)
        parts.append(
            f"Between neighbours, time / model jumps by more than {MOST_JUMP} in {len(over)} of "
            f"{len(all_jumps)} pairs, {num_bridges} of which have missing points between them."
        )
    if of_gate:
        rows = []
        for gate, model in of_gate.items():
            of_points = [r for point, r in ratio.items() if point.gate == gate]
            largest = next((j for j in all_jumps if j.pair.before.gate == gate), None)
            spread = f"{min(of_points):.2f} to {max(of_points):.2f}"
            rows.append([gate, f"`{formula(model)}`", spread, *_jump_cells(largest, ratio)])
        header = ["gate", "model, in µs", "time / model", *JUMP_HEADER]
        parts.append("The model, and the largest jump:\n\n" + figures._markdown(header, rows))
    if over:
        rows = [[jump.pair.before.gate, *_jump_cells(jump, ratio, found)] for jump in over]
        header = ["gate", *JUMP_HEADER, "ms"]
        title = f"Above {MOST_JUMP}:\n\n"
        parts.append(title + figures._markdown(header, rows))
    parts += _missing_lines(times)
    return "\n\n".join(parts) + "\n"


JUMP_HEADER = ["jump", "from", "to", "time / model there"]


def _jump_cells(jump: Jump | None, ratio: dict, found: dict | None = None) -> list[str]:
    """By JUMP_HEADER, and the times where they are given."""
    if jump is None:
        return ["-"] * len(JUMP_HEADER)
    before, after = jump.pair.before, jump.pair.after
    cells = [
        f"{jump.size:.2f} {'up' if jump.factor > 1 else 'down'}",
        f"T={before.tokens} H={before.heads}",
        f"T={after.tokens} H={after.heads}",
        f"{ratio[before]:.2f}, {ratio[after]:.2f}",
    ]
    return cells + ([f"{found[before]:.4f}, {found[after]:.4f}"] if found else [])


def formula(model: dict[str, float]) -> str:
    """The model in microseconds, as text."""
    terms = [f"{1e3 * f:.4g}" + (f" {name}" if name != "1" else "") for name, f in model.items()]
    return " + ".join(terms)


def _missing_lines(times: dict) -> list[str]:
    """A paragraph a reason: which points there are not, a span of T for each gate and H."""
    by_reason: dict[str, dict[tuple[str, int], list[int]]] = {}
    for point, why in missing(times).items():
        by_reason.setdefault(why, {}).setdefault((point.gate, point.heads), []).append(point.tokens)
    return [
        f"MISSING, {why}: "
        + "; ".join(
            f"{gate} H={heads} {len(tokens)} of T={min(tokens)} to {max(tokens)}"
            for (gate, heads), tokens in rows.items()
        )
        for why, rows in by_reason.items()
    ]


def plot(result: dict, path: Path) -> None:
    """PNG: time against T, a line per H, its model dashed, cliffs ringed; a panel per gate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = measured(result["times"])
    of_gate, over = models(found), cliffs(result["times"])
    all_heads = sorted({point.heads for point in found})
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(all_heads)))
    figure, panels = pyplot.subplots(
        1, len(of_gate), figsize=(1 + 6 * len(of_gate), 6.5),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, (gate, model) in zip(panels[0], of_gate.items(), strict=True):
        for heads, colour in zip(all_heads, colours, strict=True):
            line = sorted(p for p in found if (p.gate, p.heads) == (gate, heads))
            x = [point.tokens for point in line]
            style = {"color": colour, "linewidth": 0.9}
            axes.plot(x, [found[p] for p in line], marker=".", markersize=4, **style)
            if line:
                axes.plot(x, predict(model, line), linestyle="--", alpha=0.6, **style)
        ends = [p for cliff in over for p in cliff.pair.points if p.gate == gate]
        axes.scatter(
            [p.tokens for p in ends], [found[p] for p in ends],
            s=70, facecolors="none", edgecolors="tab:red", zorder=4,
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("T")
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.set_title(f"{gate}: {formula(model)} µs", fontsize=10)
    panels[0][0].set_ylabel("milliseconds per call (device time)")
    # The legend's own lines: a panel need not have every H.
    line_of = matplotlib.lines.Line2D
    handles = [
        line_of([], [], color=c, label=f"H={h}") for h, c in zip(all_heads, colours, strict=True)
    ]
    handles += [
        line_of([], [], color="0.4", linestyle="--", label="model"),
        line_of(
            [], [], linestyle="", marker="o", markersize=8, markerfacecolor="none",
            markeredgecolor="tab:red", label=f"jump above {MOST_JUMP}",
        ),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(f"KDA forward, {result['machine']['card']}, {result['date']}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write(result: dict, folder: Path) -> None:
    """sweep.json and, with matplotlib, sweep.png."""
    folder.mkdir(parents=True, exist_ok=True)
    nested: dict = {}
    for point, ms in result["times"].items():
        nested.setdefault(point.gate, {}).setdefault(point.heads, {})[point.tokens] = ms
    text = json.dumps({**result, "times": nested}, indent=1, ensure_ascii=False)
    (folder / "sweep.json").write_text(text + "\n", encoding="utf-8")
    if not measured(result["times"]):
        return
    try:
        plot(result, folder / "sweep.png")
    except ImportError as error:
        print(f"no plot ({error}): pip install 'cukda[bench]'", file=sys.stderr)


def load(path: Path) -> dict:
    """A result that `write` wrote. Errors: OSError, ValueError (something else is in the file)."""
    result = json.loads(path.read_text(encoding="utf-8"))
    lacking = RESULT_KEYS - (result.keys() if isinstance(result, dict) else set())
    if lacking:
        raise ValueError(f"it has no {', '.join(sorted(lacking))}")
    try:
        result["times"] = {
            Point(gate, int(heads), int(tokens)): ms
            for gate, of_heads in result["times"].items()
            for heads, of_tokens in of_heads.items()
            for tokens, ms in of_tokens.items()
        }
    except AttributeError as error:
        raise ValueError("its times are not by gate, heads and tokens") from error
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = {"nargs": "+", "action": "extend"}
    parser.add_argument("--gate", choices=GATES, help="only these", **several)
    parser.add_argument("--heads", type=_num_heads, metavar="H", help="only these", **several)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write sweep.json, .png")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"no new point after so long (default {LIMIT_SECONDS})",
    )
    parser.add_argument(
        "--from", type=Path, dest="file", metavar="FILE", help="judge an earlier sweep.json again"
    )
    options = parser.parse_args(arguments)
    gates = [gate for gate in GATES if gate in (options.gate or GATES)]
    if options.file:
        try:
            result = load(options.file)
        except (OSError, ValueError) as error:
            parser.error(f"--from: expected a sweep.json, got {options.file} ({error})")
        result["times"] = {
            point: ms
            for point, ms in result["times"].items()
            if point.gate in gates and (not options.heads or point.heads in options.heads)
        }
        return _report(result, options.out)
    if reason := bench.why_not():
        print(f"the sweep needs an NVIDIA GPU and CuPy ({reason})", file=sys.stderr)
        return 1
    result = {}
    try:
        run(grid(gates, set(options.heads or HEADS)), options.limit, result)
    finally:
        # Also what was measured before something broke.
        status = _report(result, options.out) if "times" in result else 1
    return status


def _report(result: dict, folder: Path | None) -> int:
    print(markdown(result), end="")
    if folder:
        write(result, folder)
    return 0 if is_good(result["times"]) else 1


def _num_heads(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a positive number of heads, got {text}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, from 0 on, got {text}")


if __name__ == "__main__":
    sys.exit(main())
