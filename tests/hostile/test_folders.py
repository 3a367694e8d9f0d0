"""Of every format: no link leads out of the folder that was named, whichever file it stands for,
links inside are followed, no FIFO is waited for, and no file is read whole that is too large.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA, Case, arrays_of, assert_same, copied
from hostile.files import little_memory, saved
from jax_ucp.errors import FormatError, UCPError

LABELS = (
    "deepspeed/z1_bf16_dp2", "deepspeed/z0_bf16_dp1", "deepspeed_universal/z3_bf16_dp2_frozen_tied",
    "deepspeed_writers/nvme_z3_small_dp2", "dtensors/accelerate_llama", "dtensors/verl_llama",
    "gguf/qwen2_split", "jax/orbax01110-manager_step", "jax/orbax01110-pytree_values_ocdbt_zarr3",
    "jax/orbax0128-flax_msgpack_file", "jax/orbax05-aggregate", "jax/orbax05-flax_chunked",
    "jax/orbax05-flax_msgpack", "jax/orbax05-paxml", "jax/orbax05-t5x", "megatron/dist_pp2_vpp2_fp32",
    "megatron/legacy_ep2_moe_seq_distopt_fp32", "megatron/torch_dcp_te_bf16", "torch/dcp_file_per_item",
    "torch/dcp_hf_consolidated", "torch/hf_llama", "trainers/accelerate_bin",
    "trainers/accelerate_two_proof", "trainers/lightning_gan", "trainers/small_llama",
)  # fmt: skip
PLAIN = (
    "adapters/lora/adapter", "folders/diffusers_idx/ckpt", "folders/hf_bin_noindex/ckpt",
    "megatron/old0153_tp2_zarr_fp32/ckpt", "orbax/ocdbt", "orbax/plain",
)  # fmt: skip


@dataclass
class Copy:
    """A copy of a checkpoint: its folder, the name in it of what is opened, and what opens one."""

    folder: Path
    name: str
    opener: Callable[[Path], ucp.Checkpoint]

    def __post_init__(self) -> None:
        self.want = arrays_of(self.open())

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def open(self) -> ucp.Checkpoint:
        return self.opener(self.path)

    def said(self) -> str:
        """The notes of a checkpoint that opens as it was, or why it is refused."""
        try:
            opened = self.open()
        except UCPError as error:
            return str(error)
        assert_same(arrays_of(opened), self.want)
        return "\n".join(opened.notes)

    def kinds_of_files(self) -> list[Path]:
        """One file of each kind of name, of those that have bytes and are the checkpoint's."""
        files = [x for x in self.folder.rglob("*") if x.is_file()]
        return _one_of_each_kind(x for x in files if x.stat().st_size)

    def kinds_of_folders(self) -> list[Path]:
        return _one_of_each_kind(path for path in self.folder.rglob("*") if path.is_dir())


def _one_of_each_kind(paths: Iterable[Path]) -> list[Path]:
    of_kind = {re.sub(r"\d+", "0", path.name): path for path in sorted(paths, reverse=True)}
    return [of_kind[kind] for kind in sorted(of_kind)]


@pytest.fixture(params=[*map(Case, LABELS), *PLAIN, "universal"], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    source, folder = request.param, tmp_path / "named"
    if source == "universal":
        saved(folder, {"a": np.arange(3), "b": [np.ones(2), 1.5, "text"]})
        return Copy(folder, "", ucp.open)
    path, opener = (DATA / source, ucp.open) if source in PLAIN else (source.path, source.open)
    copied(path.parent if path.is_file() else path, folder)
    return Copy(folder, path.name if path.is_file() else "", opener)


_outside: list[Path] = []
_read: list[Path] = []


def _watch(event: str, args: tuple) -> None:
    if event == "open" and _outside and isinstance(args[0], str):
        path = Path(os.path.realpath(args[0]))
        _read.extend(path for outside in _outside if path.is_relative_to(outside))


sys.addaudithook(_watch)


@contextmanager
def nothing_is_read_of(path: Path) -> Iterator[None]:
    """TensorStore opens files that no hook hears of; its formats refuse links before."""
    _outside.append(path)
    _read.clear()
    try:
        yield
        assert _read == []
    finally:
        _outside.clear()


def test_a_link_out_of_the_folder_is_refused_for_each_file_of_each_format(checkpoint, tmp_path):
    """Also of a folder in it."""
    read = files_of(checkpoint.open())
    for path in (*checkpoint.kinds_of_files(), *checkpoint.kinds_of_folders()):
        if path == checkpoint.path:
            continue  # it is what the user names
        outside = tmp_path / "outside"
        shutil.move(path, outside)
        path.symlink_to(outside)
        with nothing_is_read_of(outside):
            said = checkpoint.said()
        if f"{path} is a link to {outside}, outside the checkpoint" not in said:
            assert not any(Path(file).is_relative_to(path) for file in read)  # which is not needed
        path.unlink()
        shutil.move(outside, path)
    assert_same(arrays_of(checkpoint.open()), checkpoint.want)


def files_of(opened: ucp.Checkpoint) -> set[str]:
    """The files that it is read from."""
    return {url for url, _, _ in opened._contents.files.identities()}


def test_steps_of_a_run_may_be_links_to_each_other_where_the_run_is_named(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(DATA / "deepspeed" / "z1_bf16_dp2", run)
    step = next(run.glob("global_step*"))
    want = arrays_of(ucp.open(run))
    # a later step, one of whose files is that of the step before
    states = step.with_name("global_step6")
    shutil.copytree(step, states)
    for file in states.glob("*model_states.pt"):
        file.unlink()
        file.symlink_to(f"../{step.name}/{file.name}")
    (run / "latest").write_text("last")
    (run / "last").symlink_to("global_step6")
    (tmp_path / "named").symlink_to("run")
    assert_same(arrays_of(ucp.open(run)), want)
    assert_same(arrays_of(ucp.open(tmp_path / "named")), want)
    with pytest.raises(
        FormatError, match=rf"global_step6/.* is a link to .*{step.name}.*, outside"
    ):
        ucp.open(states)
    shutil.rmtree(step)
    shutil.copytree(states, tmp_path / "elsewhere", symlinks=True, ignore_dangling_symlinks=True)
    (run / "last").unlink()
    (run / "last").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=r"last is a link to .*elsewhere, outside the checkpoint"):
        ucp.open(run)


def test_links_inside_the_folder_are_followed_in_each_format(checkpoint):
    (checkpoint.folder / ".kept").mkdir()
    for number, file in enumerate(checkpoint.kinds_of_files()):
        kept = checkpoint.folder / ".kept" / str(number)
        file.rename(kept)
        file.symlink_to(os.path.relpath(kept, file.parent))
    assert_same(arrays_of(checkpoint.open()), checkpoint.want)


def test_links_into_a_hub_s_blobs_are_followed_in_each_format_and_no_further(checkpoint, tmp_path):
    """A Hugging Face cache has nothing but links, from each snapshot to the blobs beside the
    snapshots.
    """
    hub = tmp_path / "hub" / "models--org--name"
    shutil.move(checkpoint.folder, hub / "snapshots" / ("0" * 40) / "step")
    checkpoint.folder = hub / "snapshots" / ("0" * 40) / "step"
    (hub / "blobs").mkdir()
    for number, file in enumerate([x for x in checkpoint.folder.rglob("*") if x.is_file()]):
        file.rename(hub / "blobs" / str(number))
        file.symlink_to(os.path.relpath(hub / "blobs" / str(number), file.parent))
    assert_same(arrays_of(checkpoint.open()), checkpoint.want)
    read = files_of(checkpoint.open())
    for file in checkpoint.kinds_of_files():
        if file == checkpoint.path:
            continue
        blob, outside = file.resolve(), tmp_path / "outside"
        blob.rename(outside)
        blob.symlink_to(outside)
        with nothing_is_read_of(outside):
            said = checkpoint.said()
        assert "outside the checkpoint" in said or str(file) not in read
        blob.unlink()
        outside.rename(blob)


@pytest.mark.timeout(120)
def test_a_fifo_in_place_of_a_file_is_not_waited_for_in_any_format(checkpoint, tmp_path):
    for file in checkpoint.kinds_of_files():
        kept = tmp_path / "kept"
        shutil.move(file, kept)
        os.mkfifo(file)
        checkpoint.said()
        file.unlink()
        shutil.move(kept, file)


SPARSE_BYTES = 1 << 41
NAMED = (
    "config.json", "model.safetensors.index.json", ".metadata", "ucp.json", "latest", ".zarray",
    "trainer_state.json", "latest_checkpointed_iteration.txt", "adapter_config.json",
    "pytorch_model.bin.index.json",
)  # fmt: skip


def test_a_file_that_is_too_large_to_be_read_whole_is_refused_before_in_any_format(checkpoint):
    """Each file gets zeros at its end that take no space on the disk."""
    for file in checkpoint.kinds_of_files():
        size = file.stat().st_size
        os.truncate(file, SPARSE_BYTES)
        try:
            with little_memory():
                said = checkpoint.said()
        except MemoryError:
            raise AssertionError(f"{file} is read whole") from None
        if file.name in NAMED:
            assert f"{file} has {SPARSE_BYTES:,} bytes" in said
            assert file.name != "latest" or "at most 65,536" in said
            assert "not JSON" not in said
        os.truncate(file, size)
    assert_same(arrays_of(checkpoint.open()), checkpoint.want)
