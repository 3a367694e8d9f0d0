"""A save by several processes, which succeeds in all of them or fails in all of them.

Messages go through JAX's coordination service, to which `jax.distributed.initialize` joins every
process: unlike collectives, from any thread, and when the disk does not work.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import jax
import msgspec
from jax._src import (
    distributed,  # the service has no public client (jax 0.10); Orbax takes it from here too
)

from jax_ucp.errors import SaveFailed
from jax_ucp.universal.metadata import digest
from jax_ucp.version import VERSION

T = TypeVar("T")

# How much longer than this process another may take for its part: Orbax's default for a whole save.
PATIENCE_S = 1200

# After this time without a message of a process, we look whether it is busy with another save.
LOOK_AROUND_S = 5

# The service takes values of 4 MiB; a tree whose description is longer is not sent to be compared.
MAX_CONTENT_BYTES = 3 << 20
DIFFERENCES_SHOWN = 4

_COMPARE = "compare"

# Of this process: the number of the next save to each directory, as process 0 counts them; the keys
# of all saves that were begun, and of the last few, which are published to the others.
_next: defaultdict[str, int] = defaultdict(int)
_keys: set[str] = set()
_recent: deque[str] = deque(maxlen=8)

Stage = Literal["content", "differences", "parts"]

# The leaves that a process would save: the name, the label and a description of each.
Content = Sequence[tuple[str, str, str]]


class _Word(msgspec.Struct, omit_defaults=True):
    """A message of a process: it completed a stage, with a text, or the fault that stopped it.

    Process 0's message is about the whole save; `absent` are processes that were busy with another.
    """

    text: str = ""
    fault: str = ""
    absent: tuple[int, ...] = ()


def attempt(do: Callable[[], T]) -> Callable[[], T]:
    """Call `do` now; return a function that gives its result, or raises its error, later.

    With several processes Orbax continues here with collectives, in which the others would wait for
    one that raised. With one process an error is raised at once.
    """
    try:
        result = do()
    except Exception as error:
        if jax.process_count() == 1:
            raise
        return functools.partial(_raise, error)
    return lambda: result


class SharedSave:
    """The part of one process in a save to a directory, whose path is the same in all processes."""

    def __init__(self, directory: str):
        self._directory = directory
        self._process = jax.process_index()
        self._others = range(1, jax.process_count())
        self._stage: Stage = "content"
        if not self._others:
            return
        # Find out which save to the directory this is, and publish that it is begun. A directory
        # may be saved to again, after a save that failed: also after one in which this process had
        # no part.
        self._key = f"jax_ucp/{self._directory}/{_next[self._directory]}"
        while self._process and (verdict := _try_get(self._verdict_place("content"))):
            if self._process not in _word(verdict).absent:
                break
            self._joined()
            self._key = f"jax_ucp/{self._directory}/{_next[self._directory]}"
        if self._process == 0:
            self._joined()
        _keys.add(self._key)
        _recent.append(self._key)
        _client().key_value_set(
            _recent_place(self._process), "\n".join(_recent), allow_overwrite=True
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Context whose errors end the save in all processes, once these finish their own parts."""
        try:
            yield
        except BaseException as error:
            self._say(_Word(fault=f"process {self._process}: {type(error).__name__}: {error}"))
            error.add_note(
                f"the save to {self._directory} was not done: process {self._process} could not do"
                " its part"
            )
            raise

    def run(
        self, content: Callable[[], Content], write: Callable[[], T], commit: Callable[[T], object]
    ) -> None:
        """Write this process's part if all have the same content; process 0 then commits, with the
        value that `write` returned. Raises SaveFailed in every process, and commits nothing, if
        content differs or a part was not done.
        """
        if self._others:
            self._agree(content)
        self._stage = "parts"
        with self.telling():
            written = write()

        def committed(words: Mapping[int, str]) -> str:
            commit(written)
            return ""

        self._conclude("", committed)
        if self._others and self._process == 0:
            _client().key_value_delete(self._verdict_place("content"))

    def _joined(self) -> None:
        """Count this save, so that the next one to the directory has the next number."""
        _next[self._directory] = int(self._key.rpartition("/")[2]) + 1

    def _agree(self, content: Callable[[], Content]) -> None:
        """Raise SaveFailed with the differences unless all processes have the same content."""
        with self.telling():
            # other versions may cut and write differently
            mine = [("", "the version of jax_ucp", VERSION), *content()]
            encoded = msgspec.json.encode(mine)
        own = digest(encoded)

        def same(words: Mapping[int, str]) -> str:
            if all(word == own for word in words.values()):
                return ""
            packed = zlib.compress(encoded, 1)
            _client().key_value_set_bytes(
                self._content_place, packed if len(packed) <= MAX_CONTENT_BYTES else b""
            )
            return _COMPARE

        if self._conclude(own, same) != _COMPARE:
            return
        self._stage = "differences"
        with self.telling():
            fault = self._differences(mine)
        words = self._conclude(fault, lambda words: "\n  ".join(filter(None, words.values())))
        if self._process == 0:
            _client().key_value_delete(self._content_place)
        raise SaveFailed(
            f"the save to {self._directory} was not done, for not all would save the same:\n "
            f" {words}"
        )

    def _conclude(self, text: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        """The text that process 0 makes of all processes' texts. Raises SaveFailed."""
        if self._process == 0:
            with self.telling():
                # once another is busy with another save, the others are not awaited
                words: dict[int, _Word] = {}
                for process in self._others:
                    if any(word.absent for word in words.values()):
                        text = _try_get(self._place(process))
                        words[process] = (
                            _word(text) if text else self._elsewhere(process) or _Word()
                        )
                    else:
                        words[process] = self._hear(process)
                faults = [word.fault for word in words.values() if word.fault]
                absent = tuple(process for process, word in words.items() if process in word.absent)
                texts = {process: word.text for process, word in words.items()}
                decided = "" if faults else decide(texts)
                verdict = _Word(decided, "\n  ".join(faults), absent)
            self._say(verdict)
            if self._others:
                _client().key_value_delete(f"{self._key}/{self._stage}/")
        else:
            self._say(_Word(text))
            verdict = self._hear(0)
        if verdict.fault:
            raise SaveFailed(f"the save to {self._directory} was not done:\n  {verdict.fault}")
        return verdict.text

    def _differences(self, mine: Content) -> str:
        if self._process == 0:
            return ""
        packed = _client().blocking_key_value_get_bytes(self._content_place, PATIENCE_S * 1000)
        if not packed:
            return (
                f"process {self._process} would save another tree than process 0, of"
                f" {len(mine) - 1} leaves, by jax_ucp {VERSION}"
            )
        theirs = msgspec.json.decode(zlib.decompress(packed), type=list[tuple[str, str, str]])
        return differences(mine, theirs, self._process)

    def _say(self, word: _Word) -> None:
        """Publish a message: process 0's is about the whole save, another's about its part."""
        if self._others:
            _client().key_value_set(self._place(self._process), msgspec.json.encode(word).decode())
            if word.fault and self._process:
                self._joined()

    def _hear(self, process: int) -> _Word:
        """The message of another process; a fault if none comes in time, or it is busy."""
        begin = time.monotonic()
        while True:
            try:
                text = _client().blocking_key_value_get(self._place(process), LOOK_AROUND_S * 1000)
            except jax.errors.JaxRuntimeError as error:
                if elsewhere := self._busy_elsewhere(process):
                    return elsewhere
                waited = round(time.monotonic() - begin)
                if "DEADLINE_EXCEEDED" not in str(error) or waited > PATIENCE_S:
                    return _Word(
                        fault=(
                            f"process {process} did not say within {waited} s that it was done:"
                            f" {error}"
                        )
                    )
            else:
                if process == 0:
                    self._joined()
                return _word(text)

    def _busy_elsewhere(self, process: int) -> _Word | None:
        """The message for a process that is busy with another save, else None.

        If that is process 0, this process's own message is withdrawn: process 0 publishes that it
        has begun before it reads any, so it has not read one that was withdrawn by then.
        """
        elsewhere = self._elsewhere(process)
        if elsewhere is None or process:
            return elsewhere
        own = _try_get(self._place(self._process))
        _client().key_value_delete(self._place(self._process))
        elsewhere = self._elsewhere(process)
        if elsewhere is None and own:
            _client().key_value_set(self._place(self._process), own)
        return elsewhere

    def _elsewhere(self, process: int) -> _Word | None:
        """The message for a process that is in a save unknown to this one; else None."""
        begun = _try_get(_recent_place(process)).split("\n")
        if not begun[-1] or self._key in begun or begun[-1] in _keys:
            return None
        other = begun[-1].removeprefix("jax_ucp/").rpartition("/")[0]
        fault = f"process {process} saves to {other}, process {self._process} to {self._directory}"
        return _Word(fault=fault, absent=(process,))

    def _place(self, process: int) -> str:
        return (
            f"{self._key}/{self._stage}/{process}" if process else self._verdict_place(self._stage)
        )

    def _verdict_place(self, stage: Stage) -> str:
        return f"{self._key}/verdict/{stage}"

    @property
    def _content_place(self) -> str:
        return f"{self._key}/content of process 0"


def differences(mine: Content, theirs: Content, process: int) -> str:
    """How the leaves of a process differ from those of process 0, in words; "" if they do not.

    >>> differences([("w", "w", "float32 [2]"), ("b", "b", "int8 []")], [("w", "w", "float32 [3]")],
    ...     1)
    'process 1 has w as float32 [2], process 0 as float32 [3]; process 1 has b, process 0 has not'
    """
    if list(mine) == list(theirs):
        return ""
    leaves, first = _by_name(mine), _by_name(theirs)
    common = [key for key in leaves if first.get(key, leaves[key]) != leaves[key]]
    faults = [
        f"process {process} has {key[1]} as {leaves[key]}, process 0 as {first[key]}"
        for key in common
    ]
    faults += _absent(leaves, process, first, 0) + _absent(first, 0, leaves, process)
    if not faults:
        return f"process {process} has the leaves in another order than process 0"
    if len(faults) > DIFFERENCES_SHOWN:
        faults[DIFFERENCES_SHOWN:] = [f"and {len(faults) - DIFFERENCES_SHOWN} more"]
    return "; ".join(faults)


def _by_name(content: Content) -> dict[tuple[str, str], str]:
    return {(name, label): what for name, label, what in content}


def _absent(
    leaves: Mapping[tuple[str, str], str],
    process: int,
    others: Mapping[tuple[str, str], str],
    other: int,
) -> list[str]:
    absent = itertools.filterfalse(others.__contains__, leaves)
    return [f"process {process} has {label}, process {other} has not" for _, label in absent]


def _recent_place(process: int) -> str:
    return f"jax_ucp/begun/{process}"


def _word(text: str) -> _Word:
    return msgspec.json.decode(text, type=_Word)


def _raise(error: Exception) -> NoReturn:
    raise error


def _try_get(place: str) -> str:
    try:
        return str(_client().key_value_try_get(place))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return ""


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise SaveFailed(
            "several processes can save together only after jax.distributed.initialize()"
        )
    return client
