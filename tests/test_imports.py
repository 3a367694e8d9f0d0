"""Imports point one way, and nothing needs torch."""

import ast
import functools
import importlib
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

import jax_ucp
from commands import every_command
from programs import python

PACKAGE = Path(jax_ucp.__file__).parent
ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"

# Of formats those that contain others, and which; what several are written in is in `codecs`, whose
# optimizer states they have in `states`, and what all use of naming and describing beside the folders.
HELD = "peft", "quantized", "safetensors", "torch_save"
CONTAINED = {
    "formats.dcp": {"formats.torch_save"},
    "formats.gguf": {"formats.quantized"},
    "formats.huggingface": {f"formats.{name}" for name in HELD},
    "formats.flax_msgpack": {"formats.orbax"},
    "formats.megatron": {"formats.dcp"},
}
FORMATS = (
    "torch_save", "safetensors", "dcp", "quantized", "peft", "gguf", "orbax", "flax_msgpack",
    "equinox", "huggingface", "dtensor_ranks", "deepspeed", "megatron",
)  # fmt: skip
FOLDERS = tuple(f"formats.{name}" for name in FORMATS)
# The rooms from the bottom up: each may import those above it in this list, besides itself.
ROOMS = (
    "version", "orbax_import", "text", "errors", "json_text", "arguments", "garbage",
    "name_patterns", "layout", "tree", "files", "arrays", "shard_spec", "options", "mapping",
    "jobs", "universal", "export", "codecs", "states",
    "formats.nested", "formats.facts", "formats.assemble", "formats.weight_names",
    "formats.weight_files", "formats.state_dicts", "formats.steps", "formats.packed_experts",
    "formats.moments",
    *FOLDERS,
    *("formats", "formats.step_folders", "formats.orbax_steps", "formats.hints", "formats.exporting",
        "formats.saved_index"),
    "formats.registry", "sharding",
    "optimizers", "inspection", "checkpoint", "handler", "args", "", "cli", "__main__",
    "launcher",
)  # fmt: skip
ALL_FORMATS = {room for room in ROOMS if room.partition(".")[0] == "formats"}
BESIDE = {room: {"sharding"} for room in ALL_FORMATS}
BESIDE |= {room: ALL_FORMATS for room in ("sharding", "optimizers", "handler")}
BELOW = {room: {*ROOMS[: ROOMS.index(room)]} - BESIDE.get(room, set()) for room in ROOMS}
for room in FOLDERS:
    BELOW[room] = BELOW[room] - {*FOLDERS} - BESIDE[room] | CONTAINED.get(room, set())
# What rooms do without: integers need no arrays, and nothing but what runs on devices needs JAX.
DECIDE = (*ROOMS[: ROOMS.index("layout") + 1], "shard_spec")
OUTSIDE = {room: {"jax", "tensorstore", "numpy"} for room in DECIDE}
OUTSIDE |= {room: {"jax", "tensorstore"} for room in ("mapping", "tree", "export")}
READ = ("files", "arrays", "jobs", "universal", "codecs", "states", *ALL_FORMATS)
OUTSIDE |= {room: {"jax"} for room in READ}


def test_every_public_name_is_there_and_what_the_readme_names_is_public():
    assert all(getattr(jax_ucp, name) is not None for name in jax_ucp.__all__)
    assert sorted(jax_ucp.__all__) == jax_ucp.__all__
    assert {*jax_ucp.__all__} == {*jax_ucp._HOMES} <= {*dir(jax_ucp)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jax_ucp.nothing
    readme = (PACKAGE.parent / "README.md").read_text()
    named = re.findall(r"\bucp\.(?!json\b)(\w+)", readme) + re.findall(r"\bjax_ucp\.(\w+)", readme)
    assert named
    assert {*named} <= {*jax_ucp.__all__, "__version__"}


@functools.cache
def imports(source: str) -> list[str]:
    """The modules that a source file imports, in functions too; not for type checkers alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def room_of(module: str) -> str:
    """The room of a module that is named without `jax_ucp.`: of formats, each is one.

    >>> room_of("layout.box"), room_of("formats.dcp.reader"), room_of("formats.facts")
    ('layout', 'formats.dcp', 'formats.facts')
    """
    return ".".join(module.split(".")[: 2 if module.startswith("formats.") else 1])


def upward(files: Mapping[str, str]) -> list[str]:
    """Imports that point up or sideways, in files given by their module name without `jax_ucp.`."""
    wrong = []
    for name, source in files.items():
        room = room_of(name)
        for module in imports(source):
            top, _, rest = module.partition(".")
            inner = room_of(rest)
            if top == "jax_ucp" and inner != room and inner not in BELOW[room]:
                wrong.append(f"{name} imports {module}")
            is_orbax = top == "orbax" and room != "handler"
            if top == "torch" or is_orbax or top in OUTSIDE.get(room, ()):
                wrong.append(f"{name} imports {module}")
    return wrong


def package() -> dict[str, str]:
    files = [*PACKAGE.rglob("*.py")]
    paths = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in files}
    paths = {name.replace("/", "."): path for name, path in paths.items() if name != "__init__"}
    return {name: path.read_text() for name, path in paths.items()}


def test_imports_point_one_way():
    assert upward(package()) == []


@pytest.mark.parametrize(("module", "line"), [
    ("layout.box",           "import jax.numpy"),
    ("layout.box",           "from jax_ucp.arrays.protocol import ArrayInfo"),
    ("formats.orbax.reader", "def f():\n    from jax_ucp.sharding.boxes import device_boxes"),
    ("sharding.fit",         "from jax_ucp.formats.facts import Facts"),
    ("universal.store",      "import orbax.checkpoint"),
    ("formats.dcp.reader",   "from jax_ucp.formats.huggingface import folder"),
    ("codecs.torch_file",    "import torch"),
])  # fmt: skip
def test_an_import_that_points_the_other_way_is_seen(module, line):
    files = package()
    assert upward(files | {module: f"{files[module]}\n{line}\n"}) != []


def loaded_after(program: str) -> set[str]:
    """The modules in a fresh interpreter after it has run a program."""
    program = textwrap.dedent(program) + "\nimport sys; print(*sys.modules)"
    return set(python("-c", program).splitlines()[-1].split())


def test_importing_the_package_brings_in_neither_torch_nor_anything_slow():
    assert not {"torch", "jax", "orbax", "tensorstore"} & loaded_after("import jax_ucp")
    everything = loaded_after("from jax_ucp import *")
    assert {"jax", "orbax", "tensorstore"} <= everything
    assert not {"torch", "optax", "flax"} & everything


def test_help_imports_no_command():
    program = "from jax_ucp.cli.main import main; main(['--help'], standalone_mode=False)"
    loaded = loaded_after(program)
    ours = {name.removeprefix("jax_ucp.") for name in loaded if name.startswith("jax_ucp.")}
    assert ours == {"cli", "cli.main", "errors", "garbage", "orbax_import", "text", "version"}
    assert not {"jax", "orbax", "tensorstore", "numpy", "rich", "msgspec"} & loaded


CONVERTED = {
    "deepspeed/z1_bf16_dp2": "deepspeed",
    "megatron/dist_tp1_pp1_fp32/ckpt": "megatron",
    "torch/dcp_zstd/ckpt": "dcp",
    "torch/hf_llama/ckpt": "huggingface",
}
# What no conversion needs: other programs' libraries, and what other commands do.
NOT_CONVERTED = {"jax", "tensorstore", "rich", "asyncio", "multiprocessing", "jax_ucp.export.files"}
NOT_CONVERTED |= {f"jax_ucp.{room}" for room in ("mapping", "optimizers", "sharding", "handler")}
NOT_CONVERTED |= {f"jax_ucp.inspection.{name}" for name in ("diff", "page", "parameters")}
NOT_CONVERTED |= {"jax_ucp.formats.exporting", "jax_ucp.formats.quantized.schemes"}


# Modules of a format's folder that others use: they tell by names what files are.
TELLING = {"marks", "files", "beside", "names", "quantization", "conv1d"}


@pytest.mark.parametrize("case", CONVERTED)
def test_a_conversion_imports_the_reader_of_its_format_alone(case, tmp_path):
    """Starting is a part of what a command takes. Other formats are recognised by their marks."""
    args = ["convert", str(DATA / case), str(tmp_path / "out")]
    program = f"from jax_ucp.cli.main import main; main({args}, standalone_mode=False)"
    loaded = loaded_after(program)
    own = f"formats.{CONVERTED[case]}"
    assert not NOT_CONVERTED & loaded
    assert ("yaml" in loaded) == (own == "formats.megatron")  # whose rules are in a file
    others = {*FOLDERS} - {own} - CONTAINED.get(own, set())
    names = {name.removeprefix("jax_ucp.") for name in loaded}
    of_others = {name for name in names - others if room_of(name) in others}
    assert not {name for name in of_others if name.rpartition(".")[2] not in TELLING}
    assert f"{own}.reader" in names or f"{own}.dist" in names or f"{own}.folder" in names


def test_every_command_is_in_the_module_of_its_name():
    names = {path.stem for path in (PACKAGE / "cli").glob("*.py") if path.stem != "__init__"}
    modules = {name: importlib.import_module(f"jax_ucp.cli.{name}") for name in names - {"main"}}
    found = {name: vars(module).get(name) for name, module in modules.items()}
    commands = {name: each for name, each in found.items() if isinstance(each, click.Command)}
    assert commands == every_command()
    assert all(each.name == name for name, each in commands.items())


SAVED = str(DATA / "deepspeed/tp2_dp2_z3_bf16")
WITHOUT_JAX = {
    "inspect": [],
    "plan": [],
    "convert": ["out"],
    "export": ["exported", "--format", "safetensors"],
    "verify": [],
    "diff": [SAVED],
    "report": ["-o", "out.html"],
    "map": ["--mapping", "deepspeed-gpt-to-reference", "--size", "group=4"],
}


def test_commands_run_where_jax_and_orbax_are_not_installed(tmp_path):
    program = f"""
        import sys
        sys.modules["jax"] = sys.modules["orbax"] = None
        from jax_ucp.cli.main import main
        for command, more in {WITHOUT_JAX}.items():
            assert not main([command, {SAVED!r}, *more], standalone_mode=False), command
    """
    python("-c", textwrap.dedent(program), cwd=tmp_path)


def test_the_documented_install_without_jax_has_every_other_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]}
    page = (ROOT / "docs" / "command-line.md").read_text()
    [line] = re.findall(r"^pip install (?!-)(.*)$", page, re.MULTILINE)
    assert set(line.split()) == names - {"jax", "orbax-checkpoint"}


WITHOUT_ZSTD = """
import sys
sys.modules["zstandard"] = sys.modules["compression.zstd"] = None
import jax_ucp as ucp
try:
    ucp.open(sys.argv[1]).restore()
except ucp.errors.FormatError as error:
    print(error)
"""


def test_zstd_that_is_not_installed_is_asked_for_by_name():
    assert "pip install 'jax_ucp[zstd]'" in python("-c", WITHOUT_ZSTD, DATA / "torch/dcp_zstd/ckpt")
