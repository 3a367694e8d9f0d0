"""`checkpoint[label]` is the array as numpy would index it, and reads no more than it must."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import jax_ucp as ucp
from helpers import contents_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.checkpoint import Checkpoint
from jax_ucp.errors import CorruptData, QuantizedWeights
from jax_ucp.layout.box import Box

SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


def array_of(shape, dtype=np.int32) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def lazy(array: np.ndarray):
    return Checkpoint(contents_of({"param": {"w": array}}))["param/w"]


@given(st.data(), SHAPES, st.sampled_from([np.int32, np.float16, ml_dtypes.bfloat16, np.bool_]))
def test_it_is_indexed_as_numpy_indexes(data, shape, dtype):
    array = array_of(shape, dtype)
    index = data.draw(st_numpy.basic_indices(shape, allow_newaxis=False))
    got = lazy(array)[index]
    assert type(got) is type(array[index])
    assert same_bits(np.asarray(got), np.asarray(array[index]))


@given(st.data(), st_numpy.array_shapes(max_dims=3, max_side=5))
def test_what_numpy_refuses_is_refused_alike(data, shape):
    integers = st.integers(-7, 7) | st.sampled_from([slice(None), slice(1, None), ...])
    index = tuple(data.draw(st.lists(integers, max_size=5)))
    array = array_of(shape)
    try:
        want = array[index]
    except IndexError:
        with pytest.raises(IndexError, match=r"param/w"):
            lazy(array)[index]
    else:
        assert same_bits(np.asarray(lazy(array)[index]), np.asarray(want))


@pytest.mark.parametrize(
    "index", [None, True, 1.0, [0, 1], "a", np.array([True, False]), (0, None)]
)
def test_an_index_that_is_no_int_and_no_slice_is_refused(index):
    with pytest.raises(TypeError, match=r"param/w is indexed by ints, slices and `\.\.\.`, not"):
        lazy(array_of((2, 3)))[index]


def test_a_step_of_zero_is_refused():
    with pytest.raises(ValueError, match="zero"):
        lazy(array_of((2, 3)))[::0]


def test_it_says_its_shape_and_reads_nothing_for_it():
    contents = contents_of({"param": {"w": array_of((2, 3)), "s": array_of(())}})
    contents.arrays.read = None
    array = Checkpoint(contents)["param/w"]
    assert (array.shape, array.dtype, array.ndim, len(array)) == ((2, 3), np.int32, 2, 2)
    assert repr(array) == "<array param/w: int32 [2, 3]>"
    with pytest.raises(TypeError, match="scalar"):
        len(Checkpoint(contents)["param/s"])


def test_only_the_box_around_the_elements_is_read():
    contents = contents_of({"param": {"w": array_of((10, 6))}})
    boxes, read = [], contents.arrays.read

    def recorded(key, box):
        boxes.append(box)
        return read(key, box)

    contents.arrays.read = recorded
    Checkpoint(contents)["param/w"][2:9:3, -1]
    assert boxes == [Box((2, 5), (9, 6))]


def test_it_is_an_array_for_numpy():
    want = array_of((3, 4))
    array = lazy(want)
    assert same_bits(np.asarray(array), want)
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(array, copy=False)


def test_a_copy_is_the_readers_own():
    checkpoint = Checkpoint.of({"w": array_of((3, 4))})
    mine = np.array(checkpoint["w"])
    mine[:] = 0
    assert same_bits(checkpoint.read("w"), array_of((3, 4)))


def test_reads_are_proved_and_refuse_what_read_refuses(monkeypatch):
    checkpoint = Checkpoint(contents_of({"param": {"w": array_of((3, 4))}}))

    def differs(leaf, box):
        raise CorruptData("stored twice, and differs")

    monkeypatch.setattr(checkpoint._reads, "read", differs)
    with pytest.raises(CorruptData, match="stored twice"):
        checkpoint["param/w"][0]

    def is_code(contents, leaves):
        raise QuantizedWeights(f"{leaves[0].label} is a code")

    monkeypatch.setattr("jax_ucp.checkpoint.checkpoint.require_values", is_code)
    for read in (lambda array: array[0], np.asarray, lambda array: array[:0]):
        with pytest.raises(QuantizedWeights, match="param/w is a code"):
            read(checkpoint["param/w"])


def test_a_label_that_is_not_there_is_refused_with_those_near_it():
    names = {"layers.0.weight": array_of((2,)), "layers.1.weight": array_of((2,))}
    checkpoint = Checkpoint(contents_of({"param": names}))
    with pytest.raises(KeyError, match=r"has 0 arrays 'param/layers.1.wieght'; perhaps 'param/lay"):
        checkpoint["param/layers.1.wieght"]
    with pytest.raises(KeyError, match=r"has 0 arrays 'zzz'\""):
        checkpoint["zzz"]


def test_a_checkpoint_is_iterated_by_labels():
    checkpoint = Checkpoint.of({"a": {"b": array_of(())}, "a/b": array_of(()), "c": array_of(())})
    assert list(checkpoint) == ["c"]
    assert "c" in checkpoint
    assert "a/b" not in checkpoint
    assert 0 not in checkpoint


def test_parameters_are_collected_once():
    checkpoint = Checkpoint(contents_of({"param": {"w": array_of((2,))}}))
    assert checkpoint.params is checkpoint.params


def test_it_is_read_from_a_saved_checkpoint(tmp_path):
    want = {"w": array_of((300, 7), np.float32)}
    checkpoint = Checkpoint.of(want).save(tmp_path / "c")
    assert same_bits(ucp.open(tmp_path / "c")["w"][5:100:7, ::-2], want["w"][5:100:7, ::-2])
    assert same_bits(np.asarray(checkpoint["w"]), want["w"])
    assert checkpoint["w"][3:3, 1].shape == (0,)
