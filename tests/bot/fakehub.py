"""A GitHub in this process: its REST API over HTTP on 127.0.0.1, its repositories real bare git repositories."""

from __future__ import annotations

import base64
import datetime
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import fakehub_git
import fakehub_routes
import fakehub_shapes
import fakehub_views
from fakehub_state import Account, App, Call, Comment, Json, Planned, Pull, Refusal, Repo, Seen

ALL_RIGHTS = {
    "contents": "write",
    "pull_requests": "write",
    "issues": "write",
    "checks": "write",
    "security_events": "write",
}
_NOT_ACCESSIBLE = "Resource not accessible by integration"


class FakeHub:
    """Stands in for api.github.com (or GitHub Enterprise Server with `prefix="/api/v3"`) and for the people on it.

    It keeps state as GitHub does, where the bot depends on it: pull requests follow their branches (real git), a
    second pull request of a branch is refused, annotations only accumulate and at most 50 come at once, a review with
    one comment outside of the diff is refused as a whole, a branch that is deleted closes its pull request, a token of
    an App or a workflow has no `GET /user`. Answers are filled in to GitHub's published shape. It does not stand in
    for: GitHub's Markdown, search, review threads, branch protection on push (git hooks of the bare repository do), or
    webhooks being sent (`pull_event`, `comment_event` and `push_event` make their payloads).

    Use: `with FakeHub(tmp_path) as hub:`, then
    `repo = hub.add_repository("o/r")` makes a bare repository (or takes `bare=`); `hub.commit("o/r", branch, files)`
    commits to it, `fakehub_git.commit` likewise to any bare repository. Clone from and push to `repo.clone_url`.
    `token = hub.workflow_token()` (acts as github-actions[bot]), `hub.user_token(login)`, or `hub.add_app(...)`.
    `hub.open_pull(...)`, `hub.comment(...)`, `hub.close(...)`, `hub.merge(...)` are what people do.
    `hub.repo("o/r").pulls[1]`, `.comments`, `.checks`, `.issues`, `.sarifs` are what is there now: read it after
    `hub.sync("o/r")`, which lets pull requests follow pushes, as every request does. `hub.requests` is what was asked.
    `hub.fail(...)` plans failures. `hub.url` is the base URL for the client. A request without a field that GitHub
    requires is a bug of whoever sent it: it gets no answer, and leaving the `with` block raises (`hub.bugs`).
    """

    def __init__(self, root: Path, *, prefix: str = "") -> None:
        self.root = root
        self.prefix = prefix
        self.requests: list[Seen] = []
        self.bugs: list[Exception] = []  # of the fake itself; none may be left at the end
        self.token_life_s = 3600.0
        self.clock_shift_s = 0.0  # added to the real time
        self.repos: dict[str, Repo] = {}
        self.tokens: dict[str, Account] = {}
        self.apps: list[App] = []
        self.planned: list[Planned] = []
        self.lock = threading.RLock()
        self._ended = threading.Event()
        self._count = 1000
        self._routes = fakehub_routes.ROUTES
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}{prefix}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        assert not self.bugs, self.bugs

    # ------------------------------------------------------------------------------------------------------- accounts

    def workflow_token(self, rights: Mapping[str, str] = ALL_RIGHTS) -> str:
        """A GITHUB_TOKEN: acts as github-actions[bot], whose own account it may not read."""
        return self._token(Account(login="github-actions[bot]", kind="workflow", rights=dict(rights)), "ghs_")

    def user_token(self, login: str, rights: Mapping[str, str] = ALL_RIGHTS) -> str:
        """A token of a person or machine user, who can make no check runs."""
        return self._token(Account(login=login, kind="user", rights=dict(rights)), "ghp_")

    def add_app(self, slug: str, public_key: str, rights: Mapping[str, str] = ALL_RIGHTS) -> App:
        """Register a GitHub App, installed on every repository; it acts as `<slug>[bot]`."""
        app = App(id=self.new_id(), slug=slug, public_key=public_key, installation=self.new_id(), rights=dict(rights))
        self.apps.append(app)
        return app

    def installation_token(self, app: App, repositories: tuple[str, ...] | None, rights: Mapping[str, str]) -> str:
        """A token of an App's installation, which ends after `token_life_s` seconds."""
        ends = self.now() + self.token_life_s
        account = Account(
            login=f"{app.slug}[bot]", kind="app", rights=dict(rights), repositories=repositories, ends=ends
        )
        return self._token(account, "ghs_")

    def _token(self, account: Account, prefix: str) -> str:
        token = prefix + secrets.token_hex(18)
        self.tokens[token] = account
        return token

    # --------------------------------------------------------------------------------------------- what people do

    def add_repository(
        self,
        name: str,
        *,
        bare: Path | None = None,
        clone_url: str | None = None,
        default_branch: str = "main",
        permissions: Mapping[str, str] | None = None,
    ) -> Repo:
        """A repository; without `bare` an empty one is made. `permissions` is login -> admin, write, read."""
        bare = bare or fakehub_git.make_bare(self.root / f"{name}.git", default_branch)
        repo = Repo(name=name, bare=bare, clone_url=clone_url or bare.as_uri(), default_branch=default_branch)
        repo.permissions = dict(permissions or {name.split("/")[0]: "admin"})
        self.repos[name] = repo
        return repo

    def fork(self, name: str, owner: str) -> Repo:
        """A copy of a repository under another owner."""
        original = self.repos[name]
        bare = self.root / f"{owner}/{name.split('/')[1]}.git"
        bare.parent.mkdir(parents=True, exist_ok=True)
        fakehub_git.git(self.root, "clone", "--quiet", "--bare", str(original.bare), str(bare))
        return self.add_repository(f"{owner}/{name.split('/')[1]}", bare=bare, default_branch=original.default_branch)

    def repo(self, name: str) -> Repo:
        return self.repos[name]

    def commit(self, name: str, branch: str, files: Mapping[str, str | bytes | None], message: str = "change") -> str:
        """Commit files to a branch (None removes); a new branch starts at the default branch. Returns the commit."""
        bare = self.repos[name].bare
        if fakehub_git.commit_of(bare, f"refs/heads/{branch}") is None:
            start = fakehub_git.commit_of(bare, f"refs/heads/{self.repos[name].default_branch}")
            if start is not None:
                fakehub_git.git(bare, "update-ref", f"refs/heads/{branch}", start)
        return fakehub_git.commit(bare, branch, dict(files), message=message)

    def open_pull(
        self,
        name: str,
        *,
        head: str,
        base: str = "main",
        title: str = "A change",
        body: str = "",
        author: str = "octocat",
        head_repo: str | None = None,
        draft: bool = False,
    ) -> Pull:
        """Somebody opens a pull request, from a fork where `head_repo` names one."""
        with self.lock:
            pull = Pull(
                number=self.next_number(self.repos[name]),
                title=title,
                body=body,
                author=author,
                base=base,
                head=head,
                head_repo=head_repo or name,
                draft=draft,
                created_at=self.stamp(),
            )
            self.repos[name].pulls[pull.number] = pull
            self.sync(name)
            return pull

    def comment(self, name: str, number: int, author: str, body: str) -> Comment:
        """Somebody comments."""
        with self.lock:
            comment = Comment(id=self.new_id(), number=number, author=author, body=body)
            self.repos[name].comments.append(comment)
            return comment

    def close(self, name: str, number: int) -> None:
        """Somebody closes a pull request or issue."""
        with self.lock:
            item = self.repos[name].pulls.get(number) or self.repos[name].issues[number]
            item.state = "closed"
            if isinstance(item, Pull):
                item.closed_at = self.stamp()

    def merge(self, name: str, number: int) -> str:
        """Somebody merges a pull request with a merge commit, which is returned; raises GitFailed on a conflict."""
        with self.lock:
            self.sync(name)
            repo = self.repos[name]
            pull = repo.pulls[number]
            made = fakehub_git.merge(repo.bare, pull.base, pull.head_sha, f"Merge pull request #{number}")
            pull.state, pull.merged_at, pull.closed_at = "closed", self.stamp(), self.stamp()
            return made

    def sync(self, name: str) -> Repo:
        """Let the open pull requests of a repository follow its branches; returns the repository."""
        with self.lock:
            repo = self.repos[name]
            opened = [pull for pull in repo.pulls.values() if pull.state == "open"]
            heads = {
                key: fakehub_git.heads(self.repos[key].bare) for key in {p.head_repo for p in opened} & {*self.repos}
            }
            for pull in opened:
                self._follow(repo, pull, heads.get(pull.head_repo or "", {}).get(pull.head))
            return repo

    def _follow(self, repo: Repo, pull: Pull, head: str | None) -> None:
        source = self.repos.get(pull.head_repo or "")
        if source is None or head is None:
            if source is repo:
                pull.state, pull.closed_at = "closed", self.stamp()
            elif source is None:
                pull.head_repo = None
            return
        if head == pull.head_sha:
            return
        if source is not repo:
            kept = f"{head}:refs/pull/{pull.number}/head"
            fakehub_git.git(repo.bare, "fetch", "--quiet", "--force", str(source.bare), kept)
        else:
            fakehub_git.git(repo.bare, "update-ref", f"refs/pull/{pull.number}/head", head)
        pull.head_sha = head
        pull.base_sha = fakehub_git.commit_of(repo.bare, f"refs/heads/{pull.base}") or pull.base_sha

    # ------------------------------------------------------------------------------------------------------ failures

    def fail(
        self,
        method: str,
        path: str,
        status: int | Literal["drop", "hang"],
        headers: Mapping[str, str] | None = None,
        body: Json = None,
        *,
        times: int = 1,
        skip: int = 0,
        after_doing: bool = False,
    ) -> None:
        """Let the next `times` requests of a method ("*": any) whose path a regular expression finds fail.

        `status` "drop" closes the connection without an answer, "hang" answers nothing until the hub ends.
        `after_doing` first does what was asked. `skip` requests of the kind pass before. `path` is decoded and without
        the prefix.
        """
        planned = Planned(
            method=method,
            path=re.compile(path),
            status=status,
            headers=headers or {},
            body={"message": "planned failure"} if body is None else body,
            times=times,
            skip=skip,
            after_doing=after_doing,
        )
        with self.lock:
            self.planned.append(planned)

    def _failing(self, method: str, path: str) -> Planned | None:
        for planned in self.planned:
            if planned.times and planned.method in ("*", method) and planned.path.search(path):
                if planned.skip:
                    planned.skip -= 1
                    continue
                planned.times -= 1
                return planned
        return None

    # ------------------------------------------------------------------------------------------------------ payloads

    def pull_event(self, name: str, number: int, action: str, *, sender: str = "octocat") -> Json:
        """The payload of a `pull_request` webhook (opened, synchronize, reopened, closed, ...)."""
        with self.lock:
            pull = self.sync(name).pulls[number]
            view = fakehub_shapes.of_schema("pull-request", fakehub_views.pull(self, self.repos[name], pull))
        return {"action": action, "number": number, "pull_request": view, **self._around(name, sender)}

    def comment_event(self, name: str, comment: Comment, action: str = "created") -> Json:
        """The payload of an `issue_comment` webhook."""
        with self.lock:
            repo = self.sync(name)
            item = repo.pulls.get(comment.number) or repo.issues[comment.number]
            issue = fakehub_shapes.of_schema("issue", fakehub_views.issue(self, repo, item))
            view = fakehub_shapes.of_schema("issue-comment", fakehub_views.comment(self, repo, comment))
        return {"action": action, "issue": issue, "comment": view, **self._around(name, comment.author)}

    def push_event(self, name: str, branch: str, before: str, after: str, *, sender: str = "octocat") -> Json:
        """The payload of a `push` webhook, in which the repository's times are seconds since the epoch."""
        kinds = {"created": before == "0" * 40, "deleted": after == "0" * 40, "forced": False}
        around = self._around(name, sender)
        around["repository"] |= {"pushed_at": int(self.now()), "created_at": int(self.now())}
        return {"ref": f"refs/heads/{branch}", "before": before, "after": after, **kinds, **around}

    def _around(self, name: str, sender: str) -> Json:
        view = fakehub_shapes.of_schema("full-repository", fakehub_views.repository(self, self.repos[name]))
        around = {"repository": view, "sender": fakehub_views.user(sender)}
        return {**around, "installation": {"id": self.apps[0].installation}} if self.apps else around

    # ------------------------------------------------------------------------------------------------------- serving

    def now(self) -> float:
        return time.time() + self.clock_shift_s

    def stamp(self, at: float | None = None) -> str:
        moment = datetime.datetime.fromtimestamp(self.now() if at is None else at, datetime.timezone.utc)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    def new_id(self) -> int:
        self._count += 1
        return self._count

    def next_number(self, repo: Repo) -> int:
        return max((*repo.pulls, *repo.issues, 0)) + 1

    def account(self, header: str) -> Account | None:
        """Who a header `Authorization` stands for."""
        kind, _, secret = header.partition(" ")
        if kind.lower() == "basic":
            secret = base64.b64decode(secret).decode().partition(":")[2]
        account = self.tokens.get(secret)
        if account is None or (account.ends is not None and account.ends < self.now()):
            return None
        return account

    def handle(
        self, method: str, target: str, headers: dict[str, str], data: bytes
    ) -> tuple[Any, dict[str, str], Json]:
        """Status (or what to do with the connection), headers and body of an answer."""
        parts = urlsplit(target)
        raw = parts.path.removeprefix(self.prefix) if parts.path.startswith(self.prefix) else "/nowhere"
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = json.loads(data) if data else None
        with self.lock:
            account = self.account(headers.get("authorization", ""))
            self.requests.append(
                Seen(
                    method=method,
                    path=unquote(raw),
                    query=query,
                    headers=headers,
                    body=body,
                    account=account.login if account else None,
                )
            )
            planned = self._failing(method, unquote(raw))
            if planned is not None and not planned.after_doing:
                return planned.status, dict(planned.headers), planned.body
            answer = self._answer(method, raw, query, headers, body)
            return answer if planned is None else (planned.status, dict(planned.headers), planned.body)

    def _answer(
        self, method: str, raw: str, query: dict[str, str], headers: dict[str, str], body: Json
    ) -> tuple[int, dict[str, str], Json]:
        try:
            for route in self._routes:
                found = route.pattern.fullmatch(raw) if route.method == method else None
                if found:
                    values = {name: unquote(value) for name, value in found.groupdict().items()}
                    call = self._call(route, values, query, headers, body)
                    status, more, result = route.handler(self, call)
                    return status, more, fakehub_shapes.answer(method, route.template, status, result)
            raise Refusal(404, "Not Found")
        except Refusal as refusal:
            return refusal.status, {}, refusal.body

    def _call(
        self, route: Any, values: dict[str, str], query: dict[str, str], headers: dict[str, str], body: Json
    ) -> Call:
        header = headers.get("authorization", "")
        account = self.account(header)
        app = fakehub_routes.app_of(self, header) if account is None else None
        if account is None and app is None:
            raise Refusal(401, "Bad credentials")
        if route.as_app != (app is not None):
            raise (
                Refusal(401, "A JSON web token could not be decoded") if route.as_app else Refusal(403, _NOT_ACCESSIBLE)
            )
        repo = None
        if "owner" in values:
            name = f"{values['owner']}/{values['repo']}"
            repo = next((found for key, found in self.repos.items() if key.lower() == name.lower()), None)
            hidden = account is not None and account.repositories is not None and name not in account.repositories
            if repo is None or hidden:
                raise Refusal(404, "Not Found")
            self.sync(repo.name)
        if account is not None and route.right is not None:
            self._allow(account, route.right)
        if repo is not None and repo.archived and method_writes(route.method):
            raise Refusal(403, "Repository was archived so is read-only.")
        return Call(account=account, app=app, values=values, query=query, body=body or {}, repo=repo)

    def _allow(self, account: Account, right: str) -> None:
        """`right` is "checks: write"; one of several where "a: read | b: read"."""
        for option in right.split(" | "):
            name, _, level = option.partition(": ")
            held = account.rights.get(name, "none")
            if held == "write" or held == level:
                return
        raise Refusal(403, _NOT_ACCESSIBLE)


def method_writes(method: str) -> bool:
    return method != "GET"


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, more, body = hub.handle(self.command, self.path, headers, data)
            except Exception as bug:
                hub.bugs.append(bug)
                raise
            if status == "hang":
                hub._ended.wait()
            if status in ("drop", "hang"):
                self.close_connection = True
                self.connection.close()
                return
            text = body if isinstance(body, str) else json.dumps(body)
            payload = b"" if status == 204 else text.encode()
            self.send_response_only(status)
            for name, value in {"Content-Type": "application/json; charset=utf-8", **more}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            """Nothing: `hub.requests` is the log."""

    return Handler
