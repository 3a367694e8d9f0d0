"""Folders of weights: what transformers would load, or a refusal that names the cause."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA, assert_accounted_for
from commands import invoke
from helpers import changed_json, faults_of
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint, UCPError
from safetensors_writer import write_safetensors as write
from torch_writer import Storage, Tensor
from torch_writer import save as torch_save

INDEX = "model.safetensors.index.json"


def assert_is_the_truth(checkpoint: ucp.Checkpoint, want: dict[str, np.ndarray]) -> None:
    got = checkpoint.restore()["param"]
    assert got.keys() == want.keys()
    assert all(array.tobytes() == want[name].tobytes() for name, array in got.items())


# Generated folders.

NAMES = ("a.weight", "b.weight", "c.bias")


def tensors(version: int) -> dict[str, np.ndarray]:
    return {name: np.full((2, 3), 10 * version + i, np.float32) for i, name in enumerate(NAMES)}


def parts(folder: Path, arrays: dict[str, np.ndarray], of: int, index: bool, like="model", **how):
    """The arrays in so many numbered files, and an index that names them, with a total size."""
    suffix, save = how.get("suffix", "safetensors"), how.get("save", write)
    files = [folder / f"{like}-{n:05}-of-{of:05}.{suffix}" for n in range(1, of + 1)]
    weight_map = {name: files[i % of].name for i, name in enumerate(arrays)}
    for file in files:
        save(file, {name: array for name, array in arrays.items() if weight_map[name] == file.name})
    if index:
        metadata = {"total_size": how["total"]} if "total" in how else {}
        said = {"metadata": metadata, "weight_map": weight_map}
        (folder / f"{like}.{suffix}.index.json").write_text(json.dumps(said))
    return files


def write_torch(path: Path, arrays: dict[str, np.ndarray]) -> None:
    torch_save(arrays, path)


SAFETENSORS = {"like": "model", "suffix": "safetensors", "save": write}
OF_TORCH = {"like": "pytorch_model", "suffix": "bin", "save": write_torch}


@dataclass(frozen=True)
class Folder:
    """A folder of versions of a model as one file, as numbered ones, some gone, and as .bin."""

    single: int | None
    numbered: int | None
    of: int
    indexed: bool
    gone: frozenset[int]
    torch: int | None
    extra: tuple[str, ...]

    def make(self, at: Path) -> None:
        if self.single is not None:
            write(at / "model.safetensors", tensors(self.single))
        if self.numbered is not None:
            files = parts(at, tensors(self.numbered), self.of, self.indexed)
            for n in self.gone:
                files[n].unlink()
        if self.torch is not None:
            write_torch(at / "pytorch_model.bin", tensors(self.torch))
        for name in self.extra:
            if name == "optimizer.pt":
                write_torch(at / name, {"state": {}, "param_groups": []})
                continue
            (at / name).write_bytes(b"{}" if name.endswith(".json") else b"\0\5\x16\7 another")

    def right(self) -> int | str:
        """The version that transformers would load, or else the parts; or the refusal's words."""
        whole = self.numbered is not None and not self.gone
        if self.single is not None:
            if whole and self.numbered != self.single:
                return INDEX if self.indexed else "model-00001"
            return self.single
        if self.numbered is not None and self.indexed:
            return self.numbered if whole else f"model-{min(self.gone) + 1:05}-of"
        if self.torch is not None:
            return self.torch
        if self.numbered is None or len(self.gone) == self.of:
            return "is not a checkpoint"
        return self.numbered if whole else f"model-{min(self.gone) + 1:05}-of"


EXTRA = (
    "tokenizer.json", "._model-00001-of-00002.safetensors", "._model.safetensors", "model.safetensors.part",
)  # fmt: skip
EXTRA += (
    "optimizer.pt", "generation_config.json", "README.md", ".gitattributes",
    "model-00002-of-00003.safetensors.tmp",
)  # fmt: skip
VERSIONS = st.sampled_from([None, 0, 1])


@st.composite
def folders(draw) -> Folder:
    of = draw(st.integers(1, 3))
    gone = draw(st.frozensets(st.integers(0, of - 1)))
    extra = tuple(draw(st.lists(st.sampled_from(EXTRA), unique=True)))
    saves = draw(VERSIONS), draw(VERSIONS), draw(VERSIONS)
    return Folder(*saves[:2], of, draw(st.booleans()), gone, saves[2], extra)


@given(folders())
def test_any_folder_is_what_transformers_would_load_or_refused_by_a_name(tmp_path_factory, folder):
    at = tmp_path_factory.mktemp("f")
    folder.make(at)
    right = folder.right()
    if isinstance(right, str):
        with pytest.raises(UCPError, match=re.escape(right)):
            ucp.open(at)
        return
    checkpoint = ucp.open(at)
    assert_is_the_truth(checkpoint, tensors(right))
    assert_accounted_for(checkpoint)
    told = "\n".join(checkpoint.notes)
    for file in at.iterdir():
        belongs = file.name.startswith(("model", "pytorch_model", "optimizer"))
        places = [(item.where, item.what) for item in checkpoint.inventory]
        read = any(x.startswith(f"{file.name}:") or what == "index" for x, what in places)
        assert not belongs or read or file.name in told or "..." in told, file.name


@given(st.integers(1, 4), st.sampled_from([SAFETENSORS, OF_TORCH]), st.data())
def test_one_of_several_parts_is_refused_whatever_else_is_there(tmp_path_factory, of, how, data):
    at = tmp_path_factory.mktemp("f")
    files = parts(at, tensors(0), of, data.draw(st.booleans()), **how)
    for file in data.draw(st.sets(st.sampled_from(files), max_size=of - 1)):
        file.unlink()
    for file in (file for file in files if file.exists()):
        if of == 1:
            assert len(ucp.open(file).leaves) == len(NAMES)
        else:
            absent = [other.name for other in files if not other.exists()]
            rest = f".*{absent[0]}" if absent else "all beside it"
            cause = f"one of {of} parts of a model, {rest}"
            with pytest.raises(FormatError, match=cause):
                ucp.open(file)


# What a name or an index says is missing.


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "x" * 3000, "a\0b", "\ud800", "", ".", "..", "a/b"]
)
def test_an_index_that_names_no_file_of_the_folder_is_refused(tmp_path, name):
    write(tmp_path / "model-00001-of-00001.safetensors", tensors(0))
    kept = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path.parent / "x.safetensors").write_bytes(kept.read_bytes())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, name)}))
    for path in (tmp_path, tmp_path / INDEX):
        with pytest.raises(FormatError, match=r"of which 1 are not beside it|half of a surrogate"):
            ucp.open(path)


@given(st.integers(2, 4), st.booleans(), st.data())
def test_an_index_that_names_some_of_the_parts_is_refused(tmp_path_factory, of, torch, data):
    at = tmp_path_factory.mktemp("f")
    how = OF_TORCH if torch else SAFETENSORS
    like, suffix, save = how.values()
    arrays = {f"{name} {i}": array for i in range(2) for name, array in tensors(0).items()}
    files = parts(at, arrays, of, True, **how)
    unnamed = data.draw(st.sets(st.sampled_from(files), min_size=1, max_size=of - 1))
    index = at / f"{like}.{suffix}.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in weight_map.items() if at / file not in unnamed}
    index.write_text(json.dumps({"weight_map": kept}))
    for file in data.draw(st.sets(st.sampled_from(sorted(unnamed)))):
        file.unlink()
    for path in (at, index):
        words = f"{index.name} names .* files, and not '{min(unnamed).name}'"
        with pytest.raises(FormatError, match=words):
            ucp.open(path)
    save(at / f"{like}.{suffix}", tensors(1))  # the whole model, beside an index that was cut
    assert_is_the_truth(ucp.open(at), tensors(1))


def test_an_index_of_files_of_torch_names_what_is_in_them(tmp_path):
    first, second = parts(tmp_path, tensors(0), 2, True, **OF_TORCH, total=72)
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    write_torch(tmp_path / "training_args.bin", {})
    checkpoint = ucp.open(tmp_path)
    assert_is_the_truth(checkpoint, tensors(0))
    assert checkpoint.extras["config.json"]["config"] == {"model_type": "toy"}
    assert checkpoint.extras["pytorch_model.bin.index.json"]["total_size"] == 72
    assert checkpoint.notes == ["not read: training_args.bin: the state of the trainer"]
    write_torch(tmp_path / "pytorch_model.bin", tensors(1))
    with pytest.raises(FormatError, match=r"two saves .*, pytorch_model\.bin and .*bin\.index"):
        ucp.open(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    shutil.copy(second, first)
    with pytest.raises(FormatError, match=r"b\.weight.* would be two tensors"):
        ucp.open(tmp_path)
    write_torch(first, {"d": np.zeros(2, np.float32)})
    with pytest.raises(FormatError, match=rf"weight of {first.name} is in the index, but not"):
        ucp.open(tmp_path)


@pytest.mark.parametrize("stem", ["model", "weights", "shard"])
def test_numbered_parts_are_refused_where_one_is_missing_whatever_they_are_called(stem, tmp_path):
    array = np.zeros(2, np.float32)
    write(tmp_path / f"{stem}-00001-of-00002.safetensors", {"a": array})
    with pytest.raises(FormatError, match=f"of 2 files, of which 1 .*{stem}-00002-of-00002"):
        ucp.open(tmp_path)
    write(tmp_path / f"{stem}-00002-of-00002.safetensors", {"b": array})
    assert_is_the_truth(ucp.open(tmp_path), {"a": array, "b": array})


def test_parts_that_are_numbered_from_0_to_their_number_are_whole(tmp_path):
    parts(tmp_path, tensors(0), 2, index=True)
    write(tmp_path / "model-00000-of-00002.safetensors", {"d": np.zeros(2, np.float32)})
    first = "model-00000-of-00002.safetensors"
    changed_json(tmp_path / INDEX, lambda index: index["weight_map"].update(d=first))
    assert len(ucp.open(tmp_path).leaves) == len(NAMES) + 1


def test_parts_of_safetensors_that_are_not_whole_are_left_for_parts_of_torch_that_are(tmp_path):
    parts(tmp_path, tensors(0), 2, index=False)[0].unlink()
    parts(tmp_path, tensors(1), 2, False, **OF_TORCH)
    checkpoint = ucp.open(tmp_path)
    assert_is_the_truth(checkpoint, tensors(1))
    rest = "not read: model-00002-of-00002.safetensors: belongs to a save of which 1 files"
    assert checkpoint.notes[0].startswith(rest)


def test_a_file_that_an_index_names_among_others_is_refused_by_itself(tmp_path):
    write(tmp_path / "first.safetensors", {"a": np.zeros(2, np.float32)})
    write(tmp_path / "second.safetensors", {"b": np.zeros(2, np.float32)})
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(ucp.open(tmp_path)) == {"param/a", "param/b"}
    with pytest.raises(FormatError, match=f"one of the 2 files of a model that {INDEX} names:"):
        ucp.open(tmp_path / "first.safetensors")


@pytest.mark.parametrize(("mine", "others"), [
    ("model_world_size_8_rank_3.pt",          ()),
    ("pytorch_model_world_size_2_rank_1.bin", ()),
    ("consolidated.00.pth",                   ("consolidated.01.pth",)),
    ("model_rank0.pt",                        ("model_rank1.pt",)),
    ("checkpoint-shard0.pt",                  ("checkpoint-shard1.pt",)),
    ("pytorch_model_fsdp_rank0.bin",          ("pytorch_model_fsdp_rank1.bin",)),
])  # fmt: skip
def test_what_one_rank_wrote_is_refused_where_there_are_others(tmp_path, mine, others):
    for name in (mine, *others):
        write_torch(tmp_path / name, tensors(0))
    for path in (tmp_path / mine, tmp_path):
        with pytest.raises(UCPError, match=r"ranks wrote|named after a rank|weights of 2 models"):
            ucp.open(path)
    if others:
        for name in others:
            (tmp_path / name).unlink()
        assert len(ucp.open(tmp_path / mine).leaves) == len(NAMES)  # of one rank, which has all


PARAMS = {"dim": 8, "n_heads": 2, "vocab_size": 32}
OF_LLAMA = {
    "tok_embeddings.weight": (32, 8),
    "norm.weight": (8,),
    "layers.0.attention.wq.weight": (8, 8),
    "output.weight": (32, 8),
}


@pytest.mark.parametrize(("changed", "params", "is_part"), [
    ({}, PARAMS, False),
    ({}, {**PARAMS, "vocab_size": -1}, False),
    ({"layers.0.attention.wq.weight": (12, 8)}, {**PARAMS, "head_dim": 6}, False),
    ({"tok_embeddings.weight": (32, 4)}, None, True),
    ({"tok_embeddings.weight": (16, 8), "output.weight": (16, 8)}, PARAMS, True),
    ({"layers.0.attention.wq.weight": (4, 8)}, {**PARAMS, "vocab_size": -1}, True),
    ({"layers.0.attention.wq.weight": (8, 8)}, {**PARAMS, "head_dim": 6}, True),
    ({}, [], False),
])  # fmt: skip
def test_one_rank_s_file_of_llama_without_the_others_is_refused(tmp_path, changed, params, is_part):
    shapes = OF_LLAMA | changed
    path = tmp_path / "consolidated.00.pth"
    write_torch(path, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    if params is not None:
        (tmp_path / "params.json").write_text(json.dumps(params))
    if is_part:
        with pytest.raises(FormatError, match=r"consolidated\.00\.pth is named after a rank, and"):
            ucp.open(path)
    else:
        assert {name: leaf.shape for name, leaf in ucp.open(path).params.items()} == shapes


def test_a_rank_that_a_list_of_checksums_names_is_missing(tmp_path):
    write_torch(tmp_path / "consolidated.00.pth", tensors(0))
    lines = "0123  consolidated.00.pth\n4567  consolidated.01.pth\n89ab  params.json\n"
    (tmp_path / "checklist.chk").write_text(lines)
    with pytest.raises(FormatError, match=r"there are others: consolidated\.01\.pth"):
        ucp.open(tmp_path / "consolidated.00.pth")


# Files that stand for others.

STAND_INS = {
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n",
    "git-annex pointer": b"/annex/objects/SHA256E-s1--0\n",
    "macOS keeps": b"\0\5\x16\7\0\2\0\0Mac OS X",
    "web page": b"<!DOCTYPE html>\n<html><head>",
    "wants a login": b"Access to model org/name is restricted. You must have access",
    "empty": b"",
}


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", INDEX, "weights.pt"])
def test_a_file_that_stands_for_another_says_what_it_is(tmp_path, name, what):
    (tmp_path / name).write_bytes(STAND_INS[what])
    for path in (tmp_path / name, tmp_path) if name != "weights.pt" else (tmp_path / name,):
        with pytest.raises(UCPError, match=rf"(?s){re.escape(name)}.*{what}") as refused:
            ucp.open(path)
        assert "header has" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".incomplete", ".part", ".crdownload", ".aria2"])
def test_a_download_that_has_not_ended_is_named(tmp_path, suffix):
    files = parts(tmp_path, tensors(0), 2, index=True)
    unfinished = files[1].with_name(files[1].name + suffix)
    files[1].rename(unfinished)
    words = re.escape(f"{unfinished.name} is a download that has not ended")
    with pytest.raises(FormatError, match=words):
        ucp.open(tmp_path)
    for file in tmp_path.iterdir():
        if file != unfinished:
            file.unlink()
    unfinished.rename(tmp_path / f"model.safetensors{suffix}")
    words = rf"model\.safetensors{suffix} in it is a download that has not ended"
    with pytest.raises(NotACheckpoint, match=words):
        ucp.open(tmp_path)


def test_a_file_of_its_full_size_whose_download_goes_on_is_refused(tmp_path):
    write(tmp_path / "model.safetensors", tensors(0))
    (tmp_path / "model.safetensors.aria2").write_bytes(b"\0\1")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(FormatError, match=r"its download has not ended: .*safetensors\.aria2"):
            ucp.open(path)


def test_the_hubs_downloads_into_a_folder_and_into_its_cache_explain_what_is_missing(tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    files = parts(local, tensors(0), 2, index=True)
    files[0].unlink()
    kept = local / ".cache" / "huggingface" / "download"
    kept.mkdir(parents=True)
    (kept / f"{files[0].name}.0123abcd.incomplete").write_bytes(b"")
    with pytest.raises(FormatError, match=rf"huggingface/download/{files[0].name}.*has not ended"):
        ucp.open(local)
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    parts(snapshot, tensors(0), 2, index=True)[1].unlink()
    (snapshot / files[1].name).symlink_to("../../blobs/0123")
    with pytest.raises(FormatError, match=r"a link to \.\./\.\./blobs/0123, which does not exist"):
        ucp.open(snapshot)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.safetensors").symlink_to("../blobs/0123")
    for path in (alone, alone / "model.safetensors"):
        with pytest.raises(UCPError, match=r"is a link to \.\./blobs/0123"):
            ucp.open(path)


def test_links_into_a_cache_are_followed_and_the_revision_of_main_is_the_one_to_open(tmp_path):
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.mkdir(parents=True)
    for revision, version in (("abc", 0), ("def", 1)):
        snapshot = tmp_path / "models--o--n" / "snapshots" / revision
        snapshot.mkdir(parents=True)
        write(blobs / revision, tensors(version))
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{revision}")
    (tmp_path / "models--o--n" / "refs").mkdir()
    (tmp_path / "models--o--n" / "refs" / "main").write_text("def")
    with pytest.raises(NotACheckpoint, match=r"open one, .*/snapshots/def"):
        ucp.open(tmp_path / "models--o--n")
    weight = ucp.open(tmp_path / "models--o--n" / "snapshots" / "def").read("param/a.weight")
    assert weight[0, 0] == 10


# Two saves in a folder.


def copies(folder: Path, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    write(folder / "model.safetensors", first)
    parts(folder, second, 2, index=True)


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "name"])
def test_two_saves_that_differ_in_anything_are_refused(tmp_path, change):
    second = tensors(0)
    changed = second.pop("c.bias")
    bits = changed.copy()
    bits[0, 0] = -0.0 if changed[0, 0] == 0 else np.nextafter(changed[0, 0], 9)
    ways = {"value": bits, "dtype": changed.astype(np.float16), "shape": changed.reshape(3, 2)}
    second["d" if change == "name" else "c.bias"] = ways.get(change, changed)
    copies(tmp_path, tensors(0), second)
    with pytest.raises(FormatError, match=r"two saves of one model.*differ: param/(c\.bias|d) "):
        ucp.open(tmp_path)


def test_what_no_sample_shows_is_found_by_verify_and_refused_by_convert(tmp_path):
    first = {"w": np.zeros((64, 1024), np.float32), "b": np.zeros(3, np.float32)}
    second = {"w": first["w"].copy(), "b": first["b"]}
    second["w"][30, 7] = 1
    copies(tmp_path, first, second)
    checkpoint = ucp.open(tmp_path)
    (fault,) = faults_of(checkpoint)
    assert "param/w has other values" in fault
    assert INDEX in fault
    with pytest.raises(CorruptData, match="contradicts itself"):
        checkpoint.save(tmp_path.parent / "converted")
    assert not (tmp_path.parent / "converted").exists()


def test_parts_that_ranks_left_in_sharded_are_compared_with_what_was_made_of_them(tmp_path):
    folder = Path(shutil.copytree(DATA / "torch" / "dcp_hf_consolidated" / "ckpt", tmp_path / "c"))
    assert faults_of(ucp.open(folder)) == []
    whole = folder / "model-00001-of-00001.safetensors"
    kept = whole.read_bytes()
    data = bytearray(kept)
    data[-1] ^= 1
    whole.write_bytes(data)
    with pytest.raises(FormatError, match=r"two saves, model.*index\.json and the ranks' parts"):
        ucp.open(folder)
    assert ucp.open(folder / INDEX).leaves  # one of the two that the message says to open
    assert ucp.open(folder / "sharded").leaves
    whole.write_bytes(kept)
    sorted((folder / "sharded").iterdir())[-1].unlink()  # which shows in shapes alone
    assert any("and does not: param/" in note for note in ucp.open(folder).notes)
    sorted((folder / "sharded").iterdir())[-1].unlink()
    assert any("sharded/ should hold the ranks' parts" in note for note in ucp.open(folder).notes)


def test_models_whose_names_do_not_say_which_is_meant_are_refused(tmp_path):
    write(tmp_path / "actor.safetensors", {"actor.w": np.zeros(2, np.float32)})
    assert list(ucp.open(tmp_path)) == ["param/actor.w"]
    write(tmp_path / "critic.safetensors", {"critic.w": np.zeros(2, np.float32)})
    with pytest.raises(FormatError, match=r"weights of 2 models.*: actor\.s.*, critic\.s.* Open"):
        ucp.open(tmp_path)
    assert list(ucp.open(tmp_path / "critic.safetensors")) == ["param/critic.w"]


def test_the_file_that_the_config_names_for_transformers_is_read(tmp_path):
    for name, version in (("model.safetensors", 0), ("other.safetensors", 1)):
        write(tmp_path / name, tensors(version))
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    checkpoint = ucp.open(tmp_path)
    assert_is_the_truth(checkpoint, tensors(1))
    reason = "other.safetensors is read, which transformers and diffusers take first"
    assert checkpoint.notes == [f"not read: model.safetensors: {reason}"]
    (tmp_path / "config.json").write_text('{"transformers_weights": "gone.safetensors"}')
    with pytest.raises(FormatError, match=r"names 'gone\.safetensors' in transformers_weights"):
        ucp.open(tmp_path)


# What lies beside is said, and printed.


@pytest.fixture
def trainer(tmp_path) -> Path:
    """What transformers' Trainer leaves of a step, as far as names go."""
    folder = tmp_path / "run" / "checkpoint-4"
    folder.mkdir(parents=True)
    write(folder / "model.safetensors", tensors(0))
    write_torch(folder / "optimizer.pt", {"state": {}, "param_groups": []})
    for name in ("scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        write_torch(folder / name, {})
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    return folder


WRITER = "a training checkpoint of transformers' Trainer at step 4 (trainer_state.json)"


@pytest.mark.parametrize("command", ["convert", "plan", "export"])
@pytest.mark.parametrize("as_json", [False, True])
def test_commands_print_what_was_left_aside(trainer, tmp_path, command, as_json):
    out = tmp_path / "out"
    more = {"convert": [out], "plan": [], "export": [out, "--format", "safetensors"]}[command]
    result = invoke(command, trainer, *more, *(["--json"] if as_json else []))
    assert result.exit_code == 0, result.output
    assert WRITER in (result.output if command == "plan" else result.stderr)
    if as_json and command != "export":
        assert WRITER in json.loads(result.stdout)["notes"]


def test_the_optimizer_is_not_noted_where_only_weights_are_asked_for(trainer):
    checkpoint = ucp.open(trainer, weights_only=True)
    assert checkpoint.notes == []
    assert_accounted_for(checkpoint)
    run = ucp.open(trainer.parent, weights_only=True)
    assert run.path == str(trainer)


def test_an_adapter_is_named_wherever_it_lies(tmp_path):
    write(tmp_path / "adapter_model.safetensors", {"x.lora_A.weight": np.zeros((2, 4), np.float32)})
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (note,) = ucp.open(tmp_path).notes
    assert note.startswith("these are the weights of an adapter")
    assert "org/base; only LORA is merged" in note
    write(tmp_path / "model.safetensors", tensors(0))
    notes = ucp.open(tmp_path).notes
    assert any("adapter_model.safetensors" in note and "is not applied" in note for note in notes)
    assert any("adapter_config.json" in note for note in notes)


def test_weights_and_a_trainers_state_beside_another_format_are_noted(tmp_path):
    folder = Path(shutil.copytree(DATA / "torch" / "old_v260" / "ckpt", tmp_path / "c"))
    before = ucp.open(folder)
    write(folder / "model.safetensors", tensors(0))
    write_torch(folder / "scheduler.pt", {"epoch": 1})
    checkpoint = ucp.open(folder)
    assert set(checkpoint) == set(before)
    weights = "not read: model.safetensors: weights beside the checkpoint"
    rest = "not read: scheduler.pt: the state of the trainer"
    assert checkpoint.notes[len(before.notes) :] == [weights, rest]


def test_folders_with_weights_of_their_own_and_other_formats_are_noted(tmp_path):
    write(tmp_path / "model.safetensors", tensors(0))
    for name in ("2_Dense", "onnx"):
        (tmp_path / name).mkdir()
    write(tmp_path / "2_Dense" / "model.safetensors", tensors(1))
    (tmp_path / "tf_model.h5").write_bytes(b"\x89HDF")
    notes = ucp.open(tmp_path).notes
    rest = ["not read: tf_model.h5: may hold weights, too"]
    assert notes == ["not read: 2_Dense: a folder with weights of its own", *rest]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotACheckpoint, match=r"holds 2_Dense: open one, .*/2_Dense"):
        ucp.open(tmp_path)
    shutil.rmtree(tmp_path / "2_Dense")
    with pytest.raises(NotACheckpoint, match=r"tf_model\.h5 in it is Keras's HDF5, which is not"):
        ucp.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", INDEX, "model-00001-of-00002.safetensors", "quantize_config.json"]
)
def test_what_should_be_a_file_and_is_a_folder_or_leads_nowhere_is_refused(tmp_path, name):
    parts(tmp_path, tensors(0), 2, index=True)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../blobs/x")
    with pytest.raises(FormatError, match=rf"{name}: it is a link to .*/blobs/x, which does not"):
        ucp.open(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(FormatError, match=rf"{name}: it is a folder, where a file should be"):
        ucp.open(tmp_path)


@pytest.mark.parametrize("how", [SAFETENSORS, OF_TORCH])
@pytest.mark.parametrize(("change", "nbytes"), [
    (lambda second: second,                    192),
    (lambda second: second.astype(np.float16), 144),
    (lambda second: second[:3],                168),
], ids=["own", "dtype", "shape"])  # fmt: skip
def test_a_shard_of_another_dtype_or_shape_beside_an_index_is_noted(how, change, nbytes, tmp_path):
    first, second = (np.full((4, 6), i, np.float32) for i in range(2))
    parts(tmp_path, {"w0": first, "w1": change(second)}, 2, True, **how, total=192)
    said = f"says that the tensors have 192 bytes, and they have {nbytes}: a file of another"
    assert any(said in note for note in ucp.open(tmp_path).notes) == (nbytes != 192)


@pytest.mark.parametrize("total", [96, 192])
def test_a_total_may_count_two_names_of_one_tensor_once_or_twice(total, tmp_path):
    storage = Storage("0", np.arange(24, dtype=np.float32))
    tied = {name: Tensor(storage, 0, (4, 6), (6, 1)) for name in ("head", "embed")}
    parts(tmp_path, tied, 1, True, **OF_TORCH, total=total)
    assert not [note for note in ucp.open(tmp_path).notes if "bytes" in note]
