"""Every error a user of jax_ucp can meet, as one tree.

    UCPError
    ├── LayoutError         (ValueError)
    ├── SpecError           (ValueError)
    ├── FormatError         (ValueError)
    │   ├── UnsafePickle
    │   └── CorruptData
    ├── NotACheckpoint      (FileNotFoundError)
    ├── QuantizedWeights    (ValueError)
    ├── TreeMismatch        (ValueError)
    ├── UnsupportedPath     (ValueError)
    ├── StoreError          (OSError)
    ├── SaveFailed          (RuntimeError)
    ├── WorkerError         (RuntimeError)
    └── UnsupportedLeaf     (TypeError)

In parentheses is the built-in class that an error is too, by which code that knows nothing of
jax_ucp catches it. There is one warning, `ShardingWarning`.
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
    """A spec is not in the universal checkpoint language, or has a size without a number; or an
    option cannot be meant.
    """


class FormatError(UCPError, ValueError):
    """A file is not what its name, or the checkpoint around it, says it is."""


class UnsafePickle(FormatError):
    """A pickle asks for what no checkpoint needs: a name that runs code, an opcode, a size."""


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
