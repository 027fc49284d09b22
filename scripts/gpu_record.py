"""The record of what ran on a GPU: tests/gpu_record.json, and the README's tables made from it.

    python scripts/gpu_record.py                       on a machine with a GPU: run everything
    python scripts/gpu_record.py --unverified REASON   mark the record as stale, on purpose
    python scripts/gpu_record.py --readme              write the README's tables again

A record is one run: the GPU tests, then the contract's accuracy inputs and the benchmark, without
peers, which compile for minutes, but for fla's step. It holds the digest of every file that decides
what runs on the GPU; tests/test_record.py fails when that is not the digest of the tree. Besides
what figures.py describes, a record has

    digest      of the files that ran, None before any run
    unverified  None, or {digest, date, reason}: the tree of that digest has not run
    tests       {passed, failed, skipped}
"""

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
import figures  # noqa: E402

RECORD = ROOT / "tests" / "gpu_record.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- gpu_record: begin -->", "<!-- gpu_record: end -->"
COMMAND = "python scripts/gpu_record.py"
# Of a test file: it has tests that run on a GPU.
GPU_TEST = "mark." + "gpu"


def digested_files(root: Path = ROOT) -> list[Path]:
    """Every file that decides what runs on the GPU, sorted by its path."""
    files = [path for path in (root / "cuda_src").rglob("*") if path.is_file()]
    files += (root / "cukda").glob("*.py")
    scripts = ("bench.py", "cases_h200.json", "figures.py", "gpu_record.py")
    files += [root / "scripts" / name for name in scripts]
    for path in (root / "tests").glob("*.py"):
        helper = not path.name.startswith("test_")
        if helper or GPU_TEST in path.read_text(encoding="utf-8"):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def digest(root: Path = ROOT) -> str:
    """sha256 over names and bytes of `digested_files`."""
    sha = hashlib.sha256()
    for path in digested_files(root):
        content = path.read_bytes()
        sha.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        sha.update(content)
    return sha.hexdigest()


def load(path: Path = RECORD) -> dict:
    """The record; one without any run when there is no file."""
    if not path.exists():
        return {"digest": None, "unverified": None}
    return json.loads(path.read_text(encoding="utf-8"))


def save(record: dict, path: Path = RECORD) -> None:
    """Write the record, and the README's tables from it."""
    readme = with_tables(README.read_text(encoding="utf-8"), record)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    README.write_text(readme, encoding="utf-8")


def stale_reason(record: dict, tree: str) -> str | None:
    """Why the tree of that digest has not run, None if it has; ValueError if nobody said why."""
    if record["digest"] == tree:
        return None
    unverified = record["unverified"]
    if unverified and unverified["digest"] == tree:
        return unverified["reason"]
    raise ValueError(
        f"tests/gpu_record.json is not of these sources: run `{COMMAND}` on a machine with a GPU, "
        f'or mark it with `{COMMAND} --unverified "reason"`'
    )


def readme_block(record: dict) -> str:
    """What stands between the README's markers."""
    parts = []
    if unverified := record["unverified"]:
        parts.append(
            f"**Not verified on a GPU**, as of {unverified['date']}: {unverified['reason']}."
            + (" The figures below are of older sources." if record["digest"] else "")
        )
    if record["digest"]:
        cases = figures.load_cases()
        tests = record["tests"]
        parts += [
            f"GPU tests: {tests['passed']} passed, {tests['failed']} failed, "
            f"{tests['skipped']} skipped. Sources `{record['digest'][:12]}`.",
            figures.caption(record),
            figures.bench_table(record, cases),
            figures.standing(record, cases),
            *figures.extras(record),
            "Relative error against the float64 recurrence, ‖got − want‖ / ‖want‖:",
            figures.accuracy_table(record, cases),
        ]
    elif not parts:
        parts.append("No run on a GPU has been recorded yet.")
    return "\n\n".join(parts)


def with_tables(readme: str, record: dict) -> str:
    """The README's text with the record's tables between the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md: expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{readme_block(record)}\n\n{END}{after}"


def update_readme(record: dict) -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8"), record), encoding="utf-8")


def run_tests() -> dict:
    """Run the GPU tests in a process of their own; {passed, failed, skipped}."""
    environment = {**os.environ, "CUKDA_REQUIRE_GPU": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        if importlib.util.find_spec("xdist"):
            # Most of the time is the host's.
            command += ["-n", "12"]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        # 1 is "some tests failed"; whatever is above has not run them all.
        if status not in (0, 1) or not report.exists():
            raise RuntimeError(f"pytest ended with status {status}")
        return counts(report.read_text(encoding="utf-8"))


def counts(junit: str) -> dict:
    """{passed, failed, skipped} of a JUnit report; an error counts as a failure."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.fromstring(junit).iter("testsuite"):
        for key in total:
            total[key] += int(suite.get(key, 0))
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
    }


def make_record() -> tuple[dict, list[str]]:
    """Run all stages, whatever breaks: the record, and what went wrong."""
    record = {"digest": digest(), "unverified": None}
    cases = figures.load_cases()
    result, wrong = {}, []

    def stage(name, body):
        start = time.perf_counter()
        try:
            body()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            wrong.append(f"{name} broke: {type(error).__name__}: {error}")
            # The machine wants the process to end: no further stage.
            if isinstance(error, SystemExit):
                raise
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    try:
        stage("tests", lambda: record.update(tests=run_tests()))
        stage("benchmark", lambda: bench.run(list(cases), cases, True, result, live=False))
        stage("what is no case", lambda: bench.run_extras(result))
    except SystemExit:
        pass
    wrong += result.pop("wrong", [])
    record.update(result)
    if failed := record.get("tests", {}).get("failed"):
        wrong.append(f"{failed} GPU tests failed")
    if digest() != record["digest"]:
        wrong.append("the sources changed during the run")
    return record, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--unverified", metavar="REASON", help="mark the record as stale on purpose")
    only.add_argument("--readme", action="store_true", help="only write the README's tables again")
    options = parser.parse_args(arguments)

    if options.readme:
        update_readme(load())
        return 0
    if options.unverified is not None:
        if not options.unverified.strip():
            parser.error("--unverified: expected a reason, got an empty one")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        reason = options.unverified.strip().rstrip(".")
        mark = {"digest": digest(), "date": today, "reason": reason}
        save({**load(), "unverified": mark})
        return 0
    if reason := bench.why_not():
        print(f"a record needs an NVIDIA GPU and CuPy: {reason}", file=sys.stderr)
        return 1

    # What a time limit sends: what has been measured is still printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    record, wrong = make_record()
    print(json.dumps(record, indent=1, ensure_ascii=False))
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print(f"{RECORD.name} was left as it is", file=sys.stderr)
        return 1
    save(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
