"""Checkpoints that PyTorch's DCP wrote, against the state of the live processes."""

import shutil

import numpy as np
import pytest

import jax_ucp as ucp
from cases import DATA as CASES_DATA
from cases import Case
from jax_ucp.errors import FormatError
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.marks import metadata_files

DATA = CASES_DATA / "torch"
# Their state dicts had no paths: torch 1.13 took flat ones only, and flatten_state_dict=False
# leaves them as they are.
FLAT = ("old_v1131", "dcp_noflatten")
CASES = sorted(path.parent.name for path in DATA.glob("*/ckpt") if metadata_files(file_path(path)))


@pytest.mark.parametrize("case", CASES)
def test_where_no_paths_were_recorded_a_note_says_so(case):
    notes = ucp.open(DATA / case / "ckpt").notes
    assert any("no paths were recorded" in note for note in notes) == (case in FLAT)


def test_objects_are_extras_with_their_values():
    for case in CASES:
        extras = ucp.open(DATA / case / "ckpt").extras.values()
        kept = {name: value for file in extras for name, value in file.items()}
        for name, value in Case(f"torch/{case}").about.get("objects", {}).items():
            if case != "dcp_objects":
                assert kept[name] == value, name
    files = ucp.open(DATA / "dcp_objects" / "ckpt").extras.values()
    kept = {name: value for file in files for name, value in file.items()}
    plain = Case("torch/dcp_objects").about["objects"]
    special = {
        "o.big_int": 2**80,
        "o.bytes": {"!bytes": "AAH/"},
        "o.dtype": {"!dtype": "bfloat16"},
        "o.nested.tup": {
            "!tuple": [{"!array": "AAAAAAAAAAAAAAAA", "dtype": "float32", "shape": [3]}, 4]
        },
        "o.size": {"!tuple": [1, 2]},
    }
    assert kept == {**plain, **special}


def test_a_slice_of_a_parameter_opens_only_the_items_that_hold_it(tmp_path):
    folder = DATA / "dcp_file_per_item" / "ckpt"
    checkpoint = ucp.open(folder)
    param = checkpoint.params["output.weight"]
    first, second = param.where()
    assert first.file != second.file
    damaged = tmp_path / "c"
    shutil.copytree(folder, damaged)
    (damaged / second.file).write_bytes(b"\0" * (damaged / second.file).stat().st_size)
    param = ucp.open(damaged).params["output.weight"]
    want = Case("torch/dcp_file_per_item").truth()["param/output.weight"]
    np.testing.assert_array_equal(param.read(box=first.target), want[first.target.index])
    with pytest.raises(FormatError, match=second.file):
        param.read(box=second.target)
