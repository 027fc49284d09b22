"""Rules of the house that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sorted((ROOT / "cukda").glob("**/*.py"))
CUDA = sorted((ROOT / "cuda_src").iterdir())


def file_name(path: Path) -> str:
    return path.name


def imports(tree: ast.AST, at_import_only: bool) -> set[str]:
    """Top-level names of the packages imported; at_import_only leaves functions out."""
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        todo += ast.iter_child_nodes(node)
    return found


def without_comments(cuda: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", cuda, flags=re.DOTALL)


def test_there_is_something_to_check():
    assert {"kda.py", "jit.py", "sigmoid_ext.py"} <= {path.name for path in PYTHON}
    assert {"kda_fwd.cu", "ptx.cuh", "sigmoid.cu"} <= {path.name for path in CUDA}


# For callers of torch, who import them by name; nothing else of cukda does (tests/test_package.py).
FOR_TORCH = {"torch.py", "fla.py"}


@pytest.mark.parametrize("path", PYTHON, ids=file_name)
def test_importing_a_module_imports_no_gpu_library(path):
    libraries = {"cupy"} if path.name in FOR_TORCH else {"cupy", "torch"}
    assert not imports(ast.parse(path.read_text()), at_import_only=True) & libraries


@pytest.mark.parametrize("path", PYTHON, ids=file_name)
def test_no_function_imports_torch(path):
    """Reading a version aside, a caller's torch is found among the modules already imported."""
    if path.name not in FOR_TORCH | {"__main__.py"}:
        assert "torch" not in imports(ast.parse(path.read_text()), at_import_only=False)


@pytest.mark.parametrize("path", PYTHON, ids=file_name)
def test_python_holds_no_cuda(path):
    cuda = r"__(global|device|shared|host|launch_bounds)__|\b(threadIdx|blockIdx|blockDim)\b"
    assert not re.search(cuda, path.read_text())


@pytest.mark.parametrize("path", PYTHON, ids=file_name)
def test_users_meet_errors_not_assertions(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", CUDA, ids=file_name)
def test_asm_stands_in_one_file(path):
    uses = re.findall(r"\b(?:__asm__|__asm|asm)\b", without_comments(path.read_text()))
    assert bool(uses) == (path.name == "ptx.cuh")


def test_every_instruction_has_a_caller():
    texts = {path.name: without_comments(path.read_text()) for path in CUDA}
    words = re.findall(r"\w+", " ".join(texts.values()))
    functions = set(re.findall(r"__device__ inline \w+ (\w+)\(", texts["ptx.cuh"]))
    assert functions
    assert [name for name in sorted(functions) if words.count(name) < 2] == []


@pytest.mark.parametrize("path", CUDA, ids=file_name)
def test_cuda_includes_only_its_own_files(path):
    """So that a machine without CUDA's headers compiles."""
    included = re.findall(r"#\s*include\s*(\S+)", without_comments(path.read_text()))
    assert set(included) <= {f'"{other.name}"' for other in CUDA}


@pytest.mark.parametrize("path", [path for path in CUDA if path.suffix == ".cu"], ids=file_name)
def test_entries_are_extern_c(path):
    text = without_comments(path.read_text())
    assert re.search(r"__global__", text)
    assert len(re.findall(r"__global__", text)) == len(re.findall(r'extern "C" __global__', text))
