"""Processes that take pieces of work from one queue: pieces go in as bytes, each process answers once, at the end.

The processes run a module of this package as a script, not a copy of the caller: they need no guard in the caller's
script and are safe beside threads.
"""

from __future__ import annotations

import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from advisor.errors import ArtifactError

_LENGTH = struct.Struct("<q")


def share(module: str, pieces: Iterable[bytes], count: int, *arguments: str) -> list[bytes]:
    """Give pieces of work to `count` processes as they come free; returns what each of them wrote in the end.

    Each runs the module with the arguments. A process takes what fits into its pipe before it works on it: small pieces
    are not dealt out evenly.

    Raises ArtifactError when one of them was killed, which is what a lack of memory looks like.
    """
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_Worker(module, arguments))
        _deal(workers, pieces)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    finally:
        for worker in workers:
            worker.close()
    return [worker.answer() for worker in workers]


def _deal(workers: Sequence[_Worker], pieces: Iterable[bytes]) -> None:
    waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=len(workers))
    threads = [threading.Thread(target=worker.serve, args=(waiting,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for piece in pieces:
            waiting.put(piece)
    except BaseException:
        for worker in workers:
            worker.kill()  # what it has heard is of no use any more
        raise
    finally:
        for _ in workers:
            waiting.put(None)
        for thread in threads:
            thread.join()


class _Worker:
    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        # The search path of this process: `python -m` alone would put the working folder first, whose files may bear
        # the names of modules.
        found = [str(entry) for entry in sys.path]
        code = f"import sys; sys.path[:] = {found!r}; import runpy; runpy.run_module({module!r}, run_name='__main__')"
        command = [sys.executable, "-c", code, *arguments]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise ArtifactError(
                f"no process to read traces can be started ({error.strerror or error}): use --workers 1"
            ) from None
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

    def kill(self) -> None:
        """Stop the process; its pipes end, so that whoever waits for it goes on."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the end of the process and let go of its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError as error:  # what was not yet written to a process that has ended
                self._failed = error
        self._process.wait()

    def answer(self) -> bytes:
        """What the process wrote; after `close`."""
        status = self._process.returncode
        if status != 0 or self._failed is not None:
            raise ArtifactError(
                f"a process that reads traces ended with status {status}: where memory is short, use --workers 1"
            )
        return self._answer


def received(pipe: IO[bytes]) -> Iterator[bytes]:
    """The pieces that `share` sent to this process, to their end."""
    while True:
        head = pipe.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise SystemExit(1)  # the other process was killed
        length = _LENGTH.unpack(head)[0]
        if length == 0:
            return
        yield pipe.read(length)
