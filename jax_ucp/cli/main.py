"""`jax-ucp`: look into any checkpoint, map it to a model, plan, convert, verify, export.

Exit codes: 0, all is well; 1, the checkpoint is refused or has faults, with the reason on stderr; 2, the
command line is wrong.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

import jax_ucp
from jax_ucp.cli import report
from jax_ucp.cli.mapping import imported, mapping_report
from jax_ucp.cli.report import Report
from jax_ucp.errors import TreeMismatch, UCPError
from jax_ucp.export import EXPORT_FORMATS, MAX_SHARD_BYTES, ExportFormat
from jax_ucp.language.mapping import shipped
from jax_ucp.storage.budget import DEFAULT_BUDGET

if TYPE_CHECKING:
    from jax_ucp.sharding.fit import Rule
    from jax_ucp.sharding.reads import HostMesh

HOSTS_SHOWN = 16

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# Where the output is read by a program, lines are as long as they need to be.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 1000)
to_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


class _Refusals(click.Group):
    """Commands whose refusals are one clear message and exit code 1, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.stdout = None  # the reader has what it wanted; nothing more can be flushed
            return None
        except (UCPError, OSError) as error:
            raise click.ClickException(str(error)) from None


class _Size(click.ParamType):
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


class _Regex(click.ParamType):
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
        _Regex().convert(pattern, param, ctx)
        names = [tuple(axis.split("+")) if "+" in axis else axis for axis in axes.split(",")]
        return pattern, PartitionSpec(*[None if name in ("None", "") else name for name in names])


@click.group(cls=_Refusals, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jax_ucp.__version__, prog_name="jax-ucp")
def main() -> None:
    """Universal checkpoints for JAX: look into any checkpoint, map it, plan, convert, verify, export."""


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user says of a checkpoint that it does not say itself."""
    for option in (
        click.option(
            "--believe", type=click.Choice(["master", "copy"]), help="What to take where something is stored twice."
        ),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer aside."),
        click.option("--spec", type=click.Path(exists=True), help="A file that says how shards form parameters."),
        click.option("--size", "sizes", type=_NamedSize(), multiple=True, help="A length by name; may be repeated."),
        click.option("--mapping", help="See it as the leaves of a model: a mapping file, or one of the package."),
    ):
        command = option(command)
    return command


def _open(path: str, sizes: tuple[tuple[str, int], ...], mapping: str | None = None, **said: Any) -> jax_ucp.Checkpoint:
    found = jax_ucp.open(path, sizes=dict(sizes), **said)
    if mapping is None:
        return found
    rules = jax_ucp.Mapping.load(mapping)
    return found.map(rules, sizes=_sizes_of(rules, sizes))


def _optimizer(name: str) -> tuple[Any, ...]:
    """The optimizer that a function returns, and the model's tree if it returns that too."""
    import optax

    found = imported(name, "optimizer")
    optimizer, *model = found if type(found) is tuple else (found,)
    if not isinstance(optimizer, optax.GradientTransformation) or len(model) > 1:
        raise TreeMismatch(f"{name} gives {found!r:.80}, which is no optax optimizer")
    return optimizer, *model


def _sizes_of(mapping: jax_ucp.Mapping, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """The lengths that a mapping has a name for; others are for opening the checkpoint."""
    return {name: n for name, n in sizes if name in mapping.names}


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON for machines.")
budget = click.option(
    "--budget", type=_Size(), default=DEFAULT_BUDGET, show_default="1GiB", help="Memory for blocks in flight."
)


@main.command()
@click.argument("path")
@click.option("--leaf", "pattern", type=_Regex(), help="Show where every byte of the leaves that match lies.")
@click.option("--all", "all_", is_flag=True, help="Print every item of the account, and every extra.")
@source_options
@as_json
def inspect(path: str, pattern: str | None, all_: bool, json_: bool, **source: Any) -> None:
    """What is in the checkpoint at PATH, where its bytes are, and what is not understood."""
    found = report.inspection(_open(path, **source))
    if pattern is not None:
        found["leaves"] = [leaf for leaf in found["leaves"] if re.search(pattern, leaf["leaf"])]
    if json_:
        _print_json(found)
        return
    _print_head(found)
    if pattern is not None:
        rows = [
            (leaf["leaf"], piece["to"], piece["file"], piece["item"], piece["from"])
            for leaf in found["leaves"]
            for piece in leaf.get("stored", ())
        ]
        console.print(_table(("leaf", "block", "file", "item", "block there"), rows))
        return
    console.print(_leaf_table(found))
    _print_account(found["account"], all_)
    if all_:
        console.print_json(json.dumps(found["extras"]))


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


def _of(mesh: HostMesh | None, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The arguments for a mesh of `Checkpoint.save`."""
    return {} if mesh is None else {"mesh": mesh.sizes, "rules": rules, "hosts": mesh.hosts}


@main.command()
@click.argument("source")
@click.argument("target", required=False)
@mesh_options
@source_options
@budget
@as_json
def plan(
    source: str,
    target: str | None,
    mesh: HostMesh | None,
    rules: tuple[Rule, ...],
    budget: int,
    json_: bool,
    **said: Any,
) -> None:
    """What converting SOURCE to TARGET would do, or restoring it on a mesh. Moves no data.

    With --mesh and TARGET, the chunks are those of `convert --mesh`; what hosts read, they read of SOURCE.
    """
    checkpoint = _open(source, **said)
    found = report.copy_plan(checkpoint, target, checkpoint.plan_save(budget, **_of(mesh if target else None, rules)))
    if mesh:
        found["restore"] = report.mesh_plan(checkpoint, mesh, rules)
    if json_:
        _print_json(found)
        return
    _print_head(found)
    console.print(
        f"to read {_size(found['read_bytes'])}, to write {_size(found['write_bytes'])} in {found['blocks']} blocks "
        f"of at most {_size(found['largest_block_bytes'])}; at most {_size(found['peak_bytes_in_flight'])} in flight"
    )
    if mesh:
        _print_mesh_plan(found["restore"])
    else:
        rows = [
            (a["leaf"], a["dtype"], str(a["shape"]), str(a["pieces"]), str(a["outer_chunk"]), str(a["inner_chunk"]))
            for a in found["leaves"]
        ]
        console.print(_table(("leaf", "dtype", "shape", "pieces", "outer chunk", "inner chunk"), rows))
    _print_account(found["not_mapped"], True)


@main.command()
@click.argument("source")
@click.argument("target")
@mesh_options
@source_options
@budget
@as_json
def convert(
    source: str, target: str, mesh: HostMesh | None, rules: tuple[Rule, ...], budget: int, json_: bool, **said: Any
) -> None:
    """Write the checkpoint at SOURCE to TARGET in the universal format.

    With --mesh it is cut as a save from that mesh cuts it: a restore there reads what it needs and nothing beside it,
    and one elsewhere reads it too.

    What SOURCE stores twice is compared first. Stopped at any moment, nothing at TARGET looks like a checkpoint; the
    same command takes up where it was stopped.
    """
    checkpoint = _open(source, **said)
    for note in report.mesh_notes(checkpoint, mesh, rules) if mesh else ():
        to_stderr.print(f"note: {note}", markup=False)
    with _progress("converting", checkpoint.nbytes) as advance:
        result = checkpoint.save(
            target, **_of(mesh, rules), budget_bytes=budget, done=lambda block: advance(block.nbytes)
        )
    found = report.inspection(result)
    if json_:
        _print_json({key: found[key] for key in ("path", "format", "bytes", "arrays", "items", "source")})
    else:
        console.print(f"{target}: {found['arrays']} arrays, {_size(found['bytes'])}, {len(found['extras'])} extras")


@main.command("map")
@click.argument("source")
@click.option("--target", help="module:function, `inspect --json` of a checkpoint, or a checkpoint.")
@source_options
@as_json
def map_(source: str, target: str | None, mapping: str | None, json_: bool, **said: Any) -> None:
    """Check --mapping against the checkpoint SOURCE and a model's tree, and suggest what could be meant."""
    if mapping is None:
        raise click.UsageError(f"give --mapping: a file, or one of {', '.join(shipped())}")
    checkpoint = _open(source, **said)
    rules = jax_ucp.Mapping.load(mapping)
    found = mapping_report(checkpoint, rules, _sizes_of(rules, said["sizes"]), target)
    if json_:
        _print_json(found)
    else:
        _print_mapping(found, target)
    if found["faults"]:
        sys.exit(1)


@main.command()
@click.argument("source")
@click.argument("target")
@click.option("--format", type=click.Choice(EXPORT_FORMATS), required=True, help="What to write.")
@click.option("--dtype", help="Cast floating parameters, such as float32 masters to bfloat16; unsaid, no bit changes.")
@click.option(
    "--max-shard",
    "max_shard_bytes",
    type=_Size(),
    default=MAX_SHARD_BYTES,
    show_default="50 GB",
    help="Bytes of tensors in a file of safetensors.",
)
@click.option(
    "--zero-stage",
    type=click.IntRange(1, 3),
    help="ZeRO stage of the DeepSpeed run that will resume; unsaid, that of SOURCE.",
)
@click.option("--optimizer", help="module:function, which returns the optax optimizer of the run that wrote SOURCE.")
@click.option("--params", help="With --optimizer: the label of the parameters in SOURCE; unsaid, params.")
@click.option("--opt-state", help="With --optimizer: the label of the optimizer's state; unsaid, opt_state.")
@click.option(
    "--step-dtype",
    type=click.Choice(["float32", "int32", "int64"]),
    help="With --optimizer: the dtype of steps; unsaid, float32, and int32 for Lion.",
)
@source_options
@budget
@as_json
def export(
    source: str, target: str, format: ExportFormat, mapping: str | None, budget: int, json_: bool, **said: Any
) -> None:
    """Write the checkpoint at SOURCE to the new folder TARGET in a format that torch's world reads.

    safetensors: weights, as transformers loads them. dcp: weights and optimizer, for torch.distributed.checkpoint.
    deepspeed: a universal folder, for a run with load_universal. --mapping names the one by which SOURCE has the
    the leaves of a model: it is undone. --optimizer names a function that returns the optax optimizer of a training
    run in JAX, or it and the abstract tree of the model: its state becomes those of torch's. What SOURCE stores twice
    is compared first. Stopped at any moment, nothing is at TARGET.
    """
    options = {name: said.pop(name) for name in ("dtype", "max_shard_bytes", "zero_stage")}
    labels = {name: said.pop(name) for name in ("params", "opt_state", "step_dtype")}
    optimizer, labels = said.pop("optimizer"), {name: label for name, label in labels.items() if label}
    if labels and not optimizer:
        raise click.UsageError(f"--{next(iter(labels)).replace('_', '-')} goes with --optimizer: give that too")
    checkpoint = opened = _open(source, **said)
    if optimizer:
        checkpoint = opened.torch_states(*_optimizer(optimizer), **labels)
    if mapping:
        rules = jax_ucp.Mapping.load(mapping).inverse()
        checkpoint = checkpoint.map(rules, sizes=_sizes_of(rules, said["sizes"]))
    planned = checkpoint.plan_export(format, **options, budget_bytes=budget)
    for note in (*checkpoint.notes[len(opened.notes) :], *planned.notes):
        to_stderr.print(f"note: {note}", markup=False)
    with _progress("exporting", planned.write_bytes) as advance:
        checkpoint.export(target, format, **options, budget_bytes=budget, done=advance)
    found = report.export_plan(planned, target)
    if json_:
        _print_json(found)
    else:
        console.print(f"{target}: {found['tensors']} tensors, {_size(found['bytes'])}, in {found['files']} files")


@main.command()
@click.argument("path")
@source_options
@as_json
def verify(path: str, json_: bool, **said: Any) -> None:
    """Read every byte of the checkpoint at PATH that has a checksum or a twin, and compare."""
    checkpoint = _open(path, **said)
    looked, faults = 0, []
    for _, fault in checkpoint.verify():
        looked += 1
        if fault:
            faults.append(fault)
    if json_:
        _print_json({"path": path, "format": checkpoint.format, "checks": looked, "faults": faults})
    else:
        for fault in faults:
            to_stderr.print(f"[red]fault[/red] {fault}", markup=True)
        for note in checkpoint.notes:
            console.print(f"note: {note}", markup=False)
        console.print(f"{path}: {looked} checks, {len(faults)} faults")
        if not looked:
            console.print("nothing in this format can be checked", markup=False)
    if faults:
        sys.exit(1)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing where stderr is a file or a pipe."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=to_stderr, disable=not to_stderr.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _print_json(found: Report) -> None:
    click.echo(json.dumps(found))


def _print_head(found: Report) -> None:
    items = ", ".join(f"{n} {fate}" for fate, n in found["items"].items())
    console.print(
        f"{found['path']}: {found['format']}, {found['arrays']} arrays, {_size(found['bytes'])}", markup=False
    )
    console.print(f"stored items: {items}")
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _leaf_table(found: Report) -> Table:
    """One line a parameter where the tree is {state: {parameter: array}}, one line a leaf elsewhere."""
    leaves = [leaf for leaf in found["leaves"] if "shape" in leaf]
    if {leaf["leaf"].count("/") for leaf in leaves} != {1} or not any(x["leaf"].startswith("param/") for x in leaves):
        rows = [
            (leaf["leaf"], leaf.get("dtype", leaf["kind"]), str(leaf.get("shape", "")), _spec(leaf), _files(leaf))
            for leaf in found["leaves"]
        ]
        return _table(("leaf", "dtype", "shape", "saved as", "stored in"), rows)
    params: dict[str, list[Report]] = {}
    for leaf in leaves:
        params.setdefault(leaf["leaf"].split("/")[1], []).append(leaf)
    rows = []
    for name, states in params.items():
        kinds = [f"{x['leaf'].split('/')[0]} {x['dtype']}" for x in states]
        rows.append((name, str(states[0]["shape"]), ", ".join(kinds), _files(*states)))
    return _table(("parameter", "shape", "states", "stored in"), rows)


def _files(*leaves: Report) -> str:
    files = {piece["file"] for leaf in leaves for piece in leaf.get("stored", ())}
    return next(iter(files)) if len(files) == 1 else f"{len(files)} files"


def _spec(leaf: Report) -> str:
    return f"{tuple(leaf['spec'])} on {leaf['mesh']}" if "spec" in leaf else ""


def _print_mesh_plan(found: Report) -> None:
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    console.print(f"on a mesh of {mesh}: {_size(found['device_bytes'])} on each of {found['devices']} devices")
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    hosts = found["hosts"]
    rows = [
        (str(i), _size(h["read_bytes"]), _size(h["needed_bytes"]), f"{h['amplification']:.3f}", str(h["files"]))
        for i, h in enumerate(hosts[:HOSTS_SHOWN])
    ]
    console.print(_table(("host", "to read", "needed", "read / needed", "files"), rows))
    if len(hosts) > HOSTS_SHOWN:
        console.print(f"and {len(hosts) - HOSTS_SHOWN} hosts more, which --json lists")
    console.print(f"all hosts: read / needed {found['amplification']:.3f}, most / mean {found['balance']:.3f}")
    rows = [
        (
            leaf["leaf"],
            str(leaf["shape"]),
            str(tuple(leaf["spec"])),
            str(leaf["device_shape"]),
            "; ".join(leaf["notes"]),
        )
        for leaf in found["leaves"]
    ]
    console.print(_table(("leaf", "shape", "spec", "on each device", "given up"), rows))


def _print_mapping(found: Report, target: str | None) -> None:
    rows = [
        (leaf["rule"].partition(" -> ")[0], leaf["rule"].partition(" -> ")[2], leaf["leaf"], str(leaf["shape"]))
        + ((str(leaf["target"]) if leaf["target"] else "-",) if target else ())
        for leaf in found["leaves"]
    ]
    heads = ("parameters: axes", "leaves: axes", "leaf", "shape", *(("target",) if target else ()))
    if rows:
        console.print(_table(heads, rows))
    for name, reason in found["skipped"]:
        console.print(f"skipped: {name}: {reason}", markup=False)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    for fault in found["faults"]:
        to_stderr.print(f"fault: {fault}", markup=False)
    for suggestion in found["suggestions"]:
        to_stderr.print(f"suggestion: {suggestion}", markup=False)
    console.print(f"{found['mapping']}: {len(found['leaves'])} leaves, {len(found['faults'])} faults", markup=False)


def _print_account(items: list[Report], all_: bool) -> None:
    shown = [item for item in items if all_ or item["fate"] == "skipped"]
    if shown:
        rows = [(item["fate"], item["where"], item["what"], item["reason"]) for item in shown]
        console.print(_table(("fate", "item", "what", "why"), rows))


def _table(heads: tuple[str, ...], rows: list[Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    return table


def _size(nbytes: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


if __name__ == "__main__":
    main()
