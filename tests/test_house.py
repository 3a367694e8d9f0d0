"""Figures of the package that are held: no circles, one meaning to a name, docstrings that begin with what is returned,
and no words that decide.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax_ucp

PACKAGE = Path(jax_ucp.__file__).parent
FILES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# The first noun of a docstring is what is returned, or what the class is: these are none.
EMPTY = re.compile(r"(What|That|Those|One|None|Such|It|Which|Whatever|As)\b")
# A message that is searched, split or compared decides something by its words.
DECIDING = re.compile(
    r"\bin str\((error|e|exc|err)\)|note\.startswith\(|str\(error\)\.(split|partition|startswith)"
)
# Errors of other libraries, which have nothing else that tells one from another.
OF_LIBRARIES = {"files/hub.py": 1, "files/object_store.py": 1, "sharding/shared_save.py": 2}


def defined_classes() -> dict[str, list[str]]:
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    return classes


def docstrings() -> Iterator[tuple[str, str]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path}:{node.body[0].lineno}", text


def deciding_lines() -> Iterator[tuple[str, str]]:
    for path, text in FILES.items():
        for number, line in enumerate(text.splitlines(), 1):
            if DECIDING.search(line):
                yield f"{path}:{number}", line.strip()


def test_no_two_classes_have_one_name():
    twice = {name: places for name, places in defined_classes().items() if len(places) > 1}
    assert not twice


def test_docstrings_begin_with_what_is_returned():
    empty = [f"{place}: {text[:60]}" for place, text in docstrings() if EMPTY.match(text)]
    assert not empty


def test_no_words_of_a_message_decide():
    found: dict[str, int] = defaultdict(int)
    for place, _ in deciding_lines():
        found[place.partition(":")[0]] += 1
    assert found == OF_LIBRARIES
