"""scripts/sanitize.py, with a stand-in for compute-sanitizer that computes nothing."""

import os
import sys
import types

import hardware
import inputs
import numpy as np
import pytest
import sanitize

import cukda
from cukda import jit, plan

H200 = plan.Gpu(132, 227 * 1024, has_wgmma=True)

CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """A function that puts a shell script in compute-sanitizer's place."""

    def make(script):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def by_tool(**lines):
    """Prints a line by the tool's name, and all arguments before it."""
    cases = "".join(f"{tool}) echo '========= {line}';; " for tool, line in lines.items())
    return f'echo "$@"\ncase "$2" in {cases}esac'


def test_clean(sanitizer, capsys):
    sanitizer(by_tool(**CLEAN))
    assert sanitize.main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 * len(sanitize.names())
    for tool, line in CLEAN.items():
        assert sum(row.startswith(tool) and row.endswith(line) for row in rows) == len(rows) // 3


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("memcheck", "ERROR SUMMARY: 1 error"),
        ("memcheck", "ERROR SUMMARY: 10 errors"),
        ("racecheck", "RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)"),
        ("synccheck", "no summary"),
    ],
)
def test_not_clean(sanitizer, capsys, tool, line):
    sanitizer(by_tool(**{**CLEAN, tool: line}))
    assert sanitize.main(["--tool", tool]) == 1
    assert line in capsys.readouterr().out


def test_what_the_gpu_cannot_run_has_a_row_that_says_so(sanitizer, capsys):
    sanitizer(f"echo '{sanitize.LEFT_OUT}: no wgmma'; echo '========= {CLEAN['memcheck']}'")
    assert sanitize.main(["--tool", "memcheck"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(sanitize.names())
    assert all(row.endswith(" left out: no wgmma") for row in rows)


@pytest.mark.parametrize("line", ["ERROR SUMMARY: 1 error", ""])
def test_what_fails_is_not_left_out(sanitizer, line):
    sanitizer(f"echo '{sanitize.LEFT_OUT}: no wgmma'; echo '========= {line}'; exit 9")
    assert sanitize.main(["--tool", "memcheck"]) == 1


def test_a_run_that_fails_is_not_clean(sanitizer, capsys):
    sanitizer(f"echo '========= {CLEAN['memcheck']}'; exit 3")
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert "exit status 3: ERROR SUMMARY: 0 errors" in capsys.readouterr().out


def test_tools_are_chosen_one_by_one(sanitizer, capsys):
    sanitizer(by_tool(**CLEAN))
    assert sanitize.main(["--tool", "memcheck", "--tool", "synccheck"]) == 0
    tools = [row.split()[0] for row in capsys.readouterr().out.splitlines()]
    assert tools == [tool for tool in ("memcheck", "synccheck") for _ in sanitize.names()]
    assert "[--tool TOOL] ..." in sanitize.__doc__
    with pytest.raises(SystemExit):
        sanitize.main(["--help"])
    assert "only this; may be repeated" in capsys.readouterr().out


def test_without_compute_sanitizer(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert "compute-sanitizer, of the CUDA toolkit, is not on the PATH" in capsys.readouterr().err


def test_each_run_asks_for_its_variant(sanitizer, tmp_path):
    log = tmp_path / "log"
    sanitizer(f'echo "$@" >> {log}')
    sanitize.main(["--tool", "racecheck"])
    lines = log.read_text().splitlines()
    assert sorted(line.rpartition("--compute ")[2] for line in lines) == sorted(sanitize.names())
    assert all(line.startswith("--tool racecheck --error-exitcode 9") for line in lines)


def test_every_variant_runs_whole_and_cut_and_joined():
    assert list(sanitize.kernels().values()) == [
        *(
            (variant, plan.Segments(*segments))
            for variant in plan.variants()
            for segments in ((0,), (64,), (64, 1, 1), (64, 2, 2))
        ),
        *(
            (plan.with_layout(variant, layout), plan.Segments(64, 2, 2))
            for layout in (plan.STRIDED, plan.UNALIGNED)
            for variant in plan.variants()
        ),
    ]
    assert [name.rpartition(") ")[2] for name in list(sanitize.kernels())[:4]] == [
        "segment=0",
        "segment=64",
        "segment=64 join_every=1",
        "segment=64 join_every=2",
    ]
    assert sanitize.names() == [*sanitize.kernels(), "step", "sigmoid"]


@pytest.fixture
def planned(monkeypatch):
    """A function that computes on a GPU of which nothing is there, and returns the plans."""
    fake = types.SimpleNamespace(runtime=types.SimpleNamespace(deviceSynchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=fake))

    def compute(name, gpu):
        plans = []

        def run(case, shift):
            layout = {None: plan.CONTIGUOUS, 0: plan.STRIDED, 1: plan.UNALIGNED}[shift]
            num_sequences = len(case["cu_seqlens"]) - 1
            shape = plan.Shape(num_sequences, *case["q"].shape[1:3], packed=True)
            plans.append((plan.plan(shape, jit.gpu()), layout))

        with monkeypatch.context() as patch:
            patch.setattr(jit, "gpu", lambda: gpu)
            patch.setattr(plan, "plan", plan.plan)
            patch.setattr(hardware, "run", run)
            sanitize.compute(name)
        return plans

    return compute


@pytest.mark.parametrize("name", sanitize.kernels())
def test_a_run_is_of_its_variant_and_segment(planned, name):
    """All in one block, and with more items than there are slots for items."""
    ((launch, layout),) = planned(name, H200)
    variant = plan.with_layout(launch.variant, layout)
    assert (variant, launch.segments) == sanitize.kernels()[name]
    assert launch.grid == 1
    # As num_item_slots of cuda_src/chunk.cuh.
    num_item_slots = variant.num_stages + variant._num_raw + variant._num_solvers
    assert len(sanitize.SEQ_LENS) * sanitize.HEADS > num_item_slots


@pytest.mark.parametrize("name", sanitize.kernels())
def test_a_run_that_the_gpu_cannot_do_is_left_out(planned, capsys, name):
    variant, *_ = sanitize.kernels()[name]
    for gpu, lacks in (
        (H200._replace(has_wgmma=False), variant.wgmma),
        (
            plan.Gpu(46, 99 * 1024, has_wgmma=False),
            variant.wgmma or variant.shared_bytes > 99 * 1024,
        ),
    ):
        assert len(planned(name, gpu)) == (0 if lacks else 1)
        assert capsys.readouterr().out.startswith("left out: ") == lacks


def test_the_problem_has_cuts_and_joins_and_both():
    """At a cut, nothing is left of the state after the tokens before it."""
    case = sanitize.problem()
    longest = max(range(len(sanitize.SEQ_LENS)), key=sanitize.SEQ_LENS.__getitem__)
    sequence = inputs.alone(case, longest)
    num_tokens = sequence["q"].shape[1]
    assert 0 in sanitize.SEQ_LENS
    segment, found = sanitize.SEGMENT, []
    for cut in range(segment, num_tokens, segment):
        states = []
        for initial_state in sequence["initial_state"], -sequence["initial_state"]:
            final_state = np.empty_like(initial_state)
            call = inputs.tokens(sequence, cut - segment, cut, initial_state)
            cukda.fwd(**call, final_state=final_state)
            states.append(final_state[0])
        found.append([np.array_equal(*heads) for heads in zip(*states, strict=True)])
    # Two joins in a row, also at each second place, are what takes a transfer.
    assert len(found) == 5
    cuts_of_heads = dict(enumerate(zip(*found, strict=True)))
    assert not any(cuts_of_heads.pop(sanitize.SLOW_HEAD))
    assert cuts_of_heads.pop(sanitize.HEAD_SLOW_AT_ONE) == (True, False, True, True, True)
    assert all(map(all, cuts_of_heads.values()))
