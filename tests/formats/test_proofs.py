"""`restore` hands out nothing that a sample of what is stored twice contradicts, and with
`verify="full"` nothing that `verify` refuses: for each format, files of other ranks and steps, and
flipped bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jax_ucp as ucp
from dcp_writer import Writer
from jax_ucp.codecs.torch_file import TorchFile
from jax_ucp.errors import CorruptData, UCPError
from jax_ucp.files.path import file_path
from jax_ucp.formats.dcp.metadata import read_metadata
from jax_ucp.layout.box import Box
from jax_ucp.layout.samples import RUN_ELEMENTS, RUNS
from torch_writer import change

DATA = Path(__file__).parent.parent / "data"
Z1, Z1_COPY = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
EMBEDDING = "embed.word_embeddings.weight"


def one(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


def refusal(folder: Path, **options) -> str:
    with pytest.raises(UCPError) as caught:
        ucp.open(folder).restore(**options)
    return str(caught.value)


def next_step(array: np.ndarray) -> None:
    """What an optimizer makes of masters and moments in a step: elements a little other."""
    array[...] = (array.astype(np.float64) * 1.01 + 1e-3).astype(array.dtype)


def flip(path: Path, key: str, element: int, item: tuple[int, int] = (0, 0)) -> None:
    """Flip a bit of an element of a tensor, -1 the last; its CRC stays; `item` is its place."""
    offset, length = item
    file = TorchFile(path, offset=offset, length=length or None)
    tensor = file._tensors[key]
    element = tensor.offset + element % Box.whole(tensor.shape).size
    at = offset + file._storages[tensor.storage].offset + element * tensor.dtype.itemsize
    data = bytearray(path.read_bytes())
    data[at + tensor.dtype.itemsize - 1] ^= 0x40  # of the exponent: no rounding hides it
    path.write_bytes(data)


def flip_item(folder: Path, fqn: str, element: int, chunk: int = 0) -> str:
    """The same of a chunk of a DCP checkpoint; returns the name of its file."""
    span = read_metadata(file_path(folder)).tensors[fqn].chunks[chunk].span
    flip(folder / span.file, "", element, (span.offset, span.length))
    return span.file


# Flipped bytes.


@pytest.mark.parametrize("case", ["deepspeed/z0_bf16_dp1", "deepspeed/z0_fp16_dp2_frozen"])
def test_a_weight_that_begins_as_no_master_does_is_not_taken_in_place_of_one(copy_of, case):
    """These elements tell masters of ZeRO-0; without them the flipped weight would be taken."""
    folder = copy_of(case)
    flip(one(folder, Z1_COPY), f"module/{EMBEDDING}", 3)
    words = rf"the masters in {Z1_COPY}, rounded, are not the weights of the module"
    with pytest.raises(CorruptData, match=words):
        ucp.open(folder)
    assert ucp.open(folder, weights_only=True).restore()["param"].keys()


@pytest.mark.parametrize("name", ["wte.weight", "w"])
def test_items_of_dcp_are_summed_in_full(tmp_path, name):
    writer = Writer(tmp_path)
    whole = np.arange(4096, dtype=np.float32).reshape(64, 64)
    halves = Box((0, 0), (32, 64)), Box((32, 0), (64, 64))
    writer.tensor(name, whole, [(f"__{i}_0.distcp", half) for i, half in enumerate(halves)])
    writer.finish()
    flip_item(tmp_path, name, 5, chunk=1)
    ucp.open(tmp_path).restore()
    assert "__1_0.distcp: the bytes of storage" in refusal(tmp_path, verify="full")


def test_an_extent_that_is_none_is_refused():
    with pytest.raises(ValueError, match="verify='all' is neither"):
        ucp.open(DATA / "deepspeed/z1_bf16_dp2").restore(verify="all")


# Every door, and only what is asked for.


@pytest.fixture
def in_two_minds(copy_of) -> ucp.Checkpoint:
    """A checkpoint with valid CRCs in which the embedding of the module is not its master."""
    folder = copy_of("deepspeed/z1_bf16_dp2")
    change(one(folder, Z1_COPY), {f"module/{EMBEDDING}": next_step})
    return ucp.open(folder)


def doors() -> Iterator[tuple[str, Callable[[ucp.Checkpoint], object]]]:
    like = jax.ShapeDtypeStruct((101, 16), np.float32)
    yield "read", lambda c: c.read(f"param/{EMBEDDING}")
    yield "read a moment", lambda c: c.read(f"exp_avg/{EMBEDDING}", Box((0, 0), (1, 1)))
    yield "parameter", lambda c: c.params[EMBEDDING].read()
    yield "restore", lambda c: c.restore()
    yield (
        "restore a parameter",
        lambda c: c.restore({"param": {EMBEDDING: like}}, partial=True, mesh=MESH),
    )
    yield (
        "restore a moment",
        lambda c: c.restore({"exp_avg": {EMBEDDING: like}}, partial=True, mesh=MESH),
    )
    yield "shared", lambda c: c.restore(mesh=MESH, share_reads=True)
    yield "in full", lambda c: c.restore(verify="full")
    yield (
        "mapped",
        lambda c: c.map(mapping()).restore({"exp_avg": {"embed": like}}, partial=True, mesh=MESH),
    )
    yield "mapped and read", lambda c: c.map(mapping()).read("param/embed")
    yield (
        "optimizer",
        lambda c: c.map(mapping()).plan_optimizer(ADAM, {"embed": like}, check=False).restore(),
    )


ADAM = optax.adam(1e-3)
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


def mapping() -> ucp.Mapping:
    others = [name for name in ucp.open(DATA / "deepspeed/z1_bf16_dp2").params if name != EMBEDDING]
    leaves = [{"param": EMBEDDING, "axes": "v e", "leaf": {"embed": "v e"}}]
    skip = [{"param": name, "reason": "not of the model"} for name in others]
    return ucp.Mapping.from_dict({"leaves": leaves, "skip": skip})


@pytest.mark.parametrize(("door", "use"), list(doors()), ids=[name for name, _ in doors()])
def test_no_door_hands_out_what_a_sample_contradicts(in_two_minds, door, use):
    for _ in range(2):  # nor the second time
        words = rf"master at {Z1.format(0)}.*copy at {Z1_COPY}:module/{EMBEDDING}"
        with pytest.raises(CorruptData, match=words):
            use(in_two_minds)


def test_what_does_not_rest_on_it_is_handed_out(in_two_minds):
    like = jax.ShapeDtypeStruct((16,), np.float32)
    target = {"param": {"final_layernorm.weight": like}}
    in_two_minds.restore(target, partial=True, mesh=MESH, verify="full")
    assert in_two_minds.read("param/final_layernorm.weight").shape == (16,)
    assert in_two_minds.params["final_layernorm.weight"].read("exp_avg").shape == (16,)


def test_a_leaf_is_proved_once_and_then_read(monkeypatch):
    checkpoint = ucp.open(DATA / "deepspeed/z1_bf16_dp2")
    asked = []
    for state in ("param", "exp_avg", "param"):
        checkpoint.read(f"{state}/{EMBEDDING}")
        asked.append(len(checkpoint._reads._passed))
    assert asked[0] >= 1
    assert asked == [asked[0]] * 3


def test_arrays_that_a_mapping_says_are_tied_are_compared(tmp_path):
    writer = Writer(tmp_path)
    for name, scale in (("a", 1), ("b", 2)):
        array = np.arange(12, dtype=np.float32).reshape(3, 4) * scale
        writer.tensor(name, array, [("__0_0.distcp", Box.whole((3, 4)))])
    tied = ucp.Mapping.parse("leaves:\n- {param: a, axes: x y, tied: {b: x y}, leaf: {w: x y}}")
    with pytest.raises(CorruptData, match=r"differs between .* which the mapping says are tied"):
        ucp.open(writer.finish()).map(tied).restore()


def test_a_sample_is_a_few_kilobytes_of_each_array():
    cases = "deepspeed/z1_bf16_dp2", "deepspeed/tp2_dp2_z1_bf16_swiglu"
    for name in (*cases, "megatron/legacy_tp2_dp2_distopt_bf16/ckpt"):
        contents = ucp.open(DATA / name)._contents
        checks = (contents.checks(extent) for extent in ("sample", "full"))
        sampled, full = (sum(check.nbytes for check in some) for some in checks)
        assert 0 < sampled <= len(contents.leaves) * 8 * RUNS * RUN_ELEMENTS
        assert sampled < full
