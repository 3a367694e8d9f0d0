"""Opening and looking at a checkpoint takes work in proportion to its arrays, whatever wrote it."""

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jax_ucp as ucp
from benchmarks import array_cases
from jax_ucp.arrays.contents import Contents
from jax_ucp.arrays.evaluate import Evaluated
from jax_ucp.cli.text_table import TextTable
from jax_ucp.inspection.report import inspection
from jax_ucp.mapping.states import states_of
from jax_ucp.tree import Key, Leaf, leaf_names, tree_fault

SIZES = (48, 96, 192)
LINEAR = 2.2  # three instructions a pair of arrays beside 4,000 an array, as inspecting takes, make
# it more; the order of sets and what is already cached move it by up to 0.12
WRITERS = [array_cases.converted, array_cases.deepspeed, array_cases.megatron]
WRITERS += [array_cases.megatron_experts]
MANY = (1_000, 4_000)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Garbage waits: JAX and Hypothesis run Python of their own whenever some is collected, which
    would count as the work of whoever made the last of it.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@nothing_collected()
def operations(run: Callable[[], Any]) -> int:
    """How many instructions of Python's a call takes, in all functions that it calls."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def growth(counts: list[int]) -> float:
    """How the growth of work grows where sizes double twice: 2 if it is linear, 4 if quadratic."""
    small, middle, large = counts
    return (large - middle) / (middle - small)


def test_growth_tells_a_quadratic_loop_from_a_linear_one():
    linear = [operations(lambda n=n: [i for i in range(n)]) for n in SIZES]
    square = [operations(lambda n=n: [i for i in range(n) for _ in range(n)]) for n in SIZES]
    assert growth(linear) == pytest.approx(2, rel=0.01)
    assert growth(square) == pytest.approx(4, rel=0.1)


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__)
def folders(request, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp(request.param.__name__)
    for size in SIZES:
        request.param(root / str(size), size)
    smallest = ucp.open(root / str(SIZES[0]))  # what is imported and made once
    for name in [*smallest.params][:2]:
        smallest.read(f"param/{name}")
    return [root / str(size) for size in SIZES]


def test_opening_is_linear_in_the_arrays(folders):
    assert growth([operations(partial(ucp.open, at)) for at in folders]) < LINEAR


@nothing_collected()
def calls(run: Callable[[], Any]) -> int:
    """How many calls a call makes, each step of a generator among them: a coarser count than
    `operations`, for what is too large for that.
    """
    count = 0

    def noted(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_four_thousand_experts_open_with_as_many_calls_each_as_a_quarter_of_them(tmp_path):
    counts = []
    for size in MANY:
        array_cases.megatron_experts(tmp_path / str(size), size)
        counts.append(calls(partial(ucp.open, tmp_path / str(size))))
    assert counts[1] / counts[0] < 1.2 * MANY[1] / MANY[0]  # indexes are trees


def test_inspecting_is_linear_in_the_arrays(folders):
    opened = [ucp.open(at) for at in folders]
    assert growth([operations(partial(inspection, one)) for one in opened]) < LINEAR


def test_params_are_made_once(folders):
    opened = [ucp.open(at) for at in folders]
    assert growth([operations(lambda one=one: one.params) for one in opened]) < LINEAR
    assert all(one.params is one.params for one in opened)


def test_reads_after_the_first_cost_the_same_among_few_arrays_and_many(folders):
    counts = []
    for at in folders:
        checkpoint = ucp.open(at)
        first, second, *_ = checkpoint.params
        checkpoint.read(f"param/{first}")
        counts.append(operations(partial(checkpoint.read, f"param/{second}")))
    assert max(counts) - min(counts) < 64


RANKS = (16, 32, 64)


def zero3(folder: Path, parameters: int, ranks: int) -> Path:
    """A ZeRO-3 checkpoint in which every rank has a part of every parameter."""
    if not folder.exists():
        array_cases.deepspeed(folder, parameters, ranks, rows=16)
    return folder


def test_opening_zero_3_is_linear_in_the_ranks(tmp_path):
    folders = [zero3(tmp_path / str(ranks), 24, ranks) for ranks in RANKS]
    ucp.open(folders[0])  # what is imported and made once
    assert growth([operations(partial(ucp.open, at)) for at in folders]) < LINEAR


def test_what_64_ranks_of_zero_3_have_alike_is_read_and_kept_once(tmp_path):
    """What one more parameter costs on each rank: its part, and its name among what is kept."""
    folders = [zero3(tmp_path / str(n), n, 64) for n in (32, 96)]
    ucp.open(folders[0])
    few, many = ([*measured(partial(ucp.open, at))] for at in folders)
    instructions, nbytes = ((b - a) / (64 * 64) for a, b in zip(few, many, strict=True))
    assert instructions < 2_700  # 8,455 where every rank's tables were read
    assert nbytes < 1_050  # 2,705 where every rank's were kept


def measured(run: Callable[[], Any]) -> tuple[int, int]:
    """How many instructions of Python's a call takes, and how many bytes what it returns has."""
    count = operations(run)
    gc.collect()
    tracemalloc.start()
    try:
        result = run()
        gc.collect()
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return count, nbytes


def test_trees_names_and_tables_are_linear():
    def paths(n: int) -> list[tuple[Key, ...]]:
        return [(Key("dict", f"layer {i // 8}"), Key("dict", f"w{i % 8}/x")) for i in range(n)]

    def table(n: int) -> list[object]:
        from rich.console import Console

        console = Console(width=100)
        return list(console.render(TextTable(("a", "b"), [("x" * 80, "y" * 30)] * n)))

    def fault(n: int) -> str | None:
        return tree_fault(paths(n))

    def names(n: int) -> list[str]:
        return leaf_names(paths(n))

    for work in (fault, names, table):
        work(SIZES[0])
        assert growth([operations(partial(work, n)) for n in SIZES]) < LINEAR


def test_the_states_of_a_run_of_variables_are_found_in_linear_work():
    def run(count: int) -> Contents:
        """A run of Flax's variables, each of which has a moment."""
        leaves = [
            Leaf(
                (Key("dict", part), Key("dict", f"w{i}"), Key("dict", "value")),
                f"{part}{i}",
                "array",
                (2,),
                "float32",
            )
            for part in ("params", "mu")
            for i in range(count)
        ]
        return Contents("memory", "a run", leaves, Evaluated({}))

    counts = [operations(partial(states_of, run(n), "params")) for n in SIZES]
    assert counts[2] / counts[1] < LINEAR
