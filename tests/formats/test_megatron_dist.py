"""Real torch_dist and zarr checkpoints of Megatron, against the state taken from the live processes before the save."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ucp as ucp
from jax_ucp.errors import CorruptData, FormatError, UCPError
from jax_ucp.formats.dcp_metadata import read_metadata
from jax_ucp.formats.dcp_source import DcpSource
from jax_ucp.layout.box import Box
from jax_ucp.storage.consolidated import same_bits
from megatron_cases import DATA, about, equal, flat, truth

CORRUPTED = "dist_pp2_dp2_distopt_buckets_fully_reshardable_fp32"
EVERY = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("dist_", "old0153_")))
CASES = [case for case in EVERY if case != CORRUPTED]
CHUNKED = [case for case in CASES if "zarr" not in case]
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
RULES = [(r"(linear_.*|router)\.weight$", P("data", "model"))]


def folder_of(case: str) -> Path:
    return DATA / case / "ckpt" / "iter_0000003"


def differences(checkpoint: ucp.Checkpoint, want: dict[str, np.ndarray]) -> list[str]:
    labels = {leaf.label for leaf in checkpoint.leaves}
    return sorted(labels ^ set(want)) or [x for x in want if not equal(checkpoint.read(x), want[x], x)]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_moment_equals_the_live_state_however_it_is_read(case, tmp_path):
    want = truth(case)
    checkpoint = ucp.open(DATA / case / "ckpt", sizes={"vocab": about(case)["model"]["vocab_size"]})
    assert checkpoint.format == "megatron"
    assert differences(checkpoint, want) == []
    straight = flat(checkpoint.restore(mesh=MESH, rules=RULES))
    converted = checkpoint.save(tmp_path / "converted")  # which verifies first
    kept = flat(converted.restore(mesh=MESH, rules=RULES))
    for label, array in want.items():
        assert equal(straight[label], array, label), label
        assert equal(kept[label], array, label), label
    qkv = straight["param/decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv.sharding.spec == P("data", "model")
    assert converted.extras == checkpoint.extras


@pytest.mark.parametrize("case", CASES)
def test_any_box_equals_that_of_the_whole(case):
    checkpoint, want = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101}), truth(case)
    for label, array in want.items():
        box = Box(tuple(n // 3 for n in array.shape), tuple(n // 3 + (n + 1) // 2 for n in array.shape))
        assert equal(checkpoint.read(label, box), array[box.index], label), label


@pytest.mark.parametrize("case", CASES)
def test_where_says_which_stored_elements_a_parameter_is_made_of(case):
    checkpoint = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101})
    folder = Path(checkpoint.path)
    if case in CHUNKED:
        metadata = read_metadata(folder)
        source, spans = DcpSource(metadata), dict(metadata.objects)

    def stored(piece) -> np.ndarray:
        if case not in CHUNKED:
            shape = json.loads((folder / piece.file).with_name(".zarray").read_text())["chunks"]
            return np.fromfile(folder / piece.file, np.float32).reshape(shape)
        key = f"{piece.file}:{piece.item}"
        if key in source.arrays():
            return source.read(key, Box.whole(source.arrays()[key].shape))
        fqn, _, tensor = piece.item.partition(":")
        file = source.object(fqn, spans[fqn][0])
        return file.read(tensor, Box.whole(file.arrays()[tensor].shape))

    for label, array in truth(case).items():
        out = np.full(array.shape, np.nan, np.float32)
        for piece in checkpoint.where(label) if not label.startswith("step/") else ():
            data = stored(piece)
            part = (data.ravel() if piece.source.ndim == 1 else data)[piece.source.index]
            out[piece.target.index] = part.reshape(piece.target.shape)
        assert label.startswith("step/") or same_bits(out, array), label


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.parametrize("weights_only", [False, True])
def test_everything_stored_is_accounted_for_once_with_a_reason(case, weights_only):
    if case == CORRUPTED and not weights_only:
        return
    checkpoint = ucp.open(DATA / case / "ckpt", weights_only=weights_only)
    account = {item.where: item for item in checkpoint.account}
    assert len(account) == len(checkpoint.account)
    assert all(item.reason and item.reason != "not understood" for item in checkpoint.account)
    folder = Path(checkpoint.path)
    for path in folder.iterdir():
        assert [where for where in account if where.startswith(path.name)], path.name
    if case in CHUNKED:
        metadata = read_metadata(folder)
        assert {f"{span.file}:{fqn}" for fqn, (span,) in metadata.objects.items()} <= {
            where if where in account else where for where in account
        } | {where.rpartition(":")[0] for where in account}
        assert set(DcpSource(metadata).arrays()) <= set(account)


@pytest.mark.parametrize("case", CASES)
def test_without_a_vocabulary_the_padded_rows_stay_and_a_note_says_so(case):
    checkpoint = ucp.open(DATA / case / "ckpt")
    (note,) = checkpoint.notes
    padded = about(case)["model"]["padded_vocab_size"]
    assert f"all {padded} padded rows" in note
    want = truth(case)
    for label in ("param/embedding.word_embeddings.weight", "exp_avg/embedding.word_embeddings.weight"):
        array = checkpoint.read(label)
        assert array.shape[0] == padded
        np.testing.assert_array_equal(array[:101], want[label])


@pytest.mark.parametrize("case", EVERY)
def test_weights_alone_are_the_models_weights_and_nothing_of_the_optimizer(case):
    checkpoint, want = ucp.open(DATA / case / "ckpt", sizes={"vocab": 101}, weights_only=True), truth(case)
    assert {leaf.label for leaf in checkpoint.leaves} == {label for label in want if label.startswith("param/")}
    for param in checkpoint.params.values():
        assert same_bits(param.read(), want[f"param/{param.name}"].astype(param.dtype)), param.name
    assert [fault for _, fault in checkpoint.verify() if fault] == []


def test_extras_keep_what_the_run_put_beside_the_model():
    extras = ucp.open(DATA / "dist_tp2_dp2_distopt_dp_reshardable_bf16" / "ckpt").extras
    common = extras["common.pt"]
    assert common["iteration"] == 3
    assert common["opt_param_scheduler"]["num_steps"] == 24
    assert common["args"]["fields"]["hidden_size"] == 32
    found = {name: value for file in extras.values() for name, value in file.items()}
    assert found["rng_state/shard_0.1_1.2"][0]["torch_rng_state"]["dtype"] == "uint8"
    groups = found["optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    json.dumps(extras)


def test_the_save_directory_and_the_iteration_folder_are_the_same_checkpoint():
    for case in ("dist_tp1_pp1_fp32", "old0153_tp2_zarr_fp32"):
        assert ucp.open(DATA / case / "ckpt").path == ucp.open(folder_of(case)).path


def test_state_that_the_writer_moved_is_refused_and_its_weights_are_right():
    with pytest.raises(CorruptData) as caught:
        ucp.open(DATA / CORRUPTED / "ckpt")
    for part in ("embedding.word_embeddings.weight", "[103:104, 0:32]", "behind 64 elements", "5077", "weights_only"):
        assert part in str(caught.value)


@pytest.fixture
def copy_of(tmp_path):
    def make(case: str) -> Path:
        shutil.copytree(DATA / case / "ckpt", tmp_path / case)
        return tmp_path / case / "iter_0000003"

    return make


def swap(folder: Path, a: str, b: str) -> None:
    (folder / a).rename(folder / "aside")
    (folder / b).rename(folder / a)
    (folder / "aside").rename(folder / b)


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_is_missing_or_truncated_is_named(copy_of, case):
    folder = copy_of(case)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "metadata.json")
    for path in files if case in CHUNKED else files[:: len(files) // 12]:
        name = path.name if case in CHUNKED or path.name == "common.pt" else f"{path.parent.name}/{path.name}"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
        with pytest.raises(FormatError) as caught:
            assert not [fault for _, fault in ucp.open(folder).verify() if fault]
        assert name in str(caught.value)
        path.unlink()
        if path.name in (".metadata", ".zarray") or (path.suffix == ".pt" and path.name != "common.pt"):
            with pytest.raises(UCPError):
                assert not [fault for _, fault in ucp.open(folder).verify() if fault]
        else:
            with pytest.raises(FormatError, match="is missing") as caught:
                ucp.open(folder)
            assert name in str(caught.value)
        path.write_bytes(whole)
