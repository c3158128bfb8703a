"""GitLab's REST API version 4: one request at a time, its answers as the few fields we use, its failures as errors."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import gitlab
import msgspec
import requests

from advisor.bot.forges.failures import Answer, Patience, Request, failure, no_answer
from advisor.errors import ForgeConflict, ForgeMissing, UsageError
from advisor.redact import Redactor

Result = TypeVar("Result")

_PAGE = 100  # entries, GitLab's most
_MOST_PAGES = 500  # GitLab pages by offset no further than 50,000 entries
_PROJECT = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)+")
_READ = "the scope read_api and the role Reporter"
_WRITE = "the scope api and the role Developer"


class User(msgspec.Struct, frozen=True):
    """An account; `state` is active, blocked and others."""

    id: int
    username: str
    state: str = "active"


class Project(msgspec.Struct, frozen=True):
    """A project."""

    id: int
    path_with_namespace: str
    http_url_to_repo: str = ""
    default_branch: str | None = None
    archived: bool = False


class DiffRefs(msgspec.Struct, frozen=True):
    """The commits of a merge request's diff: merge base, head, and the target branch when the diff was made."""

    base_sha: str | None = None
    head_sha: str | None = None
    start_sha: str | None = None


class MergeRequest(msgspec.Struct, frozen=True):
    """A merge request. Lists leave out `diff_refs`, and so does GitLab while it still prepares a new one."""

    iid: int
    title: str
    state: str
    source_branch: str
    target_branch: str
    web_url: str
    created_at: datetime.datetime
    sha: str | None = None
    description: str | None = None
    draft: bool = False
    author: User | None = None
    diff_refs: DiffRefs | None = None
    source_project_id: int | None = None
    labels: tuple[str, ...] = ()
    merged_at: datetime.datetime | None = None
    closed_at: datetime.datetime | None = None


class Note(msgspec.Struct, frozen=True):
    """A comment, or (`system`) a line of the log."""

    id: int
    body: str
    author: User | None = None
    system: bool = False


class Discussion(msgspec.Struct, frozen=True):
    """A thread."""

    notes: tuple[Note, ...]


class Diff(msgspec.Struct, frozen=True):
    """A file of a diff; `diff` is empty for a file without a text diff and for one that is too large to show."""

    old_path: str
    new_path: str
    diff: str = ""
    new_file: bool = False
    renamed_file: bool = False
    deleted_file: bool = False


class Status(msgspec.Struct, frozen=True):
    """A commit status."""

    id: int
    name: str
    status: str
    description: str | None = None
    target_url: str | None = None
    author: User | None = None


class Issue(msgspec.Struct, frozen=True):
    """An issue."""

    iid: int
    title: str
    state: str
    web_url: str
    description: str | None = None
    author: User | None = None


class Emoji(msgspec.Struct, frozen=True):
    """An emoji on a comment."""

    name: str
    user: User | None = None


class Member(msgspec.Struct, frozen=True):
    """The rights of an account in a project, inherited ones included."""

    access_level: int
    state: str = "active"
    membership_state: str = "active"


class Commit(msgspec.Struct, frozen=True):
    """A commit."""

    id: str


class Branch(msgspec.Struct, frozen=True):
    """A branch."""

    commit: Commit


def segment(text: str) -> str:
    """Text as one segment of a path; raises ForgeMissing for what cannot be one, as no name is like that."""
    try:
        quoted = quote(text, safe="", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise ForgeMissing("GitLab: there is nothing of a name that is no Unicode text") from error
    if quoted in ("", ".", ".."):
        raise ForgeMissing(f"GitLab: there is nothing of the name {quoted!r}")
    return quoted


class Api:
    """Requests about one project; `path` is relative to it, or to the API where it begins with a slash.

    No redirect is followed, so that the token goes to `base_url` alone, and a failure is a ForgeError. `patience` tries
    again what may work later; a POST only where `done` can tell whether it happened.
    """

    def __init__(
        self, project: str, *, token: str, base_url: str, patience: Patience | None = None, timeout_s: float = 30.0
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("https", "http") or not parts.hostname or parts.username or parts.query:
            raise UsageError("the address of GitLab must be like https://gitlab.com, without credentials")
        if not _PROJECT.fullmatch(project) or {".", ".."} & set(project.split("/")):
            raise UsageError("the project must be named with its groups, like group/project")
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise UsageError("the token of GitLab is empty or holds blanks")
        self.patience = Patience() if patience is None else patience
        self._redactor = Redactor(extra=(token,))
        self._prefix = f"/projects/{segment(project)}"
        self._client = gitlab.Gitlab(base_url.rstrip("/"), private_token=token, timeout=timeout_s, keep_base_url=True)
        self._client.session.hooks["response"].append(self._checked)

    def get(self, path: str, kind: type[Result], **query: Any) -> Result:
        """One object."""
        return self.patience.call(lambda: self._decoded("GET", path, self._once("GET", path, query), kind))

    def each(self, path: str, kind: type[Result], **query: Any) -> list[Result]:
        """Every entry of a list, over all pages. Raises ForgeConflict for more than GitLab hands out."""
        found: list[Result] = []
        page = 1
        while page <= _MOST_PAGES:
            entries, page = self.patience.call(partial(self._page, path, kind, page, query))
            found += entries
            if not page:
                return found
        raise ForgeConflict(f"GitLab: {path} has more than {_PAGE * _MOST_PAGES:,} entries, too many to look through")

    def post(
        self, path: str, kind: type[Result], body: Mapping[str, Any], *, done: Callable[[], Result | None]
    ) -> Result:
        """Make something; `done` finds it where it was made although no answer said so."""
        return self.patience.call(
            lambda: self._decoded("POST", path, self._once("POST", path, {}, body), kind), done=done
        )

    def put(self, path: str, kind: type[Result], body: Mapping[str, Any]) -> Result:
        """Edit something: the same twice is the same."""
        return self.patience.call(lambda: self._decoded("PUT", path, self._once("PUT", path, {}, body), kind))

    def delete(self, path: str) -> None:
        """Remove something; raises ForgeMissing also where a first try removed it and did not say so."""
        self.patience.call(lambda: self._once("DELETE", path, {}))

    def content(self, path: str, *, limit: int, **query: Any) -> bytes:
        """The bytes of a file; raises ForgeConflict for more than `limit` of them, which are not read."""
        return self.patience.call(lambda: self._read(path, limit, query))

    def _read(self, path: str, limit: int, query: Mapping[str, Any]) -> bytes:
        request = self._request("GET", path)
        with self._once("GET", path, query, streamed=True) as response:
            found = bytearray()
            try:
                for piece in response.iter_content(65_536):
                    found += piece
                    if len(found) > limit:
                        raise ForgeConflict(f"{request}: the file is larger than {limit:,} bytes")
            except requests.RequestException as error:
                raise no_answer(request, error, self._redactor) from error
        return bytes(found)

    def _page(self, path: str, kind: type[Result], page: int, query: Mapping[str, Any]) -> tuple[list[Result], int]:
        response = self._once("GET", path, {**query, "per_page": _PAGE, "page": page})
        following = response.headers.get("X-Next-Page", "")
        entries = self._decoded("GET", path, response, list[kind])  # type: ignore[valid-type]
        return entries, int(following) if following.isdecimal() and int(following) > page else 0

    def _once(
        self,
        verb: str,
        path: str,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        *,
        streamed: bool = False,
    ) -> requests.Response:
        try:
            return self._client.http_request(
                verb.lower(),
                path if path.startswith("/") else f"{self._prefix}/{path}".rstrip("/"),
                query_data=dict(query),
                post_data=None if body is None else dict(body),
                streamed=streamed,
                obey_rate_limit=False,
                retry_transient_errors=False,
                max_retries=0,
            )
        except requests.RequestException as error:
            raise no_answer(self._request(verb, path), error, self._redactor) from error

    def _checked(self, response: requests.Response, **_: Any) -> requests.Response:
        """Raise for every answer that is no success, before the client follows a redirect or hides the headers."""
        if response.status_code < 300:
            return response
        asked = urlsplit(response.request.url or "").path
        request = self._request(response.request.method or "", asked.partition("/api/v4")[2] or asked)
        answer = Answer(status=response.status_code, headers=dict(response.headers), text=response.text)
        raise failure(request, answer, self._redactor)

    def _decoded(self, verb: str, path: str, response: requests.Response, kind: type[Result]) -> Result:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, requests.RequestException) as error:
            raise no_answer(self._request(verb, path), error, self._redactor) from error

    def _request(self, verb: str, path: str) -> Request:
        return Request(forge="GitLab", action=f"{verb} {path}", right=_READ if verb == "GET" else _WRITE)
