"""What the wheel and the sdist carry, and what importing costs."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cukda import jit

ROOT = Path(__file__).resolve().parent.parent
CUDA = {path.name for path in (ROOT / "cuda_src").iterdir()}
MAX_IMPORT_SECONDS = 0.2


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that the wheel is installed into, alone."""
    folder = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", folder, wheel)
    return folder


def test_wheel_carries_the_package_and_the_cuda_sources(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"cukda"}
    carried = {Path(name).name for name in names if name.startswith("cukda/cuda_src/")}
    assert carried == CUDA
    python = {path.name for path in (ROOT / "cukda").glob("*.py")}
    assert {Path(name).name for name in names if Path(name).parent == Path("cukda")} == python
    assert any(name.endswith("/LICENSE") for name in names)


def test_sdist_carries_sources_and_tests(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    assert {f"cuda_src/{name}" for name in CUDA} <= names
    for folder, pattern in (("cukda", "*.py"), ("tests", "*.py"), ("scripts", "*")):
        files = {f"{folder}/{path.name}" for path in (ROOT / folder).glob(pattern)}
        assert {name for name in files if "__pycache__" not in name} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if "__pycache__" in name or ".git/" in name]


def test_needs_numpy_and_ml_dtypes_only(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    required = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]
    always = {line.split(">")[0].strip() for line in required if "extra ==" not in line}
    assert {name.replace("-", "_") for name in always} == {"numpy", "ml_dtypes"}
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == {"cuda12", "cuda13", "test", "bench"}
    assert "Requires-Python: >=3.10" in lines


def test_installed_wheel_finds_its_sources_away_from_the_checkout(installed, tmp_path):
    code = (
        "import numpy, cukda\n"
        "from cukda import jit\n"
        "print(cukda.sigmoid(numpy.zeros(1, numpy.float32))[0])\n"
        "print(jit.source_dir())\n"
        "print(jit.source_digest())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    value, folder, digest = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).split()
    assert value == "0.5"
    assert Path(folder) == (installed / "cukda" / "cuda_src").resolve()
    assert digest == jit.source_digest()


def test_editable_install_points_at_the_checkout(tmp_path, monkeypatch):
    from hatchling import build

    monkeypatch.chdir(ROOT)
    archive = zipfile.ZipFile(tmp_path / build.build_editable(str(tmp_path)))
    names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == 1 and names[0].endswith(".pth")
    assert Path(archive.read(names[0]).decode().strip()) == ROOT


def test_import_is_quick():
    """The interpreter's own start is left out, the import of NumPy is not."""
    code = (
        "import time; start = time.perf_counter(); import cukda; print(time.perf_counter() - start)"
    )
    seconds = [float(run(sys.executable, "-c", code, cwd=ROOT)) for _ in range(7)]
    assert min(seconds) < MAX_IMPORT_SECONDS


def test_import_brings_in_no_gpu_library_and_makes_nothing(tmp_path):
    code = (
        "import sys, cukda\n"
        "print(sorted({'cupy', 'torch', 'cuda', 'cupy_backends'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("CUPY_CACHE_DIR", None)
    assert run(sys.executable, "-c", code, cwd=ROOT, env=environment).strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_public_names():
    import cukda

    assert set(cukda.__all__) == {"fwd", "sigmoid", "sigmoid_ext", "step"}
