"""Readers of foreign formats see files through `Files` alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jax_ucp

FORMATS = Path(jax_ucp.__file__).parent / "formats"
MODULES = {"glob", "io", "mmap", "shutil", "tempfile"}
FUNCTIONS = {"open", "os.open", "os.listdir", "os.scandir", "os.stat", "os.walk", "np.load"}
FUNCTIONS |= {"np.fromfile", "np.memmap", "os.path.exists", "os.path.isfile", "os.path.getsize"}
METHODS = {"iterdir", "glob", "rglob", "open", "unlink", "mkdir"}
# The options of a caller name files of the caller's, and writers write where the caller says.
OF_CALLERS = {"options.py", "exporting.py", "tensor_parallel.py"}
# The same name, of other things: TensorStore's arrays, objects of a checkpoint, formats.
OTHERS = {"ts.open", "stored.open", "stored_object.open", "self.files.objects[key].open"}
OTHERS |= {"format.open", "ts.KvStore.open"}


def reaches_past(tree: ast.AST) -> Iterator[str]:
    """What in a module may look at the local disk by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = {module or ""} | {alias.name for alias in node.names}
            yield from names & MODULES
            if names & {"pathlib"} and {alias.name for alias in node.names} - {"PurePosixPath"}:
                yield "pathlib"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in FUNCTIONS or (method in METHODS and called not in OTHERS):
                yield called


@pytest.mark.parametrize("path", sorted(FORMATS.rglob("*.py")), ids=lambda path: path.stem)
def test_a_format_reads_through_files(path):
    if path.name not in OF_CALLERS:
        assert list(reaches_past(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("text", [
    "import mmap", "from pathlib import Path", "open(path)", "os.open(path, 0)", "np.memmap(path)",
    "list(folder.iterdir())", "path.open('rb')", "folder.glob('*.pt')",
])  # fmt: skip
def test_what_reaches_past_is_found(text):
    assert list(reaches_past(ast.parse(text)))
