"""What several commands take: how a checkpoint is opened, a mesh and what lies on it, a budget, JSON."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import jax_ucp
from jax_ucp.storage.budget import DEFAULT_BUDGET

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):
    """A number of bytes: 512MiB, 2G, 1000000."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
        if not found or float(found[1]) == 0:
            self.fail(f"{value!r} is no size; write 512MiB or 2G", param, ctx)
        return int(float(found[1]) * _UNITS[found[2].upper()])


class _NamedSize(click.ParamType):
    """A name and a length: vocab=50257."""

    name = "name=n"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int]:
        name, _, number = value.partition("=")
        if not name or not number.isdigit():
            self.fail(f"{value!r} is no size by name; write vocab=50257", param, ctx)
        return name, int(number)


class _MeshSizes(click.ParamType):
    """Mesh axes and their sizes: data=4,model=2."""

    name = "axis=size,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, int]:
        found = re.findall(r"(\w+)=(\d+)", value)
        if (
            ",".join(f"{name}={size}" for name, size in found) != value
            or not all(int(n) for _, n in found)
            or (len({name for name, _ in found}) != len(found))
        ):
            self.fail(f"{value!r} is no mesh; write data=4,model=2", param, ctx)
        return {name: int(size) for name, size in found}


class Regex(click.ParamType):
    """A regular expression."""

    name = "regex"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            re.compile(value)
        except re.error as error:
            self.fail(f"{value!r} is no regular expression: {error}", param, ctx)
        return value


class _RuleType(click.ParamType):
    """A rule: a regular expression on labels, and the mesh axis of each dimension: kernel$=data,None."""

    name = "regex=axis,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Rule:
        from jax.sharding import PartitionSpec

        pattern, equals, axes = value.rpartition("=")
        if not equals:
            self.fail(f"{value!r} is no rule; write 'kernel$=data,None'", param, ctx)
        Regex().convert(pattern, param, ctx)
        names = [tuple(axis.split("+")) if "+" in axis else axis for axis in axes.split(",")]
        return pattern, PartitionSpec(*[None if name in ("None", "") else name for name in names])


class _OptimizerGroups(click.ParamType):
    """`module-order`, or a JSON file of lists of names."""

    name = "module-order|file.json"

    def convert(self, value: Any, param: Any, ctx: Any) -> str | list[list[str]]:
        if value == "module-order":
            return value
        try:
            return msgspec.json.decode(Path(value).read_bytes(), type=list[list[str]])
        except OSError as error:
            self.fail(f"{value!r} is neither module-order nor a file that can be read ({error.strerror})", param, ctx)
        except (ValueError, msgspec.MsgspecError) as error:
            self.fail(f"{value!r} is no JSON file of lists of names: {error}", param, ctx)


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON for machines.")
budget = click.option(
    "--budget", type=Size(), default=DEFAULT_BUDGET, show_default="1GiB", help="Memory for blocks in flight."
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user says of a checkpoint that it does not say itself."""
    for option in (
        click.option(
            "--believe", type=click.Choice(["master", "copy"]), help="What to take where something is stored twice."
        ),
        click.option(
            "--optimizer-groups",
            type=_OptimizerGroups(),
            help="Which parameters optimizer states that go by numbers belong to: module-order, or lists of names.",
        ),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer aside."),
        click.option("--spec", type=click.Path(exists=True), help="A file that says how shards form parameters."),
        click.option("--size", "sizes", type=_NamedSize(), multiple=True, help="A length by name; may be repeated."),
        click.option("--mapping", help="See it as the leaves of a model: a mapping file, or one of the package."),
    ):
        command = option(command)
    return command


def open_checkpoint(
    path: str, sizes: tuple[tuple[str, int], ...], mapping: str | None = None, **said: Any
) -> jax_ucp.Checkpoint:
    """The checkpoint at a path, with what `source_options` say of it."""
    found = jax_ucp.open(path, sizes=dict(sizes), **said)
    if mapping is None:
        return found
    rules = jax_ucp.Mapping.load(mapping)
    return found.map(rules, sizes=sizes_of(rules, sizes))


def sizes_of(mapping: jax_ucp.Mapping, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """The lengths that a mapping has a name for; others are for opening the checkpoint."""
    return {name: n for name, n in sizes if name in mapping.names}


def mesh_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A mesh, and what lies on it; the command gets them as one HostMesh, or None, and the rules."""

    @functools.wraps(command)
    def with_mesh(*args: Any, mesh: dict[str, int] | None, rules: tuple[Rule, ...], hosts: int, **more: Any) -> None:
        if mesh is None and (rules or hosts != 1):
            raise click.UsageError("--rule and --hosts say what lies where on a mesh: give --mesh too")
        if mesh is None:
            command(*args, mesh=None, rules=(), **more)
            return
        from jax_ucp.sharding.reads import HostMesh  # brings in jax, which nothing else here needs

        try:
            found = HostMesh.of(mesh, hosts)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        command(*args, mesh=found, rules=rules, **more)

    for option in (
        click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Processes of --mesh."),
        click.option("--rule", "rules", type=_RuleType(), multiple=True, help="A rule for --mesh; may be repeated."),
        click.option("--mesh", type=_MeshSizes(), help="The mesh to restore on; its devices need not be here."),
    ):
        with_mesh = option(with_mesh)
    return with_mesh


def mesh_arguments(mesh: HostMesh | None, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The arguments for a mesh of `Checkpoint.save`."""
    return {} if mesh is None else {"mesh": mesh.sizes, "rules": rules, "hosts": mesh.hosts}
