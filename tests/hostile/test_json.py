"""JSON that no writer writes, in every file of every format that has JSON: a reason, whatever is
then asked for, and no half of a checkpoint.
"""

import json
from pathlib import Path

import pytest

from cases import DATA, copied
from commands import invoke
from jax_ucp.json_text import MAX_JSON_DEPTH
from safetensors_writer import file_of

pytestmark = pytest.mark.timeout(120)

# A checkpoint, and its file that is JSON.
FILES = {
    "a config": ("torch/hf_llama/ckpt", "config.json"),
    "an index": ("folders/hf_resave/ckpt", "model.safetensors.index.json"),
    "a config of an adapter": ("adapters/lora/adapter", "adapter_config.json"),
    "a config of a quantisation": ("quantized/modelopt_fp8/ckpt", "hf_quant_config.json"),
    "a trainer's state": ("trainers/small_llama/ckpt", "trainer_state.json"),
    "Megatron's metadata": ("megatron/old0153_tp2_zarr_fp32/ckpt", "metadata.json"),
    "Megatron's zarr": ("megatron/old0153_tp2_zarr_fp32/ckpt", ".zarray"),
    "Orbax's tree": ("orbax/plain", "_METADATA"),
    "Orbax's zarr": ("orbax/plain", ".zarray"),
    "Orbax's shardings": ("orbax/plain", "_sharding"),
    "Orbax's texts": ("orbax/plain", "_strings.json"),
    "Orbax's kinds of arrays": ("orbax/plain", "process_0"),
    "a manager's metrics": ("jax/orbax01125-v1_training/ckpt", "metrics"),
}


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


VALUES = {
    "too deep by one": nested(MAX_JSON_DEPTH),
    "400 deep": nested(400),
    "960 deep": nested(960),
    "lists 900 deep": "[" * 900 + "]" * 900,
    "half of a surrogate pair": r'"\ud800"',
    "a name that is half of a pair": r'{"\udfff": 1}',
    "an integer of 4,000 digits": "9" * 4000,
    "an integer of 5,000 digits": "9" * 5000,
    "a million lists": "[" * 10**6,
    "no number": "[NaN, -Infinity, 1e999]",
}
REFUSED = [name for name in VALUES if "deep" in name or "pair" in name]
COMMANDS = {
    "inspect": [], "inspect --json": [], "diff": ["{}"], "report": ["-o", "{}.html"], "convert": ["{}.out"],
    "export": ["{}.out"],
}  # fmt: skip
# Each kind of file and each value meets each command.
MET = [
    (kind, value, [*COMMANDS][(i + j) % len(COMMANDS)])
    for i, kind in enumerate(FILES)
    for j, value in enumerate(VALUES)
]


def with_value(text: bytes, value: str) -> bytes:
    """A JSON object with one more name in it."""
    assert text.lstrip()[:1] == b"{"
    return b'{"x":' + value.encode() + b"," + text.lstrip()[1:]


def copy_of(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    case, name = FILES[kind]
    folder = copied(DATA / case, tmp_path / "ckpt")
    return folder, next(path for path in sorted(folder.rglob(name)) if path.is_file())


def refusal(path: Path, command: str) -> str:
    """What a command says of a checkpoint; nothing if it does what it is for."""
    words = [word.format(path) for word in COMMANDS[command]]
    result = invoke(*command.split()[:1], path, *words)
    if result.exit_code:
        assert not any(path.parent.glob(f"{path.name}.*")), "something was written"
    return result.output if result.exit_code else ""


@pytest.mark.parametrize(("kind", "value", "command"), MET)
def test_a_value_that_nobody_writes_is_carried_or_refused(tmp_path, kind, value, command):
    folder, file = copy_of(tmp_path, kind)
    file.write_bytes(with_value(file.read_bytes(), VALUES[value]))
    refusal(folder, command)


@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize("kind", ["a config", "an index", "a trainer's state"])
def test_what_can_be_neither_walked_nor_written_is_refused_where_it_is_read(tmp_path, kind, value):
    folder, file = copy_of(tmp_path, kind)
    before = file.read_bytes()
    file.write_bytes(with_value(before, nested(MAX_JSON_DEPTH - 1)))
    assert not refusal(folder, "inspect")
    file.write_bytes(with_value(before, VALUES[value]))
    reason = "half of a surrogate pair" if "pair" in value else "nested more than 100 levels"
    assert f"{file.name} is not JSON: " in refusal(folder, "inspect")
    assert reason in refusal(folder, "inspect")


@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize("where", ["header", "metadata"])
def test_a_header_of_safetensors_is_refused_likewise(tmp_path, where, value):
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = {"w": tensor, "x": "?"} if where == "header" else {"w": tensor, "__metadata__": "?"}
    text = json.dumps(header).replace('"?"', VALUES[value]).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of(text, bytes(16)))
    assert "the header is not as the format has it" in refusal(file, "convert")
