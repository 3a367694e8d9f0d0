"""The table of docs/tests.md: `python tests/tests_map.py` runs the default lane, and writes for each
module of the package the files that test it. With files, it runs these, for modules without a row.

`coverage`, which no extra has, measures which lines of the package each file executes, also in
processes that it starts; with Python 3.12 or newer COVERAGE_CORE=sysmon makes that cheap. Of each
test the first and the last row are run. Rows of modules that nothing executes stay as they are.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "jax_ucp"
PAGE = ROOT / "docs" / "tests.md"
HEAD = "| module | tested by |\n|---|---|\n"
ROW = re.compile(r"^\| `(jax_ucp/\S+)` \| (.*) \|$", re.MULTILINE)
MOST = 3  # test files that are named for a module
# What holds of every checkpoint, and what people do by mistake: these reach every reader.
OF_ALL = {"test_every_case.py", "test_damages.py", "test_temptations.py"}
CONFIG = """\
[run]
source = {package}
data_file = {folder}/data
parallel = true
patch = subprocess
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


def modules() -> list[str]:
    """The modules that have a row."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return [path.relative_to(ROOT).as_posix() for path in paths]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the first and the last row of each test: the others execute much the same lines."""
    rows = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        if item.path.is_relative_to(TESTS):
            rows[item.path, item.name.partition("[")[0]].append(item)
    kept = {id(row) for of_test in rows.values() for row in (of_test[0], of_test[-1])}
    items[:] = [item for item in items if id(item) in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Measure the tests of a file under its name."""
    from coverage import Coverage

    measured = Coverage.current()
    if measured is None:
        name = item.path.relative_to(TESTS).as_posix()
        measured = Coverage(config_file=os.environ["UCP_MAP"], context=name, data_suffix=True)
        measured.start()
    result = yield
    if measured and (nextitem is None or nextitem.path != item.path):
        measured.stop()
        measured.save()
    return result


def executed(files: Sequence[str]) -> dict[str, dict[int, list[str]]]:
    """For each module, the lines that test files execute, with the names of these files."""
    from coverage import Coverage

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config")
        config.write_text(CONFIG.format(package=PACKAGE, folder=folder))
        path = f"{TESTS}:{ROOT}"
        environment = {**os.environ, "UCP_MAP": str(config), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-p", "tests_map", *files]
        command += [f"--ignore=tests/{file}" for file in sorted(OF_ALL)]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)  # whatever fails
        measured = Coverage(config_file=str(config))
        measured.combine()
        data = measured.get_data()
        return {
            Path(path).relative_to(ROOT).as_posix(): data.contexts_by_lineno(path)
            for path in data.measured_files()
        }


def testers(module: str, lines: Mapping[int, Collection[str]]) -> list[str]:
    """The test files of a module: a line counts the more for one, the fewer others execute it.

    What is executed when a module is imported does not count, unless it has nothing else.
    """
    inside = in_functions(module)
    weights: dict[str, float] = defaultdict(float)
    for line, files in lines.items():
        for file in sorted(files) if line in inside or not inside else ():
            weights[file] += 1 / len(files)
    return sorted(weights, key=lambda file: (-weights[file], file))[:MOST]


def in_functions(module: str) -> set[int]:
    """The lines of the bodies of a module's functions."""
    nodes = ast.walk(ast.parse((ROOT / module).read_text()))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}


def main(files: Sequence[str]) -> None:
    text, _, _ = PAGE.read_text().partition(HEAD)
    rows = dict(ROW.findall(PAGE.read_text()))
    for module, lines in executed(files).items():
        found = testers(module, lines)
        if found and not (files and module in rows):
            rows[module] = ", ".join(f"`{file}`" for file in found)
    table = "".join(f"| `{module}` | {rows.get(module, '')} |\n" for module in modules())
    PAGE.write_text(f"{text}{HEAD}{table}")


if __name__ == "__main__":
    main(sys.argv[1:])
