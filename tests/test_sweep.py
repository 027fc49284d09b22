"""The sweep without a GPU: its grid, model, jumps, verdict and files, from made-up times."""

import itertools
import json
import sys
import time
import types

import bench
import pytest
import sweep
from sweep import NO_MEMORY, NOT_REACHED, NOT_THERE, Point

MODEL = {"1": 0.012, "T": 0.0005, "T·H": 7e-7}
POINTS = sweep.grid()


def times_of(model, points=POINTS):
    return dict(zip(points, sweep.predict(model, points).tolist(), strict=True))


@pytest.fixture
def result():
    """Made-up times of all points, right on a model, another for each gate."""
    slow = {"1": 0.02, "√T": 0.001, "T·H": 9e-7}
    times = times_of(MODEL)
    times.update((p, ms) for p, ms in times_of(slow).items() if p.gate == "slow")
    return {
        "machine": {"card": "A card", "driver": "1.2", "cupy": "14.0.0", "nvrtc": "12.9"},
        "date": "2000-01-02",
        "arrays": "torch",
        "state": "bfloat16",
        "seconds": 61.5,
        "again": 0,
        "times": times,
    }


def test_grid():
    counts = sweep.token_counts()
    assert counts[0] == 1 and counts[-1] == 131072
    assert {2, 3, 5, 8, 11, 16, 17, 23, 32, 33, 47, 64, 65, 1024, 1025, 65536} <= set(counts)
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(counts))
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(counts) if a >= 16)
    assert sum(1 for count in counts if 1024 <= count < 2048) == 4
    assert len(POINTS) == len(set(POINTS)) == 2 * len(sweep.HEADS) * len(counts)
    assert sweep.HEADS[0] == 1 and sweep.HEADS[-1] == 128
    assert sweep.grid(["slow"], [8, 2])[:: len(counts)] == [
        Point("slow", 2, 1),
        Point("slow", 8, 1),
    ]


def test_bytes_of_a_call():
    # Five arrays of 128 and beta, and two states, bf16.
    assert Point("rand", 3, 7).num_bytes == 2 * (5 * 7 * 3 * 128 + 7 * 3 + 2 * 3 * 128 * 128)
    assert [Point("rand", 3, t).num_rows for t in (1, 85, 86)] == [256, 256, 512]


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        {"1": 0.02},
        {"T·H": 1e-6},
        {"1": 0.01, "√T": 0.001, "T·H": 7e-7},
        {"1": 0.01, "√T": 0.001, "T": 1e-5, "T·H": 7e-7},
    ],
)
def test_a_model_is_recovered(model):
    times = times_of(model, sweep.grid(["rand"]))
    assert sweep.fit(times) == pytest.approx(model, rel=1e-6)
    assert sweep.predict(model, list(times)[:1]) == pytest.approx(
        [sum(model.values())]  # of one token and head
    )
    assert max(jump.size for jump in sweep.jumps(times)) == pytest.approx(1)


def test_factors_are_never_negative():
    """Plain least squares takes some off for what falls, or grows more slowly than a root."""
    points = sweep.grid(["rand"])
    for ms_of in (lambda p: p.tokens**0.4, lambda p: 1 + 1 / p.heads, lambda p: 1 / p.tokens):
        model = sweep.fit({p: ms_of(p) for p in points})
        assert model and min(model.values()) >= 0


def test_the_fit_is_the_best_with_no_negative_factor():
    points = sweep.grid(["rand"], [1, 16, 128])
    times = {p: 0.01 + 1e-4 * p.tokens**0.7 * (1 + p.heads / 50) for p in points}

    def error(model):
        modelled = sweep.predict(model, points)
        return sum((m / times[p] - 1) ** 2 for p, m in zip(points, modelled, strict=True))

    best = sweep.fit(times)
    for name in sweep.TERMS:
        for change in (1e-7, -1e-7):
            changed = {**best, name: best.get(name, 0) + change * (1 if name == "1" else 1e-3)}
            if changed[name] >= 0:
                assert error(changed) > error(best)


@pytest.mark.parametrize("factor", [2, 1 / 2])
@pytest.mark.parametrize("along", ["T", "H"])
def test_a_cliff_is_found(result, along, factor):
    """All points from some T or H on are slower or faster."""
    at = 1025 if along == "T" else 48
    for point in result["times"]:
        if point.gate == "slow" and (point.tokens if along == "T" else point.heads) >= at:
            result["times"][point] *= factor
    found = sweep.cliffs(result["times"])
    before = 1024 if along == "T" else 32
    lines = sweep.HEADS if along == "T" else sweep.token_counts()
    assert len(found) == len(lines)
    for cliff in found:
        assert cliff.pair.along == along and not cliff.pair.is_bridge
        ends = [p.tokens if along == "T" else p.heads for p in cliff.pair.points]
        assert ends == [before, at]
        assert {point.gate for point in cliff.pair.points} == {"slow"}
        assert cliff.size > 1.5 and (cliff.factor > 1) == (factor > 1)
        assert cliff.size == pytest.approx(2, rel=0.2)
    assert not sweep.is_good(result["times"])
    # A row each, with both points, beside the gate's own.
    rows = [row for row in sweep.markdown(result).splitlines() if row.startswith("| slow |")]
    assert len(rows) == 1 + len(found)
    for row, cliff in zip(rows[1:], found, strict=True):
        direction = "up" if factor > 1 else "down"
        ends = " | ".join(f"T={p.tokens} H={p.heads}" for p in cliff.pair.points)
        assert row.startswith(f"| slow | {cliff.size:.2f} {direction} | {ends} | ")


def test_a_point_that_stands_out_is_a_jump_on_both_sides(result):
    point = Point("rand", 16, 257)
    result["times"][point] *= 10
    found = sweep.cliffs(result["times"])
    assert len(found) == 4 and all(point in cliff.pair.points for cliff in found)
    assert {cliff.pair.along for cliff in found} == {"T", "H"}
    # Far off, but it does not draw the model to it.
    assert sweep.ratios(result["times"])[point] == pytest.approx(10, rel=0.02)


def test_the_largest_jump_comes_first(result):
    result["times"][Point("rand", 16, 257)] /= 2
    result["times"][Point("slow", 4, 2049)] *= 3
    sizes = [jump.size for jump in sweep.jumps(result["times"])]
    assert sizes == sorted(sizes, reverse=True)
    assert Point("slow", 4, 2049) in sweep.jumps(result["times"])[0].pair.points


def test_neighbours_of_a_whole_grid(result):
    num_tokens, num_heads = len(sweep.token_counts()), len(sweep.HEADS)
    pairs = list(sweep.neighbours(result["times"]))
    along_tokens, along_heads = num_heads * (num_tokens - 1), num_tokens * (num_heads - 1)
    assert len(pairs) == len(set(pairs)) == 2 * (along_tokens + along_heads)
    for along, before, after, is_bridge in pairs:
        assert before.gate == after.gate and not is_bridge
        if along == "T":
            assert before.heads == after.heads and before.tokens < after.tokens
        else:
            assert before.tokens == after.tokens and before.heads < after.heads


@pytest.mark.parametrize("reason", [NO_MEMORY, NOT_REACHED, None])
def test_a_missing_point_is_bridged_and_named(result, reason):
    times, gone = result["times"], Point("slow", 8, 1024)
    if reason is None:
        del times[gone]
    else:
        times[gone] = reason
    pairs = list(sweep.neighbours(times))
    assert not any(gone in pair.points for pair in pairs)
    bridges = [pair for pair in pairs if pair.is_bridge]
    assert bridges == [
        sweep.Pair("T", Point("slow", 8, 897), Point("slow", 8, 1025), True),
        sweep.Pair("H", Point("slow", 4, 1024), Point("slow", 16, 1024), True),
    ]
    assert sweep.missing(times) == {gone: reason or NOT_THERE}
    text = sweep.markdown(result)
    assert f"MISSING, {reason or NOT_THERE}: slow H=8 1 of T=1024 to 1024" in text
    assert f"{len(POINTS) - 1} of {len(POINTS)} points" in text
    assert f"{len(pairs)} pairs, 2 of which have missing points between them" in text


def test_a_cliff_does_not_hide_in_a_gap(result):
    for point in result["times"]:
        if point.tokens > 1024:
            result["times"][point] *= 2
        if 512 < point.tokens < 1537:
            result["times"][point] = NO_MEMORY
    pairs = [cliff.pair for cliff in sweep.cliffs(result["times"])]
    assert len(pairs) == 2 * len(sweep.HEADS) and all(pair.is_bridge for pair in pairs)
    assert {(pair.before.tokens, pair.after.tokens) for pair in pairs} == {(512, 1793)}


def test_verdict(result):
    times = result["times"]
    assert sweep.is_good(times)
    # For want of memory a sweep is as whole as it can be.
    assert sweep.is_good({**times, Point("rand", 128, 131072): NO_MEMORY})
    assert not sweep.is_good({**times, Point("rand", 128, 131072): NOT_REACHED})
    assert not sweep.is_good({p: ms for p, ms in times.items() if p != Point("rand", 8, 64)})
    assert not sweep.is_good({**times, Point("rand", 1, 1): 1.0})
    assert not sweep.is_good(dict.fromkeys(times, NO_MEMORY))
    assert not sweep.is_good({})


@pytest.mark.parametrize(
    ("call_ms", "num_calls", "want"),
    [
        (0.01, 32, (1, 15)),
        (0.02, 2, (8, 15)),
        (0.5, 2, (5, 4)),
        (0.5, 16, (1, 3)),
        (10.0, 1, (1, 3)),
        (500.0, 1, (1, 3)),
    ],
)
def test_schedule(call_ms, num_calls, want):
    assert sweep.schedule(call_ms, num_calls) == want


def test_points_beside_a_cliff_are_timed_again():
    points = sweep.grid(["rand"], [1, 2, 4])
    ms = times_of(MODEL, points)
    once, always, asked = Point("rand", 2, 64), Point("rand", 4, 4097), []

    def ms_of(point):
        asked.append(point)
        disturbed = point == once and asked.count(point) == 1
        return ms[point] * (3 if disturbed or point == always else 1)

    result = {"times": {}, "again": 0}
    sweep.measure(points, ms_of, time.monotonic() + 100, result)
    assert asked[: len(points)] == points
    assert result["times"] == {p: round(ms[p] * (3 if p == always else 1), 6) for p in points}
    assert len(set(asked[len(points) :])) == len(asked) - len(points) == result["again"]
    assert {once, always} < set(asked[len(points) :])
    # What is there the second time, too, is one.
    assert {point for c in sweep.cliffs(result["times"]) for point in c.pair.points} >= {always}
    assert all(always in cliff.pair.points for cliff in sweep.cliffs(result["times"]))


def test_nothing_is_timed_beyond_the_limit(monkeypatch, capsys):
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    points = sweep.grid(["rand", "slow"], [1])
    result = {"times": dict.fromkeys(points, NOT_REACHED), "again": 0}
    sweep.measure(points, lambda point: 1.0, 70, result)
    assert list(result["times"].values()) == [1.0] * 70 + [NOT_REACHED] * (len(points) - 70)
    assert capsys.readouterr().err.splitlines()[:2] == ["[1/2] rand H=1", "[2/2] slow H=1"]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_does_not_fit_is_not_asked_for(monkeypatch, result, breaks):
    """With a stand-in for CuPy that knows the free memory."""
    largest = Point("slow", 4, 131072)
    free_bytes = largest.num_bytes + sweep.SPARE_BYTES - 1
    runtime = types.SimpleNamespace(memGetInfo=lambda: (free_bytes, 2 * free_bytes))
    device = types.SimpleNamespace(use=lambda: None, attributes={"L2CacheSize": 1 << 20})
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=runtime, Device=lambda index: device)
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    found = dict.fromkeys(bench.MACHINE, "x") | {"best_gpu": 0}
    monkeypatch.setattr("cukda.__main__.installed", lambda: found)
    monkeypatch.setattr(bench, "_torch_with_gpu", lambda: None)

    class Pool:
        def __init__(self, points, l2_bytes):
            assert largest not in points and l2_bytes == 1 << 20

        def calls(self, point, torch):
            return point

    def device_ms(point, torch):
        if breaks and point.tokens == 64:
            raise RuntimeError("no")
        return result["times"][point]

    monkeypatch.setattr(sweep, "_Pool", Pool)
    monkeypatch.setattr(sweep, "_device_ms", device_ms)
    points, got = sweep.grid(["rand", "slow"], [2, 4]), {}
    if breaks:
        with pytest.raises(RuntimeError):
            sweep.run(points, 100, got)
    else:
        sweep.run(points, 100, got)
        assert sweep.is_good(got["times"])
    assert list(got["times"]) == points
    gone = sweep.missing(got["times"])
    assert {point for point, why in gone.items() if why == NO_MEMORY} == {
        largest,
        largest._replace(gate="rand"),
    }
    assert (NOT_REACHED in gone.values()) == breaks
    assert got["times"][points[0]] == round(result["times"][points[0]], 6)
    assert sweep.markdown({**got, "machine": result["machine"]})


def test_markdown(result):
    text = sweep.markdown(result)
    assert "A card, driver 1.2, CuPy 14.0.0, NVRTC 12.9, 2000-01-02." in text
    assert f"{len(POINTS)} of {len(POINTS)} points in 62 s, 0 of them timed again." in text
    num_pairs = len(list(sweep.neighbours(result["times"])))
    assert f"jumps by more than 1.5 in 0 of {num_pairs} pairs, 0 of which have missing" in text
    assert "| rand | `12 + 0.5 T + 0.0007 T·H` | 1.00 to 1.00 | 1.00 " in text
    assert "| slow | `20 + 1 √T + 0.0009 T·H` | 1.00 to 1.00 | 1.00 " in text
    assert "Above" not in text and "MISSING" not in text


def test_files(result, tmp_path):
    pytest.importorskip("matplotlib")
    result["times"][Point("rand", 128, 131072)] = NO_MEMORY
    result["times"][Point("slow", 16, 257)] *= 4
    sweep.write(result, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["sweep.json", "sweep.png"]
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sweep.load(tmp_path / "new" / "sweep.json") == result
    times = json.loads((tmp_path / "new" / "sweep.json").read_text(encoding="utf-8"))["times"]
    assert times["slow"]["16"]["257"] == result["times"][Point("slow", 16, 257)]
    assert times["rand"]["128"]["131072"] == NO_MEMORY


def test_a_line_that_is_not_there_at_all_is_plotted(result, tmp_path):
    pytest.importorskip("matplotlib")
    for point in result["times"]:
        if (point.gate, point.heads) == ("slow", 8):
            result["times"][point] = NOT_REACHED
    sweep.plot(result, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_makes_no_plot(result, tmp_path):
    result["times"] = dict.fromkeys(result["times"], NOT_REACHED)
    sweep.write(result, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert "MISSING, not reached before the end: rand H=1 59 of T=1 to 131072" in (
        sweep.markdown(result)
    )


def test_a_file_is_judged_again(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    result["times"][Point("slow", 16, 257)] *= 4
    sweep.write(result, tmp_path)
    file = str(tmp_path / "sweep.json")
    assert sweep.main(["--from", file]) == 1
    assert capsys.readouterr().out == sweep.markdown(result)
    # What is asked for alone is judged alone.
    assert sweep.main(["--from", file, "--gate", "rand"]) == 0
    assert "slow" not in capsys.readouterr().out
    assert sweep.main(["--from", file, "--heads", "16", "1"]) == 1
    assert sweep.main(["--from", file, "--heads", "1", "--out", str(tmp_path / "part")]) == 0
    part = sweep.load(tmp_path / "part" / "sweep.json")
    assert {point.heads for point in part["times"]} == {1}
    assert (tmp_path / "part" / "sweep.png").exists()


def test_command_line(monkeypatch, capsys, result):
    for option, value, expected in [
        ("--gate", "half", "choose from"),
        ("--heads", "0", "expected a positive number of heads, got 0"),
        ("--heads", "x", "expected a positive number of heads, got x"),
        ("--limit", "soon", "expected seconds, from 0 on, got soon"),
        ("--limit", "-1", "expected seconds, from 0 on, got -1"),
        ("--limit", "nan", "expected seconds, from 0 on, got nan"),
    ]:
        with pytest.raises(SystemExit):
            sweep.main([option, value])
        error = capsys.readouterr().err
        assert f"argument {option}: " in error and expected in error
    monkeypatch.setattr(bench, "why_not", lambda: "no driver")
    assert sweep.main([]) == 1
    assert "needs an NVIDIA GPU and CuPy (no driver)" in capsys.readouterr().err

    asked = []

    def run(points, limit_s, into):
        asked.append((points, limit_s))
        into.update(result)

    monkeypatch.setattr(bench, "why_not", lambda: None)
    monkeypatch.setattr(sweep, "run", run)
    assert sweep.main([]) == 0
    assert asked.pop() == (POINTS, sweep.LIMIT_SECONDS)
    assert sweep.main(["--gate", "slow", "--heads", "8", "2", "8", "--limit", "9.5"]) == 0
    assert asked.pop() == (sweep.grid(["slow"], [2, 8]), 9.5)
    result["times"][Point("slow", 16, 257)] *= 4
    assert sweep.main(["--gate", "slow", "rand"]) == 1
    assert asked.pop()[0] == POINTS
    assert "Above 1.5:" in capsys.readouterr().out


def test_what_was_measured_before_a_crash_is_printed(monkeypatch, capsys, result):
    def run(points, limit_s, into):
        into.update(result)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "why_not", lambda: None)
    monkeypatch.setattr(sweep, "run", run)
    with pytest.raises(RuntimeError, match="out of memory"):
        sweep.main([])
    assert "| rand | `12 + 0.5 T + 0.0007 T·H` |" in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--from", str(tmp_path / "none.json")])
    assert "--from: expected a sweep.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda sweep: b"{", "Expecting property name"),
        (lambda sweep: b"\xff", "can't decode byte"),
        (lambda sweep: [sweep], "it has no again, arrays, date, machine, seconds, state, times"),
        (lambda sweep: {**sweep, "times": [1]}, "its times are not by gate, heads and tokens"),
        (lambda sweep: {**sweep, "times": {"rand": {"x": {"1": 2}}}}, "invalid literal for int"),
        (lambda sweep: {k: v for k, v in sweep.items() if k != "times"}, "it has no times"),
    ],
)
def test_a_file_that_is_no_sweep(result, tmp_path, capsys, change, why):
    file = tmp_path / "sweep.json"
    written = change({**result, "times": {}})
    file.write_bytes(written if isinstance(written, bytes) else json.dumps(written).encode())
    with pytest.raises(SystemExit):
        sweep.main(["--from", str(file)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--from: expected a sweep.json, got {file} (" in last and why in last
