"""The README's Python examples run as they stand there."""

import re
from pathlib import Path

import figures
import hardware
import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


# JAX's asks where its arrays are, and needs none.
def needs_gpu(example):
    return ("cupy" in example or "cuda" in example) and not is_for_jax(example)


def is_for_jax(example):
    return "import jax\n" in example


def run(example):
    for module in re.findall(r"^(?:import|from) (\w+)", example, re.M):
        if module in ("jax", "numba", "torch"):
            pytest.importorskip(module)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    return names


def assert_finite(array):
    array = np.asarray(hardware.host(array)).astype(np.float32)
    assert np.isfinite(array).all() and array.any()


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not needs_gpu(e)])
def test_on_the_cpu(example):
    if is_for_jax(example):
        jax = pytest.importorskip("jax")
        with jax.default_device(jax.devices("cpu")[0]):
            names = run(example)
    else:
        names = run(example)
    assert_finite(names.get("out", names.get("y")))


@pytest.mark.gpu
@pytest.mark.parametrize("example", [e for e in EXAMPLES if needs_gpu(e)])
def test_on_a_gpu(example):
    assert_finite(run(example)["out"])


@pytest.mark.gpu
def test_jax_on_a_gpu(jax):
    """What the state is, CuPy's, becomes JAX's."""
    (example,) = filter(is_for_jax, EXAMPLES)
    names = run(example)
    assert names["xp"].__name__ == "cupy"
    for name in "out", "state":
        assert names[name].device.platform == "gpu"
        assert_finite(names[name])


@pytest.mark.parametrize(
    "words, gpu",
    [
        (["import torch", "cukda.fwd("], True),
        (["import cupy", "cukda.fwd("], True),
        (["import jax", "cukda.fwd("], False),
        (["from numba import cuda", "cukda.fwd("], True),
        (["import torch", "CUDAGraph", "cukda.step(", "replay()"], True),
        (["from cukda.fla import chunk_kda", "chunk_kda("], False),
        (["import cukda.torch", "torch.compile("], False),
    ],
)
def test_examples_are_found(words, gpu):
    found = [example for example in EXAMPLES if all(word in example for word in words)]
    assert gpu in [needs_gpu(example) for example in found]


@pytest.mark.parametrize("name", ["README.md", "docs/log.md"])
def test_rows_of_a_table_have_as_many_cells_as_its_header(name):
    text = (README.parent / name).read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert tables
    for table in tables:
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(rows)) == 1, table


def test_accuracy_table_is_what_the_benchmark_checks():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \| ([\d.e-]+) \|", TEXT, re.M)
    limits = {name: (float(out), float(state)) for name, out, state in rows}
    assert limits == figures.ACCURACY_LIMITS


def test_files_of_the_development_table_exist():
    """First cells: `folder/file`, then `file`s beside it."""
    rows = re.findall(r"^\| (`[a-z_]+/.*?) \|", TEXT, re.M)
    assert len(rows) > 10
    for row in rows:
        first, *others = re.findall(r"`(.*?)`", row)
        path = README.parent / first
        for file in (path, *(path.with_name(name) for name in others)):
            assert file.exists(), file
