"""The beginning and the end of an output of any length, in bounded memory."""

from __future__ import annotations


class Tail:
    """Keeps a quarter of `limit` bytes from the beginning and the rest from the end, in whole lines where it is cut.

    Whole lines, because half a secret would be recognised by no redactor.
    """

    def __init__(self, limit: int) -> None:
        self._head_bytes, self._tail_bytes = limit // 4, limit - limit // 4
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0

    def add(self, block: bytes) -> None:
        """Take in what comes next."""
        room = self._head_bytes - len(self._head)
        self._head += block[:room]
        self._tail += block[room:]
        if len(self._tail) > 2 * self._tail_bytes:
            self._cut()

    def _cut(self) -> None:
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    def text(self) -> str:
        """What was kept, with a line that counts what was left out."""
        self._cut()
        if not self._dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = bytes(self._head), bytes(self._tail)
        first, last = head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]
        left_out = self._dropped + len(head) - len(first) + len(tail) - len(last)
        return (
            f"{first.decode('utf-8', 'replace')}... {left_out:,} bytes left out ...\n{last.decode('utf-8', 'replace')}"
        )
