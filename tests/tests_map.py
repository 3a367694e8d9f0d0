"""The table of docs/tests.md: `python tests/tests_map.py` writes it, from what files import.

A test file tests the module that it is named like, and those whose names it imports, itself or
through helpers of the tests. A module that no test imports is tested by the files of its folder's
name, or else through the nearest modules that import it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax_ucp

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = ROOT / "docs" / "tests.md"
MOST = 3  # test files that are named for a module
HEAD = "| module | tested by |\n|---|---|"
_APART = {"data", "generators"}


def modules_in(folder: Path, below: Path) -> dict[str, Path]:
    """The modules of a folder by their dotted names from another."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(below).with_suffix("").parts
        if not _APART & set(parts):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


OURS = modules_in(ROOT / "jax_ucp", ROOT)
OF_TESTS = modules_in(TESTS, TESTS)


def imported(path: Path) -> Iterator[str]:
    """What a file imports of the package and of the tests: the module that has the name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ucp":
            names = [jax_ucp._HOMES.get(node.attr, "")]
        for name in names:
            module = name if name in OURS or name in OF_TESTS else name.rpartition(".")[0]
            if module in OURS or module in OF_TESTS:
                yield module


@functools.cache
def used_by(test: str) -> frozenset[str]:
    """The modules of the package that a file of the tests imports, and its helpers do."""
    seen, found, left = {test}, set(), [test]
    while left:
        for module in imported(OF_TESTS[left.pop()]):
            if module in OURS:
                found.add(module)
            elif module not in seen and not is_test(module):
                seen.add(module)
                left.append(module)
    return frozenset(found)


def is_test(module: str) -> bool:
    return module.rpartition(".")[2].startswith("test_")


def importers() -> Mapping[str, set[str]]:
    """For each module of the package those that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in OURS.items():
        for other in imported(path):
            if other != module and module != "jax_ucp":
                found[other].add(module)
    return found


TEST_FILES = [name for name in OF_TESTS if is_test(name)]


def testers(module: str) -> list[str]:
    """The test files of a module: those named most like it, then those that use the fewest others."""
    name = f".test_{module.rpartition('.')[2]}"
    found = [test for test in TEST_FILES if module in used_by(test) or test.endswith(name)]
    return ordered(found, module)


def of_its_room(module: str) -> list[str]:
    """The test files in the folder that is named like the one of a module, or the file that is."""
    above, _, room = module.removeprefix("jax_ucp").rpartition(".")[0][1:].rpartition(".")
    places = f"{above}.{room}.".lstrip("."), f"{above}.test_{room}"
    return ordered([test for test in TEST_FILES if room and test.startswith(places)], module)


def ordered(tests: list[str], module: str) -> list[str]:
    own, name = words_of(module), f"test_{module.rpartition('.')[2]}"

    def order(test: str) -> tuple[bool, int, int, str]:
        is_named_so = test.rpartition(".")[2] == name
        return not is_named_so, -len(own & words_of(test)), len(used_by(test)), test

    return sorted(tests, key=order)


def words_of(module: str) -> set[str]:
    return set(re.split(r"[._]", module))


def row(module: str, above: Mapping[str, set[str]]) -> str:
    """The first test files of a module, or of the nearest modules that import it."""
    if tests := testers(module) or of_its_room(module):
        return files_of(tests)
    near, seen = {module}, {module}
    while near := {up for via in near for up in above[via]} - seen:
        seen |= near
        tested = [via for via in sorted(near) if testers(via)]
        if tested:
            said = ", ".join(f"`{path_of(via)}`" for via in tested[:MOST])
            return f"{files_of([t for via in tested for t in testers(via)[:1]])}; through {said}"
    return "no test imports it"


def files_of(tests: list[str]) -> str:
    return ", ".join(f"`{test.replace('.', '/')}.py`" for test in dict.fromkeys(tests[:MOST]))


def path_of(module: str) -> str:
    return str(OURS[module].relative_to(ROOT))


def table() -> str:
    above = importers()
    rows = [
        f"| `{path_of(module)}` | {row(module, above)} |"
        for module, path in OURS.items()
        if path.name != "__init__.py"
    ]
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    text, _ = re.split(r"^\| module \|", PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(f"{text}{table()}\n")
