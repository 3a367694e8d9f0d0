"""What files say of the step they are of: any two of one save that differ in it are refused, with
both files and both values; what ranks rightly have for themselves is not.
"""

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

import jax_ucp as ucp
from dcp_writer import Writer
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import FormatError
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.facts import Facts
from jax_ucp.layout.box import Box
from safetensors_writer import write_safetensors
from torch_writer import save


def test_a_scheduler_of_the_ranks_own_losses_is_no_fact(tmp_path):
    facts = Facts(tmp_path)
    for rank, best in enumerate((0.5, 0.25)):
        path = tmp_path / f"{rank}.pt"
        save({"last_epoch": 3, "best": best, "_last_lr": [0.1]}, path)
        file = TorchFile(path)
        facts.state_all(file, path.name, "lr_scheduler", file.tree, only=("last_epoch", "_last_lr"))
        facts.state_all(file, path.name, "lr_scheduler", file.tree["best"], among=rank)
    first, second = (TorchFile(tmp_path / f"{rank}.pt") for rank in (0, 1))
    facts.state_all(first, "0.pt", "lr_scheduler", first.tree, among="all")
    with pytest.raises(FormatError, match=r"1\.pt: lr_scheduler\.best is 0\.25, but 0\.5 in 0\.pt"):
        facts.state_all(second, "1.pt", "lr_scheduler", second.tree, among="all")


@pytest.mark.parametrize(("first", "second", "agree"), [
    (3,             3.0,           True),
    (3,             4,             False),
    (float("nan"),  float("nan"),  True),
    (None,          None,          True),
    (None,          1,             False),
    ("linear",      "linear",      True),
    ("linear",      "linear2",     False),
    ([1, 2],        [1, 3],        False),
    (np.float32(5), np.float32(5), True),
    (np.zeros(2),   np.zeros(3),   False),
    ({"a": 1},      {"a": 1},      True),
    ({"a": 1},      {"a": 2},      False),
])  # fmt: skip
def test_values_agree_if_they_are_one_number(tmp_path, first, second, agree):
    facts = Facts(tmp_path)
    facts.state("a.pt", "it", first)
    facts.state("a.pt", "it", second, among="others")
    if agree:
        facts.state("b.pt", "it", second)
    else:
        with pytest.raises(FormatError, match=r"b\.pt: it is .*, but .* in a\.pt; .*of one step"):
            facts.state("b.pt", "it", second)


def patched(path: Path, offset: int, length: int, old: bytes, new: bytes) -> None:
    """Other bytes in the pickle of a torch file inside another, with the CRC that is theirs."""
    data = path.read_bytes()
    item = data[offset : offset + length]
    with zipfile.ZipFile(io.BytesIO(item)) as file:
        (name,) = [name for name in file.namelist() if name.endswith("data.pkl")]
        before = file.read(name)
    after = before.replace(old, new)
    assert after != before
    item = item.replace(before, after)
    item = item.replace(*(struct.pack("<I", zlib.crc32(pickle)) for pickle in (before, after)))
    path.write_bytes(data[:offset] + item + data[offset + length :])


def test_the_groups_of_the_ranks_of_one_stage_are_alike_in_torch_dist(copy_of):
    folder = copy_of("megatron/dist_tp2_dp2_distopt_dp_reshardable_bf16") / "iter_0000003"
    objects = read_metadata(file_path(folder)).objects
    (span,) = objects["optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1"]
    old, new = (struct.pack(">d", 0.009990034048535828 * scale) for scale in (1, 0.75))
    patched(folder / span.file, span.offset, span.length, old, new)
    words = r"__1_0\.distcp:.*lr is 0\.0074.*, but 0\.00999.* in __0_0\.distcp"
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


def ranks_without_collectives(folder: Path, name: str, values: tuple[object, object]) -> Path:
    for rank, value in enumerate(values):
        writer = Writer(folder)
        writer.tensor("w", np.zeros(4, np.float32), [(f"__{rank}_0.distcp", Box((0,), (4,)))])
        writer.object(name, f"__{rank}_0.distcp", value)
        writer.finish(f"__{rank}.metadata")
    return folder


def test_objects_that_every_rank_wrote_say_the_same_of_their_step(tmp_path):
    epochs = {"last_epoch": 3}, {"last_epoch": 4}
    folder = ranks_without_collectives(tmp_path, "lr_scheduler", epochs)
    words = r"__1_0\.distcp: lr_scheduler\.last_epoch is 4, but 3 in __0_0\.distcp"
    with pytest.raises(FormatError, match=words):
        ucp.open(folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [("dataloader", ({"iteration": 3}, {"iteration": 4})), ("rng", ({"seed": 3}, {"seed": 4}))],
)
def test_places_in_the_data_are_the_ranks_own(tmp_path, name, values):
    tree = ucp.open(ranks_without_collectives(tmp_path, name, values)).restore()
    assert tree["param"].keys() == {"w"}


def test_headers_of_safetensors_say_one_step(tmp_path):
    for i, step in enumerate(("100", "200")):
        arrays, metadata = {f"w{i}": np.zeros(1, np.float32)}, {"global_step": step}
        write_safetensors(tmp_path / f"part_{i}.safetensors", arrays, metadata)
    index = {"weight_map": {f"w{i}": f"part_{i}.safetensors" for i in range(2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"part_1\.s.*: global_step is 200, but 100 in part_0\.s"):
        ucp.open(tmp_path)
