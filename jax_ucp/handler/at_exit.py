"""Waiting at exit for saves in the background that a program has not waited for.

Python stops thread pools before it waits for threads. Such a save could then not go on, and Orbax's
thread would fail silently. Here saves are waited for before the pools are stopped.

Facts: `threading._shutdown` and `concurrent.futures.thread._python_exit` of CPython 3.11 to 3.14,
the only hook that comes early enough; the thread that waits for the futures of a save, in
`_src/checkpointers/async_checkpointer.py`, and the event loop of each save of v1, in
`_src/asyncio_utils.py`, of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jax_ucp.universal.step import UNFINISHED_STEP

ORBAX_THREAD = "async_save"

# The time that Orbax may take to create the folders of a save.
BEGIN_S = 60

_saves: list[_BackgroundSave] = []


class _BackgroundSave(Protocol):
    """A save that may still be running."""

    url: str

    def is_over(self) -> bool: ...

    def wait(self) -> None:
        """Return when it is a checkpoint. Raises the error if it fails."""
        ...


def note(save: _BackgroundSave) -> None:
    """Wait for a save before the program ends."""
    _saves[:] = [*(each for each in _saves if not each.is_over()), save]


class NotedCommit(CommitFutureAwaitingContractedSignals):
    """The future on which v0 waits, in the thread that commits the save or in the caller's."""

    def __init__(self, url: str, finish: Coroutine[Any, Any, None]):
        super().__init__(finish, name="jax_ucp_write")
        self.url = url
        self._thread: threading.Thread | None = None
        self._is_heard = False

    def result(self, timeout: float | None = None) -> Any:
        thread = threading.current_thread()
        if thread.name == ORBAX_THREAD:
            self._thread = thread
            return super().result(timeout)
        try:
            return super().result(timeout)
        finally:
            self._is_heard = True

    def is_running(self) -> bool:
        """Whether the save is neither written nor failed."""
        try:
            super().result(0)
        except TimeoutError:
            return True
        except BaseException:  # `result` raises it again
            pass
        return False

    def is_over(self) -> bool:
        return self._is_heard or (self._thread is not None and not self._thread.is_alive())

    def wait(self) -> None:
        super().result()
        if self._thread is not None:
            self._thread.join()


class NotedLoop:
    """A save that v1 runs in an event loop of its own."""

    def __init__(self, url: str):
        self.url = url
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_finished = False
        self._error: Exception | None = None

    async def run(self, finish: Coroutine[Any, Any, None]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await finish
        except Exception as error:
            self._error = error
            raise
        self._is_finished = True

    def is_over(self) -> bool:
        return self._loop is not None and not self._loop.is_running()

    def wait(self) -> None:
        end = time.monotonic() + BEGIN_S
        while self._loop is None and time.monotonic() < end:
            time.sleep(0.01)
        if self._loop is None:
            raise TimeoutError(f"Orbax did not begin it within {BEGIN_S} s")
        if self._loop.is_running():
            _wait_for_others(self._loop)
        if self._error is not None:  # the loop may have ended before
            raise self._error
        if not self._is_finished:
            raise RuntimeError("it was stopped")


def _wait_for_others(loop: asyncio.AbstractEventLoop) -> None:
    """Wait for the tasks of an event loop, until it stops. Raises the first error of any.

    It may stop, or be closed, before it begins the task that waits here for the others.
    """
    others = _others()
    try:
        waiting = asyncio.run_coroutine_threadsafe(others, loop)
    except RuntimeError:  # it is closed
        others.close()
        return
    while loop.is_running() and not waiting.done():
        time.sleep(0.01)
    if waiting.done():
        waiting.result()
    else:
        others.close()


async def _others() -> None:
    """Wait for all other tasks of this event loop. Raises the first error of any."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*tasks)


def _wait_for_saves() -> None:
    """Wait for the saves that are running; if one fails, the program's exit code is 1."""
    lost = False
    for save in _saves:
        if save.is_over():
            continue
        url = save.url.replace(UNFINISHED_STEP, "")
        _say(
            f"the program ends while {url} is being saved in the background, and waits for it."
            " Wait for a save before the end: wait_until_finished() or close() of the manager,"
            " result() of what save_async returned"
        )
        try:
            save.wait()
        except BaseException as error:
            lost = True
            _say(f"LOST: {url} was not saved: {type(error).__name__}: {error}")
    if lost:
        atexit.register(_end_badly)


def _say(text: str) -> None:
    sys.stderr.write(f"jax_ucp: {text}\n")
    sys.stderr.flush()


def _end_badly() -> None:
    """End the process with exit code 1, after the other exit functions: an error raised in one of
    them would not change the exit code.
    """
    atexit.unregister(_end_badly)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(1)


threading._register_atexit(_wait_for_saves)  # pyright: ignore[reportAttributeAccessIssue]
