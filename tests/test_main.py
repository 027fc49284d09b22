"""python -m cukda."""

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import bench
import inputs
import numpy as np
import oracle
import pytest

import cukda
from cukda import jit

main = importlib.import_module("cukda.__main__")
ROOT = Path(__file__).parents[1]


def run_module(*arguments, **environment):
    command = [sys.executable, "-m", "cukda", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def small_cpu(monkeypatch):
    """No GPU, whatever the machine has, and little to compute."""
    found = {**main.installed(), "gpus": [], "card": None, "no_gpu_because": "none for this test"}
    monkeypatch.setattr(main, "installed", lambda: found)
    monkeypatch.setattr(main, "CPU_SHAPE", (100, 3))


def test_as_a_program():
    done = run_module("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"]["cukda"] == cukda.__version__
    assert report["installed"]["numpy"] == np.__version__
    on_gpu = report["installed"]["card"] is not None
    assert report["run"]["where"].startswith("cuda:" if on_gpu else "cpu")
    assert report["run"]["ok"] is True
    assert report["run"]["ms"] > 0
    assert ("copy_share" in report["run"]) == on_gpu


def test_whoever_reads_may_leave():
    """As `head` does. Nothing is said of it: no traceback, no word when the interpreter ends."""
    command = [sys.executable, "-m", "cukda"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        process.stdout.close()
        words = process.stderr.read()
    assert process.returncode == 1
    assert "Error" not in words and "Exception" not in words


@pytest.mark.parametrize("end", ["2>&-", "2>/dev/full", ">&-"])
def test_without_a_place_for_words(end):
    """The result decides the exit status."""
    command = f'"{sys.executable}" -m cukda --json {end}'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert end == ">&-" or json.loads(done.stdout)["run"]["ok"] is True
    assert "Error" not in done.stderr


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_report_that_cannot_be_written(options):
    command = f'"{sys.executable}" -m cukda {options} >/dev/full'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "the report cannot be written ([Errno 28] No space left on device)\n"
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_without_docstrings():
    done = run_module("--help", PYTHONOPTIMIZE="2")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m cukda"), done.stderr


def test_cache_folder_that_cannot_be_made(tmp_path):
    """Under a file no folder can be made, not even by root."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")
    done = run_module("--json", HOME=nowhere, CUPY_CACHE_DIR=nowhere, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["run"]["ok"] is True
    assert Path(report["installed"]["cache"]).parent == tmp_path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_whatever_breaks_is_reported(monkeypatch, capsys, options):
    def broken():
        raise OSError("no space left")

    monkeypatch.setattr(jit, "cache_folder", broken)
    assert main.main(options) == 1
    assert "OSError: no space left" in capsys.readouterr().out


class CUDARuntimeError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "driver, reason", [(0, "no NVIDIA driver is installed"), (12040, "driver is too old")]
)
def test_why_there_is_no_gpu(monkeypatch, driver, reason):
    """The same reason in the report and in the benchmark's refusal."""

    def fail():
        raise CUDARuntimeError("driver is too old")

    runtime = types.SimpleNamespace(driverGetVersion=lambda: driver, getDeviceCount=fail)
    cupy = types.SimpleNamespace(__version__="14", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "12.9")
    found = main.installed()
    assert (found["no_gpu_because"], found["nvrtc"]) == (reason, "12.9")
    assert bench.why_not() == reason


def test_a_driver_without_a_gpu(monkeypatch):
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 0)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    assert jit.why_no_gpu() == "the driver lists no GPU"
    runtime.getDeviceCount = lambda: 1
    assert jit.why_no_gpu() is None


def test_report_without_nvrtc(small_cpu, monkeypatch, capsys):
    found = {**main.installed(), "nvrtc": None, "no_nvrtc_because": "pip install it"}
    monkeypatch.setattr(main, "installed", lambda: found)
    assert main.main([]) == 0
    out = capsys.readouterr().out
    assert "nvrtc missing" in out and "\npip install it\n" in out


def test_installed_without_nvrtc(monkeypatch):
    pytest.importorskip("cupy")

    def fail():
        raise RuntimeError("pip install it")

    monkeypatch.setattr(jit, "nvrtc_version", fail)
    found = main.installed()
    assert (found["nvrtc"], found["no_nvrtc_because"]) == (None, "pip install it")


def test_the_benchmark_asks_for_pip_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(jit, "import_cupy", jit.import_cupy.__wrapped__)
    assert "pip install 'cukda[cuda12]'" in bench.why_not()


def test_a_path_that_the_terminal_has_no_letters_for(tmp_path):
    folder = str(tmp_path / "é")
    done = run_module(CUPY_CACHE_DIR=folder, PYTHONIOENCODING="ascii", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", ["raise AttributeError('np.core')", "raise OSError('broken')", ""])
def test_a_cupy_that_does_not_work(tmp_path, text):
    """It raises, or is another package of that name."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(text)
    done = run_module("--json", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    report = json.loads(done.stdout)
    assert (done.returncode, report["run"]["where"]) == (0, "cpu"), done.stderr
    assert "CuPy does not import" in report["installed"]["no_gpu_because"]


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
    assert "copy bandwidth" not in out and "first call" not in out


def test_readme_names_the_keys_of_the_report(small_cpu, capsys):
    assert main.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {*report, *report["installed"], *report["run"], "first_call_s", "copy_tb_per_s"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {key for key in {*keys, "copy_share", "error"} if f"`{key}`" not in readme} == set()


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
