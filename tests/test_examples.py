"""The examples, run as a reader would run them."""

import re
from collections.abc import Callable, Iterator

import pytest

import elastic_training as example

STEPS = 16
TABLE_ROW = re.compile(r"^ +\d+  \(\d, \d\) +\d\.\d+ +\d\.\d+ +-?\d\.\de[-+]\d+$", re.MULTILINE)


@pytest.fixture(scope="module")
def elastic_training(tmp_path_factory) -> Iterator[Callable[..., int]]:
    """The exit code of the example with options. XLA optimises little, and what it compiles is
    kept; so are the uninterrupted runs, which restore nothing and so are the same with any option.
    """
    losses_of, kept = example.losses_of, {}

    def losses_once(run, directory, options):
        if directory.name == "interrupted":
            return losses_of(run, directory, options)
        if run not in kept:
            kept[run] = losses_of(run, directory, options)
        return kept[run]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "losses_of", losses_once)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))

        def main(*options: str) -> int:
            patch.setattr("sys.argv", [example.__file__, "--steps", str(STEPS), *options])
            return example.main()

        yield main


def test_a_run_killed_and_continued_on_three_other_meshes_agrees_with_one(elastic_training, capfd):
    code, printed = elastic_training(), capfd.readouterr().out
    assert code == 0, printed
    assert printed.count("killed") == 3
    assert len(TABLE_ROW.findall(printed)) == STEPS
    assert printed.endswith("The runs agree.\n")


def test_forgetting_the_moments_of_adam_on_restore_makes_the_runs_part(elastic_training, capfd):
    code, printed = elastic_training("--negative-control"), capfd.readouterr().out
    assert code == 1, printed
    assert len(TABLE_ROW.findall(printed)) == STEPS
    assert "The runs part" in printed
    found = (re.search(rf"{name}.*: +(\S+)", printed) for name in ("spread of", "largest"))
    spread, largest = (float(one[1]) for one in found)
    assert largest > 1000 * spread
