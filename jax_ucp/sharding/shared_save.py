"""One save by several processes: each learns whether all did their part, and if not, in whose and in what words.

The words go through JAX's coordination service, to which `jax.distributed.initialize` joins every process. Any thread
may use it, which is not so of collectives, and it works when the disk does not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
from jax._src import distributed  # the service has no public client (jax 0.10); Orbax takes it from here too

from jax_ucp.errors import SaveFailed

T = TypeVar("T")

# How much longer than this process another may take over its part: what Orbax gives a whole save by default.
PATIENCE_S = 1200

_begun: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class SharedSave:
    """A save to a directory, which has the same path in all processes. Each of them makes one of these for it."""

    def __init__(self, directory: str):
        self._directory = directory
        self._process = jax.process_index()
        self._others = range(1, jax.process_count())
        # A directory may be saved to again, after a save that failed.
        self._key = f"jax_ucp/{directory}/{next(_begun[directory])}"

    def begin(self, do: Callable[[], T]) -> Callable[[], T]:
        """Do what cannot wait for `run`, which then asks for the result.

        An error of one process among several is raised there: Orbax goes on from here with collectives, in which
        the others would wait for it.
        """
        try:
            result = do()
        except Exception as error:
            if not self._others:
                raise
            return functools.partial(_raise, error)
        return lambda: result

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What is raised here ends the save in all processes, when they come to the end of their own parts."""
        try:
            yield
        except BaseException as error:
            self._say(f"process {self._process}: {type(error).__name__}: {error}")
            error.add_note(f"the save to {self._directory} was not done: process {self._process} could not do its part")
            raise

    def run(self, write: Callable[[], object], commit: Callable[[], object]) -> None:
        """Write this process's part; when all have, commit in process 0; return when that is done.

        Raises SaveFailed in every process where another's part was not done; nothing is committed then.
        """
        with self.telling():
            write()
        if self._process == 0:
            faults = "\n  ".join(filter(None, map(self._hear, self._others)))
            with self.telling():
                if not faults:
                    commit()
            self._say(faults)
            if self._others:
                _client().key_value_delete(f"{self._key}/parts/")
        else:
            self._say("")
            faults = self._hear(0)
        if faults:
            raise SaveFailed(f"the save to {self._directory} was not done, for not all did their part:\n  {faults}")

    def _say(self, fault: str) -> None:
        """What process 0 says is of the whole save, what another says of its part."""
        if self._others:
            _client().key_value_set(self._place(self._process), fault)

    def _hear(self, process: int) -> str:
        """What another process said, or that it said nothing."""
        try:
            return str(_client().blocking_key_value_get(self._place(process), PATIENCE_S * 1000))
        except jax.errors.JaxRuntimeError as error:
            return f"process {process} did not say within {PATIENCE_S} s that it was done: {error}"

    def _place(self, process: int) -> str:
        return f"{self._key}/parts/{process}" if process else f"{self._key}/outcome"


def _raise(error: Exception) -> NoReturn:
    raise error


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise SaveFailed("several processes can save together only after jax.distributed.initialize()")
    return client
