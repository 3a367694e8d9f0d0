"""Files that stand in place of a checkpoint: pointers, web pages, and unfinished downloads."""

from __future__ import annotations

from jax_ucp.files.path import FilePath

HEAD_BYTES = 512

# The first bytes of a file that was downloaded in place of the one meant, what it is, and the
# remedy.
_HEADS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a git-lfs pointer and not the file itself",
        "run `git lfs pull`",
    ),
    (
        b"# xet version",
        "a pointer of git-xet and not the file itself",
        "fetch the file with git-xet",
    ),
    (b"/annex/objects/", "a git-annex pointer and not the file itself", "run `git annex get`"),
    (
        b"\0\5\x16\7",
        "what macOS keeps beside a file (AppleDouble)",
        "open the file without `._` in its name",
    ),
    (
        b"<!doctype html",
        "a web page, not the file that a link to it offers",
        "download the file itself",
    ),
    (b"<html", "a web page, not the file that a link to it offers", "download the file itself"),
    (b"Entry not found", "what the hub answered, not the file", "download it again"),
    (b'{"error"', "an error that a server answered, not the file", "download it again"),
    (
        b"Access to model",
        "what the hub answered, not the file: it wants a login",
        "log in and download it again",
    ),
    (
        b"Invalid credentials",
        "what the hub answered, not the file: it wants a login",
        "log in and download it again",
    ),
)

# Suffixes of unfinished downloads of browsers, scripts around curl and wget, aria2,
# huggingface_hub.
UNFINISHED = (
    *(".incomplete", ".part", ".partial", ".crdownload", ".download"),
    *(".aria2", ".tmp", ".aria2__temp"),
)
_HUB_DOWNLOADS = ".cache/huggingface/download"


def stand_in(path: FilePath) -> str | None:
    """The kind of file that stands in place of a checkpoint, and the remedy; None for other files.

    An unfinished download is such a file too, even if its size is right already.
    """
    if path.with_name(f"{path.name}.aria2").exists():
        return f"its download has not ended: {path.name}.aria2 is beside it"
    head = path.read_range(0, HEAD_BYTES)
    if not head:
        return "it is empty: its download or its save has not ended"
    text = head.lstrip().lower()
    for begin, what, remedy in _HEADS:
        if head.startswith(begin) or text.startswith(begin.lower()):
            return f"it is {what}: {remedy}"
    return None


def finished_name(name: str) -> str | None:
    """The name that an unfinished download will have; None for any other file.

    >>> finished_name("model.safetensors.part")
    'model.safetensors'
    """
    for suffix in UNFINISHED:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return None


def why_missing(folder: FilePath, name: str) -> str:
    """The reason why a file is missing, as far as the folder shows it, or an empty text."""
    path = folder / name
    if path.link():
        return (
            f"it is a link to {path.link()}, which does not exist: the download or the cache is"
            " not complete"
        )
    beside = (f"{name}{suffix}" for suffix in UNFINISHED)
    download = next((other for other in beside if (folder / other).exists()), None)
    kept = folder / _HUB_DOWNLOADS
    if download is None and kept.is_dir():  # by hash since 0.27 of huggingface_hub
        unfinished = kept.matching(".incomplete")
        of_this = [path for path in unfinished if path.name.startswith(f"{name}.")]
        download = next((path.below(folder) for path in of_this or unfinished), None)
    return f"{download} is a download that has not ended" if download else ""
