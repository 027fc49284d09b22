"""scripts/sanitize.py, with a stand-in for compute-sanitizer that computes nothing."""

import os

import pytest
import sanitize

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
    assert len(rows) == 3 * len(sanitize.variants())
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


def test_a_run_that_fails_is_not_clean(sanitizer, capsys):
    sanitizer(f"echo '========= {CLEAN['memcheck']}'; exit 3")
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert "exit status 3: ERROR SUMMARY: 0 errors" in capsys.readouterr().out


def test_without_compute_sanitizer(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert "FileNotFoundError" in capsys.readouterr().out


def test_each_run_asks_for_its_variant(sanitizer, tmp_path):
    log = tmp_path / "log"
    sanitizer(f'echo "$@" >> {log}')
    sanitize.main(["--tool", "racecheck"])
    lines = log.read_text().splitlines()
    assert sorted(line.rpartition("--compute ")[2] for line in lines) == sorted(sanitize.variants())
    assert all(line.startswith("--tool racecheck --error-exitcode 9") for line in lines)
