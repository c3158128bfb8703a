"""What `advisor check` found and what `advisor optimize` proved as SARIF 2.1.0, the format of code scanning."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from advisor.model import CheckedFile, CheckReport, Report, ReportedEdit, ReportedFinding, RulePage

from . import wording
from .untrusted import visible

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
MOST_RESULTS = 25_000  # of a run that GitHub takes (docs.github.com, "SARIF support for code scanning")
_LONGEST = 1000  # characters of a message


def render_sarif(report: CheckReport | Report) -> str:
    """The document as text."""
    document = sarif_of(report) if isinstance(report, Report) else sarif_document(report)
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def sarif_document(report: CheckReport) -> dict[str, Any]:
    """One run with a result for every finding; declines are no results.

    A finding with a rewrite is a warning and carries the rewrite as a fix, every other finding is a note. Places are
    relative to the root of the project.
    """
    index = {rule.id: number for number, rule in enumerate(report.rules)}
    seen: Counter[str] = Counter()
    found = [entry for file in report.files for entry in file.findings if entry.status != "rejected"]
    results = [_result(entry, index, seen) for entry in found]
    return _document(report.advisor, report.rules, results, _invocation(report))


def sarif_of(report: Report, rules: Sequence[RulePage] = ()) -> dict[str, Any]:
    """The report of a run as one run of SARIF: a proven rewrite is a warning with its fix, a suggestion a note.

    What was rejected or left alone is no result. `rules` are the pages of the rules; one without has its name. The
    script gives the category under which code scanning keeps the results, so that runs of several scripts stand side by
    side.
    """
    shown = [_as_proven(entry, report) for entry in report.findings if entry.status in ("applied", "suggested")]
    pages = {rule.id: rule for rule in rules}
    for entry in shown:
        named = RulePage(id=entry.rule, title=entry.rule, safety=entry.safety or "suggest", page="")
        pages.setdefault(entry.rule, named)
    used = [page for page in pages.values() if page.id in {entry.rule for entry in shown}]
    index = {rule.id: number for number, rule in enumerate(used)}
    seen: Counter[str] = Counter()
    results = [_result(entry, index, seen) for entry in shown]
    told = [_told(each, "error") for each in report.rule_errors]
    told += [_told(f"{name} is not known: {reason}", "note") for name, reason in sorted(report.missing.items())]
    invocation = {"executionSuccessful": not report.rule_errors, "toolExecutionNotifications": told}
    document = _document(report.environment.advisor or "0", used, results, invocation)
    document["runs"][0]["automationDetails"] = {"id": f"advisor/{visible(report.script)[:200]}/"}
    return document


def _as_proven(entry: ReportedFinding, report: Report) -> ReportedFinding:
    """The entry with a fix only where the patch that holds it is proven."""
    if entry.status == "applied" and report.outcome != "improved":
        return dataclasses.replace(entry, status="suggested", reason="the gain of the patch is not proven", edits=())
    return entry if entry.status == "applied" else dataclasses.replace(entry, edits=())


def _document(
    version: str, rules: Sequence[RulePage], results: list[dict[str, Any]], invocation: dict[str, Any]
) -> dict[str, Any]:
    run = {
        "tool": {
            "driver": {
                "name": "advisor",
                "semanticVersion": version,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "invocations": [invocation],
        "originalUriBaseIds": {ROOT: {"description": {"text": "the root of the project"}}},
        "columnKind": "unicodeCodePoints",
        "results": results[:MOST_RESULTS],
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _rule(rule: RulePage) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": _text(rule.title)},
        "help": {"text": _text(rule.title), **({"markdown": rule.page} if rule.page else {})},
        "properties": {"tags": ["performance", "pytorch", f"safety-{rule.safety}"]},
    }


def _result(entry: ReportedFinding, index: Mapping[str, int], seen: Counter[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": entry.rule,
        "level": "warning" if entry.status in ("found", "applied") else "note",
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
    if entry.status == "applied":
        saved = wording.saving(entry) if wording.known(entry.saved_us) else ""
        return _text(f"{said}; {saved} per step, measured" if saved else f"{said}; proven")
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
    return {"uri": quote(path.replace("\\", "/"), errors="surrogatepass"), "uriBaseId": ROOT}


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
    return _told(f"{file.path}: {text}", level)


def _told(text: str, level: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _text(text)}}


def _text(text: str) -> str:
    """One visible line of a plain message; "](" would make a link of what others wrote."""
    shown = visible(text[:_LONGEST])
    return shown.replace("](", "] (")
