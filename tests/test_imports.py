"""Imports point one way, and nothing needs torch."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import jax_ucp

PACKAGE = Path(jax_ucp.__file__).parent

# What each room may import of the package, besides itself. `checkpoint` is the user's door over formats and sharding.
BELOW = {
    "errors": set(),
    "layout": {"errors"},
    "metadata": {"layout", "errors"},
    "language": {"metadata", "layout", "errors"},
    "storage": {"metadata", "layout", "errors"},
    "formats": {"language", "storage", "metadata", "layout", "errors"},
    "sharding": {"storage", "metadata", "layout", "errors"},
    "export": {"storage", "metadata", "layout", "errors"},
    "checkpoint": {"export", "formats", "sharding", "storage", "metadata", "layout", "errors"},
    "handler": {"checkpoint", "sharding", "storage", "metadata", "layout", "errors"},
    "args": {"handler"},
    "cli": {"checkpoint", "export", "sharding", "storage", "metadata", "layout", "errors", ""},
    "__main__": {"cli"},
}
OUTSIDE = {"layout": {"jax", "tensorstore", "numpy"}, "errors": {"jax", "tensorstore", "numpy"}, "formats": {"jax"}}
OUTSIDE |= {"language": {"jax", "tensorstore", "numpy"}}
OUTSIDE |= {"export": {"jax", "tensorstore"}, "storage": {"jax"}, "metadata": {"jax", "tensorstore"}}


def imports(source: str) -> Iterator[str]:
    """The modules that a source file imports, inside functions too; but not for type checkers alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def upward(files: Mapping[str, str]) -> list[str]:
    """Imports that point up or sideways, in files given by their module name without `jax_ucp.`."""
    wrong = []
    for name, source in files.items():
        room = name.partition(".")[0]
        for module in imports(source):
            top, _, rest = module.partition(".")
            inner = rest.partition(".")[0]
            if top == "jax_ucp" and inner != room and inner not in BELOW[room]:
                wrong.append(f"{name} imports {module}")
            if top == "torch" or (top == "orbax" and room != "handler") or top in OUTSIDE.get(room, ()):
                wrong.append(f"{name} imports {module}")
    return wrong


def package() -> dict[str, str]:
    paths = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name.replace("/", "."): path.read_text() for name, path in paths.items() if name != "__init__"}


def test_imports_point_one_way():
    assert upward(package()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("layout.box", "import jax.numpy"),
        ("layout.box", "from jax_ucp.storage.source import ArrayInfo"),
        ("formats.orbax", "def f():\n    from jax_ucp.sharding.boxes import device_boxes"),
        ("sharding.fit", "from jax_ucp.formats.extras import as_json"),
        ("storage.zarr", "import orbax.checkpoint"),
        ("formats.torch_file", "import torch"),
    ],
)
def test_an_import_that_points_the_other_way_is_seen(module, line):
    files = package()
    assert upward(files | {module: f"{files[module]}\n{line}\n"}) != []


def loaded_after(program: str) -> set[str]:
    """The top-level modules in a fresh interpreter after it has run a program."""
    program = textwrap.dedent(program) + "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(out.stdout.splitlines()[-1].split())


def test_importing_the_package_brings_in_neither_torch_nor_anything_slow():
    assert not {"torch", "jax", "orbax", "tensorstore"} & loaded_after("import jax_ucp")
    everything = loaded_after("from jax_ucp import *")
    assert {"jax", "orbax", "tensorstore"} <= everything
    assert "torch" not in everything


def test_layout_brings_in_neither_jax_nor_numpy():
    assert not {"jax", "tensorstore", "numpy", "torch"} & loaded_after(
        "import jax_ucp.layout.patterns, jax_ucp.layout.blocks"
    )


def test_looking_for_modules_sees_one_that_is_there():
    assert "numpy" in loaded_after("import jax_ucp.layout.patterns, numpy")


def test_the_public_names_are_those_listed():
    for name in jax_ucp.__all__:
        assert getattr(jax_ucp, name) is not None
    assert sorted(jax_ucp.__all__) == jax_ucp.__all__
    assert set(jax_ucp._HOMES) == set(jax_ucp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jax_ucp.nothing
