"""Real torch_dist and zarr checkpoints of Megatron, against the live processes."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from cases import CORRUPTED, Case, names_of
from cases import DATA as CASES_DATA
from helpers import in_lanes
from jax_ucp.errors import CorruptData, FormatError, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.formats.dcp.source import DcpSource
from jax_ucp.layout.box import Box

_OTHERS = ("legacy_", "torch_dcp_", "fsdp_dtensor_")
DATA = CASES_DATA / "megatron"
EVERY = [case for case in names_of("megatron") if not case.startswith(_OTHERS)]
CASES = [case for case in EVERY if case != CORRUPTED]
CHUNKED = [case for case in CASES if "zarr" not in case]


def folder_of(case: str) -> Path:
    return DATA / case / "ckpt" / "iter_0000003"


def wrong(case: str, checkpoint: ucp.Checkpoint) -> list[str]:
    return Case(f"megatron/{case}").wrong(checkpoint)


def open_verified(folder: Path) -> ucp.Checkpoint:
    checkpoint = ucp.open(folder, sizes={"vocab": 101})
    for _, fault in checkpoint.verify():
        if fault:
            raise CorruptData(fault)
    return checkpoint


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


NEWER = CASES_DATA / "megatron_core" / "mla"  # has no common.pt


@pytest.mark.parametrize("common", [True, False], ids=["common.pt", "keys alone"])
@pytest.mark.parametrize("config", [None, b"", b'{"sharded_back', b"[]"])
@pytest.mark.parametrize(
    "case", [DATA / "dist_tp2_pp1_bf16", NEWER, DATA / "old0153_tp2_zarr_fp32"]
)
def test_a_lost_or_cut_config_is_named_and_put_back_as_said(case, config, common, tmp_path):
    shutil.copytree(case / "ckpt", tmp_path / "ckpt")
    (folder,) = (tmp_path / "ckpt").glob("iter_*")
    labels = set(ucp.open(folder))
    path = folder / "metadata.json"
    path.unlink() if config is None else path.write_bytes(config)
    if not common:
        (folder / "common.pt").unlink(missing_ok=True)
    for at in (folder, folder.parent):
        with pytest.raises(FormatError, match=re.escape(str(path))) as caught:
            ucp.open(at)
    if common or case == NEWER:
        path.write_text(re.search(r"write (\{.*\}) into it", str(caught.value))[1])
        assert set(ucp.open(folder)) == labels


def test_weights_of_nemo_that_lost_their_config_are_not_sent_elsewhere(tmp_path):
    shutil.copytree(NEWER / "ckpt" / "iter_0000003", tmp_path / "run" / "weights")
    path = tmp_path / "run" / "weights" / "metadata.json"
    path.unlink()
    for at in (tmp_path / "run", path.parent):
        with pytest.raises(FormatError, match=re.escape(str(path))):
            ucp.open(at)


@pytest.mark.parametrize("case", in_lanes([(case,) for case in CHUNKED]))
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_of_the_metadata_is_refused_or_changes_nothing(tmp_path, case, place, bit):
    folder = tmp_path / "iter_0000003"
    if not folder.exists():
        shutil.copytree(folder_of(case), folder)
    data = bytearray((folder_of(case) / ".metadata").read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (folder / ".metadata").write_bytes(data)
    with suppress(UCPError):
        assert wrong(case, open_verified(folder)) == []


def test_state_of_a_writer_that_does_not_move_it_is_read(megatron_copy):
    """The corrupted case with masters and moments as a writer without the defect stores them."""
    folder, name = megatron_copy(CORRUPTED), "embedding.word_embeddings.weight"
    padding = ucp.open(folder, weights_only=True).read(f"param/{name}")[101:].tobytes()
    truth = Case(f"megatron/{CORRUPTED}").truth()
    source = DcpSource(read_metadata(file_path(folder)))
    for state in ("param", "exp_avg", "exp_avg_sq"):
        (key,) = [key for key in source.arrays() if f":optimizer.state.{state}.{name}@" in key]
        stored = source.read(key, Box.whole(source.arrays()[key].shape)).tobytes()
        path = folder / key.partition(":")[0]
        right = truth[f"{state}/{name}"].tobytes() + padding
        path.write_bytes(path.read_bytes().replace(stored, right))
    assert wrong(CORRUPTED, ucp.open(folder, sizes={"vocab": 101})) == []
