"""Files of Equinox open as lists of leaves; what is no leaf as Equinox writes one is refused.

`tests/generators/equinox_files.py` writes the cases, of which `tests/test_every_case.py` compares the bits.
"""

import io
import re

import ml_dtypes
import numpy as np
import pytest

import jax_ucp as ucp
from cases import Case, flat
from jax_ucp.errors import CorruptData, FormatError, NotACheckpoint

TRAINING = Case("jax/equinox0138-training")
pytestmark = pytest.mark.fast


def saved(*arrays) -> bytes:
    out = io.BytesIO()
    for array in arrays:
        np.save(out, array)
    return out.getvalue()


@pytest.fixture
def opened(tmp_path):
    def open_bytes(data: bytes) -> ucp.Checkpoint:
        (tmp_path / "m.eqx").write_bytes(data)
        return ucp.open(tmp_path / "m.eqx")

    return open_bytes


def test_the_line_of_json_is_an_extra_and_the_leaves_a_list():
    checkpoint = Case("jax/equinox0138-mlp").open()
    sizes = {"in_size": 3, "out_size": 2, "width_size": 5, "depth": 2}
    assert checkpoint.extras["model.eqx"] == {"hyperparameters": sizes}
    restored = checkpoint.restore()
    assert [x.shape for x in restored] == [(5, 3), (5,), (5, 5), (5,), (2, 5), (2,)]


@pytest.mark.parametrize("said", ["[64, 2]", "null", '"text"', '{"lr": NaN, "least": -Infinity}'])
def test_whatever_the_line_says_comes_through_a_conversion(opened, tmp_path, said):
    checkpoint = opened(said.encode() + b"\n" + saved(np.float32(1)))
    converted = checkpoint.save(tmp_path / "converted")
    assert converted.extras == checkpoint.extras != {}
    assert None not in flat(converted.extras).values() or said == "null"


def test_a_line_that_says_a_thing_twice_is_refused(opened):
    with pytest.raises(FormatError, match="begins neither with a leaf nor with JSON"):
        opened(b'{"a": 1, "a": 2}\n' + saved(np.float32(1)))


def test_a_folder_points_at_the_file_in_it(opened, tmp_path):
    opened(saved(np.float32(1)))
    with pytest.raises(NotACheckpoint, match=r"holds m\.eqx: open one"):
        ucp.open(tmp_path)


def test_leaves_restore_into_those_of_a_model(opened):
    truth = TRAINING.truth()
    target = [np.zeros_like(truth[str(i)]) for i in range(len(truth))]
    restored = TRAINING.open().restore(target)
    assert TRAINING.differing(dict(zip(map(str, range(len(truth))), restored, strict=True))) == []


def test_a_cut_within_a_leaf_is_seen(opened):
    data = TRAINING.path.read_bytes()
    # a file cut between two leaves is one of fewer leaves: nothing in it says how many there are
    between = [found.start() for found in re.finditer(b"\x93NUMPY", data)]
    assert len(between) == len(TRAINING.truth())
    beside = {n + d for n in between for d in (-1, 0, 1)}
    for at in {*range(1, len(data), 7), *beside} - {0, -1}:
        whole = sum(n < at for n in between)
        if at in between:
            assert len(opened(data[:at]).leaves) == whole
        else:
            with pytest.raises(CorruptData, match=f"m.eqx.*ends within leaf {whole - 1}:"):
                opened(data[:at])


def test_what_is_no_array_of_numbers_is_refused(opened):
    number = saved(np.float32(1))
    others = [
        saved(np.array([{}], object)),
        saved(np.zeros(2, [("a", "f4")])),
        saved(np.array(["text"])),
        saved(np.zeros(2, ml_dtypes.float8_e4m3fn)),
        saved(np.zeros(2, ">f4")),
        b"\x93NUMPY\x02\x00" + number[8:],
        number.replace(b"()", b"(,)", 1),
        b"\x80\x04K\x01.",
    ]
    for other in others:
        with pytest.raises(FormatError, match=re.escape(f"leaf 1, at byte {len(number)}")):
            opened(number + other)


def test_shapes_beyond_any_array_are_refused(opened):
    text = b"{'descr': '|i1', 'fortran_order': False, 'shape': (0, 9999999999, 9999999999), }\n"
    with pytest.raises(FormatError, match="leaf 0"):
        opened(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def test_a_file_that_begins_with_neither_is_refused(opened):
    for data in (b"{'a': 1}\n", b"PK\x03\x04", b"{"):
        with pytest.raises(FormatError, match="begins neither with a leaf nor with JSON"):
            opened(data)
    with pytest.raises(FormatError, match="has no leaves"):
        opened(b"{}\n")
