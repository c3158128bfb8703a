"""GitHub, and GitHub Enterprise Server, as a Forge."""

from __future__ import annotations

import base64
import binascii
import gzip
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import quote

import github.Auth

from advisor.bot.forge import (
    ChangedFile,
    Check,
    Comment,
    Credentials,
    Issue,
    PullRequest,
    Reaction,
    Repository,
    Suggestion,
)
from advisor.bot.forges.appauth import InstallationAuth
from advisor.bot.forges.failures import BadToken, Patience
from advisor.bot.forges.fitting import cut, fitted
from advisor.bot.forges.githubapi import PUBLIC_URL, Api, Nothing
from advisor.bot.forges.githubchecks import Checks
from advisor.bot.forges.githubreviews import Reviews
from advisor.bot.forges.githubshapes import (
    CommentView,
    ContentView,
    FileView,
    FullRepository,
    IssueView,
    Named,
    Permission,
    PullView,
    Reference,
    User,
    author,
    same_text,
)
from advisor.bot.mirrors.gitnames import SHA, branch_ref, plain_parts
from advisor.errors import ForgeConflict, ForgeMissing, ForgeRefused, UsageError
from advisor.reports.untrusted import clip_path

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*)/(?!\.\.?\Z)[A-Za-z0-9._-]+")
_LOGIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*)(?:\[bot\])?")
_LONGEST, _TITLE, _FILE = 65_536, 255, 1 << 20
_LISTED = 50  # pages of pull requests, each of 100
_WORKFLOW = "github-actions[bot]"
_PULLS, _PULLS_READ, _ISSUES = "pull requests: write", "pull requests: read", "issues: write"
_CONTENT: Any = ContentView | list[ContentView]


class GitHub:
    """One repository on GitHub.

    `auth` is a token (of a workflow, a person or an App's installation) or an App. `base_url` is that of the REST API:
    https://HOST/api/v3 for an Enterprise Server. Each request is tried again for `patience_s` seconds at most. Raises
    UsageError for a name that is not owner/name and for a base URL that would give the token away.
    """

    kind: Literal["github", "gitlab"] = "github"

    def __init__(
        self,
        repository: str,
        auth: str | InstallationAuth,
        *,
        base_url: str = PUBLIC_URL,
        patience_s: float = 120.0,
        timeout_s: int = 30,
        write_gap_s: float = 1.0,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not _NAME.fullmatch(repository):
            raise UsageError("a repository on GitHub is named owner/name")
        if isinstance(auth, str) and not re.fullmatch(r"[\x21-\x7e]+", auth.strip()):
            raise UsageError("GitHub needs a token without blanks, for example that of the workflow in GITHUB_TOKEN")
        self._auth = github.Auth.Token(auth.strip()) if isinstance(auth, str) else auth
        self._path = f"/repos/{repository}"
        self._owner = repository.split("/")[0]
        self._login: str | None = None
        self._api = Api(
            self._auth,
            self._secret,
            base_url=base_url,
            patience=Patience(limit_s=patience_s, sleep=sleep, clock=clock),
            timeout_s=timeout_s,
            write_gap_s=write_gap_s,
        )
        self._checks = Checks(self._api, self._path, self.account)
        self._reviews = Reviews(self._api, self._path, self.account)

    def __repr__(self) -> str:
        return f"GitHub({self._path.removeprefix('/repos/')!r})"

    def _secret(self) -> str:
        return self._auth.held() if isinstance(self._auth, InstallationAuth) else self._auth.token

    # ------------------------------------------------------------------------------------------- account, repository

    def account(self) -> str:
        """Login of the account that acts: name[bot] for an App, github-actions[bot] for a workflow's own token."""
        if self._login is None:
            self._login = self._auth.login() if isinstance(self._auth, InstallationAuth) else self._asked_login()
        return self._login

    def _asked_login(self) -> str:
        """An installation's token may not read `/user`; GraphQL tells whose it is, where it can be reached."""
        try:
            return self._api.get("/user", User).login
        except BadToken:
            raise
        except ForgeRefused:
            pass
        try:
            return self._api.viewer().removesuffix("[bot]") + "[bot]"
        except (ForgeRefused, ForgeMissing, ForgeConflict):
            return _WORKFLOW

    def credentials(self) -> Credentials:
        """For git over HTTPS; raises ForgeError where an App gets no token."""
        return Credentials(user="x-access-token", secret=self._auth.token)

    def repository(self) -> Repository:
        """The repository, under the name that it has now."""
        found = self._api.get(self._path, FullRepository, right="metadata: read")
        return Repository(
            name=found.full_name,
            clone_url=found.clone_url,
            default_branch=found.default_branch,
            archived=found.archived,
        )

    def may_write(self, user: str) -> bool:
        """Whether a user may push to the repository; False for one unknown."""
        if not _LOGIN.fullmatch(user):
            return False
        path = f"{self._path}/collaborators/{quote(user, safe='')}/permission"
        try:
            found = self._api.get(path, Permission, right="metadata: read")
        except ForgeMissing:
            return False
        return found.permission in ("admin", "maintain", "write")

    def read_file(self, path: str, ref: str) -> bytes | None:
        """A file at a commit or branch; None where there is none. Raises ForgeConflict for more than 1 MiB."""
        if plain_parts(path) is None:
            return None
        place = f"{self._path}/contents/{quote(path, safe='')}"
        too_large = f"{clip_path(path, 120)} is larger than the 1 MiB that the bot reads"
        try:
            found = self._api.get(place, _CONTENT, query={"ref": ref}, right="contents: read")
        except ForgeMissing:
            return None
        except ForgeRefused as error:
            if "too large" in str(error):
                raise ForgeConflict(too_large) from None
            raise
        if isinstance(found, list) or found.type != "file":
            return None
        if found.size > _FILE or found.encoding != "base64":
            raise ForgeConflict(too_large)
        try:
            return base64.b64decode(found.content)
        except binascii.Error:
            raise ForgeConflict(f"GitHub: the content of {clip_path(path, 120)} is no base64") from None

    def branch_head(self, branch: str) -> str | None:
        """The commit of a branch; None where there is none, also in an empty repository."""
        ref = _ref(branch)
        if ref is None:
            return None
        try:
            found = self._api.get(f"{self._path}/git/ref/{ref}", Reference, right="contents: read")
        except ForgeMissing:
            return None
        except ForgeConflict as error:
            if "empty" in str(error).lower():
                return None
            raise
        return found.object.sha

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; one that is gone already is no error."""
        ref = _ref(branch)
        if ref is None:
            return
        try:
            self._api.send("DELETE", f"{self._path}/git/refs/{ref}", None, Nothing, right="contents: write")
        except (ForgeMissing, ForgeConflict):
            if self.branch_head(branch) is not None:
                raise

    # ------------------------------------------------------------------------------------------------- pull requests

    def pull_request(self, number: int) -> PullRequest:
        """One pull request; raises ForgeMissing."""
        return self._pull(number).noun()

    def pull_requests(self, *, state: Literal["open", "all"], branch_prefix: str) -> tuple[PullRequest, ...]:
        """Those from branches of this repository with the prefix, newest first; of the newest 5,000 pull requests."""
        query = {"state": state, "sort": "created", "direction": "desc"}
        found = {
            view.number: view.noun()
            for view in self._pulls(query)
            if view.inside and view.head.ref.startswith(branch_prefix)
        }
        return tuple(found[number] for number in sorted(found, reverse=True))

    def pull_request_at(self, head_sha: str) -> PullRequest | None:
        """The open pull request whose head is a commit (the oldest of several), from a fork or not; None without one.

        GitHub lists the pull requests of a commit, but leaves out forks' at times: then every open one is looked at.
        """
        if not SHA.fullmatch(head_sha):
            return None
        try:
            pages = self._api.pages(f"{self._path}/commits/{head_sha}/pulls", list[PullView], right=_PULLS_READ)
            found = [view for page in pages for view in page if view.state == "open" and view.head.sha == head_sha]
        except (ForgeMissing, ForgeConflict):  # the repository itself does not have a fork's commit
            found = []
        if not found:
            query = {"state": "open", "sort": "updated", "direction": "desc"}
            found = [view for view in self._pulls(query) if view.head.sha == head_sha]
        return min(found, key=lambda view: view.number).noun() if found else None

    def changed_files(self, number: int) -> tuple[ChangedFile, ...]:
        """The files of a pull request's diff, of which GitHub lists the first 3,000."""
        pages = self._api.pages(f"{self._path}/pulls/{number}/files", list[FileView], right=_PULLS_READ)
        return tuple(view.noun() for page in pages for view in page)

    def open_pull_request(
        self, *, branch: str, base: str, title: str, body: str, labels: Sequence[str], draft: bool
    ) -> PullRequest:
        """Open one, or edit the open one of that branch: its title, body, base and missing labels."""
        view = self._open_pull_of(branch) or self._opened(branch, base, title, body, draft=draft)
        view = self._edited(view, title, body, base)
        missing = [label for label in labels if label.lower() not in {named.name.lower() for named in view.labels}]
        if missing:
            path = f"{self._path}/issues/{view.number}/labels"
            view.labels = self._api.send("POST", path, {"labels": missing}, list[Named], right=_PULLS)
        return view.noun()

    def edit_pull_request(self, number: int, *, title: str, body: str) -> None:
        """Change title and body, where they differ."""
        view = self._pull(number)
        self._edited(view, title, body, view.base.ref)

    def close_pull_request(self, number: int, marker: str, reason: str) -> None:
        """Say why (once) and close it; one that is not open is left alone."""
        if self._pull(number).state != "open":
            return
        self.add_comment(number, marker, reason)
        self._api.send("PATCH", f"{self._path}/pulls/{number}", {"state": "closed"}, PullView, right=_PULLS)

    def _opened(self, branch: str, base: str, title: str, body: str, *, draft: bool) -> PullView:
        text = {"title": cut(title, _TITLE), "body": fitted(body, _LONGEST)}
        wanted = {**text, "head": branch, "base": base, "draft": draft, "maintainer_can_modify": True}
        try:
            return self._api.send(
                "POST",
                f"{self._path}/pulls",
                wanted,
                PullView,
                right=_PULLS,
                done=lambda: self._open_pull_of(branch),
            )
        except ForgeConflict:
            view = self._open_pull_of(branch)  # another job of ours may have been first
            if view is None:
                raise
            return view

    def _pull(self, number: int) -> PullView:
        return self._api.get(f"{self._path}/pulls/{number}", PullView, right=_PULLS_READ)

    def _pulls(self, query: dict[str, str]) -> Iterator[PullView]:
        pages = self._api.pages(f"{self._path}/pulls", list[PullView], query=query, right=_PULLS_READ)
        for _, page in zip(range(_LISTED), pages, strict=False):
            yield from page

    def _open_pull_of(self, branch: str) -> PullView | None:
        query = {"state": "open", "head": f"{self._owner}:{branch}"}
        found = [view for view in self._pulls(query) if view.inside and view.head.ref == branch]
        return min(found, key=lambda view: view.number, default=None)

    def _edited(self, view: PullView, title: str, body: str, base: str) -> PullView:
        title, body = cut(title, _TITLE), fitted(body, _LONGEST)
        changes = {} if same_text(view.title, title) else {"title": title}
        changes |= {} if same_text(view.body, body) else {"body": body}
        changes |= {} if view.base.ref == base else {"base": base}
        if not changes:
            return view
        return self._api.send("PATCH", f"{self._path}/pulls/{view.number}", changes, PullView, right=_PULLS)

    # -------------------------------------------------------------------------------------------------- conversation

    def upsert_comment(self, number: int, marker: str, body: str) -> Comment:
        """Edit our comment that begins with the marker, or write it; younger ones of ours with it are deleted."""
        ours = self._ours(number, marker)
        if not ours:
            return self._new_comment(number, marker, body).noun()
        kept, *others = ours
        for other in others:
            self._delete_comment(other.id)
        text = _marked(marker, body)
        if same_text(kept.body, text):
            return kept.noun()
        path = f"{self._path}/issues/comments/{kept.id}"
        return self._api.send("PATCH", path, {"body": text}, CommentView, right=_PULLS).noun()

    def add_comment(self, number: int, marker: str, body: str) -> Comment:
        """Answer in the conversation, unless a comment of ours begins with the marker already."""
        ours = self._ours(number, marker)
        return (ours[0] if ours else self._new_comment(number, marker, body)).noun()

    def react(self, number: int, comment: int, reaction: Reaction) -> None:
        """Put an emoji on a comment of the conversation; GitHub keeps one of a kind and account."""
        path = f"{self._path}/issues/comments/{comment}/reactions"
        self._api.send("POST", path, {"content": reaction}, Nothing, right=_PULLS)

    def upsert_issue(self, marker: str, title: str, body: str) -> Issue:
        """Edit our open issue whose body begins with the marker, or open it."""
        text = {"title": cut(title, _TITLE), "body": _marked(marker, body)}
        found = self._our_issue(marker)
        if found is None:
            path = f"{self._path}/issues"
            done: Callable[[], IssueView | None] = lambda: self._our_issue(marker)  # noqa: E731
            return self._api.send("POST", path, text, IssueView, right=_ISSUES, done=done).noun()
        if same_text(found.title, text["title"]) and same_text(found.body, text["body"]):
            return found.noun()
        path = f"{self._path}/issues/{found.number}"
        return self._api.send("PATCH", path, text, IssueView, right=_ISSUES).noun()

    def _ours(self, number: int, marker: str) -> list[CommentView]:
        """Our comments that begin with a marker, oldest first."""
        path = f"{self._path}/issues/{number}/comments"
        pages = self._api.pages(path, list[CommentView], right=_PULLS_READ)
        return sorted((c for page in pages for c in page if self._begins(c, marker)), key=lambda view: view.id)

    def _begins(self, view: CommentView | IssueView, marker: str) -> bool:
        return author(view.user).lower() == self.account().lower() and (view.body or "").lstrip().startswith(marker)

    def _new_comment(self, number: int, marker: str, body: str) -> CommentView:
        return self._api.send(
            "POST",
            f"{self._path}/issues/{number}/comments",
            {"body": _marked(marker, body)},
            CommentView,
            right=_PULLS,
            done=lambda: next(iter(self._ours(number, marker)), None),
        )

    def _delete_comment(self, comment: int) -> None:
        try:
            self._api.send("DELETE", f"{self._path}/issues/comments/{comment}", None, Nothing, right=_PULLS)
        except ForgeMissing:
            return  # another job of ours was first

    def _our_issue(self, marker: str) -> IssueView | None:
        """Asked for by author first: cheap, and right unless GitHub does not know the author of a bot by its login."""
        for query in ({"creator": self.account()}, {}):
            asked = {"state": "open", "sort": "created", "direction": "asc", **query}
            try:
                for page in self._api.pages(f"{self._path}/issues", list[IssueView], query=asked, right="issues: read"):
                    for view in page:
                        if view.pull_request is None and self._begins(view, marker):
                            return view
            except ForgeConflict:
                if not query:
                    raise
        return None

    # ------------------------------------------------------------------------------------------- checks, suggestions

    def post_check(self, check: Check) -> str:
        """Create or edit a check run with all its annotations; returns its URL."""
        return self._checks.post(check)

    def post_suggestions(self, number: int, head_sha: str, suggestions: Sequence[Suggestion]) -> int:
        """Post those that are not there yet and lie in the diff as one review; returns how many those were."""
        return self._reviews.post(number, head_sha, suggestions, self.changed_files(number)) if suggestions else 0

    def upload_sarif(self, document: str, *, head_sha: str, ref: str) -> None:
        """Hand a SARIF document to code scanning; a repository without it is no error."""
        packed = base64.b64encode(gzip.compress(document.encode(), mtime=0)).decode()
        body = {"commit_sha": head_sha, "ref": ref, "sarif": packed}
        try:
            path = f"{self._path}/code-scanning/sarifs"
            self._api.send("POST", path, body, Nothing, right="security events: write")
        except ForgeMissing:
            return
        except ForgeRefused as error:
            if not re.search(r"not enabled|must be enabled|not available|not supported", str(error), re.IGNORECASE):
                raise


def _marked(marker: str, body: str) -> str:
    return fitted(body if body.startswith(marker) else f"{marker}\n{body}", _LONGEST)


def _ref(branch: str) -> str | None:
    """A branch as the API wants it in a path; None for a name that no branch can have, and other addresses could."""
    try:
        return quote(branch_ref(branch).removeprefix("refs/"), safe="")
    except UsageError:
        return None
