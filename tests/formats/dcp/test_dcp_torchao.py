"""Tensors of torchao in DCP: states of low-bit optimizers are the numbers that their codes stand
for, weights that are gathered as float8 are the tensors in their wrappers.
"""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_ucp as ucp
from dcp_writer import Writer
from helpers import faults_of
from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.errors import CorruptData, FormatError
from jax_ucp.layout.box import Box
from safetensors_writer import safetensors
from torch_writer import Global, Instance, Size, Storage, save

NAME, STATE = "w", "optim.state.w.exp_avg"
OPTIM = "torchao.optim"
FLOAT8 = "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"


def wrapper(kind: str, shape, dtype, state: dict) -> Instance:
    """A tensor subclass as torch pickles it (`_rebuild_wrapper_subclass`)."""
    of = Global(*kind.rsplit(".", 1))
    inner = of, np.dtype(dtype), Size(shape), Size((1,) * len(shape)), 0, None, "cpu", False
    function = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Instance("torch._tensor._rebuild_from_type_v2", None, (function, of, inner, state))


def coded(bits: str, shape, dtype, rng) -> tuple[Instance, np.ndarray]:
    """A state of one chunk, and what torchao's `dequantize(dtype)` gives of it."""
    n = int(np.prod(shape))
    scale = rng.random(n // 8, np.float32)
    extra: dict = {"scale": scale, "block_size": 8}
    if bits == "fp8":
        codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        plain = codes.astype(np.float32)
        strides = tuple(np.cumprod([1, *shape[:0:-1]])[::-1].tolist())
        storage = Storage("fp8", codes.reshape(-1).view(np.uint8))
        args = storage, 0, Size(shape), Size(strides), False, {}, codes.dtype
        extra["codes"] = Instance("torch._utils._rebuild_tensor_v3", None, args)
    elif bits == "8bit":
        extra |= {"codes": rng.integers(0, 256, shape, np.uint8), "signed": True}
        extra["qmap"] = rng.standard_normal(256).astype(np.float32)
        plain = extra["qmap"][extra["codes"]]
    else:
        extra |= {"codes": rng.integers(0, 256, n // 2, np.uint8), "signed": False}
        extra |= {"qmap": rng.random(16, np.float32), "_shape": Size(shape)}
        high, low = extra["codes"] // 16, extra["codes"] % 16
        plain = extra["qmap"][[number for pair in zip(high, low, strict=True) for number in pair]]
    values = (plain.reshape(-1, 8) * scale.reshape(-1, 1)).reshape(shape).astype(dtype)
    name = {"8bit": "OptimState8bit", "4bit": "OptimState4bit", "fp8": "OptimStateFp8"}[bits]
    return wrapper(f"{OPTIM}.subclass_{bits}.{name}", shape, dtype, extra), values


def write(folder, bits, dtype=np.float32, rows=64, change=lambda instance: None):
    """Two ranks, each with half of the rows."""
    rng = np.random.default_rng(0)
    writer = Writer(folder / "dcp")
    weight = rng.standard_normal((2 * rows, 32)).astype(np.float32)
    boxes = [Box((at, 0), (at + rows, 32)) for at in (0, rows)]
    files = ["__0_0.distcp", "__1_0.distcp"]
    writer.paths = {f"model.{NAME}": ("model", NAME), STATE: ("optim", "state", NAME, "exp_avg")}
    writer.tensor(f"model.{NAME}", weight, list(zip(files, boxes, strict=True)))
    writer.declare(STATE, np.dtype(dtype), weight.shape, boxes)
    values = []
    for file, box in zip(files, boxes, strict=True):
        instance, part = coded(bits, box.shape, dtype, rng)
        change(instance.args[3])
        writer.item(STATE, file, box.start, instance)
        values.append(part)
    return writer.finish(), np.concatenate(values)


def state_of(checkpoint: ucp.Checkpoint) -> str:
    (label,) = (label for label in checkpoint if label.endswith("exp_avg"))
    return label


@pytest.mark.parametrize("bits", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_states_of_low_bit_optimizers_are_the_numbers_of_their_codes(bits, dtype, tmp_path):
    folder, want = write(tmp_path, bits, dtype)
    checkpoint = ucp.open(folder)
    label = state_of(checkpoint)
    assert same_bits(checkpoint.read(label), want)
    part = Box((3, 5), (70, 9))
    assert same_bits(checkpoint.read(label, part), want[part.index])
    assert same_bits(checkpoint.save(tmp_path / "out").read(label), want)
    assert faults_of(checkpoint) == []
    noted = any("low-bit optimizers" in note for note in checkpoint.notes)
    assert noted or dtype is not np.float32


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 255))
def test_a_damaged_code_is_refused_or_has_another_crc(at, by):
    with tempfile.TemporaryDirectory() as work:
        folder, want = write(Path(work), "8bit")
        file = folder / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[at % len(data)] ^= by
        file.write_bytes(data)
        try:
            checkpoint = ucp.open(folder)
            got = checkpoint.read(state_of(checkpoint))
        except FormatError:
            return
        faults = faults_of(checkpoint)
        assert faults or same_bits(got, want)


CHANGES = {
    "a scale too few": lambda state: state.update(scale=state["scale"][:-1]),
    "a short table": lambda state: state.update(qmap=state["qmap"][:-1]),
    "no scale": lambda state: state.pop("scale"),
    "codes of another dtype": lambda state: state.update(codes=state["codes"].astype(np.int32)),
    "codes of another length": lambda state: state.update(codes=state["codes"][:-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_whose_tensors_do_not_fit_is_refused(change, tmp_path):
    folder, _ = write(tmp_path, "8bit", change=CHANGES[change])
    with pytest.raises(FormatError, match=r"(?s)exp_avg.*OptimState8bit whose codes"):
        ucp.open(folder).restore()


def test_an_item_that_is_too_short_and_no_codes_is_damaged(tmp_path):
    writer = Writer(tmp_path / "dcp")
    box = Box((0, 0), (64, 64))
    writer.paths = {"w": ("w",)}
    writer.declare("w", np.dtype(np.float32), (64, 64), [box])
    writer.item("w", "__0_0.distcp", (0, 0), np.zeros((8, 64), np.float32))
    with pytest.raises(CorruptData, match="has a chunk of float32"):
        ucp.open(writer.finish())


@pytest.mark.parametrize("options", [{}, {"weights_only": True}])
def test_weights_that_are_gathered_as_float8_are_the_tensors_in_their_wrappers(options, tmp_path):
    writer = Writer(tmp_path / "dcp")
    weight = np.arange(96, dtype=np.float32).reshape(8, 12)
    boxes = [Box((0, 0), (4, 12)), Box((4, 0), (8, 12))]
    writer.paths = {"w": ("w",)}
    writer.declare("w", weight.dtype, weight.shape, boxes)
    config = Instance("torchao.float8.float8_training_tensor.LinearMMConfig", None)
    for rank, box in enumerate(boxes):
        state = {"_tensor": weight[box.index], "_linear_mm_config": config, "_dtype": None}
        item = wrapper(FLOAT8, box.shape, np.float32, {**state, "_precomputed_scale": None})
        writer.item("w", f"__{rank}_0.distcp", box.start, item)
    checkpoint = ucp.open(writer.finish(), **options)
    assert same_bits(checkpoint.read("param/w"), weight)
    assert faults_of(checkpoint) == []
    save({"w": item}, tmp_path / "w.pt")
    assert same_bits(ucp.open(tmp_path / "w.pt").read("param/w"), weight[4:])


@pytest.mark.parametrize("bits", ["8bit", "4bit", "fp8"])
def test_states_outside_of_dcp_are_left_out_by_the_name_of_their_class(bits, tmp_path):
    state, _ = coded(bits, (8, 8), np.float32, np.random.default_rng(0))
    tree = {"model": {"w": np.ones((8, 8), np.float32)}, "optim": {"state": {0: {"m": state}}}}
    save(tree, tmp_path / "run.pt")
    checkpoint = ucp.open(tmp_path / "run.pt")
    assert [*checkpoint] == ["param/w"]
    assert "m of run.pt was left out: it is a torchao.optim." in checkpoint.notes[0]
    assert "codes of torchao's optimizer" in checkpoint.notes[0]


def test_items_in_safetensors_are_named(tmp_path):
    writer = Writer(tmp_path / "dcp")
    writer.paths = {"a": ("a",), "b": ("b",)}
    for name in "ab":
        writer.tensor(name, np.ones(3, np.float32), [("__0_0.distcp", Box((0,), (3,)))])
    data = safetensors({"a": np.zeros(3, np.float32)}) + bytes(12)
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(data)
    writer.storage.clear()
    for name in "ab":
        writer.place(name, (0,), "__0_0.distcp", 0, len(data))
    with pytest.raises(FormatError, match="serialization_format"):
        ucp.open(writer.finish())
    del writer.tensors["b"], writer.paths["b"]
    writer.storage.clear()
    writer.place("a", (0,), "__0_0.distcp", 0, len(data))
    with pytest.raises(FormatError, match="serialization_format"):
        ucp.open(writer.finish()).restore()
