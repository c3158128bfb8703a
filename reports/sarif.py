"""What `advisor check` found as SARIF 2.1.0, the format of code scanning services."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from advisor.model import CheckedFile, CheckReport, ReportedEdit, ReportedFinding, RulePage

from . import wording
from .untrusted import visible

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
MOST_RESULTS = 25_000  # of a run that GitHub takes (docs.github.com, "SARIF support for code scanning")
_LONGEST = 1000  # characters of a message


def render_sarif(report: CheckReport) -> str:
    """The document as text."""
    return json.dumps(sarif_document(report), indent=2, allow_nan=False) + "\n"


def sarif_document(report: CheckReport) -> dict[str, Any]:
    """One run with a result for every finding; declines are no results.

    A finding with a rewrite is a warning and carries the rewrite as a fix, every other finding is a note. Places are
    relative to the root of the project.
    """
    index = {rule.id: number for number, rule in enumerate(report.rules)}
    seen: Counter[str] = Counter()
    found = [entry for file in report.files for entry in file.findings if entry.status != "rejected"]
    results = [_result(entry, index, seen) for entry in found]
    run = {
        "tool": {
            "driver": {
                "name": "advisor",
                "semanticVersion": report.advisor,
                "rules": [_rule(rule) for rule in report.rules],
            }
        },
        "invocations": [_invocation(report)],
        "originalUriBaseIds": {ROOT: {"description": {"text": "the root of the project"}}},
        "columnKind": "unicodeCodePoints",
        "results": results[:MOST_RESULTS],
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _rule(rule: RulePage) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": _text(rule.title)},
        "help": {"text": _text(rule.title), "markdown": rule.page},
        "properties": {"tags": ["performance", "pytorch", f"safety-{rule.safety}"]},
    }


def _result(entry: ReportedFinding, index: Mapping[str, int], seen: Counter[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": entry.rule,
        "level": "warning" if entry.status == "found" else "note",
        "message": {"text": _message(entry)},
        "properties": {"status": entry.status},
    }
    if entry.rule in index:
        result["ruleIndex"] = index[entry.rule]
    if entry.path is not None:
        result["locations"] = [{"physicalLocation": _location(entry)}]
    if entry.fingerprint is not None:
        seen[entry.fingerprint] += 1
        result["partialFingerprints"] = {"primaryLocationLineHash": f"{entry.fingerprint}:{seen[entry.fingerprint]}"}
    if entry.edits:
        result["fixes"] = [_fix(entry)]
    return result


def _message(entry: ReportedFinding) -> str:
    said = entry.title
    if entry.estimate_us is not None and wording.known(entry.estimate_us[1]):
        said += f"; could save up to {wording.duration(entry.estimate_us[1])} per step"
    if entry.status == "suggested" and entry.reason:
        said += f"; not rewritten: {entry.reason}"
    if entry.status == "not measured":
        said += "; not measured"
    return _text(said)


def _location(entry: ReportedFinding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": _artifact(entry.path or "")}
    if entry.line is None:
        return location
    region = {"startLine": entry.line, "endLine": entry.end_line or entry.line}
    if entry.column is not None and entry.end_column is not None:
        region |= {"startColumn": entry.column + 1, "endColumn": entry.end_column + 1}
    location["region"] = region
    return location


def _artifact(path: str) -> dict[str, str]:
    return {"uri": quote(path.replace("\\", "/")), "uriBaseId": ROOT}


def _fix(entry: ReportedFinding) -> dict[str, Any]:
    files: dict[str, list[ReportedEdit]] = {}
    for edit in entry.edits:
        files.setdefault(edit.path, []).append(edit)
    changes = [
        {
            "artifactLocation": _artifact(path),
            "replacements": [
                _replacement(edit) for edit in sorted(edits, key=lambda e: (e.line, e.column, e.end_line, e.end_column))
            ],
        }
        for path, edits in sorted(files.items())
    ]
    return {"description": {"text": _text(entry.title)}, "artifactChanges": changes}


def _replacement(edit: ReportedEdit) -> dict[str, Any]:
    """Text for a region; SARIF counts columns from 1."""
    region = {
        "startLine": edit.line,
        "startColumn": edit.column + 1,
        "endLine": edit.end_line,
        "endColumn": edit.end_column + 1,
    }
    return {"deletedRegion": region, **({"insertedContent": {"text": edit.text}} if edit.text else {})}


def _invocation(report: CheckReport) -> dict[str, Any]:
    failed = [file for file in report.files if file.status == "not measured"]
    told = [_notification(file, file.reason or "it could not be run", "error") for file in failed]
    told += [_notification(file, each, "error") for file in report.files for each in file.rule_errors]
    told += [
        _notification(file, f"{name} is not known: {reason}", "note")
        for file in report.files
        for name, reason in sorted(file.missing.items())
    ]
    good = not failed and not any(file.rule_errors for file in report.files)
    return {"executionSuccessful": good, "toolExecutionNotifications": told}


def _notification(file: CheckedFile, text: str, level: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _text(f"{file.path}: {text}")}}


def _text(text: str) -> str:
    """One visible line of a plain message; "](" would make a link of what others wrote."""
    shown = visible(text[:_LONGEST])
    return shown.replace("](", "] (")
