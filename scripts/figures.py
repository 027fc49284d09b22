"""The benchmark's cases, and the tables and the plot of what was measured on them. No GPU here.

A result, as bench.py makes it and gpu_record.py keeps it, is a dict:

    machine        {card, driver, cuda, cupy, nvrtc, torch, python}
    copy_tb_per_s  bytes read plus bytes written of a large copy, per second
    wgmma          whether plans had it
    arrays, state  the library and the state dtype that were timed
    accuracy       {case: {out, state}}, relative errors against the float64 recurrence
    bench          {case: {ms, ms_call, host_us}}; host_us in the median
    live           {peer: {case: ms, or the reason why there is none}}
    start_s        {cold, warm}: seconds from Python's start to a first result; may be missing
    host_us        {library: [{us, loop_us}]}: medians of each of some processes: of the time that
                   a call of next to no work keeps the host, and that HOST_LOOP_LENGTH passes of an
                   empty loop of Python take beside it; may be missing
    sigmoid        {ms, gib}: device time, size of the float32 input; may be missing
    decode         [{sequences, heads, ms, fla_ms}]: device time of a step of one token, float32
                   states; and of fla's, or the reason why there is none, if fla was there; may be
                   missing
    fla            the versions of that and of Triton; may be missing
    strides_ms     {case: {contiguous, aligned, unaligned}}: of rows without and with gaps between
                   them, timed in turn; may be missing
    mma_sync_ms    {case: ms}: without wgmma, on a GPU that has it; may be missing
"""

import json
from dataclasses import dataclass
from pathlib import Path

CASES_FILE = Path(__file__).with_name("cases_h200.json")
HEAD_DIM = 128
# Passes of the loop that a call's host time is seen beside.
HOST_LOOP_LENGTH = 1000

# Relative errors of out and final state that the contract allows, float32 states.
ACCURACY_LIMITS = {
    "rand": (4.3e-3, 2.8e-3),
    "slow": (4.7e-3, 3.7e-3),
    "collinear": (1.5e-2, 2e-2),
}


@dataclass(frozen=True)
class Case:
    """A problem, and what others take for it on the card that the cases file names."""

    seq_lens: tuple[int, ...]
    heads: int
    gate: str
    flashkda_ms: float
    best_peer_ms: float
    best_peer: str
    bar_ms: float
    goal_ms: float

    @property
    def num_bytes(self) -> int:
        """Bytes of q, k, v, g and out: what any kernel has to move."""
        return 5 * 2 * HEAD_DIM * self.heads * sum(self.seq_lens)

    def floor_ms(self, copy_tb_per_s: float) -> float:
        """The time in which a copy moves as many bytes."""
        return self.num_bytes / copy_tb_per_s / 1e9


def load_cases(path: Path = CASES_FILE) -> dict[str, Case]:
    """Cases by name, in the file's order."""
    cases = json.loads(Path(path).read_text(encoding="utf-8"))["cases"]
    return {
        name: Case(**{**case, "seq_lens": tuple(case["seq_lens"])}) for name, case in cases.items()
    }


def bench_table(result: dict, cases: dict[str, Case]) -> str:
    """Markdown: a row per measured case."""
    live = result.get("live", {})
    header = ["case", "ours", "floor", "FlashKDA", "best peer", "ratio", "bar", "call", "host µs"]
    rows = []
    for name, case in cases.items():
        if name not in result["bench"]:
            continue
        row = result["bench"][name]
        best = f"{_ms(case.best_peer_ms)} {case.best_peer}"
        rows.append(
            [
                name,
                f"**{_ms(row['ms'])}**",
                _ms(case.floor_ms(result["copy_tb_per_s"])),
                _ms(case.flashkda_ms),
                best,
                f"{case.best_peer_ms / row['ms']:.2f}",
                _ms(case.bar_ms),
                _ms(row["ms_call"]),
                f"{row['host_us']:.0f}",
                *(_ms(times.get(name, "-")) for times in live.values()),
            ]
        )
    return _markdown(header + [f"{peer} here" for peer in live], rows)


def accuracy_table(result: dict, cases: dict[str, Case]) -> str:
    """Markdown: the contract's inputs in full, and the worst of the benchmark's cases."""
    rows = []
    for gate, (out_limit, state_limit) in ACCURACY_LIMITS.items():
        if gate in result["accuracy"]:
            error = result["accuracy"][gate]
            limits = [f"{out_limit:.1e}", f"{state_limit:.1e}"]
            rows.append([gate, f"{error['out']:.2e}", f"{error['state']:.2e}", *limits])
    for gate in ACCURACY_LIMITS:
        errors = [
            result["accuracy"][name]
            for name, case in cases.items()
            if case.gate == gate and name in result["accuracy"]
        ]
        if errors:
            worst = [f"{max(error[key] for error in errors):.2e}" for key in ("out", "state")]
            label = f"worst of {len(errors)} benchmark cases, {gate}, {result['state']} state"
            rows.append([label, *worst, "", ""])
    return _markdown(["inputs", "out", "state", "out allowed", "state allowed"], rows)


def caption(result: dict) -> str:
    """What was measured, how and on what, in one paragraph."""
    machine = result["machine"]
    no_torch = " Torch is missing or sees no GPU, so the arrays are CuPy's and no peer is timed."
    return (
        f"{machine['card']}, driver {machine['driver']}, CuPy {machine['cupy']}, "
        f"NVRTC {machine['nvrtc']}, {result['date']}. Milliseconds; `ours` is the median device "
        f"time of one call from CUDA-graph replay, `call` the median of one plain call between two "
        "events, `host µs` the median time that a warm call keeps the host. "
        f"{result['arrays']} arrays; {result['state']} states, the initial one non-zero, the final "
        "one written. `floor`: q, k, v, g and out once, at the "
        f"{result['copy_tb_per_s']:.2f} TB/s at which this card copies. `FlashKDA` and `best peer` "
        "were measured before, on an H200 (driver 580, CUDA 13.0); cudnn-frontend was fed fp32 g "
        "and beta, and stands only where it is the faster of the two. `ratio` is best peer / ours, "
        "above 1 where cukda is faster. `bar` is this project's target for a kernel that uses "
        "Hopper's wgmma." + (no_torch if result["arrays"] == "CuPy" else "")
    )


def standing(result: dict, cases: dict[str, Case]) -> str:
    """In how many cases ours is faster than what it is compared with, in a sentence; and which are
    above their bars.
    """
    times = [(row["ms"], cases[name]) for name, row in result["bench"].items()]
    faster = sum(ms < case.flashkda_ms for ms, case in times)
    best = sum(ms < case.best_peer_ms for ms, case in times)
    above = [name for name, row in result["bench"].items() if row["ms"] > cases[name].bar_ms]
    return (
        f"Of {len(times)} cases, ours is faster than FlashKDA in {faster}, faster than the best "
        f"peer that was measured in {best}, and at or under the bar in {len(times) - len(above)}."
    ) + (f" Above it: {', '.join(above)}." if above else "")


def extras(result: dict) -> list[str]:
    """What is no case, a sentence each; nothing where it was not measured."""
    sentences = []
    if start := result.get("start_s"):
        sentences.append(
            f"A new process has its first result {start['cold']:.2f} s after Python starts when it "
            f"compiles, and after {start['warm']:.2f} s when the binary is in the cache."
        )
    if host_us := result.get("host_us"):
        of_each = [
            f"{_range(processes, 'us')} µs with {library} arrays (in turn with it, "
            f"{HOST_LOOP_LENGTH} passes of an empty loop of Python took "
            f"{_range(processes, 'loop_us')})"
            for library, processes in host_us.items()
        ]
        num_processes = len(next(iter(host_us.values())))
        sentences.append(
            "Of a problem of 16 tokens, a warm call with both states and `cu_seqlens` keeps this "
            f"host {' and '.join(of_each)}, in the median of each of {num_processes} processes "
            "that do nothing else."
        )
    if sigmoid := result.get("sigmoid"):
        num_bytes = 2 * sigmoid["gib"] * 2**30
        copy_ms = num_bytes / result["copy_tb_per_s"] / 1e9
        sentences.append(
            f"The float32 sigmoid of {sigmoid['gib']} GiB takes {sigmoid['ms']:.3f} ms; a copy "
            f"would take {copy_ms:.3f} ms."
        )
    if decode := result.get("decode"):
        header, fla = ["sequences x heads", "µs", "share"], ""
        rows = [
            [
                f"{row['sequences']} x {row['heads']}",
                f"{1e3 * row['ms']:.1f}",
                f"{_share_of_copy(row, result['copy_tb_per_s']):.0%}",
            ]
            for row in decode
        ]
        if any("fla_ms" in row for row in decode):
            header += ["fla, µs", "ratio"]
            fla = (
                f"; fla is what `fused_recurrent_kda` of {result['fla']} launches, on states in "
                "place, timed in turn with ours, and `ratio` its time over ours"
            )
            for cells, row in zip(rows, decode, strict=True):
                ms = row.get("fla_ms", "-")
                is_time = _is_time(ms)
                cells += [f"{1e3 * ms:.1f}", f"{ms / row['ms']:.2f}"] if is_time else [ms, "-"]
        sentences.append(
            "A step of one token, `cukda.step` with float32 states; the share is of what a copy of "
            f"as many bytes as the states have, read and written, would move in that time{fla}:"
        )
        sentences.append(_markdown(header, rows))
    if strides := result.get("strides_ms"):
        rows = [
            [name, *(_ms(ms[kind]) for kind in ("contiguous", "aligned", "unaligned"))]
            for name, ms in strides.items()
        ]
        sentences.append(
            "Device time with gaps between all rows, as long as these, timed in turn, in "
            "milliseconds: `aligned` has rows at multiples of 16 bytes, `unaligned` one element "
            "past them."
        )
        sentences.append(_markdown(["case", "no gaps", "aligned", "unaligned"], rows))
    if mma_sync := result.get("mma_sync_ms"):
        of_each = ", ".join(f"{name} {ms:.4f} ms" for name, ms in mma_sync.items())
        sentences.append(f"By `mma.sync`, with `CUKDA_WGMMA=0`: {of_each}.")
    return sentences


def _range(rows: list[dict], key: str) -> str:
    return f"{min(row[key] for row in rows):.1f} to {max(row[key] for row in rows):.1f}"


def state_bytes(num_sequences: int, heads: int) -> int:
    """Of float32 states."""
    return 4 * HEAD_DIM**2 * num_sequences * heads


def _share_of_copy(step: dict, copy_tb_per_s: float) -> float:
    """Of what a copy would move in a step's time: its states, read and written."""
    num_bytes = 2 * state_bytes(step["sequences"], step["heads"])
    return num_bytes / step["ms"] / 1e9 / copy_tb_per_s


def plot(result: dict, cases: dict[str, Case], path: Path) -> None:
    """PNG: a row per case, time on a logarithmic axis, ours against peers and floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in cases if name in result["bench"]]
    height = range(len(names))
    ours = [result["bench"][name]["ms"] for name in names]
    floor = [cases[name].floor_ms(result["copy_tb_per_s"]) for name in names]
    flashkda = [cases[name].flashkda_ms for name in names]
    best = [cases[name].best_peer_ms for name in names]

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.3 * len(names)), layout="constrained")
    axes.hlines(height, floor, flashkda, color="0.85", linewidth=1, zorder=1)
    axes.scatter(floor, height, marker="|", s=120, color="0.4", label="floor (copy)", zorder=2)
    axes.scatter(flashkda, height, marker="s", s=28, color="tab:orange", label="FlashKDA, H200")
    axes.scatter(
        best, height, marker="o", s=44, facecolors="none", edgecolors="tab:red",
        label="best peer, H200", zorder=3,
    )  # fmt: skip
    colours = iter(["tab:green", "tab:purple"])
    for peer, times in result.get("live", {}).items():
        timed = [(times[name], y) for y, name in enumerate(names) if _is_time(times.get(name))]
        if timed:
            x, y = zip(*timed, strict=True)
            axes.scatter(x, y, marker="^", s=28, color=next(colours), label=f"{peer}, here")
    axes.scatter(ours, height, marker="D", s=36, color="tab:blue", label="cukda", zorder=4)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds per call (device time)")
    axes.set_yticks(height, names)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", color="0.92")
    axes.set_axisbelow(True)
    axes.set_title(f"KDA forward, {result['machine']['card']}, {result['date']}")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _is_time(value) -> bool:
    return isinstance(value, int | float)


def _ms(value) -> str:
    return f"{value:.4f}" if _is_time(value) else str(value)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, align, *rows])
