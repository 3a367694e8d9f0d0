"""What is called a master need not be one: a remainder is joined with its weight; an integer, or
fewer digits than the weight has, is refused with the reason, and the weights open without it.
"""

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_ucp as ucp
from helpers import MemoryStore, faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.arrays.remainders import Halves
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.formats.assemble import ContentsBuilder
from jax_ucp.layout.box import Box
from torch_writer import change, rewrite

DATA = Path(__file__).parents[2] / "data"
PRECISION_AWARE = ("te_pa_default_fr", "te_pa_default_dpr", "te_pa_fp16_dpr")


def rounded_half_up(masters: np.ndarray) -> np.ndarray:
    """As TransformerEngine makes bfloat16 weights of masters that it keeps in two halves."""
    bits = masters.view(np.uint32).astype(np.uint64) + (1 << 15)
    return (bits >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("case", PRECISION_AWARE)
def test_masters_of_a_precision_aware_optimizer_are_joined_with_the_weights(case):
    """In flat buffers remainders are int16, put together they are widened to fp32; masters may
    be fp16 too, and then differ in the last digit.
    """
    folder = DATA / "masters" / case
    restored = ucp.open(folder / "ckpt", sizes={"vocab": 101}).restore(verify="full")
    with np.load(folder / "weights.npz") as weights:
        assert restored["param"].keys() == restored["exp_avg"].keys() == set(weights.files)
        for name, master in restored["param"].items():
            assert master.dtype == np.float32
            weight = weights[name]
            if "fp16" in case:
                np.testing.assert_allclose(master, weight, rtol=2**-7)
            else:
                assert same_bits(rounded_half_up(master).astype(np.float32), weight), name
                assert np.any(master != weight), name


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1))
def test_halves_of_any_32_bits_are_joined_to_them(bits):
    masters = np.array(bits, np.uint32).view(np.float32)
    remainders = masters.view(np.uint32).astype(np.uint16).view(np.int16)
    for low in (remainders, remainders.astype(np.float32)):
        parts = {"weights": rounded_half_up(masters), "low": low}
        assert same_bits(Halves().values(Box.whole(masters.shape), parts), masters)


def test_widened_remainders_that_are_no_whole_numbers_are_refused(tmp_path):
    low = np.array([1.0, -32768.0, 0.0, 0.5], np.float32)
    stored = MemoryStore({"f:low": low, "f:weight": low.astype(ml_dtypes.bfloat16)})
    opened = ContentsBuilder("test", tmp_path, stored)
    opened.remainders("w", opened.array("f:low"), opened.array("f:weight"), "halves")
    faults = [check.run() for check in opened.contents().checks("sample")]
    assert [fault for fault in faults if fault and "not whole numbers of 16 bits" in fault]


@pytest.mark.parametrize("case", PRECISION_AWARE)
def test_the_weights_of_such_a_run_are_right(case):
    folder = DATA / "masters" / case
    checkpoint = ucp.open(folder / "ckpt", weights_only=True, sizes={"vocab": 101})
    restored = checkpoint.restore()["param"]
    with np.load(folder / "weights.npz") as weights:
        assert restored.keys() == set(weights.files)
        for name, array in restored.items():
            assert array.dtype == ml_dtypes.bfloat16
            assert same_bits(array.astype(np.float32), weights[name]), name
    assert faults_of(checkpoint) == []


@pytest.fixture
def with_remainders(tmp_path: Path) -> Path:
    """A legacy checkpoint with TransformerEngine's masters: the 16 bits that bf16 lacks."""
    folder = tmp_path / "case"
    shutil.copytree(DATA / "megatron/legacy_tp2_dp2_distopt_bf16/ckpt", folder)

    def remainder(master: np.ndarray) -> None:
        master[...] = (master.view(np.uint32) & 0xFFFF).astype(np.uint16).view(np.int16)

    for path in folder.rglob("distrib_optim.pt"):
        change(path, {key: remainder for key in TorchFile(path).arrays() if key.endswith("/param")})
    return folder


def test_remainders_are_joined_where_the_args_tell_of_them(with_remainders):
    def told(name: str, data: bytes) -> bytes:
        pattern = rb"(use_precision_aware_optimizer(?:q.|r....))\x89"
        if not name.endswith("data.pkl"):
            return data
        return re.sub(pattern, lambda found: found[1] + b"\x88", data, flags=re.DOTALL)

    for path in with_remainders.rglob("model_optim_rng.pt"):
        rewrite(path, told)
    assert ucp.open(with_remainders).restore()["param"]
    assert ucp.open(with_remainders, weights_only=True).restore()["param"]


def test_remainders_are_named_where_no_args_tell_of_them(with_remainders):
    with pytest.raises(CorruptData, match=r"whole numbers.*store_param_remainders.*weights_only"):
        ucp.open(with_remainders).restore()


def found(master: np.dtype, copy: np.dtype, folder: Path, on_conflict=None) -> ContentsBuilder:
    """A parameter of four numbers, with a master and a copy of these dtypes."""
    values = np.array([0, 1, 2, 4])
    stored = MemoryStore({"optim:master": values.astype(master), "model:copy": values.astype(copy)})
    found = ContentsBuilder("test", folder, stored, on_conflict)
    found.parameter("param", "w", found.array("optim:master"), "the master")
    found.duplicate("param", "w", found.array("model:copy"), "its copy")
    return found


MASTERS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16"), ("float64", "float32"),
    ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("int32", "int32"), ("int64", "int32"),
]  # fmt: skip
NO_MASTERS = [
    ("int16", "bfloat16"), ("uint16", "float16"), ("int32", "float32"), ("float16", "bfloat16"),
    ("bfloat16", "float16"), ("bfloat16", "float32"), ("float16", "float32"), ("float8_e4m3fn", "bfloat16"),
    ("uint8", "float8_e5m2"), ("bool", "float32"),
]  # fmt: skip


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize(("master", "copy"), MASTERS)
def test_a_master_that_holds_every_value_of_its_copy_is_one(tmp_path, master, copy):
    contents = found(dtype(master), dtype(copy), tmp_path).contents()
    assert contents.leaves[0].dtype == master
    assert [check.run() for check in contents.checks("sample")] == [None]
    assert contents.arrays.read(contents.leaves[0].name, Box.whole((4,))).dtype == dtype(master)


@pytest.mark.parametrize(("master", "copy"), NO_MASTERS)
def test_an_integer_or_what_is_narrower_than_its_copy_is_no_master(tmp_path, master, copy):
    words = (
        rf"optim:master has dtype {master}, which cannot be a master of the {copy} at model:copy"
    )
    for on_conflict in (None, "master"):
        with pytest.raises(FormatError, match=words):
            found(dtype(master), dtype(copy), tmp_path, on_conflict).contents()
    (leaf,) = found(dtype(master), dtype(copy), tmp_path, "copy").contents().leaves
    assert leaf.dtype == copy
