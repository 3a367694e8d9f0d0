"""Objects are hidden from the garbage collector once, and what the program hid stays hidden."""

import pytest

from jax_ucp import garbage
from jax_ucp.garbage import gc_frozen


class Collector:
    """A stand-in for `gc`, with the number of times that it counted what it hides."""

    def __init__(self, frozen: int):
        self.frozen, self.counts = frozen, 0

    def get_freeze_count(self) -> int:
        self.counts += 1
        return self.frozen

    def freeze(self) -> None:
        self.frozen += 1

    def unfreeze(self) -> None:
        self.frozen = 0


@pytest.fixture
def collector(request, monkeypatch):
    made = Collector(request.param)
    monkeypatch.setattr(garbage, "gc", made)
    monkeypatch.setattr(garbage, "_frozen_by", set())
    return made


@pytest.mark.parametrize("collector", [0], indirect=True)
def test_jobs_within_one_another_hide_objects_once_until_the_first_ends(collector):
    for _ in range(2):
        with gc_frozen():
            with gc_frozen():
                assert collector.frozen == 1
            assert collector.frozen == 1
        assert collector.frozen == 0


@pytest.mark.parametrize("collector", [5], indirect=True)
def test_what_the_program_hid_stays_hidden_and_is_counted_once(collector):
    for _ in range(3):
        with gc_frozen():
            assert collector.frozen == 5
        assert (collector.frozen, collector.counts) == (5, 1)
