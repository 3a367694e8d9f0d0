"""Files that go with a model (tokenizer, chat template, licence ...), whose bytes are kept.

Facts: the names are those that `save_pretrained` of transformers 4 and 5 writes and
`from_pretrained` looks for (`utils/hub.py`, `tokenization_utils_base.py`, `processing_utils.py`),
sentencepiece's and tiktoken's, and those that people use for licences. Python files are the code
that a config names in `auto_map`; nothing here runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jax_ucp.files.path import FilePath
from jax_ucp.files.source_files import note
from jax_ucp.formats.assemble import ContentsBuilder

# What is kept of one file, and of all together. The largest tokenizers have 40 MB.
MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 256 << 20

_TEMPLATES = "additional_chat_templates"
_KINDS: Mapping[str, str] = {
    "the tokenizer": (
        r"tokenizer(_config)?\.json|tokenizer\.model(\.v\d+)?|special_tokens_map\.json"
        r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model|tekken\.json"
        r"|sentencepiece(\.bpe)?\.model|(source|target)\.spm|normalizer\.json|[\w.-]+\.tiktoken"
    ),
    "the chat template": rf"chat_template\.(jinja|json)|{_TEMPLATES}/[\w.-]+\.jinja",
    "settings of generation": r"generation_config\.json",
    "settings of a processor": r"((video_|image_)?pre)?processor_config\.json",
    "code that its config may name": (
        r"(configuration|modeling|modular|tokenization|processing|image_processing"
        r"|video_processing|feature_extraction|generation)_\w+\.py"
    ),
    "about the model": r"(LICEN[SC]E|NOTICE|README|USE_POLICY|COPYING)([\w.-]*)?",
}


def kind_of(name: str) -> str:
    """The kind of a file that goes with a model, by its name; empty for any other.

    >>> kind_of("tokenizer.json"), kind_of("../tokenizer.json"), kind_of("model.safetensors")
    ('the tokenizer', '', '')
    """
    fitting = (kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name))
    return next(fitting, "") if name.isascii() and len(name) < 200 else ""


def keep_companions(builder: ContentsBuilder, folder: FilePath) -> set[str]:
    """The entries of a folder that go with its model; the files are kept, or noted as left out."""
    names: set[str] = set()
    for file, fault in _files(folder):
        names.add(file.key.partition("/")[0])
        if fault:
            builder.skip(file.key, "file", fault)
            builder.notes.append(f"{file.key} is left out: {fault}")
            continue
        note(file.files, file.file())
        what = f"{kind_of(file.key)}, {file.name}"
        builder.companion(file, f"goes with the model ({what}): its bytes are kept")
    return names


def companions_in(folder: FilePath) -> dict[str, FilePath]:
    """A folder's files that go with the model and can be kept, by name; none of a file."""
    return {file.key: file for file, fault in _files(folder) if not fault}


def _files(folder: FilePath) -> Iterator[tuple[FilePath, str]]:
    """The files that go with the model, each with the reason why it cannot be kept, or ""."""
    files, room = folder.folder(), MAX_BYTES
    for inside in ("", _TEMPLATES):
        for info in files.list(inside):
            if info.kind != "folder" and kind_of(info.name):
                file = FilePath(files, info.name)
                fault = _fault(file, room)
                room -= 0 if fault else file.size()
                yield file, fault


def _fault(file: FilePath, room: int) -> str:
    info = file.info()
    if info is None or info.kind != "file":
        return "it is not a file"
    if info.size > MAX_FILE_BYTES:
        return f"it has {info.size} bytes, more than the {MAX_FILE_BYTES} that are kept of one"
    if info.size > room:
        return f"with it more than {MAX_BYTES} bytes would be kept of such files"
    return ""
