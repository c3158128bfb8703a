"""Opens a trace file as a stream of byte blocks, inflated where it is gzip, and says how the stream ended.

A damaged or truncated file yields what is whole. Memory is one block whatever the size of the file.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from advisor.errors import ArtifactError

BLOCK_BYTES = 4 << 20
MAX_INFLATED_BYTES = 64 << 30
MAX_RATIO = 100  # profiler traces deflate to 1/12 to 1/40; the format cannot do more than 1032
RATIO_APPLIES_FROM = 64 << 20
_STORED_BYTES = 1 << 16  # at once; what follows the end of a gzip member is copied


class Stream:
    """The blocks of one trace file.

    After `blocks` has been read to its end, `lost` says why the content is not whole, None when it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: str | None = None
        self._inflated_bytes = 0
        try:
            state = path.stat()
        except FileNotFoundError:
            raise ArtifactError(f"{path.name} is missing: give the path of a trace") from None
        except OSError as error:
            raise ArtifactError(f"{path.name} cannot be read ({error.strerror or error})") from None
        if not stat.S_ISREG(state.st_mode):  # a pipe or a device may never answer or never end
            raise ArtifactError(f"{path.name} is no file: give the path of a trace")
        self.stored_bytes = state.st_size

    def blocks(self) -> Iterator[bytes]:
        """Blocks of at most a few MiB; raises ArtifactError for a file that cannot be read at all."""
        try:
            with self.path.open("rb") as file:
                before = _state(file)
                magic = file.read(2)
                file.seek(0)
                yield from _gathered(self._inflated(file) if magic == b"\x1f\x8b" else _plain(file))
                if _state(file) != before:
                    self.lost = "the file changed while it was read"
        except OSError as error:
            raise ArtifactError(f"{self.path.name} cannot be read ({error.strerror or error})") from None

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        inflater = zlib.decompressobj(31)
        pending = b""
        while True:
            stored = pending or file.read(_STORED_BYTES)
            if not stored:
                if not inflater.eof:
                    self.lost = "truncated: the gzip stream ends early"
                    yield inflater.flush()
                return
            if inflater.eof:  # a file may hold several gzip members; padding may follow the last
                if not stored.strip(b"\0"):
                    return
                inflater = zlib.decompressobj(31)
            before = inflater.copy()
            try:
                block = inflater.decompress(stored, BLOCK_BYTES)
            except zlib.error as error:
                self.lost = f"the gzip stream is damaged ({error})"
                yield from _to_damage(before, stored)
                return
            pending = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            self._inflated_bytes += len(block)
            yield block
            if self._exceeds():
                return

    def _exceeds(self) -> bool:
        total = self._inflated_bytes
        if total > MAX_INFLATED_BYTES or (total > RATIO_APPLIES_FROM and total > MAX_RATIO * max(1, self.stored_bytes)):
            self.lost = (
                f"it inflates to more than {total >> 20} MiB from {self.stored_bytes >> 10} KiB and is not read on"
            )
            return True
        return False


def _to_damage(inflater: Any, stored: bytes) -> Iterator[bytes]:
    """What stands before the byte at which a stream is damaged."""
    for place in range(len(stored)):
        try:
            block = inflater.decompress(stored[place : place + 1])
        except zlib.error:
            return
        yield block


def _gathered(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that are not small: what is added to a text copies the text."""
    waiting: list[bytes] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += len(block)
        if size >= BLOCK_BYTES // 4:
            yield b"".join(waiting)
            waiting, size = [], 0
    if size:
        yield b"".join(waiting)


def _state(file: BinaryIO) -> tuple[int, int]:
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block
