"""Real files of torch.save give torch's own values; damaged and hostile ones give our errors."""

import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_writer
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import TorchFile, TreeContents
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.layout.box import Box

DATA = Path(__file__).parents[2] / "data" / "torch"


def whole(file: TorchFile, key: str) -> np.ndarray:
    return file.read(key, Box.whole(file.arrays()[key].shape))


def node(file: TorchFile, *path: object) -> Any:
    at: Any = file.tree
    for key in path:
        at = at[key]
    return at


# Hand-written files: a pickle in pieces, zipped as torch zips it.


def plain(value: object) -> bytes:
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def name(dotted: str) -> bytes:
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(dotted: str, *args: bytes) -> bytes:
    return name(dotted) + b"(" + b"".join(args) + b"tR"


def storage(key="0", numel=6, kind="torch.FloatStorage", location="cpu") -> bytes:
    about = name(kind) + plain(key) + plain(location) + plain(numel)
    return b"(" + plain("storage") + about + b"tQ"


def tensor(stored: bytes = storage(), offset=0, shape=(2, 3), strides=(3, 1), *more) -> bytes:
    args = (
        stored, plain(offset), plain(shape), plain(strides), plain(False), call("collections.OrderedDict"),
    )  # fmt: skip
    return call("torch._utils._rebuild_tensor_v2", *args, *more)


def mapping(**items: bytes) -> bytes:
    return b"}(" + b"".join(plain(key) + value for key, value in items.items()) + b"u"


SIX = np.arange(6, dtype=np.float32)


@pytest.fixture
def save(tmp_path) -> Callable[..., Path]:
    def save(body: bytes, storages: Mapping[str, bytes] | None = None, **members: bytes) -> Path:
        path = tmp_path / "hand.pt"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("hand/data.pkl", b"\x80\x02" + body + b".")
            for key, data in ({"0": SIX.tobytes()} if storages is None else storages).items():
                file.writestr(f"hand/data/{key}", data)
            for member, data in members.items():
                file.writestr(f"hand/{member}", data)
        return path

    return save


# What is read.


def test_empty_boxes_and_boxes_outside_are_told_apart():
    file = TorchFile(DATA / "torchsave" / "views.pt")
    assert file.arrays()["a"].shape == (5, 8)
    assert file.read("a", Box((2, 3), (2, 8))).shape == (0, 5)
    for box in (Box((0, 0), (6, 8)), Box((-1, 0), (2, 8)), Box((0,), (5,)), Box((), ())):
        with pytest.raises(ValueError, match=r"views\.pt: box .* does not lie in 'a'"):
            file.read("a", box)


@pytest.mark.parametrize(("kind", "dtype"), [
    ("Float", np.float32), ("Short", np.int16), ("Byte", np.uint8),
    ("ComplexFloat", np.complex64), ("ComplexDouble", np.complex128), ("BFloat16", ml_dtypes.bfloat16),
])  # fmt: skip
def test_a_big_endian_file_has_the_same_values(save, kind, dtype):
    values = np.arange(6) * 300 + 1j * np.arange(6) if "Complex" in kind else np.arange(6) * 40
    values = values.astype(dtype)
    parts = 2 if values.dtype.kind == "c" else 1
    size = values.dtype.itemsize // parts
    swapped = values.view(f"u{size}").byteswap().tobytes()
    body = mapping(w=tensor(storage(kind=f"torch.{kind}Storage")))
    path = save(body, {"0": swapped}, byteorder=b"big")
    want = values.reshape(2, 3)
    assert same_bits(whole(TorchFile(path), "w"), want)
    assert same_bits(TorchFile(path).read("w", Box((0, 1), (2, 3))), want[:, 1:])


def test_a_file_inside_another_is_read_from_its_own_start(save, tmp_path):
    inner = save(mapping(a=tensor())).read_bytes()
    outer = tmp_path / "outer.distcp"
    outer.write_bytes(b"x" * 77 + inner + b"PK\5\6 and more")
    file = TorchFile(outer, offset=77, length=len(inner))
    np.testing.assert_array_equal(whole(file, "a"), SIX.reshape(2, 3), strict=True)


def test_a_tensor_held_twice_has_one_key_and_two_tensors_of_a_storage_have_two(save):
    file = TorchFile(save(mapping(a=tensor() + b"q\x07", b=b"h\x07", c=tensor())))
    assert node(file, "a") is node(file, "b")
    assert set(file.arrays()) == {"a", "c"}
    assert node(file, "c").storage == node(file, "a").storage


def test_keys_stay_unique_where_paths_coincide(save):
    items = plain("a/b") + tensor() + plain("a") + mapping(b=tensor()) + plain("a/b#2") + tensor()
    file = TorchFile(save(b"}(" + items + b"u"))
    assert set(file.arrays()) == {"a/b", "a/b#2", "a/b#2#2"}
    for key in file.arrays():
        np.testing.assert_array_equal(whole(file, key), SIX.reshape(2, 3), strict=True)


def test_labels_of_any_length_make_keys_of_bounded_length(save):
    (key,) = TorchFile(save(mapping(**{"x" * 100_000: mapping(w=tensor())}))).arrays()
    assert len(key) < 300
    assert key.endswith(".../w")
    deep = tensor()
    for _ in range(50):
        deep = mapping(**{"y" * 100: deep})
    (key,) = TorchFile(save(deep)).arrays()
    assert len(key) == 1024


def test_a_tensor_in_the_attributes_of_another_has_a_key(save):
    state = mapping(main=tensor())
    kind = name("torch._utils._rebuild_tensor_v2") + name("torch.nn.parameter.Parameter")
    inner = plain(0) + plain((6,)) + plain((1,)) + plain(True) + plain(None)
    inner = b"(" + storage() + inner + b"t"
    body = call("torch._tensor._rebuild_from_type_v2", kind, inner, state)
    file = TorchFile(save(mapping(w=body)))
    assert set(file.arrays()) == {"w", "w/main"}
    np.testing.assert_array_equal(whole(file, "w"), SIX, strict=True)


def test_dtypes_devices_and_sizes_are_plain_values(save):
    items = {
        "dtype": name("torch.bfloat16"),
        "odd": name("torch.complex32"),
        "device": call("torch.device", plain("cuda"), plain(3)),
        "layout": call("torch.serialization._get_layout", plain("torch.strided")),
        "size": call("torch.Size", plain((2, 3))),
    }
    tree = node(TorchFile(save(mapping(**items))))
    assert str(tree.pop("odd")) == "torch.complex32"
    want = {"dtype": np.dtype(ml_dtypes.bfloat16), "device": "cuda:3"}
    assert tree == want | {"layout": "torch.strided", "size": (2, 3)}


def test_the_oldest_rebuild_and_storages_of_other_devices_are_read(save):
    stored = storage(kind="torch.cuda.FloatStorage", location="cuda:1")
    body = call("torch._utils._rebuild_tensor", stored, plain(1), plain((2, 2)), plain((2, 1)))
    got = whole(TorchFile(save(body)), "")
    np.testing.assert_array_equal(got, SIX[1:5].reshape(2, 2), strict=True)


def test_zip64_sizes_and_offsets_are_read(save, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 0)
    path = save(mapping(a=tensor()))
    assert b"PK\6\6" in path.read_bytes()
    np.testing.assert_array_equal(whole(TorchFile(path), "a"), SIX.reshape(2, 3), strict=True)


# What is refused.

EXOTIC = {
    "complex32.pt":  (FormatError, r"'c': torch\.complex32 has no numpy equivalent"),
    "conj.pt":       (FormatError, r"'c': it is a lazy view \(conj\)"),
    "neg.pt":        (FormatError, r"'n': it is a lazy view \(neg\)"),
    "meta.pt":       (FormatError, r"'m': it is on the meta device"),
    "quantized.pt":  (FormatError, r"'q': it is quantized"),
    "sparse_coo.pt": (FormatError, r"'s': it is sparse"),
    "sparse_csr.pt": (FormatError, r"'s': it is sparse"),
    "storage.pt":    (FormatError, r"'s': a bare storage[\s\S]*'ts': a bare storage"),
    "subclass.pt":   (FormatError, r"'t': it is a __main__\.SubT, a kind of tensor that is not known here"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXOTIC)
def test_what_numpy_cannot_hold_is_refused_by_file_path_and_reason(case):
    error, why = EXOTIC[case]
    with pytest.raises(error, match=rf"{case}: [\s\S]*{why}"):
        TorchFile(DATA / "torchsave_exotic" / case)


def v3(dtype: bytes, numel: int = 24, shape=(2, 3)) -> bytes:
    stored = storage(numel=numel, kind="torch.storage.UntypedStorage")
    args = (plain(0), plain(shape), plain((3, 1)), plain(False), plain(None), dtype)
    return call("torch._utils._rebuild_tensor_v3", stored, *args)


BAD_TENSORS = {
    "a view one element past its storage": (tensor(offset=1), "reaches element 6 of storage '0', which has 6"),
    "a stride past its storage": (tensor(strides=(4, 1)), "reaches element 6"),
    "a negative offset": (tensor(offset=-1), "arguments it does not take"),
    "a negative stride": (tensor(strides=(3, -1)), "arguments it does not take"),
    "a fractional size": (tensor(shape=(2.0, 3)), "arguments it does not take"),
    "a stride too few": (tensor(strides=(3,)), "arguments it does not take"),
    "an offset of 2**70": (tensor(offset=2**70), "beyond any array"),
    "a shape of 2**66 elements": (tensor(shape=(2**33, 2**33), strides=(0, 0)), "beyond any array"),
    "an empty shape of 2**66 columns": (tensor(shape=(0, 2**66)), "beyond any array"),
    "a thousand axes": (tensor(shape=(1,) * 1000, strides=(1,) * 1000), "beyond any array"),
    "a view that repeats 24 bytes to gigabytes": (tensor(shape=(2**30,), strides=(0,)), "repeats 24 stored bytes"),
    "an untyped storage read as too wide a dtype": (v3(name("torch.float64")), "reaches element 5"),
    "a dtype that is none": (v3(plain(3)), "arguments it does not take"),
    "a packed dtype": (v3(name("torch.float4_e2m1fn_x2")), "float4_e2m1fn_x2 has no numpy equivalent"),
    "a storage on the meta device": (tensor(storage(location="meta")), "meta device"),
    "a quantized storage": (tensor(storage(kind="torch.QInt8Storage")), "no numpy dtype"),
    "a storage the file lacks": (tensor(storage(key="7")), "storage '7', which the file does not hold"),
    "a storage of another size": (tensor(storage(numel=7)), "should be 7 elements .*has 24 bytes"),
    "a negative storage": (tensor(storage(numel=-6)), "should be -6 elements"),
    "a storage of no storage class": (tensor(storage(kind="torch.float32")), "does not name a storage"),
    "a persistent id of another kind": (plain(("module", 1)) + b"Q", "does not name a storage"),
    "metadata we do not know": (tensor(storage(), 0, (2, 3), (3, 1), plain({"odd": True})), r"lazy view \(odd\)"),
    "a Parameter of no tensor": (
        call("torch._utils._rebuild_parameter", plain(1), plain(True), plain(None)),
        "arguments it does not take",
    ),
    "a subclass that is a function": (
        call(
            "torch._tensor._rebuild_from_type_v2",
            name("_codecs.encode"), name("torch.Tensor"), plain(("x", "latin1")), plain(None),
        ),
        "arguments it does not take",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_tensor_that_cannot_be_is_refused(save, case):
    body, why = BAD_TENSORS[case]
    with pytest.raises(FormatError, match=rf"hand\.pt: [\s\S]*{why}"):
        TorchFile(save(mapping(w=body)))


@pytest.mark.parametrize("may_be_coded", [False, True])
def test_a_broken_tensor_is_refused_by_its_path_where_others_are_good(save, may_be_coded):
    bad = b"]" + mapping(w=tensor(offset=1)) + b"a"
    with pytest.raises(FormatError, match=r"'bad/0/w': its view reaches element 6"):
        TorchFile(save(mapping(good=tensor(), bad=bad)), may_be_coded=may_be_coded)


def test_torchscript_and_zips_of_something_else_are_named(save, tmp_path):
    with pytest.raises(FormatError, match="TorchScript"):
        TorchFile(save(mapping(a=tensor()), **{"constants.pkl": b"\x80\x02)."}))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(FormatError, match=r"0 members <root>/data\.pkl"):
        TorchFile(tmp_path / "other.zip")


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"PK", b"\x00" * 1000, b"PK\5\6" + b"\x00" * 18, b"PK\5\6" + b"\xff" * 18],
)
def test_files_that_are_no_zip_are_refused(tmp_path, content):
    path = tmp_path / "some.pt"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"some\.pt: "):
        TorchFile(path)


def read_all(path: Path) -> None:
    file = TorchFile(path)
    for key in file.arrays():
        whole(file, key).tobytes()


def outcome(path: Path) -> str:
    try:
        read_all(path)
    except FormatError as error:
        return str(error)
    return f"{path} was read"


@pytest.mark.parametrize(("case", "step"), [
    ("torchsave/list.pt", 1), ("torchsave_variants/deflated.pt", 1),
    ("torchsave_legacy/tied.pt", 9), ("torchsave_legacy/views.pt", 9),
])  # fmt: skip
def test_a_file_cut_at_any_byte_is_refused(tmp_path, case, step):
    content = (DATA / case).read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(0, len(content), step):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match=r"cut\.pt: "):
            read_all(path)


SMALL = [
    (DATA / case).read_bytes()
    for case in (
        "torchsave/dtypes.pt", "torchsave/views.pt", "torchsave_variants/proto5.pt",
        "torchsave_variants/deflated.pt", "torchsave_variants/nocrc.pt", "torchsave_exotic/numpy.pt",
        "torchsave_exotic/namespace.pt", "torchsave_exotic/param_with_state.pt",
        "torchsave_legacy/tied.pt",
    )
]  # fmt: skip


@pytest.mark.timeout(60)
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_give_our_errors_or_a_readable_file(tmp_path, data):
    content = bytearray(data.draw(st.sampled_from(SMALL)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.pt"
    path.write_bytes(content)
    assert str(path) in outcome(path)


@pytest.mark.timeout(60)
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_of_the_pickle_give_our_errors_or_a_readable_file(save, data):
    """The same where no CRC stands between the damage and the interpreter."""
    name = data.draw(st.sampled_from(["dtypes.pt", "parameters.pt"]))
    with zipfile.ZipFile(DATA / "torchsave" / name) as file:
        members = {member.partition("/")[2]: file.read(member) for member in file.namelist()}
    body = bytearray(members.pop("data.pkl"))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    path = save(bytes(body[2:-1]), {}, **members)
    assert str(path) in outcome(path)


def test_a_damaged_pickle_is_found_by_its_crc(save):
    path = save(mapping(note=plain("hello")))
    path.write_bytes(path.read_bytes().replace(b"hello", b"jello"))
    with pytest.raises(CorruptData, match=r"hand\.pt: .*'hand/data\.pkl' differ from their CRC"):
        TorchFile(path)


# Zip files that two readers could see differently. Offsets are those of APPNOTE.TXT 4.3.7 and
# 4.3.12.


def central(content: bytes, member: bytes) -> int:
    """Where the directory entry of a member starts; its name stands 46 bytes into it."""
    at = content.rfind(member) - 46
    assert content[at : at + 4] == b"PK\1\2"
    return at


def local(content: bytes, member: bytes) -> int:
    at = content.find(member) - 30
    assert content[at : at + 4] == b"PK\3\4"
    return at


STORAGE = b"hand/data/0"
DAMAGES: dict[str, tuple[Callable[[bytes], int], int, bytes, str]] = {
    "encrypted in the directory": (lambda c: central(c, STORAGE), 8, b"\x01\x00", "encrypted"),
    "encrypted in the local header": (lambda c: local(c, STORAGE), 6, b"\x01\x00", "disagree"),
    "patched": (lambda c: central(c, STORAGE), 8, b"\x20\x00", "encrypted"),
    "another method in the directory": (lambda c: central(c, STORAGE), 10, b"\x0c\x00", "method 12"),
    "deflated in the local header": (lambda c: local(c, STORAGE), 8, b"\x08\x00", "disagree"),
    "deflated in both": (lambda c: central(c, STORAGE), 10, b"\x08\x00", "disagree"),
    "another CRC": (lambda c: central(c, STORAGE), 16, b"abcd", "disagree"),
    "a smaller stored size": (lambda c: central(c, STORAGE), 20, b"\x10\x00\x00\x00",
        "16 bytes stored for 24"),
    "other sizes in the directory": (lambda c: central(c, STORAGE), 20, b"\x10\x00\x00\x00" * 2, "disagree"),
    "other sizes in the local header": (lambda c: local(c, STORAGE), 18, b"\x10\x00\x00\x00" * 2, "disagree"),
    "a size beyond the file": (lambda c: central(c, STORAGE), 20, b"\xfe\xff\xff\xff" * 2, "runs past"),
    "a zip64 size that is not there": (lambda c: central(c, STORAGE), 20, b"\xff\xff\xff\xff" * 2, "zip64"),
    "another disk": (lambda c: central(c, STORAGE), 34, b"\x01\x00", "another disk"),
    "the header of another member": (lambda c: central(c, STORAGE), 42, b"\x00\x00\x00\x00", "disagree"),
    "no header": (lambda c: central(c, STORAGE), 42, b"\x01\x00\x00\x00", "no local header"),
    "another name in the local header": (lambda c: local(c, STORAGE), 30, b"hand/data/1", "disagree"),
    "a longer local name": (lambda c: local(c, STORAGE), 26, b"\xff\xff", "runs past"),
    "several disks": (lambda c: len(c) - 22, 4, b"\x01\x00", "several disks"),
    "entries on another disk": (lambda c: len(c) - 22, 8, b"\x01\x00", "several disks"),
    "an absurd count": (lambda c: len(c) - 22, 8, b"\x00\x80" * 2, "claims 32768 entries"),
    "one entry less": (lambda c: len(c) - 22, 8, b"\x01\x00" * 2, "more than the 1 entries"),
    "a directory elsewhere": (lambda c: len(c) - 22, 16, b"\x00\x00\x00\x00",
        "does not end at its end record"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_zip_that_two_readers_could_see_differently_is_refused(save, case):
    where, offset, patch, why = DAMAGES[case]
    path = save(mapping(a=tensor()))
    content = bytearray(path.read_bytes())
    at = where(bytes(content)) + offset
    content[at : at + len(patch)] = patch
    path.write_bytes(content)
    with pytest.raises(FormatError, match=rf"hand\.pt: .*{why}"):
        TorchFile(path)


def rebuilt(content: bytes, entries: list[bytes]) -> bytes:
    """The same members under another directory."""
    start = struct.unpack_from("<L", content, len(content) - 6)[0]
    directory = b"".join(entries)
    numbers = 0, 0, len(entries), len(entries), len(directory), start, 0
    counts = struct.pack("<4s4H2LH", b"PK\5\6", *numbers)
    return content[:start] + directory + counts


def entries_of(content: bytes) -> list[bytes]:
    start = struct.unpack_from("<L", content, len(content) - 6)[0]
    return [b"PK\1\2" + entry for entry in content[start:-22].split(b"PK\1\2")[1:]]


def test_a_member_named_twice_is_refused(save):
    path = save(mapping(a=tensor()))
    content = path.read_bytes()
    path.write_bytes(rebuilt(content, [*entries_of(content), entries_of(content)[1]]))
    with pytest.raises(FormatError, match="'hand/data/0' occurs twice"):
        TorchFile(path)


def test_a_member_inside_another_is_refused(save, tmp_path):
    """A storage whose bytes are themselves a local header and data, listed in the directory too."""
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("hand/data/9", b"abcdefg")
    hidden = inner.read_bytes()
    start = struct.unpack_from("<L", hidden, len(hidden) - 6)[0]
    path = save(mapping(a=tensor(storage(numel=start // 4), 0, (2, 3))), {"0": hidden[:start]})
    content = path.read_bytes()
    entry = bytearray(entries_of(hidden)[0])
    entry[42:46] = struct.pack("<L", content.find(hidden[:30]))
    path.write_bytes(rebuilt(content, [*entries_of(content), bytes(entry)]))
    with pytest.raises(FormatError, match="overlaps"):
        TorchFile(path)


def test_a_member_that_reaches_into_the_directory_is_refused(save):
    path = save(mapping(a=tensor(storage(numel=8))))
    content = bytearray(path.read_bytes())
    for at in (central(bytes(content), STORAGE) + 20, local(bytes(content), STORAGE) + 18):
        content[at : at + 8] = struct.pack("<2L", 32, 32)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="overlaps another or runs past"):
        TorchFile(path)


def test_a_deflated_member_inflates_to_just_its_declared_size(save):
    with zipfile.ZipFile(save(mapping(a=tensor())), "a") as file:
        file.writestr("hand/byteorder", b"little", zipfile.ZIP_DEFLATED)
    path = Path(str(file.filename))
    content = path.read_bytes()
    assert TorchFile(path).arrays()
    for size, why in (5, "does not inflate"), (7, "does not inflate"), (2**29, "more than the 16 "):
        changed = bytearray(content)
        places = (central(content, b"hand/byteorder"), 24), (local(content, b"hand/byteorder"), 22)
        for at, offset in places:
            changed[at + offset : at + offset + 4] = size.to_bytes(4, "little")
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=why):
            TorchFile(path)


def test_a_deflate_bomb_is_refused_by_its_claim(tmp_path):
    path = tmp_path / "bomb.pt"

    def bomb(numel: int) -> Path:
        """24 MiB of zeros, deflated to 24 KiB, that claim to be `numel` elements of float32."""
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("hand/data/0", bytes(24 << 20), zipfile.ZIP_DEFLATED)
            file.writestr("hand/data.pkl", b"\x80\x02" + tensor(storage(numel=numel)) + b".")
        content = bytearray(path.read_bytes())
        places = (central(bytes(content), STORAGE), 24), (local(bytes(content), STORAGE), 22)
        for at, offset in places:
            content[at + offset : at + offset + 4] = (4 * numel).to_bytes(4, "little")
        path.write_bytes(content)
        return path

    assert whole(TorchFile(bomb(6 << 20)), "").tobytes() == bytes(24)
    with pytest.raises(CorruptData, match="does not inflate to the 20971520 bytes"):
        whole(TorchFile(bomb(5 << 20)), "")
    with pytest.raises(FormatError, match=r"would inflate 2.* bytes to 536870912"):
        whole(TorchFile(bomb(128 << 20)), "")
    with pytest.raises(FormatError, match="more than the 1073741824 allowed"):
        whole(TorchFile(bomb(512 << 20)), "")


def test_equal_files_share_their_object_and_keep_their_own_bytes(tmp_path):
    names = ("first.pt", "second.pt", "short.pt", "other.pt", "unknown.pt")
    paths = {name: tmp_path / name for name in names}
    for value, (name, path) in enumerate(paths.items(), 1):
        tree = {"w": np.full(4, value, np.float32), "step": value if name == "other.pt" else 7}
        if name == "unknown.pt":
            tree["args"] = torch_writer.Instance("some.Class", {"a": 1})
        torch_writer.save(tree, path)
    equal: dict[Hashable, TreeContents] = {}
    files = {name: TorchFile(paths[name], equal=equal) for name in names if name != "short.pt"}
    assert [whole(file, "w").tolist() for file in files.values()] == [[i] * 4 for i in (1, 2, 4, 5)]
    assert files["first.pt"].tree is files["second.pt"].tree
    assert files["other.pt"].tree["step"] == 4
    again = TorchFile(paths["unknown.pt"], equal=equal)
    assert again.tree is not files["unknown.pt"].tree
    assert len(equal) == 2

    def cut(name, data):
        return data[:-4] if "/data/" in name else data

    torch_writer.rewrite(paths["short.pt"], cut)
    with pytest.raises(CorruptData, match=r"short\.pt: storage '\w+' should be 4 elements"):
        TorchFile(paths["short.pt"], equal=equal)
