"""Asks `advisor check` about a script and compares its answer with an answer key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEAR = 3
"""Lines by which the end of a span may miss the line of the key (the README of the cases)."""

GRAPH_RULES = frozenset(
    "naive-attention materialised-causal-mask sdpa-math-fallback gqa-repeat mha-need-weights library-attention "
    "unfused-rmsnorm unfused-layernorm unfused-gelu unfused-silu unfused-gated-mlp unfused-rope manual-cross-entropy "
    "logits-memory misaligned-dims channels-last conv-bias-before-bn python-loop-index expert-loop ema-loop "
    "clip-grad-slow library-fused-ops pointwise-chain".split()
)
"""Rules that these exams are about; the others (optimizers, loaders, waits, precision) have exams of their own."""

PLACE_IN_LIBRARY = re.compile(r"(\S+/\S+\.py):(\d+)")


@dataclass(frozen=True)
class Entry:
    """A finding or a decline; `library` is the place in an installed package that its text names."""

    rule: str
    path: str | None
    line: int | None
    end_line: int | None
    found: bool
    text: str
    diff: str = ""
    library: tuple[str, int] | None = None

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """File, first and last line of what it speaks of."""
        own = [] if self.path is None or self.line is None else [(self.path, self.line, self.end_line or self.line)]
        return own if self.library is None else [*own, (*self.library, self.library[1])]


@dataclass(frozen=True)
class Answer:
    """Everything that was said of one script; `trouble` is what kept the tool from looking."""

    entries: tuple[Entry, ...]
    trouble: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Entry]:
        """What was found."""
        return [entry for entry in self.entries if entry.found]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must be said at a place: "find" it, "say" something of it, or "refuse" it (a decline is welcome).

    "may" marks a finding that is neither asked for nor wrong. Without lines the whole file is meant.
    """

    answer: str
    rules: tuple[str, ...]
    file: str
    lines: tuple[int, int] | None = None
    note: str = ""

    def __str__(self) -> str:
        lines = "" if self.lines is None else f":{self.lines[0]}-{self.lines[1]}"
        return f"{'/'.join(self.rules)} {self.file}{lines}"

    def concerns(self, entry: Entry) -> bool:
        """Whether an entry is of one of the rules and of this place."""
        if entry.rule not in self.rules and "*" not in self.rules:
            return False
        return any(
            _same_file(path, self.file) and (self.lines is None or (first <= self.lines[1] and last >= self.lines[0]))
            for path, first, last in entry.places
        )


@dataclass
class Grade:
    """How an answer compares with its key."""

    met: list[Expectation] = field(default_factory=list)
    missed: list[tuple[Expectation, str]] = field(default_factory=list)
    wrong: list[Entry] = field(default_factory=list)


def ask(script: Path, *, environment: Mapping[str, str] | None = None, interpreter: str | None = None) -> Answer:
    """Run `advisor check` on a script in its own folder, on the CPU, with every share gate open."""
    command = [sys.executable, "-m", "advisor", "check", script.name, "--json", "--worth", "0"]
    command += [] if interpreter is None else ["--python", interpreter]
    set_here = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    ended = subprocess.run(
        command, cwd=script.parent, env={**os.environ, **set_here}, capture_output=True, text=True, timeout=300
    )
    try:
        document = json.loads(ended.stdout)
    except json.JSONDecodeError:
        return Answer((), (f"no answer: {ended.stderr.strip()[-300:]}",))
    return read(document)


def read(document: Mapping[str, Any]) -> Answer:
    """The answer in a document of `advisor check`."""
    entries = [_entry(each, found=True) for each in document["findings"]]
    entries += [_entry(each, found=False) for each in document["declines"]]
    trouble: list[str] = []
    for file in document["files"]:
        trouble += [] if file["status"] == "measured" else [f"{file['status']}: {file['reason']}"]
        trouble += file["rule_errors"]
    return Answer(tuple(entries), tuple(trouble))


def _entry(each: Mapping[str, Any], *, found: bool) -> Entry:
    title, reason = each.get("title") or "", each.get("reason") or ""
    text = title if title == reason else f"{title}: {reason}" if title and reason else title or reason
    place = PLACE_IN_LIBRARY.search(text)
    return Entry(
        rule=each["rule"],
        path=each["path"],
        line=each["line"],
        end_line=each["end_line"],
        found=found,
        text=text,
        diff=each.get("diff") or "",
        library=None if place is None else (place[1], int(place[2])),
    )


def near(entry: Entry, line: int) -> bool:
    """Whether an entry's span contains a line of the script or ends at most three lines from it."""
    if entry.line is None:
        return False
    last = entry.end_line or entry.line
    return entry.line <= line <= last or abs(last - line) <= NEAR


def _same_file(path: str, wanted: str) -> bool:
    return path == wanted or path.endswith(f"/{wanted}")


def grade(key: Sequence[Expectation], answer: Answer, rules: Iterable[str] = GRAPH_RULES) -> Grade:
    """Compare: every "find" needs a finding, every "say" an entry; a finding that nothing allows is wrong."""
    known = frozenset(rules)
    result = Grade()
    for wanted in key:
        if wanted.answer in ("find", "say"):
            here = [entry for entry in answer.entries if wanted.concerns(entry)]
            if any(entry.found or wanted.answer == "say" for entry in here):
                result.met.append(wanted)
            else:
                said = "; ".join(dict.fromkeys(entry.text for entry in here))
                result.missed.append((wanted, said or "; ".join(answer.trouble) or "nothing was said"))
    allowed = [wanted for wanted in key if wanted.answer in ("find", "say", "may")]
    refused = [wanted for wanted in key if wanted.answer == "refuse"]
    for entry in answer.findings:
        if entry.rule not in known:
            continue
        if any(w.concerns(entry) for w in refused) or not any(w.concerns(entry) for w in allowed):
            result.wrong.append(entry)
    return result
