"""Serve patched sources to the interpreter without touching the user's tree.

Modules are served by a meta path finder, the script and what spawned workers re-run through `io.open_code`, which runpy
uses. Code objects carry the real path, so tracebacks and `inspect` stay right; byte code is never cached.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import json
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from advisor.source import split_lines

VARIABLE = "ADVISOR_OVERLAY"  # path of a JSON file {absolute source path: path of its replacement}


class _OverlayLoader(importlib.machinery.SourceFileLoader):
    """Loads one module from replaced text under its real path."""

    def __init__(self, fullname: str, path: str, text: bytes) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if os.path.realpath(path) == os.path.realpath(self.path) else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _OverlayFinder(importlib.abc.MetaPathFinder):
    """Asks the ordinary path finder, then swaps the loader of replaced files."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        text = self._texts.get(os.path.realpath(spec.origin))
        if text is None:
            return None
        spec.loader = _OverlayLoader(fullname, spec.origin, text)
        spec.cached = None
        return spec


def install(replacements: Mapping[str, str]) -> None:
    """Serve `replacements` (absolute path -> file with the new text) from now on, in this process."""
    if not replacements:
        return
    texts = {os.path.realpath(path): Path(new).read_bytes() for path, new in replacements.items()}
    sys.meta_path.insert(0, _OverlayFinder(texts))
    original = io.open_code

    def open_code(path: str) -> io.BufferedIOBase:
        text = texts.get(os.path.realpath(path))
        return io.BytesIO(text) if text is not None else original(path)  # type: ignore[return-value]

    io.open_code = open_code  # type: ignore[assignment]
    for path, text in texts.items():  # inspect.getsource and tracebacks read through linecache
        lines = split_lines(text.decode("utf-8"))
        linecache.cache[path] = (len(text), None, lines, path)


def install_from_environment() -> None:
    """Install the overlay a parent process announced in the environment, if any."""
    announced = os.environ.get(VARIABLE)
    if announced:
        install(json.loads(Path(announced).read_text(encoding="utf-8")))


def source_of(path: str, replacements: Mapping[str, str]) -> bytes:
    """The text the interpreter will see for `path`."""
    real = os.path.realpath(path)
    for original, new in replacements.items():
        if os.path.realpath(original) == real:
            return Path(new).read_bytes()
    return Path(path).read_bytes()
