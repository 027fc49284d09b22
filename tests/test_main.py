"""python -m cukda."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import inputs
import numpy as np
import oracle
import pytest

import cukda

main = importlib.import_module("cukda.__main__")


def run_module(*arguments):
    command = [sys.executable, "-m", "cukda", *arguments]
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.fixture
def small_cpu(monkeypatch):
    """No GPU, whatever the machine has, and little to compute."""
    found = {**main.installed(), "gpus": [], "card": None, "no_gpu_because": "none for this test"}
    monkeypatch.setattr(main, "installed", lambda: found)
    monkeypatch.setattr(main, "CPU_SHAPE", (100, 3))
    monkeypatch.setitem(main.COPY_BYTES, "cpu", 1 << 20)


def test_as_a_program():
    done = run_module("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"]["cukda"] == cukda.__version__
    assert report["installed"]["numpy"] == np.__version__
    on_gpu = report["installed"]["card"] is not None
    assert report["run"]["where"].startswith("cuda:" if on_gpu else "cpu")
    assert report["run"]["ok"] is True
    assert report["run"]["ms"] > 0 and report["run"]["copy_share"] > 0


@pytest.mark.gpu
def test_on_a_gpu():
    done = run_module()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cuda:" in done.stdout and "first call, compiling" in done.stderr
    assert "check           ok" in done.stdout


def test_report_without_a_gpu(small_cpu, capsys):
    assert main.main([]) == 0
    out = capsys.readouterr().out
    assert "no GPU: none for this test. Running on the CPU instead." in out
    assert "cpu, T=100, H=3, D=128" in out
    assert "check           ok" in out


@pytest.mark.parametrize("array", ["out", "final_state"])
@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: x * np.nan])
def test_a_wrong_result_is_status_1(small_cpu, monkeypatch, capsys, array, change):
    fwd = cukda.fwd

    def wrong(**arguments):
        fwd(**arguments)
        written = arguments[array]
        written[...] = change(written.astype(np.float32)).astype(written.dtype)

    monkeypatch.setattr(cukda, "fwd", wrong)
    assert main.main(["--json"]) == 1
    # Strict JSON has no NaN.
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["run"]["ok"] is False
    assert main.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_failed_run_is_status_1(small_cpu, monkeypatch, capsys):
    def broken(**_):
        raise RuntimeError("the compiler said no")

    monkeypatch.setattr(cukda, "fwd", broken)
    assert main.main([]) == 1
    assert "FAILED: RuntimeError: the compiler said no" in capsys.readouterr().out


def test_recurrence_is_the_oracles():
    case = inputs.make([40], 3, "rand", seed=1, batch=1)
    want_out, want_state = oracle.recurrence(**case)
    tokens = [case[name][0] for name in inputs.TOKENS]
    rest = [case[name] for name in ("scale", "A_log", "dt_bias", "lower_bound")]
    out, state = main.recurrence(*tokens, *rest, case["initial_state"][0], main._sigmoid)
    # The gate passes through float32 on its way to the sigmoid, as on the GPU.
    assert oracle.error(out, want_out[0]) < 1e-6
    assert oracle.error(state, want_state[0]) < 1e-6
