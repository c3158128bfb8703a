"""A check on GitHub: one check run of a name and commit, its annotations in batches, nothing twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from advisor.bot.forge import Annotation, Check
from advisor.bot.forges.fitting import cut, fitted
from advisor.bot.forges.githubapi import Api
from advisor.bot.forges.githubshapes import AnnotationView, CheckList, CheckView, same_text
from advisor.errors import ForgeRefused

_BATCH = 50  # annotations in one request
_SUMMARY, _TITLE, _MESSAGE = 65_535, 255, 64_000
_RIGHT = "checks: write, which the token of a GitHub App or of a workflow can have and that of a person cannot"
# What GitHub says to a classic and to a fine-grained token of a person: neither can have the right to make checks.
_PERSONAL = re.compile("authenticate via a GitHub App|not accessible by personal access token")

Key: TypeAlias = "tuple[str, int, int, str, str, str]"
Body: TypeAlias = "dict[str, Any]"


class Checks:
    """The check runs of a repository that its account made. `path` is that of the repository, `account` its login."""

    def __init__(self, api: Api, path: str, account: Callable[[], str]) -> None:
        self._api = api
        self._path = path
        self._account = account

    def post(self, check: Check) -> str:
        """Create or edit the run of a check; returns its URL, empty for the token of a person, who can make none.

        Annotations cannot be taken back: a run that has some which the check lacks gives way to a new one, and of runs
        with one name GitHub shows the newest. Only the last request names the conclusion.
        """
        try:
            return self._post(check)
        except ForgeRefused as error:
            if _PERSONAL.search(str(error)) is None:
                raise
            return ""

    def _post(self, check: Check) -> str:
        wanted = {_key(annotation): _annotation(annotation) for annotation in check.annotations}
        run = self._find(check)
        known = self._known(run) if run else set()
        if run is None or known - set(wanted):
            batch, rest = _split(list(wanted))
            run = self._create(check, [wanted[key] for key in batch], final=not rest, instead_of=run)
            if not rest:
                return run.html_url or ""
        else:
            rest = [key for key in wanted if key not in known]
            if not rest and _is_as(run, check):
                return run.html_url or ""
        while True:
            batch, rest = _split(rest)
            run = self._extend(run, check, {key: wanted[key] for key in batch}, final=not rest)
            if not rest:
                return run.html_url or ""

    def _find(self, check: Check) -> CheckView | None:
        """Our newest run of a check; the same name may be used by others, also by other jobs of a workflow."""
        query = {"check_name": check.name, "filter": "all"}
        path = f"{self._path}/commits/{check.head_sha}/check-runs"
        pages = self._api.pages(path, CheckList, query=query, right="checks: read")
        ours = [run for page in pages for run in page.check_runs if self._is_ours(run, check)]
        return max(ours, key=lambda run: run.id, default=None)

    def _is_ours(self, run: CheckView, check: Check) -> bool:
        slug = run.app.slug if run.app else None
        return run.external_id == _external(check) and f"{slug}[bot]".lower() == self._account().lower()

    def _known(self, run: CheckView) -> set[Key]:
        if not run.output.annotations_count:
            return set()
        path = f"{self._path}/check-runs/{run.id}/annotations"
        return {
            _seen(view) for page in self._api.pages(path, list[AnnotationView], right="checks: read") for view in page
        }

    def _create(self, check: Check, batch: list[Body], *, final: bool, instead_of: CheckView | None) -> CheckView:
        def done() -> CheckView | None:
            found = self._find(check)
            return None if found is None or (instead_of and found.id == instead_of.id) else found

        body = {"name": check.name, "head_sha": check.head_sha, "external_id": _external(check)}
        body |= _state(check, batch, final=final)
        return self._api.send("POST", f"{self._path}/check-runs", body, CheckView, right=_RIGHT, done=done)

    def _extend(self, run: CheckView, check: Check, batch: dict[Key, Body], *, final: bool) -> CheckView:
        def done() -> CheckView | None:
            found = self._api.get(path, CheckView, right="checks: read")
            arrived = set(batch) <= self._known(found) and (not final or _is_as(found, check))
            return found if arrived else None

        path = f"{self._path}/check-runs/{run.id}"
        body = _state(check, list(batch.values()), final=final)
        return self._api.send("PATCH", path, body, CheckView, right=_RIGHT, done=done)


def _split(keys: Sequence[Key]) -> tuple[Sequence[Key], Sequence[Key]]:
    return keys[:_BATCH], keys[_BATCH:]


def _state(check: Check, batch: list[Body], *, final: bool) -> Body:
    output: Body = {"title": cut(check.title, _TITLE), "summary": fitted(check.summary, _SUMMARY)}
    if batch:
        output["annotations"] = batch
    if check.conclusion is None or not final:
        return {"status": "in_progress", "output": output}
    return {"status": "completed", "conclusion": check.conclusion, "output": output}


def _is_as(run: CheckView, check: Check) -> bool:
    """Whether a run says what a check says, its annotations aside."""
    status: Literal["in_progress", "completed"] = "completed" if check.conclusion else "in_progress"
    summary = same_text(run.output.summary, fitted(check.summary, _SUMMARY))
    title = same_text(run.output.title, cut(check.title, _TITLE))
    return (run.status, run.conclusion) == (status, check.conclusion) and summary and title


def _external(check: Check) -> str:
    return f"advisor/{check.name}"


def _annotation(annotation: Annotation) -> Body:
    return {
        "path": annotation.path,
        "start_line": annotation.start_line,
        "end_line": annotation.end_line,
        "annotation_level": annotation.level,
        "title": cut(annotation.title, _TITLE),
        "message": cut(annotation.message, _MESSAGE),
    }


def _key(annotation: Annotation) -> Key:
    return _seen(msgspec.convert(_annotation(annotation), AnnotationView))


def _seen(view: AnnotationView) -> Key:
    title, message = (" ".join((text or "").split()) for text in (view.title, view.message))
    return view.path, view.start_line, view.end_line, view.annotation_level or "", title, message
