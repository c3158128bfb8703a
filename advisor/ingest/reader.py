"""Reads a trace file into a table, in this process or with helpers that decode chunks beside each other."""

from __future__ import annotations

import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO

from advisor.errors import ArtifactError
from advisor.ingest.decode import Decoder, Part
from advisor.ingest.events import Events
from advisor.ingest.stream import Stream
from advisor.ingest.table import Table, assemble

HELPERS_FROM_BYTES = 24 << 20  # stored size from which starting helpers pays
GZIP_HELPERS_FROM_BYTES = 3 << 20
LENGTH = struct.Struct("<q")


def read_table(path: Path, workers: int | None = None) -> Table:
    """Read a Kineto or Chrome trace, .json or .json.gz, in object or array form.

    A damaged or truncated file yields what is whole, with the reasons in `lost`. Raises ArtifactError for a file that
    holds no list of events. `workers` processes decode (default: as many as there are cores, one for a small file).
    """
    stream = Stream(path)
    events = Events(path.name, stream.blocks())
    count = workers if workers is not None else _workers(path, stream.stored_bytes)
    chunks = events.chunks()
    try:
        parts = [_decode(chunks)] if count <= 1 else _decode_beside(chunks, count)
    except ArtifactError as error:
        if stream.lost is None:
            raise
        raise ArtifactError(f"{error}; {stream.lost}") from None
    lost = [*([] if stream.lost is None else [stream.lost]), *events.lost]
    table = assemble(parts, events.head, lost)
    return replace(table, skipped=table.skipped + events.skipped)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers(path: Path, stored: int) -> int:
    least = GZIP_HELPERS_FROM_BYTES if path.suffix == ".gz" else HELPERS_FROM_BYTES
    return min(cores(), 8) if stored >= least else 1


def _decode(chunks: Iterable[bytes]) -> Part:
    decoder = Decoder()
    for chunk in chunks:
        decoder.feed(chunk)
    return decoder.part()


def _decode_beside(chunks: Iterable[bytes], count: int) -> list[Part]:
    """Hand the chunks to helpers as they come free, and collect what they made of them."""
    helpers = [_Helper() for _ in range(count)]
    waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=count)
    threads = [threading.Thread(target=helper.serve, args=(waiting,), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    try:
        for chunk in chunks:
            waiting.put(chunk)
    finally:
        for _ in helpers:
            waiting.put(None)
        for thread in threads:
            thread.join()
    return [helper.part() for helper in helpers]


class _Helper:
    """One process that decodes chunks: each goes in with its length before it, the columns come back at the end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "advisor.ingest.reader"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._failed: OSError | None = None
        self._answer = b""

    def serve(self, waiting: queue.Queue[bytes | None]) -> None:
        """Feed the process until there is no more; a process that died takes its share without doing it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        while (chunk := waiting.get()) is not None:
            if self._failed is None:
                try:
                    _send(self._process.stdin, chunk)
                except OSError as error:
                    self._failed = error
        try:
            _send(self._process.stdin, b"")
            self._process.stdin.close()
        except OSError as error:
            self._failed = error
        self._answer = self._process.stdout.read()

    def part(self) -> Part:
        """What the process made of its chunks; raises ArtifactError when it was killed."""
        status = self._process.wait()
        if status != 0 or self._failed is not None:
            raise ArtifactError(
                f"a process that reads the trace ended with status {status}: is there enough memory? --workers 1 needs "
                "least"
            )
        part = pickle.loads(self._answer)
        assert isinstance(part, Part)
        return part


def _send(pipe: IO[bytes], chunk: bytes) -> None:
    pipe.write(LENGTH.pack(len(chunk)))
    pipe.write(chunk)


def _received(pipe: IO[bytes]) -> Iterable[bytes]:
    while length := LENGTH.unpack(pipe.read(LENGTH.size))[0]:
        yield pipe.read(length)


if __name__ == "__main__":
    pickle.dump(_decode(_received(sys.stdin.buffer)), sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
