"""What the README shows is what happens."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import jax_ucp as ucp
import tests_map
from commands import run
from programs import python

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_in_the_readme_prints_what_the_readme_says():
    program = re.search(r"```python\n(.*?)```\nprints\n```\n(.*?)```", README, re.DOTALL)
    program, printed = program.groups()
    assert python("-c", program, cwd=ROOT) == printed


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_command_prints_what_the_page_says(page):
    pattern = r"^jax-ucp (inspect \S+).*?```text\n(.*?)```"
    found = re.search(pattern, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    command, printed = found.groups()
    text = run(*command.split()).replace(f"{ROOT}/", "")
    assert text.startswith(printed)


def test_the_first_example_script_restores_every_array():
    printed = python("examples/open_deepspeed.py", cwd=ROOT)
    assert "124 of 124 arrays equal" in printed
    assert "0 faults" in printed


FOLDERS = (path for path in (ROOT / "jax_ucp").iterdir() if (path / "__init__.py").exists())
ROOMS = sorted(path.name for path in FOLDERS)
ROOMS += ["tree"]


def is_there(name: str) -> bool:
    """Whether a dotted name below `jax_ucp` is a module, or something in one, methods included; or
    of a `checkpoint` something that it has.
    """
    try:
        pkgutil.resolve_name(f"jax_ucp.{name}")
        return True
    except (ImportError, AttributeError):
        room, _, rest = name.partition(".")
        return room == "checkpoint" and hasattr(ucp.Checkpoint, rest)


def test_a_name_that_is_not_there_is_seen():
    assert is_there("universal.store.ZarrStore.write")
    assert not is_there("universal.store.ZarrStore.wrote")
    assert not is_there("universal.shop")
    assert is_there("checkpoint.groups")
    assert not is_there("checkpoint.grooves")


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
)
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for number, link in re.findall(r"\[(\d{3})\]\(([^)#]+)\)", text):
        assert Path(link).name.startswith(number), link
    for name in re.findall(rf"`((?:{'|'.join(ROOMS)})\.[\w.]+)`", text):
        assert is_there(name), name


def test_every_public_name_is_in_the_reference_as_people_type_it():
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    shown = re.findall(r"^::: jax_ucp\.(\S+)", "".join(pages), re.MULTILINE)
    assert set(ucp.__all__) <= {name.partition(".")[0] for name in shown}
    (listed,) = re.findall(r"jax_ucp\.Checkpoint\n.*members: \[(.*)\]", "".join(pages))
    methods = {name for name in vars(ucp.Checkpoint) if name[0] != "_"}
    own = {name.removeprefix("Checkpoint.") for name in shown} | set(listed.split(", "))
    assert methods <= own


def test_every_kind_of_error_has_an_entry_that_says_what_to_do():
    classes = {name: kind for name, kind in vars(ucp.errors).items() if isinstance(kind, type)}
    kinds = {name for name, kind in classes.items() if issubclass(kind, Exception)} - {"UCPError"}
    _, *entries = re.split(r"^## ", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE)
    assert kinds == set(re.findall(r"`(\w+)`", " ".join(entry.split("\n")[0] for entry in entries)))
    assert all(len(entry.splitlines()) > 1 for entry in entries)


def test_the_remedies_of_the_faq_are_options_that_there_are():
    page = (ROOT / "docs" / "faq.md").read_text()
    named = set(re.findall(r"[`(](\w+)=", page))
    of_checkpoints = ("restore", "map", "export", "plan_optimizer")
    functions = (ucp.open, *(getattr(ucp.Checkpoint, name) for name in of_checkpoints))
    known = {name for each in functions for name in inspect.signature(each).parameters}
    assert len(named) > 8
    assert named <= known


def test_the_map_of_tests_has_every_module_with_files_that_exist():
    rows = tests_map.ROW.findall(tests_map.PAGE.read_text())
    assert [module for module, _ in rows] == tests_map.modules()
    for module, files in rows:
        named = re.findall(r"`([^`]+)`", files)
        assert named, module
        assert all((ROOT / "tests" / file).exists() for file in named), module
