"""The README's Python examples run as they stand there."""

import re
from pathlib import Path

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


def test_files_of_the_development_table_exist():
    """First cells: `folder/file`, then `file`s beside it."""
    rows = re.findall(r"^\| (`[a-z_]+/.*?) \|", TEXT, re.M)
    assert len(rows) > 10
    for row in rows:
        first, *others = re.findall(r"`(.*?)`", row)
        path = README.parent / first
        for file in (path, *(path.with_name(name) for name in others)):
            assert file.exists(), file
