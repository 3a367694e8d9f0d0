"""Options of several commands: opening a checkpoint, a mesh and its rules, budget, JSON."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import msgspec

import jax_ucp
from jax_ucp.checkpoint import open_with
from jax_ucp.formats.options import Options, rule_of
from jax_ucp.sources.budget import DEFAULT_BUDGET

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

_Value = TypeVar("_Value", int, str)

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_AXIS = re.compile(r"\w+=(?=0*[1-9])[0-9]{1,9}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):
    """A number of bytes: 512MiB, 2G, 1000000."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
        if nbytes < 1:
            self.fail(f"{value!r} is not a size; write 512MiB or 2G", param, ctx)
        return nbytes


class _NamedSize(click.ParamType):
    """A name and a length: vocab=50257."""

    name = "name=n"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int]:
        name, _, number = value.partition("=")
        if not name or not re.fullmatch(r"[0-9]{1,18}", number):
            self.fail(f"{value!r} is not a name with a size; write vocab=50257", param, ctx)
        return name, int(number)


class _MeshSizes(click.ParamType):
    """Mesh axes and their sizes: data=4,model=2."""

    name = "axis=size,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, int]:
        axes = value.split(",")
        sizes = dict(axis.split("=") for axis in axes if _AXIS.fullmatch(axis))
        if len(sizes) != len(axes):
            self.fail(f"{value!r} is not a mesh; write data=4,model=2", param, ctx)
        return {name: int(size) for name, size in sizes.items()}


class Regex(click.ParamType):
    """A regular expression."""

    name = "regex"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            re.compile(value)
        except re.error as error:
            self.fail(f"{value!r} is not a regular expression: {error}", param, ctx)
        return value


class _RuleType(click.ParamType):
    """A rule: a regular expression on labels, and mesh axes: kernel$=data,None."""

    name = "regex=axis,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Rule:
        from jax.sharding import PartitionSpec

        pattern, equals, axes = value.rpartition("=")
        if not equals:
            self.fail(f"{value!r} is not a rule; write 'kernel$=data,None'", param, ctx)
        Regex().convert(pattern, param, ctx)
        names = [tuple(axis.split("+")) if "+" in axis else axis for axis in axes.split(",")]
        return pattern, PartitionSpec(*[None if name in ("None", "") else name for name in names])


class Renames(click.ParamType):
    """What labels begin with, in the first checkpoint and in the second: param=params."""

    name = "first=second"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        first, equals, second = value.partition("=")
        if not (first and equals and second):
            self.fail(f"{value!r} renames nothing; write param=params", param, ctx)
        return first, second


class _OptimizerGroups(click.ParamType):
    """`module-order`, `hf-decay`, or a JSON file of lists of names."""

    name = "module-order|hf-decay|file.json"

    def convert(self, value: Any, param: Any, ctx: Any) -> str | list[list[str]]:
        if rule_of(value):
            return value
        try:
            return msgspec.json.decode(Path(value).read_bytes(), type=list[list[str]])
        except OSError as error:
            self.fail(
                f"{value!r} is neither module-order nor hf-decay nor a file that can be read"
                f" ({error.strerror})",
                param,
                ctx,
            )
        except (ValueError, msgspec.MsgspecError) as error:
            self.fail(f"{value!r} is not a JSON file of lists of names: {error}", param, ctx)


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON, for programs.")
budget = click.option(
    "--budget",
    type=Size(),
    default=DEFAULT_BUDGET,
    show_default="1GiB",
    help="How much memory the blocks that are being copied may take, such as 512MiB.",
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user says of a checkpoint that it does not say itself."""
    for option in (
        click.option(
            "--on-conflict",
            type=click.Choice(["master", "copy"]),
            help="Where a parameter is stored as a master and as a 16-bit copy: take this one,"
            " and do not compare them.",
        ),
        click.option(
            "--dequantize",
            type=click.Choice(["bfloat16", "float16", "float32"]),
            help="Read quantised weights as numbers of this dtype.",
        ),
        click.option(
            "--no-dequantize",
            is_flag=True,
            help="Read quantised weights as they are stored: codes and scales.",
        ),
        click.option(
            "--optimizer-groups",
            type=_OptimizerGroups(),
            help=(
                "Where the optimizer's states have numbers and no names: which parameters they"
                " belong to. module-order and hf-decay are known orders; a JSON file lists names."
            ),
        ),
        click.option(
            "--merge",
            metavar="ADAPTER",
            multiple=True,
            help="Merge this LoRA adapter (a folder that peft wrote); may be repeated.",
        ),
        click.option("--model", metavar="NAME", help="The model to open, where there are several."),
        click.option(
            "--step", type=int, help="The step to open, where the path is the folder of a run."
        ),
        click.option("--weights-only", is_flag=True, help="Ignore the optimizer."),
        click.option(
            "--spec", metavar="FILE", help="A YAML file that says how shards form parameters."
        ),
        click.option(
            "--size",
            "sizes",
            type=_NamedSize(),
            multiple=True,
            help="A length that the files lack, such as vocab=50257; may be repeated.",
        ),
        click.option(
            "--assume",
            metavar="NAME",
            multiple=True,
            help="With --mapping: take this requirement of the mapping as met; may be repeated.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            help="With --mapping: the model's config.json, if the checkpoint has none.",
        ),
        click.option(
            "--params",
            metavar="LABEL",
            help=(
                "With --mapping: where the parameters are in the tree of a training run in JAX; the"
                " optimizer's states are mapped with them."
            ),
        ),
        click.option(
            "--inverse",
            is_flag=True,
            help="With --mapping: apply it backwards, from the model's leaves to parameters.",
        ),
        click.option(
            "--mapping",
            metavar="NAME|FILE",
            help="Show the leaves of your model: a mapping of the package, or a YAML file.",
        ),
    ):
        command = option(command)
    return command


def open_checkpoint(
    path: str,
    sizes: tuple[tuple[str, int], ...],
    mapping: str | None = None,
    of_mapping: jax_ucp.Mapping | None = None,
    dequantize: Literal["bfloat16", "float16", "float32"] | None = None,
    no_dequantize: bool = False,
    config: str | None = None,
    assume: tuple[str, ...] = (),
    params: str | None = None,
    inverse: bool = False,
    merge: tuple[str, ...] = (),
    **others: Any,
) -> jax_ucp.Checkpoint:
    """The checkpoint at a path, with what `source_options` say of it.

    `of_mapping` is one that the command applies itself: some of the sizes may be for it.
    """
    require_mapping(mapping, config, assume, params, inverse)
    rules = load_mapping(mapping, inverse)
    if dequantize and no_dequantize:
        raise click.UsageError(
            "--dequantize and --no-dequantize contradict each other: give one of them"
        )
    kept = False if no_dequantize else dequantize
    options = Options.of(once("--size", sizes), **others, dequantize=kept)
    for_rules = [used.names for used in (rules, of_mapping) if used]
    checkpoint = open_with(path, options, frozenset().union(*for_rules))
    if merge:
        checkpoint = checkpoint.merge(*merge)
    if rules is None:
        return checkpoint
    return checkpoint.map(rules, **map_arguments(rules, sizes, config, assume), params=params)


def load_mapping(mapping: str | None, inverse: bool = False) -> jax_ucp.Mapping | None:
    """The mapping in a file, or of the package, if one is asked for; or its way back."""
    if mapping is None:
        return None
    rules = jax_ucp.Mapping.load(mapping)
    return rules.inverse() if inverse else rules


def require_mapping(
    mapping: str | None,
    config: str | None,
    assume: tuple[str, ...],
    params: str | None = None,
    inverse: bool = False,
) -> tuple[str | None, tuple[str, ...]]:
    """`config` and `assume`. Raises UsageError if what goes with a mapping is given without one."""
    if mapping is not None:
        return config, assume
    if config is not None or assume:
        raise click.UsageError("--config and --assume go with --mapping: give that too")
    if params is not None or inverse:
        raise click.UsageError("--params and --inverse go with --mapping: give that too")
    return config, assume


def once(option: str, pairs: Sequence[tuple[str, _Value]]) -> dict[str, _Value]:
    """Values by name. Raises UsageError for a name to which an option gives two."""
    values: dict[str, _Value] = {}
    for name, value in pairs:
        if values.setdefault(name, value) != value:
            raise click.UsageError(f"{option} gives {name} twice: {values[name]} and {value}")
    return values


def map_arguments(
    mapping: jax_ucp.Mapping,
    sizes: tuple[tuple[str, int], ...],
    config: str | None,
    assume: tuple[str, ...],
) -> dict[str, Any]:
    """The arguments of `Checkpoint.map`; the other lengths are for opening the checkpoint."""
    lengths = {name: n for name, n in sizes if name in mapping.names}
    return {"sizes": lengths, "config": config, "assume": assume}


def mesh_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a mesh, given to the command as one HostMesh, or None, and the rules."""

    @functools.wraps(command)
    def with_mesh(
        *args: Any, mesh: dict[str, int] | None, rules: tuple[Rule, ...], hosts: int, **more: Any
    ) -> None:
        if mesh is None and (rules or hosts != 1):
            raise click.UsageError("--rule and --hosts are for a mesh: give --mesh too")
        if mesh is None:
            command(*args, mesh=None, rules=(), **more)
            return
        from jax_ucp.sharding.reads import HostMesh  # brings in jax, which nothing else here needs

        try:
            host_mesh = HostMesh.of(mesh, hosts)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        command(*args, mesh=host_mesh, rules=rules, **more)

    for option in (
        click.option(
            "--hosts",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="With --mesh: how many processes share its devices.",
        ),
        click.option(
            "--rule",
            "rules",
            type=_RuleType(),
            multiple=True,
            help=(
                "With --mesh: how to shard the arrays whose labels match, as 'kernel$=data,None';"
                " may be repeated."
            ),
        ),
        click.option(
            "--mesh",
            type=_MeshSizes(),
            help="A mesh, such as data=4,model=2; this machine need not have its devices.",
        ),
    ):
        with_mesh = option(with_mesh)
    return with_mesh


def mesh_arguments(mesh: HostMesh | None, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The arguments for a mesh of `Checkpoint.save`."""
    return {} if mesh is None else {"mesh": mesh.sizes, "rules": rules, "hosts": mesh.hosts}
