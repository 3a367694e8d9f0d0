"""What an array source is: one class says it, and nothing is asked of one beside it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jax_ucp
from helpers import MemoryStore, numbered
from jax_ucp.arrays.combined import Combined
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import read
from jax_ucp.arrays.protocol import ArrayInfo, ArraySource, MakesArrays
from jax_ucp.arrays.value import Constant
from jax_ucp.layout.box import Box

PACKAGE = Path(jax_ucp.__file__).parent
METHODS = {"arrays", "read", "read_into", "claims"}
# What may be asked for attributes whose names are known only at run time: no source is among them.
NO_SOURCES = {"ml_dtypes", "errors", "node"}
KINDS = {"ArraySource", "MakesArrays", "Protocol"}


def trees(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def asked(tree: ast.AST) -> list[str]:
    """The calls of getattr and hasattr that may be of a source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr"):
            of, attribute = call.args[:2]
            if isinstance(attribute, ast.Constant):
                suspect = attribute.value in METHODS
            else:
                suspect = ast.unparse(of) not in NO_SOURCES
            if suspect:
                found.append(ast.unparse(call))
    return found


def unsaid(tree: ast.AST) -> list[str]:
    """The classes that have the arrays and the read of a source, and do not say that they are one."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            bases = {ast.unparse(base) for base in node.bases}
            if {"arrays", "read_into"} <= methods and not bases & KINDS:
                found.append(node.name)
    return found


def test_nothing_asks_a_source_whether_it_has_a_method():
    rooms = ("arrays", "codecs", "states", "universal", "formats", "sharding", "optimizers")
    assert [(name, calls) for name, tree in trees(*rooms) if (calls := asked(tree))] == []


@pytest.mark.parametrize("call", ["getattr(a, 'claims', None)", "hasattr(a, 'read')"])
def test_such_a_question_is_found(call):
    assert asked(ast.parse(call))
    assert asked(ast.parse("getattr(source, name)"))


def test_every_source_says_that_it_is_one():
    assert [(name, classes) for name, tree in trees(".") if (classes := unsaid(tree))] == []
    assert unsaid(ast.parse("class A:\n def arrays(self): ...\n def read_into(self, key): ..."))


def test_a_source_that_reads_nothing_is_none():
    class Half(ArraySource):
        def arrays(self):
            return {}

    with pytest.raises(TypeError, match="read_into"):
        Half()


class Plain(MakesArrays):
    """A source with nothing but what it must have."""

    def __init__(self, array: np.ndarray, chunk: tuple[int, ...] | None):
        self.array, self.chunk = array, chunk
        self.reads: list[Box] = []

    def arrays(self):
        return {"w": ArrayInfo(self.array.shape, self.array.dtype, self.chunk)}

    def read(self, key, box):
        self.reads.append(box)
        return self.array[box.index]


@pytest.mark.parametrize(("chunk", "reads"), [(None, 2), ((4, 6), 1)])
def test_boxes_are_read_into_their_places_by_read_alone(chunk, reads):
    source = Plain(numbered((8, 6)), chunk)
    boxes = [Box((1, 0), (4, 3)), Box((1, 3), (4, 6))]
    outs = [np.zeros((3, 3), np.int64), np.zeros((3, 3), np.int64).T]
    source.read_into("w", boxes, outs)
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, source.array[box.index])
    assert len(source.reads) == reads
    assert list(source.claims()) == []


def test_combined_sources_have_the_arrays_of_each():
    a, b = MemoryStore({"x": numbered((3,))}), MemoryStore({"x": numbered((2, 2))})
    assert Combined.of_files({"a": a, "b": b}).arrays().keys() == {"a:x", "b:x"}
    found = Combined.prefixed({"": a, "b/": b})
    whole = Box.whole((2, 2))
    np.testing.assert_array_equal(found.read("b/x", whole), b.data["x"])


def test_what_is_read_from_memory_is_the_callers_own():
    array = numbered((4,))
    read(Constant(array), Box((0,), (2,)))[...] = 9
    np.testing.assert_array_equal(array, numbered((4,)))


@pytest.mark.parametrize("row", [(1 << 20, 1), (1 << 10, 1), (1, 64), None])
def test_blocks_are_no_larger_than_asked_whatever_rows_an_array_has(row):
    info = ArrayInfo((1 << 20, 64), np.dtype("u1"), row=row)
    blocks = list(info.blocks([Box.whole(info.shape)], 1 << 16))
    assert max(block.size for block in blocks) <= 1 << 16
    assert sum(block.size for block in blocks) == 64 << 20


def test_claims_that_could_be_asked_for_once_only_are_refused():
    with pytest.raises(TypeError, match="can be gone through once only"):
        Contents("own", "path", (), MemoryStore({}), claims=iter(()))
