"""Weights that transformers wrote, against the live model; files that break the format's rules."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case, assert_accounted_for, assert_equal_however_read
from helpers import grids
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import FormatError, LayoutError, UCPError
from jax_ucp.formats.safetensors.reader import SafetensorsFile
from jax_ucp.layout.box import Box
from safetensors_writer import file_of

DATA = CASES_DATA / "torch"
SHARDED = ("dcp_hf_sharded", "dcp_hf_sharded_2d")
INDEX = "model.safetensors.index.json"


def test_parts_of_ranks_are_noted_and_a_config_is_kept():
    for case in SHARDED:
        notes = ucp.open(DATA / case / "ckpt").notes
        assert "4 ranks wrote parts of tensors; that" in notes[0]
    for path in DATA.glob("hf_*/ckpt"):
        config = ucp.open(path).extras["config.json"]["config"]
        assert config["model_type"] in path.parent.name


@pytest.mark.parametrize("case", ["dcp_hf_consolidated", "dcp_hf_consolidated_mapped"])
def test_the_parts_beside_a_consolidated_checkpoint_are_set_aside_and_open(case, tmp_path):
    inventory = ucp.open(DATA / case / "ckpt").inventory
    (aside,) = [item for item in inventory if item.where == "sharded"]
    assert aside.status == "skipped"
    assert aside.reason.startswith("parts of the same tensors,")
    parts = ucp.open(DATA / case / "ckpt" / "sharded")
    assert_equal_however_read(parts, Case(f"torch/{case}").truth(), tmp_path)


def test_an_index_and_a_folder_without_one_open_too_and_a_part_alone_is_refused(tmp_path):
    folder = DATA / "hf_gpt2" / "ckpt"
    labels = set(ucp.open(folder))
    assert set(ucp.open(folder / INDEX)) == labels
    shutil.copytree(folder, tmp_path / "c")
    (tmp_path / "c" / INDEX).unlink()
    assert set(ucp.open(tmp_path / "c")) == labels
    first = min((tmp_path / "c").glob("*.safetensors"))
    alone = rf"{first.name} is one of \d+ parts of a model, all beside it: open its folder"
    with pytest.raises(FormatError, match=alone):
        ucp.open(first)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(file_of(header, data))
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(("header", "data", "message"), [
    ({"a": entry(0, 4, [4]), "b": entry(5, 8, [3])}, b"x" * 8, "b begins at byte 5 of the data, but 4"),
    ({"a": entry(0, 4, [4]), "b": entry(3, 8, [5])}, b"x" * 8, "b begins at byte 3"),
    ({"a": entry(0, 4, [3])}, b"x" * 4, "a of U8 .* which is not its size"),
    ({"a": entry(0, 4, [4])}, b"x" * 3, "has .* bytes, but its header describes"),
    ({"a": entry(0, 4, [4])}, b"x" * 5, "has .* bytes, but its header describes"),
    ({"a": entry(0, 4, [-4])}, b"x" * 4, r"a has shape \[-4\]"),
    ({"a": entry(0, 4, [8], "F3")}, b"x" * 4, "a has dtype F3"),
    ({"a": entry(0, 4, [7], "F4")}, b"x" * 4, "a of F4 .* which is not its size"),
    ({"a": {"dtype": "U8"}}, b"", "a should have dtype, shape and data_offsets"),
    ({"__metadata__": {"a": 1}}, b"", "__metadata__ should map strings to strings"),
    (b'{"a": 1, "a": 2}', b"", "a name occurs twice"),
    (b"[]", b"", "the header is not a JSON object"),
    (b"{" * 60_000, b"", "the header is not as the format has it"),
    ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}}, b"", "holds one rank's parts of tensors"),
])  # fmt: skip
def test_a_file_that_breaks_a_rule_of_the_format_is_refused(tmp_path, header, data, message):
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=message):
        ucp.open(path)


@given(st.data())
def test_a_changed_header_is_refused_or_describes_what_is_there(tmp_path_factory, data):
    whole = next((DATA / "hf_llama_bf16_tied" / "ckpt").glob("*.safetensors")).read_bytes()
    changed = bytearray(whole)
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("f") / "x.safetensors"
    path.write_bytes(bytes(changed))
    try:
        file = SafetensorsFile(path)
    except UCPError:
        return
    for key, info in file.arrays().items():
        assert file.read(key, Box.whole(info.shape)).nbytes == info.nbytes


# Parts of tensors, as DCP's Hugging Face storage writes them.


def parts(path: Path, **tensors: tuple[list[int], np.ndarray]) -> None:
    """A file of one rank: for each tensor where its part begins, and the part."""
    header, data = {}, b""
    for name, (_, array) in tensors.items():
        header[name] = entry(len(data), len(data) + array.size, list(array.shape))
        data += array.tobytes()
    said = {name: {"saved_offsets": start} for name, (start, _) in tensors.items()}
    about = {"DCP_SHARDING_INFO": json.dumps(said), "format": "pt"}
    write(path, {"__metadata__": about, **header}, data)


def of_rank(rank: int) -> str:
    return f"shard-{rank:05}-model-00001-of-00001.safetensors"


@given(st.data())
def test_parts_cut_anywhere_among_any_ranks_are_the_tensor(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("c")
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.uint8).reshape(shape)
    boxes = dict.fromkeys(data.draw(grids(shape)))
    for i, box in enumerate(data.draw(st.permutations(list(boxes)))):
        parts(folder / of_rank(i + 1), w=(list(box.start), whole[box.index]))
    checkpoint = ucp.open(folder, sizes={"ranks": len(boxes)})
    assert same_bits(checkpoint.read("param/w"), whole)
    assert checkpoint.params["w"].shape == shape
    assert all(piece.target.size for piece in checkpoint.params["w"].where())


@pytest.fixture
def sharded(tmp_path) -> Path:
    return Path(shutil.copytree(DATA / "dcp_hf_sharded" / "ckpt", tmp_path / "c"))


def test_a_missing_part_in_the_middle_is_a_hole_and_one_rank_alone_is_no_checkpoint(sharded):
    first, second, *_ = sorted(sharded.iterdir())
    second.unlink()
    with pytest.raises(LayoutError, match=r"(?s)/c: param.*hole"):
        ucp.open(sharded, sizes={"ranks": 3})
    with pytest.raises(FormatError, match=f"{first.name} holds one rank's parts of .*: open its"):
        ucp.open(first)


@given(st.data())
def test_a_part_said_to_begin_elsewhere_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("c") / "c"
    shutil.copytree(DATA / "dcp_hf_sharded_2d" / "ckpt", folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    said = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    cut = [name for name, one in said.items() if one["saved_offsets"]]
    start = said[data.draw(st.sampled_from(cut))]["saved_offsets"]
    axis = data.draw(st.integers(0, len(start) - 1))
    other = st.integers(-1, 40).filter(lambda n: n != start[axis])
    start[axis] = data.draw(other | st.sampled_from([None, "0", 1 << 70]))
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(said)
    write(path, header, whole[end:])
    with pytest.raises(UCPError, match=f"{path.name}|hole|overlap|is stored twice"):
        ucp.open(folder)


NEGATIVE = '{"w": {"saved_offsets": [-1, 0]}}'


@pytest.mark.parametrize(
    "said", ["[", "[]", "{}", '{"w": 1}', '{"w": {}}', '{"w": {"saved_offsets": [0]}}', NEGATIVE]
)
def test_a_mark_that_does_not_say_where_parts_begin_is_refused(tmp_path, said):
    path = tmp_path / "model-00001-of-00001.safetensors"
    write(path, {"__metadata__": {"DCP_SHARDING_INFO": said}, "w": entry(0, 4, [2, 2])}, b"1234")
    with pytest.raises(FormatError, match=f"{path.name}: "):
        ucp.open(tmp_path)


def test_a_rank_without_a_file_had_nothing_to_write_by_the_users_word_alone(tmp_path):
    for rank, column in ((1, 0), (3, 1)):
        parts(tmp_path / of_rank(rank), w=([0, column], np.zeros((2, 1), np.uint8)))
    with pytest.raises(FormatError, match=r"rank 2 is not there \(shard-00002-model-\*"):
        ucp.open(tmp_path)
    with pytest.raises(FormatError, match=r"ranks=3, and there are files of 2: 1, 3\. .*ranks=2"):
        ucp.open(tmp_path, sizes={"ranks": 3})
    checkpoint = ucp.open(tmp_path, sizes={"ranks": 2})
    assert checkpoint.params["w"].shape == (2, 2)
    (note,) = checkpoint.notes
    assert note == "2 ranks wrote parts of tensors, as sizes says: nothing in the files proves it"


@pytest.mark.parametrize("case", SHARDED)
def test_no_files_of_a_real_save_open_without_the_others(case, tmp_path):
    """Whatever is missing; by a hole, by the numbers of ranks, or as nothing shows that it is all."""
    files = sorted((DATA / case / "ckpt").iterdir())
    some = [kept for n in range(1, len(files)) for kept in itertools.combinations(files, n)]
    for i, kept in enumerate(some):
        folder = tmp_path / str(i)
        folder.mkdir()
        for file in kept:
            shutil.copy(file, folder)
        with pytest.raises(UCPError, match=r"may be missing|hole|the model is not whole without"):
            ucp.open(folder)


# Tensors as FSDP2 cuts them: whole rows, over all ranks.
LENGTHS = st.integers(1, 12)


def chunked(folder: Path, ranks: int, tensors: dict[str, np.ndarray]) -> None:
    """A save of FSDP2: each rank has the rows that torch.chunk gives it, which may be none."""
    for rank in range(ranks):
        cut: dict[str, tuple[list[int], np.ndarray]] = {}
        for name, whole in tensors.items():
            rows = -(-len(whole) // ranks)
            first = min(rank * rows, len(whole))
            cut[name] = [first, *[0] * (whole.ndim - 1)], whole[first : first + rows]
        parts(folder / of_rank(rank + 1), **cut)


@given(st.data())
def test_the_first_ranks_of_a_save_never_open_as_if_they_were_all(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("c")
    width, ranks = data.draw(LENGTHS), data.draw(st.integers(1, 6))
    shapes = {"model.norm.weight": (width,)}
    shapes["model.embed_tokens.weight"] = data.draw(LENGTHS), width
    more = range(data.draw(st.integers(0, 3)))
    shapes |= {f"w{i}": (data.draw(LENGTHS), data.draw(LENGTHS)) for i in more}
    used = data.draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, unique=True))
    sizes = {name: np.prod(shapes[name]) for name in used}
    tensors = {n: np.arange(sizes[n], dtype=np.uint8).reshape(shapes[n]) for n in used}
    chunked(folder, ranks, tensors)
    there = data.draw(st.integers(1, ranks))
    for rank in range(there + 1, ranks + 1):
        (folder / of_rank(rank)).unlink()
    try:
        checkpoint = ucp.open(folder)
    except FormatError:
        checkpoint = ucp.open(folder, sizes={"ranks": there})
        read = checkpoint.read
        assert there < ranks or all(same_bits(read(f"param/{n}"), tensors[n]) for n in used)
        return
    assert all(same_bits(checkpoint.read(f"param/{name}"), tensors[name]) for name in used)


@pytest.mark.parametrize(
    ("tensors", "config", "is_shown"),
    [
        ({"w": (8, 6)}, {}, False),
        ({"w": (7, 6)}, {}, True),
        ({"w": (8, 6), "b": (5,)}, {}, True),
        ({"model.norm.weight": (8,), "model.embed_tokens.weight": (12, 8)}, {}, True),
        ({"norm.weight": (8,), "layers.0.attention.wq.weight": (16, 8)}, {}, True),
        ({"model.norm.weight": (8,), "w": (12, 8)}, {}, False),
        ({"model.norm.weight": (8,), "w": (12, 8)}, {"hidden_size": 8}, True),
        ({"model.norm.weight": (8,), "w": (12, 8)}, {"hidden_size": 16}, False),
        ({"model.embed_tokens.weight": (12, 4)}, {"vocab_size": 12, "hidden_size": 4}, False),
    ],
)  # fmt: skip
def test_what_shows_that_no_rank_is_missing(tmp_path, tensors, config, is_shown):
    chunked(tmp_path, 2, {name: np.zeros(shape, np.uint8) for name, shape in tensors.items()})
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if is_shown:
        assert {n: leaf.shape for n, leaf in ucp.open(tmp_path).params.items()} == tensors
    else:
        with pytest.raises(FormatError, match=r"a file may be missing: .*--size ranks=2"):
            ucp.open(tmp_path)


def test_an_embedding_shorter_than_its_config_says_has_lost_a_rank(tmp_path):
    chunked(tmp_path, 4, {"model.embed_tokens.weight": np.zeros((12, 4), np.uint8)})
    (tmp_path / of_rank(4)).unlink()
    (tmp_path / "config.json").write_text('{"vocab_size": 12}')
    with pytest.raises(FormatError, match=r"ends at row 9, and config\.json says 12"):
        ucp.open(tmp_path)


def test_a_rank_of_any_number_takes_no_time(tmp_path):
    parts(tmp_path / of_rank(10**12), w=([0, 0], np.zeros((2, 1), np.uint8)))
    with pytest.raises(FormatError, match="that of rank 1 is not there"):
        ucp.open(tmp_path)


def test_other_files_of_the_folder_are_accounted_for_and_other_weights_noted(tmp_path):
    folder = Path(shutil.copytree(DATA / "hf_gpt2" / "ckpt", tmp_path / "c"))
    write(folder / "old.safetensors", {"w": entry(0, 4, [4])}, b"1234")
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = ucp.open(folder)
    (note,) = checkpoint.notes
    assert note == f"not read: old.safetensors: weights under another name; {INDEX} is read"
    assert {"old.safetensors", "tokenizer.json"} <= {item.where for item in checkpoint.inventory}
    assert_accounted_for(checkpoint)
