"""What is there in a project of GitLab, in the nouns of the bot."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Literal

from advisor.bot.forge import ChangedFile, PullRequest, Repository, State
from advisor.bot.forges.gitlab_api import (
    Api,
    Branch,
    Diff,
    DiffRefs,
    Discussion,
    Member,
    MergeRequest,
    Note,
    Project,
    Status,
    User,
    segment,
)
from advisor.bot.forges.gitlab_api import Issue as LabIssue
from advisor.bot.forges.gitlab_text import bare_title, mark_in
from advisor.bot.forges.hunks import shown_lines
from advisor.errors import ForgeError, ForgeMissing, ForgeUnavailable

_DEVELOPER = 30  # GitLab's lowest access level that may push
_LARGEST_FILE = 1 << 20  # bytes
_UNKNOWN = "0" * 40
_STATES: Mapping[str, State] = {"opened": "open", "locked": "open", "closed": "closed", "merged": "merged"}


class Reader:
    """The half of the Forge that changes nothing."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._names: dict[int, str | None] = {}  # of source projects
        self._user: User | None = None
        self._home: Project | None = None

    def account(self) -> str:
        """Login of the account that acts."""
        return self._me().username

    def repository(self) -> Repository:
        """The project as it is now."""
        project = self._home = self._api.get("", Project)
        return Repository(
            name=project.path_with_namespace,
            clone_url=project.http_url_to_repo,
            default_branch=project.default_branch or "",
            archived=project.archived,
        )

    def pull_request(self, number: int) -> PullRequest:
        """One merge request; raises ForgeMissing."""
        return self._pull_request(self._merge_request(number))

    def pull_requests(self, *, state: Literal["open", "all"], branch_prefix: str) -> tuple[PullRequest, ...]:
        """Those from branches of this project with the prefix, newest first."""
        newest = {"scope": "all", "order_by": "created_at", "sort": "desc"}
        found = self._api.each("merge_requests", MergeRequest, state="opened", **newest)
        if state == "all":
            found += self._api.each("merge_requests", MergeRequest, author_id=self._me().id, **newest)
        home = self._project().id
        kept = {
            one.iid: one
            for one in found
            if one.source_project_id == home and one.source_branch.startswith(branch_prefix)
        }
        whole = [self._merge_request(number) for number in kept]
        whole.sort(key=lambda one: (one.created_at, one.iid), reverse=True)
        return tuple(self._pull_request(one) for one in whole)

    def pull_request_at(self, head_sha: str) -> PullRequest | None:
        """The open merge request whose head is a commit, from a fork or not; None without one."""
        path = f"repository/commits/{segment(head_sha)}/merge_requests"
        try:
            found = self._api.each(path, MergeRequest, state="opened")
        except ForgeMissing as error:
            raise_if_hidden(error)
            return None
        numbers = [one.iid for one in found if one.state == "opened" and one.sha == head_sha]
        return self.pull_request(min(numbers)) if numbers else None

    def changed_files(self, number: int) -> tuple[ChangedFile, ...]:
        """The files of the diff; of one that GitLab finds too large to show no lines are known."""
        return tuple(_changed_file(diff) for diff in self._diffs(number))

    def may_write(self, user: str) -> bool:
        """Whether a user has at least the role Developer, by whatever group; False for one unknown."""
        if not user:
            return False
        found = self._api.get("/users", list[User], username=user)
        known = next((one for one in found if one.username.casefold() == user.casefold()), None)
        if known is None or known.state != "active":
            return False
        try:
            member = self._api.get(f"members/all/{known.id}", Member)
        except ForgeMissing as error:
            raise_if_hidden(error)
            return False
        return member.access_level >= _DEVELOPER and member.state == member.membership_state == "active"

    def read_file(self, path: str, ref: str) -> bytes | None:
        """A file at a commit or branch; None where there is none. Raises ForgeConflict for more than 1 MiB."""
        try:
            return self._api.content(f"repository/files/{segment(path)}/raw", limit=_LARGEST_FILE, ref=ref)
        except ForgeMissing as error:
            raise_if_hidden(error)
            return None

    def branch_head(self, branch: str) -> str | None:
        """The commit of a branch; None where there is none."""
        try:
            return self._api.get(f"repository/branches/{segment(branch)}", Branch).commit.id
        except ForgeMissing as error:
            raise_if_hidden(error)
            return None

    def _me(self) -> User:
        if self._user is None:
            self._user = self._api.get("/user", User)
        return self._user

    def _project(self) -> Project:
        if self._home is None:
            self._home = self._api.get("", Project)
        return self._home

    def _merge_request(self, number: int) -> MergeRequest:
        return self._api.get(f"merge_requests/{number}", MergeRequest)

    def _open_from(self, branch: str) -> MergeRequest | None:
        found = self._api.each("merge_requests", MergeRequest, state="opened", scope="all", source_branch=branch)
        home = self._project().id
        return next((one for one in found if one.source_project_id == home and one.source_branch == branch), None)

    def _diffs(self, number: int) -> list[Diff]:
        return self._api.each(f"merge_requests/{number}/diffs", Diff)

    def _refs(self, number: int) -> DiffRefs:
        """The commits that a position names; GitLab makes them a moment after the merge request."""
        refs = self._merge_request(number).diff_refs
        if refs is None or not (refs.base_sha and refs.start_sha and refs.head_sha):
            raise ForgeUnavailable(f"GitLab: the diff of merge request {number} is still being made")
        return refs

    def _ours(self, author: User | None) -> bool:
        return author is not None and author.id == self._me().id

    def _our_notes(self, number: int, marker: str) -> list[Note]:
        """Oldest first."""
        notes = self._api.each(f"merge_requests/{number}/notes", Note, sort="asc", order_by="created_at")
        ours = (note for note in notes if not note.system and self._ours(note.author))
        return sorted((note for note in ours if note.body.startswith(marker)), key=lambda note: note.id)

    def _posted(self, number: int) -> set[str]:
        """The marks of the suggestions that are there."""
        threads = self._api.each(f"merge_requests/{number}/discussions", Discussion)
        notes = (note for thread in threads for note in thread.notes if self._ours(note.author))
        return {mark for note in notes if (mark := mark_in(note.body)) is not None}

    def _our_issue(self, marker: str) -> LabIssue | None:
        """The oldest."""
        issues = self._api.each("issues", LabIssue, state="opened", scope="all", author_id=self._me().id)
        ours = [one for one in issues if self._ours(one.author) and (one.description or "").startswith(marker)]
        return min(ours, key=lambda one: one.iid, default=None)

    def _status(self, sha: str, name: str) -> Status | None:
        """Our latest of a name."""
        found = self._api.each(f"repository/commits/{segment(sha)}/statuses", Status, name=name)
        ours = [one for one in found if one.name == name and self._ours(one.author)]
        return max(ours, key=lambda one: one.id, default=None)

    def _source(self, project: int | None) -> str | None:
        """The name of the project that a merge request comes from; None for one deleted or hidden from us."""
        if project is None:
            return None
        if project == self._project().id:
            return self._project().path_with_namespace
        if project not in self._names:
            try:
                self._names[project] = self._api.get(f"/projects/{project}", Project).path_with_namespace
            except ForgeMissing:
                self._names[project] = None
        return self._names[project]

    def _pull_request(self, one: MergeRequest) -> PullRequest:
        state = _STATES.get(one.state, "closed")
        refs = one.diff_refs or DiffRefs()
        ended = one.merged_at if state == "merged" else one.closed_at
        return PullRequest(
            number=one.iid,
            title=bare_title(one.title) if one.draft else one.title,
            body=one.description or "",
            state=state,
            draft=one.draft,
            author=one.author.username if one.author else "ghost",
            base_ref=one.target_branch,
            base_sha=refs.start_sha or self.branch_head(one.target_branch) or _UNKNOWN,
            head_ref=one.source_branch,
            head_sha=one.sha or _UNKNOWN,
            head_repository=self._source(one.source_project_id),
            labels=one.labels,
            url=one.web_url,
            created=_utc(one.created_at),
            ended=None if state == "open" or ended is None else _utc(ended),
        )


def raise_if_hidden(error: ForgeError) -> None:
    """For what is not there in a project that is; raises again where the project itself is not to be seen."""
    if re.search("404 project not found", str(error), re.IGNORECASE):
        raise error


def _changed_file(diff: Diff) -> ChangedFile:
    lines, added = shown_lines(diff.diff)
    status: Literal["added", "modified", "removed", "renamed"] = (
        "removed" if diff.deleted_file else "added" if diff.new_file else "renamed" if diff.renamed_file else "modified"
    )
    previous = diff.old_path if status == "renamed" else None
    return ChangedFile(path=diff.new_path, status=status, previous=previous, lines=lines, added=added)


def _utc(moment: datetime.datetime) -> datetime.datetime:
    return moment.astimezone(datetime.timezone.utc)
