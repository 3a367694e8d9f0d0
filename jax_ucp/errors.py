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

from collections.abc import Sequence


class UCPError(Exception):
    """Anything jax_ucp refuses to do, with the reason and the remedy in its text."""


class LayoutError(UCPError, ValueError):
    """The shards do not fit the pattern or the geometry declared for them."""


class SpecError(UCPError, ValueError):
    """A text is not in the universal checkpoint language, or a size in it has no number; or an
    option is not one.
    """


class FormatError(UCPError, ValueError):
    """A file is not what its name, or the checkpoint around it, says it is."""


class UnsafePickle(FormatError):
    """A pickle asks for something that reading a checkpoint never needs."""


class CorruptData(FormatError):
    """Bytes differ from their checksum, from their duplicate, or from their recorded size."""


class NotACheckpoint(UCPError, FileNotFoundError):
    """Nothing at the path is a finished checkpoint of a format we know."""


class QuantizedWeights(UCPError, ValueError):
    """Weights are stored as codes that mean something only with their scales, and were asked for
    as weights.
    """


class TreeMismatch(UCPError, ValueError):
    """The target tree and the checkpoint do not have the same leaves."""


class UnsupportedPath(UCPError, ValueError):
    """A path is a URL of a kind that is not known, or where a local path is needed, or would be
    taken for another path than the one that is meant.
    """


class StoreError(UCPError, OSError):
    """A bucket, a hub or a web server did not answer, however often it was asked, or refused."""


class SaveFailed(UCPError, RuntimeError):
    """A process could not do its part of a save, and this is another one, which did; there is no
    checkpoint.
    """


class WorkerError(UCPError, RuntimeError):
    """The processes of an executor cannot do the work they were given, or one of them has ended."""


class UnsupportedLeaf(UCPError, TypeError):
    """A leaf of a tree to be saved is nothing we could restore as what it was."""


class ShardingWarning(UserWarning):
    """Leaves are not placed on a mesh as their saved specs or the rules ask for."""


FAULTS_SHOWN = 20


def fault_lines(faults: Sequence[str], shown: int = FAULTS_SHOWN) -> str:
    """The first `shown` faults, a line each with the indent that a message's later lines have.

    >>> print("  " + fault_lines(["a is missing", "b is missing", "c is missing"], shown=2))
      a is missing
      b is missing
      ... and 1 more
    """
    lines = list(faults[:shown])
    if len(faults) > shown:
        lines.append(f"... and {len(faults) - shown} more")
    return "\n  ".join(lines)
