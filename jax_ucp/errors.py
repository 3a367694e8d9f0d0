"""Every error a user of jax_ucp can meet, as one tree.

    UCPError
    ├── LayoutError          shards do not fit the pattern or the geometry declared for them
    ├── SpecError            a spec is not in the universal checkpoint language, or has a
    │                        size without a number; or an option cannot be meant
    ├── FormatError          a file is not what its name or its checkpoint says it is
    │   ├── UnsafePickle     a torch file asks for what no data needs: a name that runs
    │   │                    something, an opcode, a size
    │   └── CorruptData      bytes differ from their checksum, duplicate or recorded size
    ├── NotACheckpoint       nothing at the path is a checkpoint we know, or it was never finished
    ├── QuantizedWeights     weights are stored as codes and scales, and were asked for as weights
    ├── TreeMismatch         a target tree and a checkpoint do not have the same leaves
    ├── UnsupportedPath      a path is a URL where none can be, or would be taken for another path
    ├── StoreError           a bucket or a server did not answer, or refused
    ├── SaveFailed           another process could not do its part of a save
    ├── WorkerError          an executor's processes cannot do the work, or one of them has ended
    └── UnsupportedLeaf      a leaf of a tree to be saved is nothing we could restore as what it was

One warning, which is no error: `ShardingWarning`, where leaves are placed otherwise than asked for.

`LayoutError`, `SpecError`, `FormatError`, `QuantizedWeights`, `TreeMismatch` and `UnsupportedPath`
are also `ValueError`, `NotACheckpoint` is also `FileNotFoundError`, `StoreError` also `OSError`,
`SaveFailed` and `WorkerError` also `RuntimeError` and `UnsupportedLeaf` also `TypeError`, so that
code which knows nothing of us catches them where it would expect to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from jax_ucp.text import fault_lines

# What to say of an option that opens the rest of a checkpoint.
WAYS_OUT = {
    "weights_only": "weights_only opens the weights alone: the optimizer and the trainer's state"
    " are left aside"
}


class UCPError(Exception):
    """Anything jax_ucp refuses to do, with the reason and the remedy: data, which `str` words.

    Attributes:
        reason: Why it is refused, in one sentence.
        faults: Everything that is wrong, where the reason is a title over several faults. `str`
            lists the first of them.
        remedy: What to do; it follows the list of faults.
        path: The file or the folder that it is about. `str` begins with it, unless the reason
            names it.
        way_out: The option that opens the rest of the checkpoint, such as `weights_only`.

    >>> error = LayoutError("2 leaves do not fit:", ["a is missing", "b is missing"]).at("run/7")
    >>> print(error)
    run/7: 2 leaves do not fit:
      a is missing
      b is missing
    """

    def __init__(
        self,
        reason: object = "",
        faults: Sequence[str] = (),
        *,
        remedy: str = "",
        path: object = "",
        way_out: str = "",
    ):
        super().__init__(reason)
        self.reason, self.faults, self.remedy = str(reason), list(faults), remedy
        self.path, self.way_out = str(path), way_out

    def at(self, path: object = "", item: str = "", way_out: str = "") -> Self:
        """The error, with a file (its own stays), the item and the way out its caller knows of."""
        self.path, self.way_out = self.path or str(path), self.way_out or way_out
        if item:
            self.reason = f"{item}: {self.reason}"
        return self

    def __str__(self) -> str:
        reason = self.reason
        if self.path not in reason:
            reason = f"{self.path}: {reason}"
        text = f"{reason}{fault_lines(self.faults)}"
        if self.remedy:
            text += f"\n{self.remedy}"
        return f"{text}; {WAYS_OUT[self.way_out]}" if self.way_out else text


class LayoutError(UCPError, ValueError):
    """The shards do not fit the pattern or the geometry declared for them."""


class SpecError(UCPError, ValueError):
    """A text is not in the universal checkpoint language, or an option is not one."""


class FormatError(UCPError, ValueError):
    """A file is not what its name, or the checkpoint around it, says it is."""


class UnsafePickle(FormatError):
    """A pickle asks for something that reading a checkpoint never needs."""


class CorruptData(FormatError):
    """Bytes differ from their checksum, from their duplicate, or from their recorded size."""


@contextmanager
def naming(path: object = "", item: str = "", way_out: str = "") -> Iterator[None]:
    """A context that says of an error about files or shards where it was met, as `UCPError.at`."""
    try:
        yield
    except (FormatError, LayoutError) as error:
        error.at(path, item, way_out)
        raise


class NotACheckpoint(UCPError, FileNotFoundError):
    """Nothing at the path is a finished checkpoint of a format we know."""


class QuantizedWeights(UCPError, ValueError):
    """Weights are stored as codes that need their scales, and were asked for as weights."""


class TreeMismatch(UCPError, ValueError):
    """The target tree and the checkpoint do not have the same leaves."""


class UnsupportedPath(UCPError, ValueError):
    """A path is a URL of an unknown kind, or would be taken for another path than is meant."""


class StoreError(UCPError, OSError):
    """A bucket, a hub or a web server did not answer, however often it was asked, or refused."""


class SaveFailed(UCPError, RuntimeError):
    """Another process could not do its part of a save; there is no checkpoint."""


class WorkerError(UCPError, RuntimeError):
    """The processes of an executor cannot do the work they were given, or one of them has ended."""


class UnsupportedLeaf(UCPError, TypeError):
    """A leaf of a tree to be saved is nothing we could restore as what it was."""


class ShardingWarning(UserWarning):
    """Leaves are not placed on a mesh as their saved specs or the rules ask for."""
