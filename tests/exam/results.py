"""Tables of what an exam found: one row a script, recall and wrong findings, and a reason for every miss."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from applying import SAME
from examiner import Answer, Entry, Expectation, Grade, grade


@dataclass(frozen=True)
class Row:
    """One script of an exam with its key, what was said and how that compares."""

    name: str
    origin: str
    key: Sequence[Expectation]
    answer: Answer
    grade: Grade
    applied: Sequence[tuple[Entry, str]] = ()  # what came of applying each rewrite

    @property
    def asked(self) -> int:
        """Places that must be found or spoken of."""
        return sum(1 for wanted in self.key if wanted.answer in ("find", "say"))


def row(
    name: str,
    origin: str,
    key: Sequence[Expectation],
    answer: Answer,
    applied: Sequence[tuple[Entry, str]] = (),
) -> Row:
    """Grade an answer."""
    return Row(name, origin, key, answer, grade(key, answer), applied)


def expectations(entries: Iterable[Mapping[str, Any]]) -> list[Expectation]:
    """The key of one script as its file holds it."""
    return [
        Expectation(
            answer=entry["answer"],
            rules=tuple(entry["rules"]),
            file=entry["file"],
            lines=None if entry.get("lines") is None else (entry["lines"][0], entry["lines"][1]),
            note=entry.get("note", ""),
        )
        for entry in entries
    ]


@dataclass(frozen=True)
class Setting:
    """Under what an exam ran; `not_run` names what the key's authors listed and no script covers, with the reason."""

    torch: str
    date: str
    not_run: Mapping[str, str] = field(default_factory=dict)


def setting(interpreter: str, not_run: Mapping[str, str] | None = None) -> Setting:
    """Today, with the torch of an interpreter."""
    asked = [interpreter, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return Setting(version, datetime.date.today().isoformat(), not_run or {})


def write(rows: Sequence[Row], title: str, stem: Path, under: Setting) -> None:
    """Write `stem`.json and `stem`.md."""
    stem.with_suffix(".json").write_text(json.dumps(document(rows, under), indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(rows, title, under), encoding="utf-8")


def tell(found: Row) -> None:
    """Print a row and what is wrong with it."""
    print(f"{found.name}: {len(found.grade.met)} of {found.asked}, {len(found.grade.wrong)} wrong", flush=True)
    for wanted, reason in found.grade.missed:
        print(f"  missed {wanted}: {reason[:300]}")
    for entry in found.grade.wrong:
        print(f"  wrong {entry.rule} {entry.places}: {entry.text[:200]}")
    for entry, said in found.applied:
        print(f"  applied {entry.rule} {entry.places}: {said}")
    for trouble in found.answer.trouble:
        print(f"  trouble {trouble[:300]}", flush=True)


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """Counts over the rows; `find` and `say` count places, `wrong` findings that nothing allows."""
    counts = {"find": 0, "find_met": 0, "say": 0, "say_met": 0}
    for each in rows:
        for wanted in each.key:
            if wanted.answer in ("find", "say"):
                counts[wanted.answer] += 1
                counts[f"{wanted.answer}_met"] += wanted in each.grade.met
    applied = [said for each in rows for _, said in each.applied]
    return {
        **counts,
        "wrong": sum(len(each.grade.wrong) for each in rows),
        "applied": len(applied),
        "applied_same": applied.count(SAME),
    }


def document(rows: Sequence[Row], under: Setting) -> dict[str, Any]:
    """Everything as JSON types."""
    return {
        "date": under.date,
        "torch": under.torch,
        "totals": totals(rows),
        "not_run": dict(under.not_run),
        "scripts": [
            {
                "name": each.name,
                "origin": each.origin,
                "met": [str(wanted) for wanted in each.grade.met],
                "missed": [{"wanted": str(wanted), "reason": reason} for wanted, reason in each.grade.missed],
                "wrong": [{"rule": e.rule, "places": e.places, "text": e.text} for e in each.grade.wrong],
                "applied": [{"rule": e.rule, "places": e.places, "result": said} for e, said in each.applied],
                "trouble": list(each.answer.trouble),
            }
            for each in rows
        ],
    }


def markdown(rows: Sequence[Row], title: str, under: Setting) -> str:
    """A page with the totals, one row a script, and the reasons."""
    sums = totals(rows)
    lines = [
        f"# {title}",
        "",
        f"{under.date}, torch {under.torch}, on a CPU.",
        "",
        f"Must be found: {sums['find_met']} of {sums['find']}. Must be spoken of (a finding, or a decline with its "
        f"reason): {sums['say_met']} of {sums['say']}. Wrong findings: {sums['wrong']}. Rewrites applied: "
        f"{sums['applied']}, of which {sums['applied_same']} train with the same losses.",
        "",
        "| script | from | asked | met | wrong findings | missed, and why | rewrites applied |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        missed = "<br>".join(f"{wanted}: {_cell(reason)}" for wanted, reason in each.grade.missed) or "-"
        wrong = "<br>".join(f"{e.rule} at {e.places}: {_cell(e.text)}" for e in each.grade.wrong) or "0"
        applied = "<br>".join(f"{e.rule}: {_cell(said)}" for e, said in each.applied) or "-"
        met = len(each.grade.met)
        lines.append(f"| {each.name} | {each.origin} | {each.asked} | {met} | {wrong} | {missed} | {applied} |")
    if under.not_run:
        lines += ["", "Not run, and why:", "", *(f"- {name}: {reason}" for name, reason in under.not_run.items())]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
