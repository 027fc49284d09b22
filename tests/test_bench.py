"""The benchmark without a GPU: its cases, tables, plot and files, from made-up figures."""

import itertools
import json
import math
import sys
import types
from pathlib import Path

import bench
import figures
import inputs
import numpy as np
import pytest

CASES = figures.load_cases()


@pytest.fixture
def result():
    """Made-up figures of two cases, one of which a live peer failed on."""
    return {
        "machine": {"card": "A card", "driver": "1.2", "cupy": "14.0.0", "nvrtc": "12.9"},
        "date": "2000-01-02",
        "arrays": "torch",
        "state": "bfloat16",
        "copy_tb_per_s": 4.24,
        "accuracy": {
            "rand": {"out": 1e-3, "state": 2e-3},
            "h12_2048": {"out": 1.5e-3, "state": 2.5e-3},
        },
        "bench": {
            "h96_fixed_8192": {"ms": 0.7093, "ms_call": 0.72, "host_us": 33.3},
            "h12_2048": {"ms": 0.05, "ms_call": 0.06, "host_us": 34.0},
        },
        "live": {"fla": {"h96_fixed_8192": 2.5, "h12_2048": "OSError: no"}},
        "wrong": ["slow: out is off by 1.00e+00, allowed 4.70e-03"],
    }


def test_cases_are_complete():
    assert len(CASES) == 25
    for name, case in CASES.items():
        assert case.gate in ("rand", "slow"), name
        assert name.endswith("_slow") == (case.gate == "slow")
        assert f"h{case.heads}_" in name
        assert 0 < case.goal_ms < case.bar_ms
        assert case.best_peer_ms <= case.flashkda_ms


# From a copy bandwidth of 4.24 TB/s, by hand: 5 arrays of 2 bytes.
@pytest.mark.parametrize(
    ("name", "floor_ms"),
    [("h96_fixed_8192", 0.2374), ("h64_mixed", 0.1583), ("h4_1024", 0.0012), ("h32_256", 0.0025)],
)
def test_floor(name, floor_ms):
    assert round(CASES[name].floor_ms(4.24), 4) == floor_ms


def test_table_has_a_row_per_measured_case(result):
    header, _, *rows = figures.bench_table(result, CASES).splitlines()
    assert header == (
        "| case | ours | floor | FlashKDA | best peer | ratio | bar | call | host µs | fla here |"
    )
    assert rows == [
        "| h96_fixed_8192 | **0.7093** | 0.2374 | 1.4186 | 1.4186 FlashKDA | 2.00 | 0.5500 "
        "| 0.7200 | 33 | 2.5000 |",
        "| h12_2048 | **0.0500** | 0.0074 | 0.2314 | 0.0477 cudnn-frontend | 0.95 | 0.0450 "
        "| 0.0600 | 34 | OSError: no |",
    ]


def test_accuracy_table_has_the_limits_and_the_worst(result):
    rows = figures.accuracy_table(result, CASES).splitlines()[2:]
    assert rows == [
        "| rand | 1.00e-03 | 2.00e-03 | 4.3e-03 | 2.8e-03 |",
        "| worst of 1 benchmark cases, rand, bfloat16 state | 1.50e-03 | 2.50e-03 |  |  |",
    ]


def test_standing(result):
    result["bench"] = {
        name: {"ms": ms, "ms_call": 9.0, "host_us": 9.0}
        # Faster than both, than FlashKDA alone, than neither; the first is the bar itself.
        for name, ms in [("h12_2048", 0.045), ("h12_4096", 0.4), ("h4_1024", 0.1098)]
    }
    assert figures.standing(result, CASES) == (
        "Of 3 cases, ours is faster than FlashKDA in 2, faster than the best peer that was "
        "measured in 1, and at or under the bar in 1. Above it: h12_4096, h4_1024."
    )
    del result["bench"]["h12_4096"], result["bench"]["h4_1024"]
    assert figures.standing(result, CASES).endswith(" under the bar in 1.")


HOST_US = {
    "torch": [{"us": 40.6, "loop_us": 9.5}, {"us": 31.4, "loop_us": 7.0}],
    "CuPy": [{"us": 11.4, "loop_us": 6.1}, {"us": 20.7, "loop_us": 6.6}],
}


def test_extras(result):
    assert figures.extras(result) == []
    result |= {"start_s": {"cold": 1.8, "warm": 0.9}, "host_us": HOST_US}
    result |= {"sigmoid": {"ms": 0.6, "gib": 1}}
    # 2 * 64 KiB * 8192 at 4.24 TB/s are 253 us.
    result |= {"decode": [{"sequences": 256, "heads": 32, "ms": 0.3}]}
    of_rows = {"contiguous": 0.05, "aligned": 0.051, "unaligned": 0.12}
    result |= {"strides_ms": {"h12_2048": of_rows}}
    result |= {"mma_sync_ms": {"h96_fixed_8192": 0.5675, "h64_fixed_8192": 0.38}}
    assert figures.extras(result) == [
        "A new process has its first result 1.80 s after Python starts when it compiles, and after "
        "0.90 s when the binary is in the cache.",
        "Of a problem of 16 tokens, a warm call with both states and `cu_seqlens` keeps this host "
        "31.4 to 40.6 µs with torch arrays (in turn with it, 1000 passes of an empty loop of "
        "Python took 7.0 to 9.5) and 11.4 to 20.7 µs with CuPy arrays (in turn with it, 1000 "
        "passes of an empty loop of Python took 6.1 to 6.6), in the median of each of 2 processes "
        "that do nothing else.",
        # 2 * 2**30 bytes at 4.24 TB/s.
        "The float32 sigmoid of 1 GiB takes 0.600 ms; a copy would take 0.506 ms.",
        "A step of one token, `cukda.step` with float32 states; the share is of what a copy of "
        "as many bytes as the states have, read and written, would move in that time:",
        "| sequences x heads | µs | share |\n| --- | ---: | ---: |\n| 256 x 32 | 300.0 | 84% |",
        "Device time with gaps between all rows, as long as these, timed in turn, in milliseconds: "
        "`aligned` has rows at multiples of 16 bytes, `unaligned` one element past them.",
        "| case | no gaps | aligned | unaligned |\n| --- | ---: | ---: | ---: |\n"
        "| h12_2048 | 0.0500 | 0.0510 | 0.1200 |",
        "By `mma.sync`, with `CUKDA_WGMMA=0`: h96_fixed_8192 0.5675 ms, h64_fixed_8192 0.3800 ms.",
    ]


def test_a_step_beside_flas(result):
    rows = [{"sequences": 1, "heads": 4, "ms": 0.003, "fla_ms": 0.0036}]
    rows += [{"sequences": 8, "heads": 32, "ms": 0.02, "fla_ms": "OSError: no"}]
    text, table = figures.extras(result | {"decode": rows, "fla": "fla 1.2, Triton 3.4"})
    assert "`fused_recurrent_kda` of fla 1.2, Triton 3.4" in text
    header, _, first, second = table.splitlines()
    assert header == "| sequences x heads | µs | share | fla, µs | ratio |"
    assert first.startswith("| 1 x 4 | 3.0 |") and first.endswith("| 3.6 | 1.20 |")
    assert second.startswith("| 8 x 32 | 20.0 |") and second.endswith("| OSError: no | - |")


def test_a_start_is_timed_from_the_start_of_python(monkeypatch):
    monkeypatch.setattr(bench, "FIRST_RESULT", "import time; time.sleep(0.2); print(time.time())")
    times = bench._start_seconds(2)
    assert len(times) == 2 and all(0.2 < seconds < 20 for seconds in times)


@pytest.mark.parametrize("torch", [None, "torch"])
def test_host_times_are_of_the_call_and_of_the_loop(monkeypatch, torch):
    asked = []

    def host_seconds(calls, num_rows):
        asked.append(calls[0])
        # The first turns are disturbed.
        seconds = 2e-5 if calls[0] is bench._loop else {"torch": 4e-5, None: 3e-5}[calls[0]()]
        return [1.0 if len(asked) < 4 else seconds] * num_rows * bench.ROW_CALLS

    monkeypatch.setattr(bench, "_torch_with_gpu", lambda: torch)
    monkeypatch.setattr(bench, "_inputs", lambda *_: None)
    monkeypatch.setattr(bench, "_call", lambda data, state, library: (lambda: library, None))
    monkeypatch.setattr(bench, "_host_seconds", host_seconds)
    want = {"torch": {"us": 40.0, "loop_us": 20.0}} if torch else {}
    assert bench.tiny_host_us() == want | {"CuPy": {"us": 30.0, "loop_us": 20.0}}
    assert asked[1::2] == [bench._loop] * (len(asked) // 2) and bench._loop not in asked[::2]


def test_host_times_are_of_processes_of_their_own(monkeypatch):
    starts = iter(range(bench.NUM_HOST_PROCESSES))

    def run(command, env, stdout, text, check):
        assert check and text and env["PYTHONPATH"].split(bench.os.pathsep) == [scripts, "/a/b"]
        assert command[:2] == [sys.executable, "-c"] and "tiny_host_us()" in command[2]
        i = next(starts)
        of_libraries = {"torch": {"us": i, "loop_us": 7}, "CuPy": {"us": 2 * i, "loop_us": 8}}
        return types.SimpleNamespace(stdout=json.dumps(of_libraries))

    scripts = str(Path(bench.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", "/a/b")
    monkeypatch.setattr(bench.subprocess, "run", run)
    processes = range(bench.NUM_HOST_PROCESSES)
    assert bench._host_us_by_process() == {
        "torch": [{"us": i, "loop_us": 7} for i in processes],
        "CuPy": [{"us": 2 * i, "loop_us": 8} for i in processes],
    }
    assert next(starts, None) is None


def test_the_median_of_turns(monkeypatch):
    """Each turn has all; what it is timed with is passed on."""
    times = iter([3.0, 30.0, 1.0, 10.0, 2.0, 20.0])
    asked = []

    def device_ms(calls, torch):
        asked.append((calls, torch))
        return next(times)

    monkeypatch.setattr(bench, "_device_ms", device_ms)
    assert bench._in_turn({"ms": (["ours"], None), "fla_ms": (["fla"], "torch")}) == {
        "ms": 2.0,
        "fla_ms": 20.0,
    }
    assert asked == [(["ours"], None), (["fla"], "torch")] * 3


@pytest.mark.parametrize("breaks", [None, "when made", "when timed"])
def test_a_step_is_timed_whatever_becomes_of_flas(monkeypatch, breaks):
    """With stand-ins for CuPy, fla's step and the clock."""
    free_bytes = [bench.NUM_DECODE_STATES * figures.state_bytes(2, 4)]
    cupy = types.ModuleType("cupy")
    cupy.arange, cupy.empty_like = np.arange, np.empty_like
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(memGetInfo=lambda: (free_bytes[0], 2**40))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        bench, "_inputs", lambda lens, heads, gate, _: inputs.make(lens, heads, gate)
    )
    monkeypatch.setattr(bench, "_copies", lambda data, outputs: iter(()))

    def fla_steps(sets, torch):
        if breaks == "when made":
            raise ValueError("wrong result")
        return ["fla's"]

    def device_ms(calls, torch):
        if torch and breaks == "when timed":
            raise ValueError("wrong result")
        assert len(calls) == 1 and (calls == ["fla's"]) == bool(torch)
        return 0.75 if torch else 0.5

    monkeypatch.setattr(bench, "_fla_steps", fla_steps)
    monkeypatch.setattr(bench, "_device_ms", device_ms)
    fla_ms = "ValueError: wrong result" if breaks else 0.75
    alone = {"sequences": 2, "heads": 4, "ms": 0.5}
    assert bench._decode_row(2, 4, "torch", True) == alone | {"fla_ms": fla_ms}
    assert bench._decode_row(2, 4, "torch", False) == alone
    free_bytes[0] -= 1
    assert bench._decode_row(2, 4, "torch", True) is None


@pytest.mark.parametrize("wgmma", [False, True])
def test_mma_sync_is_timed_in_a_process_without_wgmma(monkeypatch, wgmma):
    def run(command, env, stdout, check):
        assert check and env["CUKDA_WGMMA"] == "0" and "--no-live" in command
        names = [b for a, b in itertools.pairwise(command) if a == "--case"]
        timed = {name: {"ms": i} for i, name in enumerate(names)}
        folder = Path(command[command.index("--out") + 1])
        (folder / "bench.json").write_text(json.dumps({"wgmma": wgmma, "bench": timed}))

    gpu = types.SimpleNamespace(has_wgmma=True)
    monkeypatch.setattr("cukda.jit.gpu", lambda: gpu)
    monkeypatch.setattr(bench.subprocess, "run", run)
    if wgmma:
        with pytest.raises(RuntimeError, match=r"CUKDA_WGMMA=0: .* got one by wgmma"):
            bench._mma_sync_ms()
    else:
        assert bench._mma_sync_ms() == {n: i for i, n in enumerate(bench.MMA_SYNC_CASES)}
    gpu.has_wgmma = False
    assert bench._mma_sync_ms() == {}


def test_all_work_is_queued_before_any_is_waited_for(monkeypatch):
    """With a stand-in for CuPy in which work takes 1, 2, 3 ms."""
    done, now = [], [0]

    class Event:
        def record(self):
            self.ms = now[0]
            done.append("record")

        def synchronize(self):
            done.append("wait")

    def work():
        now[0] += 1 + done.count("work")
        done.append("work")

    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: b.ms - a.ms)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert bench._elapsed_ms(work, 3) == [1, 2, 3]
    assert done == ["record", "work"] * 3 + ["record", "wait"]


def test_files(result, tmp_path):
    pytest.importorskip("matplotlib")
    bench.write(result, CASES, tmp_path / "new")
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert json.loads(written["bench.json"]) == result
    markdown = written["bench.md"].decode()
    assert figures.bench_table(result, CASES) in markdown
    assert "A card, driver 1.2, CuPy 14.0.0, NVRTC 12.9, 2000-01-02" in markdown
    assert "WRONG: slow: out is off by" in markdown
    assert written["bench.png"].startswith(b"\x89PNG")


def test_the_caption_says_where_torch_is_missing(result):
    sentence = " Torch is missing or sees no GPU, so the arrays are CuPy's and no peer is timed."
    with_torch = figures.caption(result)
    result["arrays"] = "CuPy"
    assert figures.caption(result) == with_torch.replace("torch arrays", "CuPy arrays") + sentence


def test_nothing_measured_makes_no_plot(result, tmp_path):
    result["bench"] = {}
    bench.write(result, CASES, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


@pytest.mark.parametrize(
    ("value", "ok"), [(1.0, True), (1.001, True), (1.1, False), (math.nan, False)]
)
def test_a_wrong_result_is_named(value, ok):
    result = {"accuracy": {}, "wrong": []}
    outputs = {"out": np.full((1, 3, 4, 2), value), "final_state": np.ones((1, 4, 2, 2))}
    want = np.ones((1, 3, 2, 2)), np.ones((1, 2, 2, 2))
    heads = slice(1, None, 2)
    assert bench._judge("a case", outputs, want, heads, (5e-3, 5e-3), result) is ok
    assert [line.partition(":")[0] for line in result["wrong"]] == ([] if ok else ["a case"])


def test_progress_names_each_case(capsys):
    assert list(bench._progress(["one", "two"])) == ["one", "two"]
    assert capsys.readouterr().err.splitlines() == ["[1/2] one", "[2/2] two"]


def test_command_line(monkeypatch, capsys, result):
    with pytest.raises(SystemExit):
        bench.main(["--case", "h1_1"])
    monkeypatch.setattr(bench, "why_not", lambda: "no driver")
    assert bench.main([]) == 1
    assert "needs an NVIDIA GPU and CuPy (no driver)" in capsys.readouterr().err

    asked = []

    def run(names, cases, check, into, live):
        asked.append((names, check, live))
        into.update(result)

    monkeypatch.setattr(bench, "why_not", lambda: None)
    monkeypatch.setattr(bench, "run", run)
    assert bench.main(["--case", "h12_2048", "--no-check"]) == 1
    assert asked.pop() == (["h12_2048"], False, True)
    result["wrong"] = []
    assert bench.main([]) == 0
    assert asked.pop() == (list(CASES), True, True)
    assert capsys.readouterr().out.count("| h12_2048 |") == 2
    assert bench.main(["--case", "h12_2048", "--case", "h4_1024", "--no-live"]) == 0
    assert asked.pop() == (["h12_2048", "h4_1024"], True, False)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert "only this; may be repeated" in capsys.readouterr().out


def test_what_was_measured_before_a_crash_is_printed(monkeypatch, capsys, result):
    def run(_names, _cases, _check, into, _live):
        into.update(result)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "why_not", lambda: None)
    monkeypatch.setattr(bench, "run", run)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.main([])
    assert "| h12_2048 |" in capsys.readouterr().out
