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


def needs_gpu(example):
    return "cupy" in example or "cuda" in example


def run(example):
    names = {}
    exec(compile(example, str(README), "exec"), names)
    return names


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not needs_gpu(e)])
def test_on_the_cpu(example):
    if "import torch" in example:
        pytest.importorskip("torch")
    run(example)


@pytest.mark.gpu
@pytest.mark.parametrize("example", [e for e in EXAMPLES if needs_gpu(e)])
def test_on_a_gpu(example):
    out = hardware.host(run(example)["out"]).astype(np.float32)
    assert np.isfinite(out).all() and out.any()


def test_examples_are_found():
    assert [needs_gpu(example) for example in EXAMPLES].count(True) >= 2
    assert [needs_gpu(example) for example in EXAMPLES].count(False) >= 2


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
