"""Processes that take pieces of work from one queue: pieces go in as bytes, each process answers once, at the end.

The processes run a module of this package with `python -m`, not a copy of the caller: they need no guard in the
caller's script and are safe beside threads.
"""

from __future__ import annotations

import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import IO

from advisor.errors import ArtifactError

_LENGTH = struct.Struct("<q")


def share(module: str, pieces: Iterable[bytes], count: int) -> list[bytes]:
    """Give pieces of work to `count` processes as they come free; returns what each of them wrote in the end.

    Raises ArtifactError when one of them was killed, which is what a lack of memory looks like.
    """
    helpers = [_Helper(module) for _ in range(count)]
    waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=count)
    threads = [threading.Thread(target=helper.serve, args=(waiting,), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    try:
        for piece in pieces:
            waiting.put(piece)
    finally:
        for _ in helpers:
            waiting.put(None)
        for thread in threads:
            thread.join()
    return [helper.answer() for helper in helpers]


class _Helper:
    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._failed: OSError | None = None
        self._answer = b""

    def serve(self, waiting: queue.Queue[bytes | None]) -> None:
        """Feed the process until there is no more; one that died goes on taking its share, so that nobody waits."""
        assert self._process.stdin is not None and self._process.stdout is not None
        while (piece := waiting.get()) is not None:
            self._send(self._process.stdin, piece)
        self._send(self._process.stdin, b"")
        try:
            self._process.stdin.close()
        except OSError as error:
            self._failed = error
        self._answer = self._process.stdout.read()

    def _send(self, pipe: IO[bytes], piece: bytes) -> None:
        if self._failed is None:
            try:
                pipe.write(_LENGTH.pack(len(piece)))
                pipe.write(piece)
                pipe.flush()
            except OSError as error:
                self._failed = error

    def answer(self) -> bytes:
        status = self._process.wait()
        if status != 0 or self._failed is not None:
            raise ArtifactError(
                f"a process that reads traces ended with status {status}: where memory is short, use --workers 1"
            )
        return self._answer


def received(pipe: IO[bytes]) -> Iterator[bytes]:
    """The pieces that `share` sent to this process, to their end."""
    while length := _LENGTH.unpack(pipe.read(_LENGTH.size))[0]:
        yield pipe.read(length)
