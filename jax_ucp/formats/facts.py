"""Facts that the files of a checkpoint state of their step. All files of one save say the
same.

Each rank writes for itself how far the training has come: counters, learning rates, schedulers,
loss scalers, the steps of its optimizer. Where two files differ in that, they are of two steps, or
of two runs, however well the rest of them fits. What ranks rightly have for themselves (random
states, places in the data, groups of parameters that only some pipeline stages have) is no such
fact, and nobody states it here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import numpy as np

from jax_ucp.arrays.dtypes import same_bits
from jax_ucp.codecs.torch_file import StoredTensor, TorchFile
from jax_ucp.codecs.unpickle import Record
from jax_ucp.errors import FormatError
from jax_ucp.files.path import FilePath
from jax_ucp.layout.box import Box

# Of more elements than this a tensor is data, not a fact.
_FEW = 16
_SHOWN = 80
# What describes parameters, which are each rank's own.
_PARAMETERS = ("params", "param_names")
# How trainers call what all ranks count alike, and what follows from such counts.
COUNTS = (
    *("iteration", "global_step", "global_steps", "num_steps"),
    *("last_epoch", "_step_count", "last_batch_iteration"),
)
RATES = ("lr", "_last_lr", "last_lr")


class Facts:
    """Facts by name, each with the first file that stated it."""

    def __init__(self, folder: FilePath):
        self.folder = folder
        self._known: dict[tuple[Hashable, str], tuple[str, Any]] = {}

    def state(self, file: str, what: str, value: Any, among: Hashable = None) -> None:
        """`file` says that `what` is `value`; so must all others do that state it `among` the same
        ranks.

        Raises FormatError, naming both files and both values, where one says otherwise.
        """
        first, known = self._known.setdefault((among, what), (file, value))
        # two values are alike that are one number, whatever its type; NaN is NaN
        a, b = np.asarray(known), np.asarray(value)
        if a.dtype != b.dtype:
            are_alike = a.shape == b.shape and np.all(a == b)
        else:
            are_alike = a.item() == b.item() if a.dtype == object else same_bits(a, b)
        if not are_alike:
            raise FormatError(
                f"{self.folder / file}: {what} is {value!s:.{_SHOWN}}, but {known!s:.{_SHOWN}} in"
                f" {first}; the files are not of one step of one run. Put the files of one save in"
                " their places"
            )

    def state_all(
        self,
        file: TorchFile,
        name: str,
        what: str,
        tree: Any,
        among: Hashable = None,
        only: Collection[str] = (),
    ) -> None:
        """Every number, text and small tensor in a value that `file`, called `name`, has for
        `what`.

        With `only`, those that are called so.
        """
        for path, value in _facts(tree, what, file.tensor):
            called = path.partition("[")[0].rpartition(".")[2]
            if not only or called in only:
                self.state(name, path, value, among)


def _facts(
    tree: Any, what: str, read: Callable[[StoredTensor], np.ndarray]
) -> Iterator[tuple[str, Any]]:
    match tree:
        case Record():
            yield from _facts(dict(tree.fields), what, read)
        case dict():
            for key, value in tree.items():
                if key not in _PARAMETERS:
                    yield from _facts(value, f"{what}.{key}", read)
        case list() | tuple():
            for i, value in enumerate(tree):
                yield from _facts(value, f"{what}[{i}]", read)
        case StoredTensor() if Box.whole(tree.shape).size <= _FEW:
            yield what, read(tree)
        case None | bool() | int() | float() | str() | np.generic():
            yield what, tree
