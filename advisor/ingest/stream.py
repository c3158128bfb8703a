"""Opens a trace file as a stream of byte blocks, inflated where it is gzip, and says how the stream ended.

A damaged or truncated file yields what is whole. Memory is one block whatever the size of the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from advisor.errors import ArtifactError

BLOCK_BYTES = 4 << 20
MAX_INFLATED_BYTES = 64 << 30
MAX_RATIO = 300  # profiler traces deflate to 1/12 to 1/40; the format cannot do more than 1032
RATIO_APPLIES_FROM = 256 << 20


class Stream:
    """The blocks of one trace file.

    After `blocks` has been read to its end, `lost` says why the content is not whole, None when it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: str | None = None
        self.inflated_bytes = 0
        try:
            self.stored_bytes = path.stat().st_size
        except FileNotFoundError:
            raise ArtifactError(f"{path.name} is missing: give the path of a trace") from None
        except OSError as error:
            raise ArtifactError(f"{path.name} cannot be read ({error.strerror or error})") from None

    def blocks(self) -> Iterator[bytes]:
        """Blocks of at most a few MiB; raises ArtifactError for a file that cannot be read at all."""
        try:
            with self.path.open("rb") as file:
                magic = file.read(2)
                file.seek(0)
                for block in self._inflated(file) if magic == b"\x1f\x8b" else _plain(file):
                    self.inflated_bytes += len(block)
                    yield block
        except OSError as error:
            raise ArtifactError(f"{self.path.name} cannot be read ({error.strerror or error})") from None

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        inflater = zlib.decompressobj(31)
        pending = b""
        while True:
            stored = pending or file.read(1 << 18)
            if not stored:
                if not inflater.eof:
                    self.lost = "truncated: the gzip stream ends early"
                return
            try:
                if inflater.eof:  # a file may hold several gzip members; padding may follow the last
                    if not stored.strip(b"\0"):
                        return
                    inflater = zlib.decompressobj(31)
                block = inflater.decompress(stored, BLOCK_BYTES)
            except zlib.error as error:
                self.lost = f"the gzip stream is damaged ({error})"
                return
            pending = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if block:
                yield block
            if self._exceeds():
                return

    def _exceeds(self) -> bool:
        total = self.inflated_bytes
        if total > MAX_INFLATED_BYTES or (total > RATIO_APPLIES_FROM and total > MAX_RATIO * max(1, self.stored_bytes)):
            self.lost = (
                f"it inflates to more than {total >> 20} MiB from {self.stored_bytes >> 10} KiB and is not read on"
            )
            return True
        return False


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block
