"""The compile cache: whatever state it is in, and whoever else writes to it, the right binary."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
LIMIT_SECONDS = 120

# Prints a digest of the outputs.
FORWARD = """
import hashlib, hardware, inputs
outputs = hardware.run(inputs.make([33, 64], 2, seed=100))
print(hashlib.sha256(b"".join(hardware.bits(x).tobytes() for x in outputs)).hexdigest())
"""
# Prints sigmoid(1): 0.731, or 0.75 when the instruction is exchanged for a move.
SIGMOID = """
import cukda, cupy
print(float(cukda.sigmoid(cupy.ones(1, cupy.float32))[0]))
"""


def start(script, cache=None, root=PROJECT, **environment):
    paths = [str(root), str(TESTS), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    env.pop("CUPY_CACHE_DIR", None)
    if cache is not None:
        env["CUPY_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=env,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that one process has filled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digest(filled):
    """What the forward gives, with that cache."""
    return result(start(FORWARD, filled))


def test_eight_processes_on_an_empty_cache(tmp_path, digest):
    processes = [start(FORWARD, tmp_path) for _ in range(8)]
    try:
        assert [result(process) for process in processes] == [digest] * 8
    finally:
        for process in processes:
            process.kill()
    assert list(tmp_path.iterdir()), "nothing was cached"
    assert result(start(FORWARD, tmp_path)) == digest


@pytest.mark.parametrize("keep", [0, 0.5], ids=["empty", "half"])
def test_truncated_files(tmp_path, filled, digest, keep):
    cache = shutil.copytree(filled, tmp_path / "cache")
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files, "nothing was cached"
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
    assert result(start(FORWARD, cache)) == digest


def test_edited_header(tmp_path):
    """CuPy's cache does not look into what is included."""
    import cukda.jit

    package = Path(cukda.__file__).resolve().parent
    sources = cukda.jit.source_dir()
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tree / "cukda", ignore=ignore)
    copied = tree / sources.relative_to(package.parent)
    shutil.copytree(sources, copied, dirs_exist_ok=True)

    def sigmoid_of_one():
        return float(result(start(SIGMOID, cache, root=tree)))

    assert abs(sigmoid_of_one() - 0.731) < 1e-3
    header = copied / "ptx.cuh"
    text = header.read_text()
    assert text.count("tanh.approx.f32 %0, %1;") == 1
    header.write_text(text.replace("tanh.approx.f32 %0, %1;", "mov.f32 %0, %1;"))
    assert sigmoid_of_one() == 0.75
    header.write_text(text)
    assert abs(sigmoid_of_one() - 0.731) < 1e-3


@pytest.mark.parametrize("cache", ["in the home", "given"])
def test_read_only_home(tmp_path, digest, cache):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    if os.access(home, os.W_OK):
        # Root writes where it likes, but not here.
        home = Path("/sys")
    folder = None if cache == "in the home" else home / "cache"
    # CuPy cannot be imported by itself there; through cukda, as callers with torch do, it can.
    script = "import cukda.jit; cukda.jit.import_cupy()\n" + FORWARD
    assert result(start(script, folder, HOME=str(home))) == digest
