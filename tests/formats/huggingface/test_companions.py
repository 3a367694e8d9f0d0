"""What goes with a model, its tokenizer, chat template and licence, goes with it through every
format that has a place for it: byte for byte, and nothing from outside its folder.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import jax_ucp as ucp
from helpers import faults_of, tree_of_files
from jax_ucp.errors import UCPError
from jax_ucp.formats.huggingface import companions
from jax_ucp.universal.metadata import decode, digest, encode

DATA = Path(__file__).parents[2] / "data"
MODEL = DATA / "adapters" / "lora" / "base"
FILES = {
    "tokenizer.json": b'{"version": "1.0", "\xc3\xa9": 1e-05}\r\n',
    "tokenizer.model": bytes(range(256)),
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{ }",
    "chat_template.jinja": b"{{ bos_token }}\n",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}",
    "configuration_ours.py": b"raise SystemExit('it was run')\n",
    "LICENSE.txt": b"do what you like\n",
    "README.md": b"",
    "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "training.log").write_bytes(b"not the model's")
    return folder


def test_what_goes_with_a_model_is_kept_by_convert_and_written_by_export(model, tmp_path):
    opened = ucp.open(model)
    statuses = {item.where: item.status for item in opened.inventory}
    assert {statuses[name] for name in FILES if "/" not in name} == {"extra"}
    assert statuses["training.log"] == "skipped"
    saved = opened.save(tmp_path / "saved")
    again = saved.save(tmp_path / "again")
    for number, checkpoint in enumerate((opened, saved, again)):
        out = tmp_path / f"out{number}"
        checkpoint.export(out, "safetensors")
        found = tree_of_files(out)
        assert {name: found.get(name) for name in FILES} == FILES
        assert "training.log" not in found
        generation = (MODEL / "generation_config.json").read_bytes()
        assert found["generation_config.json"] == generation
        config = json.loads((MODEL / "config.json").read_text())
        assert json.loads(found["config.json"]) == config
    assert faults_of(saved) == []


def test_a_companion_that_changes_or_is_damaged_is_seen(model, tmp_path):
    opened = ucp.open(model)
    (model / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(UCPError, match=r"tokenizer\.json"):
        opened.save(tmp_path / "before")
    saved = ucp.open(model).save(tmp_path / "saved")
    kept = tmp_path / "saved" / "ucp.companions" / "LICENSE.txt"
    kept.write_bytes(b"do what WE like \n")
    faults = faults_of(saved)
    assert any("LICENSE.txt is damaged" in fault for fault in faults)
    kept.unlink()
    with pytest.raises(UCPError, match=r"LICENSE\.txt is missing"):
        ucp.open(tmp_path / "saved")


def test_what_is_too_large_is_left_out_with_a_note(model, tmp_path, monkeypatch):
    (model / "vocab.txt").symlink_to(model / "vocab.json")
    (model / "COPYING").mkdir()
    monkeypatch.setattr(companions, "MAX_FILE_BYTES", 255)
    opened = ucp.open(model)
    said = "\n".join(opened.notes)
    assert "tokenizer.model is left out: it has 256 bytes, more than the 255" in said
    opened.export(tmp_path / "out", "safetensors")
    found = tree_of_files(tmp_path / "out")
    assert found["vocab.txt"] == FILES["vocab.json"]
    assert not {"COPYING", "tokenizer.model"} & found.keys()
    monkeypatch.setattr(companions, "MAX_BYTES", 40)
    assert "with it more than 40 bytes" in "\n".join(ucp.open(model).notes)


@pytest.mark.parametrize("name", ["../../out", "model.safetensors", "evil.sh", "a/b/c.json"])
def test_names_that_are_none_of_such_files_are_not_written(name: str, tmp_path: Path) -> None:
    # whoever writes a checkpoint can write any name into its list of files
    ucp.open(MODEL).save(tmp_path / "saved")
    path = tmp_path / "saved" / "ucp.json"
    metadata = decode(path.read_bytes(), "")
    hostile = tmp_path / "saved" / "ucp.companions" / name
    hostile.resolve().parent.mkdir(parents=True, exist_ok=True)
    hostile.resolve().write_bytes(b"hostile")
    files = {**metadata.files, f"ucp.companions/{name}": digest(b"hostile")}
    path.write_bytes(encode(replace(metadata, files=files)))
    if ".." in name:
        with pytest.raises(UCPError):
            ucp.open(tmp_path / "saved")
        return
    ucp.open(tmp_path / "saved").export(tmp_path / "out", "safetensors")
    written = tree_of_files(tmp_path / "out").keys() - {"ucp.checksums.sfv"}
    assert written == tree_of_files(MODEL).keys()
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights != b"hostile"


def test_other_formats_say_that_they_have_no_place_for_them(model):
    opened = ucp.open(model)
    notes = "\n".join(opened.plan_export("dcp").notes)
    assert "13 files that go with the model are left out, the first LICENSE.txt" in notes


def test_a_config_says_the_dtype_that_is_written(model: Path, tmp_path: Path) -> None:
    # a loader takes the dtype from there, and would round float32 to it
    plan = ucp.open(model).plan_export("safetensors", dtype="bfloat16")
    assert "config.json says bfloat16" in "\n".join(plan.notes)
    ucp.open(model).export(tmp_path / "out", "safetensors", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    dequantised = ucp.open(DATA / "quantized" / "gptq_4" / "ckpt", dequantize="float32")
    dequantised.export(tmp_path / "wide", "safetensors")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert "quantization_config" not in config


def test_weights_that_were_trained_in_jax_go_out_with_what_goes_with_their_model(model, tmp_path):
    """The run has neither config nor tokenizer: they come from the folder of the model."""
    weights = {name: array.read() for name, array in ucp.open(MODEL).params.items()}
    trained = ucp.Checkpoint.of({"param": weights})
    trained.export(tmp_path / "alone", "safetensors")
    trained.export(tmp_path / "out", "safetensors", config=model)
    written = tree_of_files(tmp_path / "out")
    assert {name: written[name] for name in FILES} == FILES
    assert json.loads(written["config.json"])["model_type"] == "llama"
    assert "training.log" not in written
    assert not FILES.keys() & tree_of_files(tmp_path / "alone").keys()
    trained.export(tmp_path / "config", "safetensors", config=model / "config.json")
    assert not FILES.keys() & tree_of_files(tmp_path / "config").keys()
    with pytest.raises(ValueError, match="config is for safetensors: dcp has no place for it"):
        trained.export(tmp_path / "dcp", "dcp", config=model)
