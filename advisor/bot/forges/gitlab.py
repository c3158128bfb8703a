"""GitLab as a Forge: merge requests, notes, commit statuses and threads with suggestions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from advisor.bot.forge import (
    Check,
    Comment,
    Credentials,
    Issue,
    PullRequest,
    Reaction,
    Suggestion,
)
from advisor.bot.forges.failures import Patience
from advisor.bot.forges.gitlab_api import (
    Api,
    Discussion,
    Emoji,
    MergeRequest,
    Note,
    Status,
    segment,
)
from advisor.bot.forges.gitlab_api import Issue as LabIssue
from advisor.bot.forges.gitlab_reader import Reader, raise_if_hidden
from advisor.bot.forges.gitlab_text import described, discussion, inert, key_mark, same_text, title_of, with_references
from advisor.errors import ForgeConflict, ForgeMissing
from advisor.reports.untrusted import clip

_LONGEST_STATUS = 255  # characters of a name or description of a status
_EMOJI: Mapping[Reaction, str] = {"eyes": "eyes", "+1": "thumbsup", "confused": "confused"}


class GitLab(Reader):
    """One project of a GitLab, with a personal, project or group access token of the scope `api`.

    Where GitLab is another world than the protocol: a check is a commit status, whose description holds the title and a
    summary of one line; a longer summary and annotations have no place there and are not posted (the sticky note has to
    carry them), and neutral is success. A status of a running check keeps its first title. `base_sha` is the target
    branch when the diff was last made, all zeros where GitLab does not know. `pull_requests` of state "all" holds, of
    those that have ended, the ones that this account opened. Code scanning takes no SARIF.
    """

    kind: Literal["github", "gitlab"] = "gitlab"

    def __init__(
        self,
        project: str,
        *,
        token: str,
        base_url: str = "https://gitlab.com",
        patience: Patience | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        super().__init__(Api(project, token=token, base_url=base_url, patience=patience, timeout_s=timeout_s))
        self._token = token

    def credentials(self) -> Credentials:
        """For git: any user name does, with the token as password."""
        return Credentials(user="oauth2", secret=self._token)

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; one that is gone already is no error."""
        try:
            self._api.delete(f"repository/branches/{segment(branch)}")
        except ForgeMissing as error:
            raise_if_hidden(error)

    def upsert_comment(self, number: int, marker: str, body: str) -> Comment:
        """Edit our note that begins with the marker, or write it; of several of ours the oldest is kept."""
        text = inert(_marked(marker, body))
        ours = self._our_notes(number, marker)
        if not ours:
            note = self._write_note(number, marker, text)
            ours = self._our_notes(number, marker) or [note]  # another worker may have written one meanwhile
        for extra in ours[1:]:
            self._remove_note(number, extra.id)
        if not same_text(ours[0].body, text):
            return _comment(self._api.put(f"merge_requests/{number}/notes/{ours[0].id}", Note, {"body": text}))
        return _comment(ours[0])

    def add_comment(self, number: int, marker: str, body: str) -> Comment:
        """Answer in the conversation, unless a note of ours begins with the marker already."""
        ours = self._our_notes(number, marker)
        return _comment(ours[0] if ours else self._write_note(number, marker, inert(_marked(marker, body))))

    def react(self, number: int, comment: int, reaction: Reaction) -> None:
        """Put an emoji on a note of a merge request."""
        path = f"merge_requests/{number}/notes/{comment}/award_emoji"
        name = _EMOJI[reaction]

        def given() -> Emoji | None:
            me = self._me().id
            awards = self._api.each(path, Emoji)
            return next((one for one in awards if one.name == name and one.user and one.user.id == me), None)

        if given() is not None:
            return
        try:
            self._api.post(path, Emoji, {"name": name}, done=given)
        except ForgeMissing:  # so GitLab says that it is there already
            if given() is None:
                raise

    def post_check(self, check: Check) -> str:
        """Set the commit status of the check's name; its URL is empty. A fork's commit gets it on the merge request."""
        state = {None: "running", "failure": "failed"}.get(check.conclusion, "success")
        said = check.title if check.conclusion is None else described(check.title, check.summary)
        body = {
            "state": state,
            "name": check.name[:_LONGEST_STATUS],
            "description": clip(said, _LONGEST_STATUS - 40)[:_LONGEST_STATUS],
        }

        def there() -> Status | None:
            found = self._status(check.head_sha, body["name"])
            if found is None or found.status != state:
                return None
            return found if state == "running" or same_text(found.description, body["description"]) else None

        found = there()
        if found is None:
            found = self._set_status(check.head_sha, body, there)
        return found.target_url or ""

    def post_suggestions(self, number: int, head_sha: str, suggestions: Sequence[Suggestion]) -> int:
        """Post as threads those that are not there yet; returns how many those were.

        What GitLab cannot show is passed over (see `gitlab_text.discussion`). Raises ForgeConflict where the head has
        moved on.
        """
        if not suggestions:
            return 0
        posted = self._posted(number)
        waiting = {key_mark(one.key): one for one in suggestions}
        waiting = {mark: one for mark, one in waiting.items() if mark not in posted}
        if not waiting:
            return 0
        refs = self._api.patience.call(lambda: self._refs(number))
        if refs.head_sha != head_sha:
            raise ForgeConflict(f"GitLab: merge request {number} is at {refs.head_sha}, no longer at {head_sha}")
        diffs = {diff.new_path: diff for diff in self._diffs(number)}
        count = 0
        for mark, one in waiting.items():
            request = discussion(one, diffs[one.path], refs) if one.path in diffs else None
            if request is not None:
                self._open_thread(number, mark, request)
                count += 1
        return count

    def open_pull_request(
        self, *, branch: str, base: str, title: str, body: str, labels: Sequence[str], draft: bool
    ) -> PullRequest:
        """Open one, or edit the open one of that branch, which stays the draft that it is or not."""
        found = self._open_from(branch)
        if found is None:
            request = {
                "source_branch": branch,
                "target_branch": base,
                "title": title_of(title, draft=draft),
                "description": inert(body),
                "labels": ",".join(labels),
            }
            try:
                found = self._api.post("merge_requests", MergeRequest, request, done=lambda: self._open_from(branch))
            except ForgeConflict:  # there is one already, which somebody else opened meanwhile
                found = self._open_from(branch)
                if found is None:
                    raise
        changes = _changes(found, title, body)
        if found.target_branch != base:
            changes["target_branch"] = base
        if missing := [label for label in labels if label not in found.labels]:
            changes["add_labels"] = ",".join(missing)
        self._edit(found.iid, changes)
        return self.pull_request(found.iid)

    def edit_pull_request(self, number: int, *, title: str, body: str) -> None:
        """Change title and description, where they differ; a draft stays one."""
        self._edit(number, _changes(self._merge_request(number), title, body))

    def close_pull_request(self, number: int, marker: str, reason: str) -> None:
        """Say why (once) and close it; one that is not open is left alone."""
        if self._merge_request(number).state != "opened":
            return
        self.add_comment(number, marker, reason)
        self._edit(number, {"state_event": "close"})

    def upsert_issue(self, marker: str, title: str, body: str) -> Issue:
        """Edit our open issue whose description begins with the marker, or open it."""
        request = {"title": title[:_LONGEST_STATUS], "description": inert(_marked(marker, body))}
        found = self._our_issue(marker)
        if found is None:
            found = self._api.post("issues", LabIssue, request, done=lambda: self._our_issue(marker))
        if found.title != request["title"] or not same_text(found.description, request["description"]):
            found = self._api.put(f"issues/{found.iid}", LabIssue, request)
        return Issue(
            number=found.iid,
            title=found.title,
            body=found.description or "",
            state="open" if found.state == "opened" else "closed",
            url=found.web_url,
        )

    def upload_sarif(self, document: str, *, head_sha: str, ref: str) -> None:
        """Nothing: GitLab takes reports as artifacts of its own jobs only."""

    def _write_note(self, number: int, marker: str, text: str) -> Note:
        def written() -> Note | None:
            return next(iter(self._our_notes(number, marker)), None)

        return self._api.post(f"merge_requests/{number}/notes", Note, {"body": text}, done=written)

    def _remove_note(self, number: int, note: int) -> None:
        try:
            self._api.delete(f"merge_requests/{number}/notes/{note}")
        except ForgeMissing as error:
            raise_if_hidden(error)

    def _open_thread(self, number: int, mark: str, request: Mapping[str, Any]) -> None:
        def opened() -> Discussion | None:
            return Discussion(notes=()) if mark in self._posted(number) else None

        self._api.post(f"merge_requests/{number}/discussions", Discussion, request, done=opened)

    def _set_status(self, sha: str, body: Mapping[str, str], there: Callable[[], Status | None]) -> Status:
        try:
            return self._api.post(f"statuses/{segment(sha)}", Status, body, done=there)
        except ForgeConflict:  # another worker has set the same state meanwhile: GitLab refuses to set it again
            found = there()
            if found is None:
                raise
            return found
        except ForgeMissing as error:
            if "ref" in body or "References for commit" not in str(error):
                raise
            from_fork = self.pull_request_at(sha)
            if from_fork is None:
                raise
            return self._set_status(sha, {**body, "ref": f"refs/merge-requests/{from_fork.number}/head"}, there)

    def _edit(self, number: int, changes: Mapping[str, str]) -> None:
        if not changes:
            return
        try:
            self._api.put(f"merge_requests/{number}", MergeRequest, changes)
        except ForgeConflict:
            if changes.get("state_event") != "close" or self._merge_request(number).state == "opened":
                raise  # else it was merged or closed meanwhile


def _marked(marker: str, body: str) -> str:
    return with_references(body if body.startswith(marker) else f"{marker}\n{body}")


def _changes(found: MergeRequest, title: str, body: str) -> dict[str, str]:
    """What an edit has to send for title and description."""
    wanted = {"title": title_of(title, draft=found.draft), "description": inert(body)}
    kept = {"title": found.title == wanted["title"], "description": same_text(found.description, wanted["description"])}
    return {name: text for name, text in wanted.items() if not kept[name]}


def _comment(note: Note) -> Comment:
    return Comment(id=note.id, author=note.author.username if note.author else "ghost", body=note.body, url="")
