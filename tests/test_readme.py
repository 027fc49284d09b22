"""The README's Python examples run as they stand there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def needs_gpu(example):
    return "cupy" in example or "cuda" in example.replace("cukda", "")


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
    out = run(example)["out"]
    assert bool((abs(out.astype("float32") if hasattr(out, "get") else out.float()) < 1e3).all())


def test_examples_are_found():
    assert [needs_gpu(example) for example in EXAMPLES].count(True) >= 2
    assert [needs_gpu(example) for example in EXAMPLES].count(False) >= 2
