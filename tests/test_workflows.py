"""What the workflows, the issue templates and the papers of a release name exists, and versions agree."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from packaging.requirements import Requirement

from commands import command as command_named
from jax_ucp.cli.main import main

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS_BY_NAME = {path.stem: path for path in WORKFLOWS}
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]
PAPERS = [*FORMS, ROOT / "SECURITY.md"]
FILES = {".toml", ".md", ".txt", ".py", ".yml"}
BUILT = {"build/site", "dist"}  # what steps before make
RUNNER = {"pip", "pipx", "grep"}  # what a runner with a Python has

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
each_form = pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
each_paper = pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)


class Loader(yaml.SafeLoader):
    """YAML as GitHub reads it: `on` is a text, and a key that is there twice an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false)$"), list("tf"))


def load(path: Path) -> dict:
    return yaml.load(path.read_text(), Loader)


def variants(job: dict) -> list[dict]:
    """What `${{ matrix.x }}` stands for in each run of a job."""
    matrix = job.get("strategy", {}).get("matrix", {})
    if "include" in matrix:
        return matrix["include"]
    [(name, values)] = matrix.items() or [("", [None])]
    return [{name: value} for value in values]


def filled(text: str, variant: dict) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: variant[found[1]], text)


def steps(path: Path) -> list[tuple[dict, dict]]:
    """Each step of a workflow with each variant of its job."""
    jobs = load(path)["jobs"].values()
    return [(step, variant) for job in jobs for variant in variants(job) for step in job["steps"]]


def commands(path: Path) -> list[list[str]]:
    lines = [filled(step["run"], variant) for step, variant in steps(path) if "run" in step]
    return [shlex.split(command) for line in lines for command in line.strip().split("\n")]


def extra(name: str) -> set[str]:
    return {Requirement(text).name for text in PROJECT["optional-dependencies"][name]}


def python_versions() -> dict[str, str]:
    """The Python of each cell, as docs/versions.md has it."""
    lines = (ROOT / "docs" / "versions.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    [names] = [row for row in rows if row[1:] == ["oldest", "usual", "newest"]]
    [versions] = [row for row in rows if row[0] == "Python"]
    return dict(zip(names[1:], versions[1:], strict=True))


def test_the_workflows_are_tests_docs_and_release():
    assert {"tests", "docs", "release"} <= {path.stem for path in WORKFLOWS}


@each_workflow
def test_a_workflow_may_read_only_and_needs_jobs_that_exist(path):
    workflow = load(path)
    assert workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert len({"run", "uses"} & set(step)) == 1


@each_workflow
def test_a_workflow_uses_actions_by_version_and_only_of_those_who_make_the_runner_and_pypi(path):
    used = [step["uses"] for step, _ in steps(path) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1", action)


@each_workflow
def test_every_command_of_a_workflow_exists(path):
    installed = {name for words in commands(path) for name in extras_of(words)}
    for words in commands(path):
        command = words[0]
        if "/" in command:
            assert os.access(ROOT / command, os.X_OK), command
        elif command not in RUNNER:
            assert command in installed, f"{command} is in no extra that the workflow installs"


def extras_of(words: list[str]) -> set[str]:
    """What is installed by the extras in a `pip install -e .[...]`."""
    if words[:2] != ["pip", "install"]:
        return set()
    [names] = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
    return set().union(*map(extra, names.split(",")))


@each_workflow
def test_every_path_of_a_workflow_exists_or_is_built_there(path):
    given = [step.get("with", {}) for step, _ in steps(path)]
    paths = {value for options in given for key, value in options.items() if key.endswith("path")}
    paths |= {options["packages-dir"] for options in given if "packages-dir" in options}
    named = {word for words in commands(path) for word in words[1:] if Path(word).suffix in FILES}
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert paths <= BUILT
    for built in paths:
        assert built_in_text(built), f"no step makes {built}"


def built_in_text(built: str) -> bool:
    scripts = [*WORKFLOWS, ROOT / ".ci" / "package"]
    return any(re.search(rf"(--site-dir|--outdir) {built}\b", s.read_text()) for s in scripts)


def test_tests_run_in_the_cells_and_pythons_of_the_documentation():
    cells = load(WORKFLOWS_BY_NAME["tests"])["jobs"]["cells"]
    cells = {v["cell"]: v["python"] for v in variants(cells)}
    assert cells == python_versions()
    script = (ROOT / ".ci" / "run").read_text()
    [default] = re.findall(r"\|\| cells=\((.*)\)", script)
    assert set(default.split()) == set(cells)
    for cell in cells:
        [line] = re.findall(rf"^ +{cell}\) (.*) ;;$", script, re.MULTILINE)
        [python] = set(re.findall(r"\b3\.\d+\b", line)) or {"3.11"}
        assert python == cells[cell]


def test_classifiers_are_the_pythons_that_are_supported():
    prefix = "Programming Language :: Python :: "
    said = [text for text in PROJECT["classifiers"] if text.startswith(f"{prefix}3.")]
    minors = {int(text.rpartition(".")[2]) for text in said}
    pythons = {int(version.rpartition(".")[2]) for version in python_versions().values()}
    page = (ROOT / "docs" / "versions.md").read_text()
    by_hand = re.search(r"With Python 3\.(\d+)\.\d+ the newest\ncell's tests were run by", page)
    pythons.add(int(by_hand[1]))
    assert minors == set(range(min(pythons), max(pythons) + 1))
    assert PROJECT["requires-python"] == f">=3.{min(pythons)}"


@pytest.mark.parametrize("script", ["run", "package", "frameworks", "writers"])
def test_a_script_is_shell_and_refuses_what_it_does_not_know(script):
    path = ROOT / ".ci" / script
    subprocess.run(["bash", "-n", path], check=True)
    if script == "run":
        refused = subprocess.run([path, "nonsense"], capture_output=True, text=True)
        assert (refused.returncode, refused.stderr) == (2, "no such cell: nonsense\n")


def test_every_family_of_writers_has_its_generator():
    script = (ROOT / ".ci" / "writers").read_text()
    (families,) = re.findall(r"families=\((\w[\w ]+)\)", script)
    made = {path.stem for path in (ROOT / "tests" / "generators").glob("*.py")}
    assert {*families.split()} - {"configs"} <= made


def test_only_a_tag_releases_and_with_no_secret_but_an_attestation():
    text = WORKFLOWS_BY_NAME["release"].read_text()
    release = load(WORKFLOWS_BY_NAME["release"])
    assert release["on"] == {"push": {"tags": ["v*"]}}
    assert "secrets." not in text
    publish = release["jobs"]["publish"]
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    assert publish["environment"] == "pypi"
    assert publish["steps"][-1]["with"] == {"packages-dir": "dist", "attestations": True}


@pytest.mark.parametrize(
    ("tag", "released"),
    [(f"v{PROJECT['version']}", True), (f"v{PROJECT['version']}.1", False), ("v0", False)],
)
def test_a_tag_that_is_not_the_version_is_not_released(tag, released):
    runs = [step["run"] for step, _ in steps(WORKFLOWS_BY_NAME["release"]) if "run" in step]
    [compare] = [run for run in runs if "pyproject.toml" in run]
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    code = subprocess.run(["bash", "-c", compare], cwd=ROOT, env=environment).returncode
    assert (code == 0) == released


def test_the_citation_has_the_project_s_name_version_and_licence():
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "authors"} <= set(citation)
    for key, name in {"title": "name", "version": "version", "license": "license"}.items():
        assert citation[key] == PROJECT[name]
    assert citation["keywords"] == PROJECT["keywords"]
    assert citation["abstract"] == PROJECT["description"]


@each_form
def test_an_issue_form_has_what_github_wants(path):
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    for field in fields:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]


@each_paper
def test_every_command_and_page_that_a_paper_names_exists(path):
    text = path.read_text()
    for command in re.findall(r"`jax-ucp ([^`]+)`", text):
        name, *words = command.split()
        options = [word for word in (name, *words) if word.startswith("--")]
        known = main if name.startswith("--") else command_named(name)
        flags = {flag for p in known.params if isinstance(p, click.Option) for flag in p.opts}
        assert set(options) <= flags, command
    pages = re.findall(r"\bdocs/[\w/-]+\.md", text)
    assert [page for page in pages if not (ROOT / page).exists()] == []
