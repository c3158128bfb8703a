"""What the fake does on each request of the API."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import fakehub_git
import fakehub_views as views
import jwt
from fakehub_state import App, Call, CheckRun, Comment, Issue, Json, Pull, Refusal, Repo

if TYPE_CHECKING:
    from fakehub import FakeHub

Answered: TypeAlias = "tuple[int, dict[str, str], Json]"
R = "/repos/{owner}/{repo}"
_LONGEST = 65_536
_LEVELS = ("notice", "warning", "failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An operation: `right` a token needs, `as_app` for those that take an App's JSON web token instead."""

    method: str
    template: str
    pattern: re.Pattern[str]
    right: str | None
    as_app: bool
    handler: Callable[[FakeHub, Call], Answered]


ROUTES: list[Route] = []


def route(method: str, template: str, right: str | None = None, *, as_app: bool = False) -> Any:
    def register(handler: Callable[[FakeHub, Call], Answered]) -> Callable[[FakeHub, Call], Answered]:
        regex = re.sub(
            r"\\{(\w+)\\}", lambda m: f"(?P<{m[1]}>{'.+' if m[1] in ('ref', 'path') else '[^/]+'})", re.escape(template)
        )
        ROUTES.append(
            Route(
                method=method,
                template=template,
                pattern=re.compile(regex),
                right=right,
                as_app=as_app,
                handler=handler,
            )
        )
        return handler

    return register


def paged(hub: FakeHub, call: Call, path: str, items: Sequence[Json]) -> Answered:
    """One page of a list, with the Link header that names the next."""
    size = min(int(call.query.get("per_page", 30)), 100)
    page = int(call.query.get("page", 1))
    more = {}
    if len(items) > page * size:
        query = "&".join(f"{k}={v}" for k, v in {**call.query, "page": str(page + 1)}.items())
        more["Link"] = f'<{hub.url}{path}?{query}>; rel="next", <{hub.url}{path}?page=99>; rel="last"'
    return 200, more, list(items[(page - 1) * size : page * size])


def _repo(call: Call) -> Repo:
    assert call.repo is not None
    return call.repo


def _login(call: Call) -> str:
    assert call.account is not None
    return call.account.login


def _invalid(resource: str, field: str, code: str, message: str | None = None) -> Refusal:
    error = {"resource": resource, "field": field, "code": code}
    return Refusal(422, "Validation Failed", [{**error, "message": message} if message else error])


def _fits(resource: str, body: str | None) -> None:
    if body is not None and len(body) > _LONGEST:
        raise _invalid(resource, "body", "custom", f"body is too long (maximum is {_LONGEST} characters)")


# --------------------------------------------------------------------------------------------------- accounts and Apps


def app_of(hub: FakeHub, header: str) -> App | None:
    """The App whose JSON web token a header `Authorization` carries; checks signature, issuer and times."""
    secret = header.partition(" ")[2]
    for app in hub.apps:
        try:
            claims = jwt.decode(
                secret, app.public_key, algorithms=["RS256"], options={"verify_exp": False, "verify_iat": False}
            )
        except jwt.PyJWTError:
            continue
        now = hub.now()
        if claims["iss"] == str(app.id) and claims["iat"] <= now < claims["exp"] <= now + 600:
            return app
    return None


@route("GET", "/user")
def _user(hub: FakeHub, call: Call) -> Answered:
    assert call.account is not None
    if call.account.kind != "user":
        raise Refusal(403, "Resource not accessible by integration")
    return 200, {}, views.user(_login(call))


@route("POST", "/graphql")
def _graphql(hub: FakeHub, call: Call) -> Answered:
    return 200, {}, {"data": {"viewer": {"login": _login(call)}}}


@route("GET", "/app", as_app=True)
def _app(hub: FakeHub, call: Call) -> Answered:
    assert call.app is not None
    return 200, {}, {"id": call.app.id, "slug": call.app.slug, "name": call.app.slug, "owner": views.user("owner")}


@route("GET", f"{R}/installation", as_app=True)
def _installation(hub: FakeHub, call: Call) -> Answered:
    assert call.app is not None
    return (
        200,
        {},
        {
            "id": call.app.installation,
            "app_id": call.app.id,
            "app_slug": call.app.slug,
            "permissions": {**call.app.rights, "metadata": "read"},
            "account": views.user("o"),
        },
    )


@route("POST", "/app/installations/{installation_id}/access_tokens", as_app=True)
def _access_token(hub: FakeHub, call: Call) -> Answered:
    assert call.app is not None
    if int(call.values["installation_id"]) != call.app.installation:
        raise Refusal(404, "Not Found")
    wanted = call.body.get("permissions") or call.app.rights
    if any(call.app.rights.get(name) not in (level, "write") for name, level in wanted.items() if name != "metadata"):
        raise Refusal(422, "The permissions requested are not granted to this installation.")
    names = call.body.get("repositories")
    full = tuple(name for name in hub.repos if name.split("/")[1] in names) if names else None
    if names and len(full or ()) < len(names):
        raise Refusal(
            422, "There is at least one repository that does not exist or is not accessible to the installation."
        )
    token = hub.installation_token(call.app, full, wanted)
    ends = hub.tokens[token].ends
    return (
        201,
        {},
        {"token": token, "expires_at": hub.stamp(ends), "permissions": wanted, "repository_selection": "selected"},
    )


# ------------------------------------------------------------------------------------------------ repository and files


@route("GET", R)
def _repository(hub: FakeHub, call: Call) -> Answered:
    return 200, {}, views.repository(hub, _repo(call))


@route("GET", f"{R}/collaborators/{{username}}/permission")
def _permission(hub: FakeHub, call: Call) -> Answered:
    name = call.values["username"]
    known = {key.lower(): value for key, value in _repo(call).permissions.items()}
    if name.lower() not in known:
        raise Refusal(404, f"{name} is not a user")
    return 200, {}, {"permission": known[name.lower()], "role_name": known[name.lower()], "user": views.user(name)}


@route("GET", f"{R}/git/ref/{{ref}}", "contents: read")
def _ref(hub: FakeHub, call: Call) -> Answered:
    found = fakehub_git.commit_of(_repo(call).bare, f"refs/{call.values['ref']}")
    if found is None:
        raise Refusal(404, "Not Found")
    return 200, {}, {"ref": f"refs/{call.values['ref']}", "object": {"type": "commit", "sha": found}}


@route("DELETE", f"{R}/git/refs/{{ref}}", "contents: write")
def _delete_ref(hub: FakeHub, call: Call) -> Answered:
    ref, repo = f"refs/{call.values['ref']}", _repo(call)
    if fakehub_git.commit_of(repo.bare, ref) is None:
        raise Refusal(422, "Reference does not exist")
    if ref.removeprefix("refs/heads/") in repo.protected:
        raise Refusal(422, "Cannot delete this protected branch")
    fakehub_git.git(repo.bare, "update-ref", "-d", ref)
    hub.sync(repo.name)
    return 204, {}, None


@route("GET", f"{R}/contents/{{path}}", "contents: read")
def _contents(hub: FakeHub, call: Call) -> Answered:
    repo, path = _repo(call), call.values["path"]
    commit = fakehub_git.commit_of(repo.bare, call.query.get("ref", repo.default_branch))
    if commit is None:
        raise Refusal(404, f"No commit found for the ref {call.query.get('ref')}")
    entry = fakehub_git.git(repo.bare, "ls-tree", commit, "--", path.rstrip("/")).decode().strip()
    if not entry or path != path.strip("/"):
        raise Refusal(404, "Not Found")
    mode, kind, sha = entry.split("\t")[0].split()
    common = {"path": path, "name": path.rsplit("/", 1)[-1], "sha": sha, "_links": {}, "size": 0}
    if kind == "tree":
        return 200, {}, [{"type": "file", "path": f"{path}/x", "name": "x", "sha": sha, "_links": {}, "size": 0}]
    if kind == "commit":
        return 200, {}, {"type": "submodule", "submodule_git_url": "https://github.example/x", **common}
    data = fakehub_git.git(repo.bare, "cat-file", "blob", sha)
    if mode == "120000":
        return 200, {}, {"type": "symlink", "target": data.decode(), **common}
    text, encoding = base64.encodebytes(data).decode(), "base64"
    if len(data) > 1 << 20:
        text, encoding = "", "none"
    return 200, {}, {**common, "type": "file", "size": len(data), "encoding": encoding, "content": text}


@route("POST", f"{R}/code-scanning/sarifs", "security_events: write")
def _sarif(hub: FakeHub, call: Call) -> Answered:
    repo = _repo(call)
    if not repo.code_scanning:
        raise Refusal(
            403,
            "Code scanning is not enabled for this repository. Please enable code scanning in the repository settings.",
        )
    document = gzip.decompress(base64.b64decode(call.body["sarif"], validate=True)).decode()
    repo.sarifs.append({"commit_sha": call.body["commit_sha"], "ref": call.body["ref"], "document": document})
    return 202, {}, {"id": "47177e22-5596-11eb-80a1-c1e54ef945c6", "url": f"{hub.url}/sarifs/1"}


# ---------------------------------------------------------------------------------------------------------- the checks


@route("GET", f"{R}/commits/{{ref}}/check-runs", "checks: read")
def _checks(hub: FakeHub, call: Call) -> Answered:
    repo = _repo(call)
    sha = fakehub_git.commit_of(repo.bare, call.values["ref"])
    runs = [run for run in repo.checks if run.head_sha == sha]
    if "check_name" in call.query:
        runs = [run for run in runs if run.name == call.query["check_name"]]
    if call.query.get("filter", "latest") == "latest":
        runs = list({(run.app, run.name): run for run in runs}.values())
    status, more, page = paged(
        hub, call, f"/repos/{repo.name}/commits/{sha}/check-runs", [views.check(hub, repo, r) for r in runs[::-1]]
    )
    return status, more, {"total_count": len(runs), "check_runs": page}


@route("POST", f"{R}/check-runs", "checks: write")
def _new_check(hub: FakeHub, call: Call) -> Answered:
    repo, account = _repo(call), call.account
    assert account is not None
    if account.kind == "user":
        raise Refusal(403, "You must authenticate via a GitHub App.")
    sha = call.body["head_sha"]
    if fakehub_git.commit_of(repo.bare, sha) is None:
        raise Refusal(422, f"No commit found for SHA: {sha}")
    run = CheckRun(
        id=hub.new_id(),
        app=account.slug,
        name=call.body["name"],
        head_sha=sha,
        external_id=call.body.get("external_id", ""),
        status="queued",
        conclusion=None,
    )
    _change_check(run, call.body)
    repo.checks.append(run)
    return 201, {}, views.check(hub, repo, run)


@route("PATCH", f"{R}/check-runs/{{check_run_id}}", "checks: write")
def _edit_check(hub: FakeHub, call: Call) -> Answered:
    repo, run = _repo(call), _check(call)
    assert call.account is not None
    if run.app != call.account.slug:
        raise Refusal(403, "Invalid app_id: the check run was made by another app.")
    _change_check(run, call.body)
    run.edits += 1
    return 200, {}, views.check(hub, repo, run)


@route("GET", f"{R}/check-runs/{{check_run_id}}", "checks: read")
def _one_check(hub: FakeHub, call: Call) -> Answered:
    return 200, {}, views.check(hub, _repo(call), _check(call))


@route("GET", f"{R}/check-runs/{{check_run_id}}/annotations", "checks: read")
def _annotations(hub: FakeHub, call: Call) -> Answered:
    run = _check(call)
    shown = [
        {"start_column": None, "end_column": None, "raw_details": None, "title": None, **a} for a in run.annotations
    ]
    return paged(hub, call, f"/repos/{_repo(call).name}/check-runs/{run.id}/annotations", shown)


def _check(call: Call) -> CheckRun:
    found = [run for run in _repo(call).checks if run.id == int(call.values["check_run_id"])]
    if not found:
        raise Refusal(404, "Not Found")
    return found[0]


def _change_check(run: CheckRun, body: Json) -> None:
    output = body.get("output", {})
    new = output.get("annotations", [])
    bad = [a for a in new if a["annotation_level"] not in _LEVELS or len(a["message"].encode()) > 65_536]
    bad += [
        a for a in new if len(a.get("title", "")) > 255 or a["start_line"] > a["end_line"] or a["path"].startswith("/")
    ]
    if len(new) > 50 or bad or len(output.get("summary", "")) > 65_535:
        raise Refusal(422, 'Invalid request.\n\nNo subschema in "anyOf" matched.')
    if body.get("status") == "completed" and "conclusion" not in body:
        raise Refusal(422, "Missing conclusion")
    run.status = "completed" if "conclusion" in body else body.get("status", run.status)
    run.conclusion = body.get("conclusion", run.conclusion if run.status == "completed" else None)
    run.title, run.summary = output.get("title", run.title), output.get("summary", run.summary)
    run.annotations.extend(new)


# ---------------------------------------------------------------------------------------------- issues and conversation


def _item(call: Call) -> Issue | Pull:
    number = int(call.values["issue_number"])
    repo = _repo(call)
    found = repo.pulls.get(number) or repo.issues.get(number)
    if found is None:
        raise Refusal(404, "Not Found")
    return found


@route("GET", f"{R}/issues/{{issue_number}}/comments", "issues: read | pull_requests: read")
def _comments(hub: FakeHub, call: Call) -> Answered:
    repo, item = _repo(call), _item(call)
    shown = [views.comment(hub, repo, comment) for comment in repo.of(item.number)]
    return paged(hub, call, f"/repos/{repo.name}/issues/{item.number}/comments", shown)


@route("POST", f"{R}/issues/{{issue_number}}/comments", "issues: write | pull_requests: write")
def _new_comment(hub: FakeHub, call: Call) -> Answered:
    repo, item = _repo(call), _item(call)
    _fits("IssueComment", call.body["body"])
    comment = Comment(id=hub.new_id(), number=item.number, author=_login(call), body=call.body["body"])
    repo.comments.append(comment)
    return 201, {}, views.comment(hub, repo, comment)


def _comment(call: Call) -> Comment:
    found = [comment for comment in _repo(call).comments if comment.id == int(call.values["comment_id"])]
    if not found:
        raise Refusal(404, "Not Found")
    return found[0]


@route("PATCH", f"{R}/issues/comments/{{comment_id}}", "issues: write | pull_requests: write")
def _edit_comment(hub: FakeHub, call: Call) -> Answered:
    comment = _comment(call)
    _fits("IssueComment", call.body["body"])
    comment.body = call.body["body"]
    comment.edits += 1
    comment.edited_by.append(_login(call))
    return 200, {}, views.comment(hub, _repo(call), comment)


@route("DELETE", f"{R}/issues/comments/{{comment_id}}", "issues: write | pull_requests: write")
def _delete_comment(hub: FakeHub, call: Call) -> Answered:
    _repo(call).comments.remove(_comment(call))
    return 204, {}, None


@route("POST", f"{R}/issues/comments/{{comment_id}}/reactions", "issues: write | pull_requests: write")
def _react(hub: FakeHub, call: Call) -> Answered:
    comment, reaction = _comment(call), (_login(call), call.body["content"])
    known = reaction in comment.reactions
    if not known:
        comment.reactions.append(reaction)
    body = {"id": 1, "content": call.body["content"], "user": views.user(_login(call)), "created_at": hub.stamp()}
    return 200 if known else 201, {}, body


@route("POST", f"{R}/issues/{{issue_number}}/labels", "issues: write | pull_requests: write")
def _add_labels(hub: FakeHub, call: Call) -> Answered:
    item = _item(call)
    item.labels += [name for name in call.body["labels"] if name not in item.labels]
    return 200, {}, views.labels(item.labels)


@route("GET", f"{R}/issues", "issues: read")
def _issues(hub: FakeHub, call: Call) -> Answered:
    repo = _repo(call)
    state, creator = call.query.get("state", "open"), call.query.get("creator")
    items: list[Issue | Pull] = [*repo.issues.values(), *repo.pulls.values()]
    items = [i for i in items if state in ("all", i.state) and creator in (None, i.author)]
    items.sort(key=lambda item: item.number, reverse=call.query.get("direction", "desc") == "desc")
    return paged(hub, call, f"/repos/{repo.name}/issues", [views.issue(hub, repo, item) for item in items])


@route("POST", f"{R}/issues", "issues: write")
def _new_issue(hub: FakeHub, call: Call) -> Answered:
    repo = _repo(call)
    if not repo.has_issues:
        raise Refusal(410, "Issues are disabled for this repo")
    _fits("Issue", call.body.get("body"))
    found = Issue(
        number=hub.next_number(repo),
        title=call.body["title"],
        body=call.body.get("body"),
        author=_login(call),
        created_at=hub.stamp(),
    )
    repo.issues[found.number] = found
    return 201, {}, views.issue(hub, repo, found)


@route("PATCH", f"{R}/issues/{{issue_number}}", "issues: write")
def _edit_issue(hub: FakeHub, call: Call) -> Answered:
    item = _item(call)
    _fits("Issue", call.body.get("body"))
    for name in ("title", "body", "state"):
        if name in call.body:
            setattr(item, name, call.body[name])
    item.edits += 1
    return 200, {}, views.issue(hub, _repo(call), item)


# -------------------------------------------------------------------------------------------------------- pull requests


def _pull(call: Call) -> Pull:
    found = _repo(call).pulls.get(int(call.values["pull_number"]))
    if found is None:
        raise Refusal(404, "Not Found")
    return found


@route("GET", f"{R}/pulls", "pull_requests: read")
def _pulls(hub: FakeHub, call: Call) -> Answered:
    repo, query = _repo(call), call.query
    items = [p for p in repo.pulls.values() if query.get("state", "open") in ("all", p.state)]
    if "head" in query and ":" in query["head"]:
        owner, _, branch = query["head"].partition(":")
        items = [p for p in items if p.head == branch and (p.head_repo or "").split("/")[0] == owner]
    if "base" in query:
        items = [p for p in items if p.base == query["base"]]
    items.sort(key=lambda pull: pull.number, reverse=query.get("direction", "desc") == "desc")
    return paged(hub, call, f"/repos/{repo.name}/pulls", [views.pull(hub, repo, pull) for pull in items])


@route("POST", f"{R}/pulls", "pull_requests: write")
def _new_pull(hub: FakeHub, call: Call) -> Answered:
    repo, body = _repo(call), call.body
    _fits("PullRequest", body.get("body"))
    branch = body["head"].rpartition(":")[2]
    head = fakehub_git.commit_of(repo.bare, f"refs/heads/{branch}")
    for field, name in (("head", branch), ("base", body["base"])):
        if fakehub_git.commit_of(repo.bare, f"refs/heads/{name}") is None:
            raise _invalid("PullRequest", field, "invalid")
    if any(
        p.state == "open" and (p.head, p.base, p.head_repo) == (branch, body["base"], repo.name)
        for p in repo.pulls.values()
    ):
        told = f"A pull request already exists for {repo.name.split('/')[0]}:{branch}."
        raise _invalid("PullRequest", "head", "custom", told)
    assert head is not None
    if fakehub_git.contains(repo.bare, body["base"], head):
        raise _invalid("PullRequest", "base", "custom", f"No commits between {body['base']} and {branch}")
    made = hub.open_pull(
        repo.name,
        head=branch,
        base=body["base"],
        title=body["title"],
        body=body.get("body") or "",
        author=_login(call),
        draft=body.get("draft", False),
    )
    return 201, {}, views.pull(hub, repo, made)


@route("GET", f"{R}/pulls/{{pull_number}}", "pull_requests: read")
def _one_pull(hub: FakeHub, call: Call) -> Answered:
    return 200, {}, views.pull(hub, _repo(call), _pull(call))


@route("PATCH", f"{R}/pulls/{{pull_number}}", "pull_requests: write")
def _edit_pull(hub: FakeHub, call: Call) -> Answered:
    found, body = _pull(call), call.body
    _fits("PullRequest", body.get("body"))
    found.title, found.body, found.base = (body.get(name, getattr(found, name)) for name in ("title", "body", "base"))
    if body.get("state", found.state) != found.state:
        if found.merged_at is not None:
            raise _invalid("PullRequest", "state", "custom", "state cannot be changed. The pull request was merged.")
        found.state = body["state"]
        found.closed_at = hub.stamp() if found.state == "closed" else None
    found.edits += 1
    return 200, {}, views.pull(hub, _repo(call), found)


@route("GET", f"{R}/pulls/{{pull_number}}/files", "pull_requests: read")
def _files(hub: FakeHub, call: Call) -> Answered:
    found, repo = _pull(call), _repo(call)
    shown = []
    for file in fakehub_git.diff(repo.bare, found.base_sha, found.head_sha):
        lines = (file.patch or "").split("\n")
        view = {
            "sha": file.blob,
            "filename": file.path,
            "status": file.status,
            "additions": sum(line.startswith("+") for line in lines),
            "deletions": sum(line.startswith("-") for line in lines),
            "changes": sum(line[:1] in ("+", "-") for line in lines),
        }
        view |= {"patch": file.patch} if file.patch is not None else {}
        view |= {"previous_filename": file.previous} if file.previous is not None else {}
        shown.append(view)
    return paged(hub, call, f"/repos/{repo.name}/pulls/{found.number}/files", shown)


@route("GET", f"{R}/commits/{{commit_sha}}/pulls", "pull_requests: read")
def _pulls_of_commit(hub: FakeHub, call: Call) -> Answered:
    repo, sha = _repo(call), call.values["commit_sha"]
    if fakehub_git.commit_of(repo.bare, sha) is None:
        raise Refusal(422, f"No commit found for SHA: {sha}")
    inside = [p for p in repo.pulls.values() if p.head_repo == repo.name]  # pull requests of forks are left out
    items = [p for p in inside if p.head_sha and _reaches(repo, p, sha)]
    return paged(hub, call, f"/repos/{repo.name}/commits/{sha}/pulls", [views.pull(hub, repo, p) for p in items])


def _reaches(repo: Repo, pull: Pull, sha: str) -> bool:
    try:
        listed = fakehub_git.git(repo.bare, "rev-list", f"{pull.base_sha}..{pull.head_sha}").decode().split()
    except fakehub_git.GitFailed:
        return False
    return sha in listed


@route("GET", f"{R}/pulls/{{pull_number}}/comments", "pull_requests: read")
def _review_comments(hub: FakeHub, call: Call) -> Answered:
    found = _pull(call)
    return paged(hub, call, f"/repos/{_repo(call).name}/pulls/{found.number}/comments", found.review_comments)


@route("POST", f"{R}/pulls/{{pull_number}}/reviews", "pull_requests: write")
def _review(hub: FakeHub, call: Call) -> Answered:
    found, repo, body = _pull(call), _repo(call), call.body
    commit, comments = body.get("commit_id", found.head_sha), body.get("comments", [])
    if body.get("event") != "COMMENT" or not (comments or body.get("body")):
        raise Refusal(422, "Unprocessable Entity", ["the fake knows reviews that comment"])
    if commit != found.head_sha and not _reaches(repo, found, commit):
        raise Refusal(422, "Unprocessable Entity", ["The commit_id is not part of the pull request"])
    files = {file.path: file for file in fakehub_git.diff(repo.bare, found.base_sha, found.head_sha)}
    for comment in comments:
        _fits("PullRequestReviewComment", comment["body"])
        if comment["path"] not in files:
            raise Refusal(422, "Unprocessable Entity", ["Path could not be resolved"])
        first, last = comment.get("start_line", comment["line"]), comment["line"]
        if "start_line" in comment and first >= last:
            raise Refusal(422, "Unprocessable Entity", ["start_line must precede the end line."])
        if comment.get("side") != "RIGHT" or not any(first in h and last in h for h in files[comment["path"]].hunks()):
            raise Refusal(422, "Unprocessable Entity", ["Line could not be resolved"])
    review = {"id": hub.new_id(), "body": body.get("body", ""), "state": "COMMENTED", "commit_id": commit}
    review |= {"user": views.user(_login(call)), "author_association": "NONE", "submitted_at": hub.stamp()}
    found.reviews.append(review)
    for comment in comments:
        made = {"id": hub.new_id(), "pull_request_review_id": review["id"], "commit_id": commit, **comment}
        made |= {"user": views.user(_login(call)), "created_at": hub.stamp(), "author_association": "NONE"}
        found.review_comments.append(made)
    return 200, {}, review
