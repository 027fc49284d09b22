"""The record of what ran on a GPU is of these sources, and the README shows what it says."""

import json
import warnings

import figures
import gpu_record
import pytest


class UnverifiedOnGpu(UserWarning):
    """The sources have changed since they last ran on a GPU, and somebody said why."""


def test_record_is_of_this_tree():
    record = gpu_record.load()
    try:
        reason = gpu_record.stale_reason(record, gpu_record.digest())
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    if reason:
        warnings.warn(f"not verified on a GPU: {reason}", UnverifiedOnGpu, stacklevel=1)
        return
    assert record["tests"]["failed"] == 0
    assert record["tests"]["passed"] > 0
    cases = figures.load_cases()
    assert set(record["bench"]) == set(cases)
    assert set(record["accuracy"]) == {*cases, *figures.ACCURACY_LIMITS}
    for gate, (out_limit, state_limit) in figures.ACCURACY_LIMITS.items():
        assert record["accuracy"][gate]["out"] <= out_limit
        assert record["accuracy"][gate]["state"] <= state_limit


def test_readme_shows_the_record():
    readme = gpu_record.README.read_text(encoding="utf-8")
    if gpu_record.with_tables(readme, gpu_record.load()) != readme:
        pytest.fail(
            f"README.md does not show tests/gpu_record.json: run `{gpu_record.COMMAND} --readme`",
            pytrace=False,
        )


@pytest.fixture
def tree(tmp_path):
    """A tree with the kinds of files that there are."""
    for name, text in {
        "cuda_src/a.cu": "a",
        "cuda_src/deep/b.cuh": "b",
        "cukda/c.py": "c",
        "scripts/bench.py": "d",
        "scripts/cases_h200.json": "e",
        "scripts/figures.py": "j",
        "scripts/gpu_record.py": "k",
        "scripts/other.py": "f",
        "tests/helper.py": "g",
        "tests/test_cpu.py": "h",
        "tests/test_mixed.py": f"pytest.{gpu_record.GPU_TEST}",
        "tests/gpu_record.json": "{}",
        "README.md": "i",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_digest_covers_what_decides(tree):
    names = [path.relative_to(tree).as_posix() for path in gpu_record.digested_files(tree)]
    assert names == [
        "cuda_src/a.cu",
        "cuda_src/deep/b.cuh",
        "cukda/c.py",
        "scripts/bench.py",
        "scripts/cases_h200.json",
        "scripts/figures.py",
        "scripts/gpu_record.py",
        "tests/helper.py",
        "tests/test_mixed.py",
    ]
    before = gpu_record.digest(tree)
    (tree / "README.md").write_text("changed")
    (tree / "tests" / "test_cpu.py").write_text("changed")
    assert gpu_record.digest(tree) == before
    (tree / "cuda_src" / "deep" / "b.cuh").write_text("changed")
    changed = gpu_record.digest(tree)
    assert changed != before
    (tree / "cukda" / "new.py").write_text("")
    assert gpu_record.digest(tree) not in (before, changed)


def test_digest_covers_the_project():
    names = {path.name for path in gpu_record.digested_files()}
    assert {"kda_fwd.cu", "ptx.cuh", "kda.py", "jit.py", "bench.py", "cases_h200.json"} <= names
    assert {"figures.py", "gpu_record.py"} <= names
    assert {"conftest.py", "oracle.py", "inputs.py", "test_gpu_accuracy.py"} <= names
    assert "test_record.py" not in names


def test_stale_reason():
    old, new = "0" * 64, "1" * 64
    verified = {"digest": old, "unverified": None}
    assert gpu_record.stale_reason(verified, old) is None
    with pytest.raises(ValueError, match=r"run `python scripts/gpu_record\.py` on a machine"):
        gpu_record.stale_reason(verified, new)
    marked = {"digest": old, "unverified": {"digest": new, "date": "2000-01-02", "reason": "why"}}
    assert gpu_record.stale_reason(marked, new) == "why"
    with pytest.raises(ValueError, match="--unverified"):
        gpu_record.stale_reason(marked, "2" * 64)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The paths of a record that is not there and of a README with empty markers."""
    record, readme = tmp_path / "record.json", tmp_path / "README.md"
    readme.write_text(f"before\n{gpu_record.BEGIN}\n{gpu_record.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(gpu_record, "RECORD", record)
    monkeypatch.setattr(gpu_record, "README", readme)
    monkeypatch.setattr(gpu_record.load, "__defaults__", (record,))
    monkeypatch.setattr(gpu_record.save, "__defaults__", (record,))
    monkeypatch.setattr(gpu_record.bench, "why_not", lambda: None)
    extras = {"start_s": {"cold": 1.8, "warm": 0.9}, "sigmoid": {"ms": 0.6, "gib": 1}}
    monkeypatch.setattr(gpu_record.bench, "run_extras", lambda result: result.update(extras))
    return record, readme


def measure(result, live):
    """Stands in for bench.run."""
    # Peers would compile for minutes.
    assert live is False
    result.update(
        machine={"card": "A card", "driver": "1.2", "cupy": "14.0.0", "nvrtc": "12.9"},
        date="2000-01-02",
        arrays="torch",
        state="bfloat16",
        copy_tb_per_s=4.0,
        accuracy={"slow": {"out": 1e-3, "state": 1e-3}},
        bench={"h12_2048": {"ms": 0.05, "ms_call": 0.06, "host_us": 34.0}},
        live={},
        wrong=[],
    )


def test_a_run_is_recorded_and_shown(files, monkeypatch):
    record_file, readme = files
    tests = {"passed": 7, "failed": 0, "skipped": 1}
    monkeypatch.setattr(gpu_record, "run_tests", lambda: tests)
    monkeypatch.setattr(
        gpu_record.bench, "run", lambda _names, _cases, _check, result, live: measure(result, live)
    )
    assert gpu_record.main([]) == 0
    record = json.loads(record_file.read_text(encoding="utf-8"))
    assert record["digest"] == gpu_record.digest() and record["unverified"] is None
    assert record["tests"] == tests
    assert record["bench"] == {"h12_2048": {"ms": 0.05, "ms_call": 0.06, "host_us": 34.0}}
    assert record["start_s"]["warm"] == 0.9 and record["sigmoid"]["ms"] == 0.6
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "7 passed, 0 failed, 1 skipped" in text and "| h12_2048 | **0.0500** |" in text
    assert "after 0.90 s when the binary is in the cache" in text

    assert gpu_record.main(["--unverified", "no card at hand"]) == 0
    marked = json.loads(record_file.read_text(encoding="utf-8"))
    assert marked == {**record, "unverified": marked["unverified"]}
    text = readme.read_text(encoding="utf-8")
    assert "**Not verified on a GPU**, as of" in text and "no card at hand" in text
    assert "| h12_2048 | **0.0500** |" in text


@pytest.mark.parametrize("broken", ["tests", "failures", "bench", "terminated"])
def test_a_broken_run_prints_what_it_has(files, monkeypatch, capsys, broken):
    record_file, readme = files
    before = readme.read_text(encoding="utf-8")

    def run_tests():
        if broken == "tests":
            raise RuntimeError("pytest ended with status 3")
        return {"passed": 7, "failed": int(broken == "failures"), "skipped": 0}

    def run(_names, _cases, _check, result, live):
        measure(result, live)
        if broken == "bench":
            raise RuntimeError("out of memory")
        if broken == "terminated":
            raise SystemExit("terminated")

    monkeypatch.setattr(gpu_record, "run_tests", run_tests)
    monkeypatch.setattr(gpu_record.bench, "run", run)
    assert gpu_record.main([]) == 1
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["bench"] and ("tests" in record) == (broken != "tests")
    assert {
        "tests": "pytest ended with status 3",
        "failures": "1 GPU tests failed",
        "bench": "out of memory",
        "terminated": "SystemExit",
    }[broken] in printed.err
    assert not record_file.exists()
    assert readme.read_text(encoding="utf-8") == before


def test_unverified_wants_a_reason(files):
    with pytest.raises(SystemExit):
        gpu_record.main(["--unverified", " "])
    assert not files[0].exists()


def test_counts():
    junit = (
        """<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>"""
    )
    assert gpu_record.counts(junit) == {"passed": 3, "failed": 3, "skipped": 3}
