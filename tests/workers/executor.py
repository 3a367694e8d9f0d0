"""What tests have an executor's processes do before their work. JAX is not imported here, because
those processes import this.
"""

import os
from typing import Any


def log_reads(log: str) -> None:
    """Write a line to `log` for every read by position: file, first byte, number of bytes."""
    preadv = os.preadv
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def logged(file: int, rooms: list[memoryview], at: int) -> int:
        length = preadv(file, rooms, at)
        os.write(handle, f"{os.readlink(f'/proc/self/fd/{file}')}\t{at}\t{length}\n".encode())
        return length

    def pread(file: int, size: int, at: int) -> bytes:
        room = bytearray(size)
        return bytes(room[: logged(file, [memoryview(room)], at)])

    os.preadv, os.pread = logged, pread


def die_at_write(number: int) -> None:
    """End the process, as a crash does, in the middle of its write of that number."""
    from jax_ucp.files.local import LocalFiles

    write, count = LocalFiles.write, 0

    def dying(self: LocalFiles, name: str, parts: Any, *, durable: bool) -> None:
        nonlocal count
        count += 1
        if count == number:
            write(self, name, [bytes(next(iter(parts)))[:100]], durable=durable)
            os._exit(1)
        write(self, name, parts, durable=durable)

    LocalFiles.write = dying
