"""The format of torch.save before torch 1.6: files made by hand, and damaged ones."""

import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import boxes_in
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs import torch_legacy as torch_legacy
from jax_ucp.codecs.torch_file import TorchFile, is_torch_file
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.files.path import file_path
from jax_ucp.layout.box import Box
from torch_writer import Global, Storage, Tensor, legacy

ARRAYS = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]),
    st.integers(0, 99),
)
TREES = st.recursive(
    ARRAYS | st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=4) | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "old.pt"
    path.write_bytes(data)
    return path


def read(file: TorchFile, node: object) -> object:
    """The tree with arrays in place of its tensors."""
    if isinstance(node, dict):
        return {key: read(file, value) for key, value in node.items()}
    if isinstance(node, list):
        return [read(file, value) for value in node]
    return file.read(node.key, Box.whole(node.shape)) if hasattr(node, "storage") else node


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return same_bits(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else a == b


@given(TREES, st.integers(2, 5))
def test_any_object_is_read_back_equal_at_any_protocol(tree, protocol):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), legacy(tree, protocol))
        assert is_torch_file(file_path(path))
        file = TorchFile(path)
        assert same(read(file, file.tree), tree)


WHOLE = np.arange(24, dtype=np.float32)


@given(st.data())
def test_a_view_of_a_storage_is_that_part_of_it(data):
    first = data.draw(st.integers(0, 20))
    length = data.draw(st.integers(4, 24 - first))
    part, all_of_it = Storage("7", WHOLE, (first, length)), Storage("7", WHOLE)
    tree = {"part": Tensor(part, 0, (2, 2), (2, 1)), "all": Tensor(all_of_it, 0, (4, 6), (6, 1))}
    with tempfile.TemporaryDirectory() as folder:
        file = TorchFile(write(Path(folder), legacy(tree)))
        part = file.read("part", Box.whole((2, 2))).ravel()
        np.testing.assert_array_equal(part, WHOLE[first : first + 4])
        box = data.draw(boxes_in((4, 6)))
        np.testing.assert_array_equal(file.read("all", box), WHOLE.reshape(4, 6)[box.index])


def test_a_file_inside_another_is_read_from_its_own_start(tmp_path):
    inner = legacy({"w": WHOLE})
    path = write(tmp_path, b"before" + inner + b"after")
    file = TorchFile(path, offset=6, length=len(inner))
    np.testing.assert_array_equal(file.read("w", Box.whole((24,))), WHOLE)


def test_a_file_that_ends_too_soon_or_too_late_is_refused(tmp_path):
    data = legacy({"w": WHOLE})
    with pytest.raises(CorruptData, match=r"old\.pt: storage '\d+' runs past the end .* truncated"):
        TorchFile(write(tmp_path, data[:-1]))
    with pytest.raises(CorruptData, match=r"old\.pt: 1 bytes follow the last storage"):
        TorchFile(write(tmp_path, data + b"x"))


def tensor(view: tuple | None = None, numel: int = 4) -> Tensor:
    return Tensor(Storage("7", WHOLE, view), 0, (numel,), (1,))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("data", "message"), [
    (legacy({}, version=1002), "its protocol is 1002, not 1001"),
    (legacy(tensor(), keys=[]), "does not name just those that the object has"),
    (legacy(tensor(), keys=["7", "7"]), "does not name just those"),
    (legacy(tensor(), keys=["7", "8"]), "does not name just those"),
    (legacy(tensor(), keys={"7": 1}), "is not a list of keys"),
    (legacy(tensor(), keys=[7]), "is not a list of keys"),
    (legacy(tensor((20, 5))), r"\('7 view', 20, 5\) is not part of storage '7' of 24 elements"),
    (legacy(tensor((-1, 5))), "is not part of storage '7'"),
    (legacy(tensor((0, 3))), "its view reaches element 3 of storage '7\\[0:3\\]', which has 3"),
    (legacy(tensor(numel=25)), "its view reaches element 24 of storage '7', which has 24"),
    (legacy([tensor(), Tensor(Storage("7", WHOLE[:6]), 0, (1,), (1,))]),
     "24 elements of .* and 6 of .* at once"),
    (legacy(Global("os", "system")), "asks for 'os.system'"),
    (legacy([tensor()]).replace(b"FloatStorage", b"QInt8Storage"), "has no numpy dtype, so where"),
])  # fmt: skip
def test_what_the_format_does_not_have_is_refused(tmp_path, data, message):
    with pytest.raises(FormatError, match=rf"(?s)old\.pt: .*{message}"):
        TorchFile(write(tmp_path, data))


def test_numbers_of_elements_are_believed_only_if_the_file_has_them(tmp_path):
    data = legacy(tensor())
    at = len(data) - 24 * 4 - 8
    for said in (0, 23, 25, 1 << 62, (1 << 64) - 1):
        with pytest.raises(CorruptData, match="storage '7' should be 24 elements, but the file"):
            TorchFile(write(tmp_path, data[:at] + said.to_bytes(8, "little") + data[at + 8 :]))


def test_a_pickle_cannot_take_more_memory_than_pickles_may(tmp_path, monkeypatch):
    """A file of gigabytes may hold a text as long as itself; it is refused before it is copied."""
    monkeypatch.setattr(torch_legacy, "MAX_PICKLE_BYTES", 1 << 16)
    head = legacy({})[: -len(pickle.dumps({}, 2) + pickle.dumps([], 2))]
    text = b"\x80\x04\x8e" + (1 << 24).to_bytes(8, "little") + bytes(1 << 24) + b"."
    path = write(tmp_path, head + text)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="ends inside"):
            TorchFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
