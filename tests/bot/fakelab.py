"""A GitLab in this process: the part of its REST API version 4 that the bot asks, over HTTP on 127.0.0.1."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import fakelab_git

Json = dict[str, Any]
QUICK_ACTIONS = "close|merge|approve|label|assign|reopen|title|draft|ready|target_branch|lock|shrug|award"


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: Any, **headers: str) -> None:
        super().__init__(f"{status} {message}")
        self.status, self.message, self.headers = status, message, headers


@dataclass
class Plan:
    """A failure to come: `done` does what was asked before it fails; status 0 hangs up, -1 answers too late."""

    method: str
    path: str
    status: int
    headers: dict[str, str]
    body: bytes
    done: bool
    times: int


@dataclass
class FakeProject:
    """What is there now."""

    id: int
    name: str
    bare: Path | None = None  # the git repository, where there is one
    visible: bool = True
    archived: bool = False
    branches: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    protected: set[str] = field(default_factory=set)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)  # (ref, path)
    members: dict[str, Json] = field(default_factory=dict)
    merges: dict[int, Json] = field(default_factory=dict)
    texts: dict[int, dict[str, tuple[str | None, str | None]]] = field(default_factory=dict)  # of merge requests
    notes: dict[int, list[Json]] = field(default_factory=dict)  # of merge requests
    emoji: dict[int, list[Json]] = field(default_factory=dict)  # of notes
    issues: dict[int, Json] = field(default_factory=dict)
    statuses: list[Json] = field(default_factory=list)


class FakeLab:
    """Stands in for a GitLab and the people on it.

    It keeps state and refuses as GitLab does where the bot depends on it: lists come in pages, drafts are made by their
    title, a second merge request of a branch is refused with 409, a status cannot go from running to running, a
    finished one is followed by a new one, a commit on no branch takes no status without a ref, a position has to name a
    line of the diff (with its old number, where the line is old), an emoji given twice is "not found", commands in
    notes and descriptions are carried out (`carried_out`), texts lose carriage returns and blanks at the end.
    A project with a bare git repository takes branches, heads, files and diffs from there, and keeps the heads of merge
    requests under refs/merge-requests as GitLab does: the last one stays when the branch is gone or the request closed.
    It does not stand in for: Markdown, permissions but of the token, approvals, pipelines, webhooks being sent.

    Use: `with FakeLab() as lab:`, `lab.add("group/project")`, `GitLab("group/project", token=lab.token("bot"),
    base_url=lab.url)`. `lab.requests` is what was asked, `lab.fail(...)` plans failures. With git: `lab.add(name,
    bare=folder)`, and `lab.sync()` before what is there is looked at, as before every request.
    """

    def __init__(self, *, root: str = "", per_page: int = 100) -> None:
        self.root, self.per_page = root, per_page
        self.projects: dict[str, FakeProject] = {}
        self.users: dict[str, Json] = {}
        self.tokens: dict[str, str] = {}
        self.requests: list[tuple[str, str, Json]] = []
        self.carried_out: list[str] = []
        self.plans: list[Plan] = []
        self.lock = threading.RLock()
        self.late = threading.Event()
        self.next_id = 100

    def __enter__(self) -> FakeLab:
        lab = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer leaves in one piece

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self) -> None:
                lab._answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{self.root}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.late.set()
        self.server.shutdown()
        self.server.server_close()

    # what people do

    def user(self, name: str, **more: Any) -> Json:
        """An account, made where there is none."""
        if name not in self.users:
            self.users[name] = {"id": self._id(), "username": name, "name": name, "state": "active"}
        self.users[name] |= more
        return self.users[name]

    def token(self, name: str) -> str:
        """A token of an account."""
        self.user(name)
        token = f"glpat-{hashlib.sha256(name.encode()).hexdigest()[:20]}"
        self.tokens[token] = name
        return token

    def add(self, name: str, *, bare: Path | None = None) -> FakeProject:
        """A project, with a git repository where one is given."""
        self.projects[name] = FakeProject(id=self._id(), name=name, bare=bare)
        self.sync()
        return self.projects[name]

    def sync(self) -> None:
        """Let branches and merge requests follow what was pushed."""
        for here in self.projects.values():
            if here.bare is not None:
                here.branches = fakelab_git.branches(here.bare)
        for here in self.projects.values():
            for one in here.merges.values() if here.bare is not None else ():
                if one["state"] == "opened":
                    self._follow(here, one)

    def _follow(self, here: FakeProject, one: Json) -> None:
        origin = next((lab for lab in self.projects.values() if lab.id == one["source_project_id"]), None)
        head = origin.branches.get(one["source_branch"]) if origin is not None else None
        if head is None or origin is None or origin.bare is None or here.bare is None:
            return
        fakelab_git.keep_head(here.bare, origin.bare, head, one["iid"])
        base, texts = fakelab_git.texts(here.bare, here.branches[one["target_branch"]], head)
        one["git_base"], here.texts[one["iid"]] = base, texts

    def fail(
        self,
        method: str,
        path: str,
        status: int,
        *,
        done: bool = False,
        times: int = 1,
        body: bytes = b'{"message":"planned"}',
        **headers: str,
    ) -> None:
        """Let the next requests whose method and path (regular expression) match fail."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.plans.append(Plan(method, path, status, named, body, done, times))

    def open_merge_request(
        self,
        project: str,
        author: str,
        *,
        source: str = "topic",
        target: str = "main",
        sha: str = "b" * 40,
        fork: str | None = None,
        texts: dict[str, tuple[str | None, str | None]] | None = None,
        **more: Any,
    ) -> int:
        """A merge request; `texts` are path -> text before and after."""
        self.sync()
        here = self.projects[project]
        origin = self.projects[fork] if fork else here
        if origin.bare is None:
            origin.branches[source] = sha
        fields = {"title": "Topic", "description": "", "source_branch": source, "target_branch": target, **more}
        number = int(self._make_merge(here, self.user(author), fields, origin)["iid"])
        here.texts[number] = texts or {}
        self.sync()
        return number

    def comment(self, project: str, number: int, author: str, body: str, **more: Any) -> int:
        """A note of somebody, as it is (no commands are carried out)."""
        note = {"id": self._id(), "body": body, "author": self.user(author), "system": False, "type": None, **more}
        self.projects[project].notes.setdefault(number, []).append(note)
        return int(note["id"])

    # requests

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        parts = urlsplit(handler.path)
        path = parts.path.removeprefix(self.root).removeprefix("/api/v4")
        body: Json = json.loads(content) if content else {}
        with self.lock:
            self.sync()
            self.requests.append((handler.command, path, body))
            plan = next(
                (one for one in self.plans if one.method == handler.command and re.search(one.path, path)), None
            )
            if plan is not None:
                plan.times -= 1
                if not plan.times:
                    self.plans.remove(plan)
            status, headers, out = 0, {}, b""
            if plan is None or plan.done:
                status, headers, out = self._outcome(handler, path, dict(parse_qsl(parts.query)), body)
        if plan is not None:
            status, headers, out = plan.status, plan.headers, plan.body
        if status == -1:
            self.late.wait(20)
        if status <= 0:
            handler.close_connection = True
            return
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(out)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(out)

    def _outcome(
        self, handler: BaseHTTPRequestHandler, path: str, query: Json, body: Json
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            name = self.tokens.get(handler.headers.get("PRIVATE-TOKEN", ""))
            if name is None:
                raise Refused(401, "401 Unauthorized")
            found = self._routed(handler.command, path, self.users[name], query, body)
        except Refused as refused:
            return refused.status, dict(refused.headers), json.dumps({"message": refused.message}).encode()
        if isinstance(found, bytes):
            return 200, {"Content-Type": "text/plain"}, found
        if isinstance(found, list):
            size = min(int(query.get("per_page", 20)), self.per_page)
            page = int(query.get("page", 1))
            following = str(page + 1) if page * size < len(found) else ""
            found = found[(page - 1) * size : page * size]
            return 200, {"X-Next-Page": following, "X-Page": str(page)}, json.dumps(found).encode()
        if found is None:
            return 204, {}, b""
        return (201 if handler.command == "POST" else 200), {}, json.dumps(found).encode()

    def _routed(self, method: str, path: str, me: Json, query: Json, body: Json) -> Any:
        if path == "/user":
            return me
        if path == "/users":
            return [one for one in self.users.values() if one["username"].lower() == query["username"].lower()]
        match = re.fullmatch(r"/projects/([^/]+)(?:/(.*))?", path)
        if match is None:
            raise Refused(404, "404 Not Found")
        name = unquote(match[1])
        here = next((one for one in self.projects.values() if name in (one.name, str(one.id))), None)
        if here is None or not here.visible:
            raise Refused(404, "404 Project Not Found")
        for verb, pattern, route in ROUTES:
            found = re.fullmatch(pattern, match[2] or "")
            if verb == method and found:
                return route(self, here, me, [unquote(one) for one in found.groups()], {**query, **body})
        raise Refused(404, "404 Not Found")

    def _text(self, text: str) -> str:
        """A text after its commands are carried out, with GitLab's own pattern for them."""
        text = text.replace("\r", "")
        pattern = re.compile(
            rf"(?P<code>^```.+?\n```$)|(?:^/(?P<cmd>{QUICK_ACTIONS})(?:[ ](?P<arg>[^\n]*))?(?:\s*\n|$))",
            re.MULTILINE | re.DOTALL | re.IGNORECASE,
        )

        def carried(match: re.Match[str]) -> str:
            if match["cmd"] is None:
                return match[0]
            self.carried_out.append(match["cmd"])
            return ""

        return pattern.sub(carried, text).rstrip()

    # merge requests

    def _make_merge(self, here: FakeProject, me: Json, fields: Json, origin: FakeProject) -> Json:
        source, target = fields["source_branch"], fields["target_branch"]
        if source not in origin.branches:
            raise Refused(400, {"source_branch": ["does not exist"]})
        if target not in here.branches:
            raise Refused(400, {"target_branch": ["does not exist"]})
        for other in here.merges.values():
            same = (other["source_branch"], other["target_branch"], other["source_project_id"])
            if other["state"] == "opened" and same == (source, target, origin.id):
                raise Refused(409, [f"Another open merge request already exists: !{other['iid']}"])
        number = len(here.merges) + 1
        moment = datetime.datetime(2026, 1, 1, 0, number % 60, tzinfo=datetime.timezone.utc).isoformat()
        made = {
            "iid": number,
            "state": "opened",
            "author": me,
            "source_branch": source,
            "target_branch": target,
            "source_project_id": origin.id,
            "target_project_id": here.id,
            "web_url": f"https://lab.example/{here.name}/-/merge_requests/{number}",
            "created_at": moment,
            "closed_at": None,
            "merged_at": None,
            "labels": [],
        }
        here.merges[number] = made
        self._edit_merge(here, made, {"description": "", **fields})
        return self._shown(here, made)

    def _edit_merge(self, here: FakeProject, one: Json, fields: Json) -> None:
        if "title" in fields:
            if not 0 < len(fields["title"]) <= 255:
                raise Refused(400, {"title": ["is too long (maximum is 255 characters)"]})
            one["title"] = fields["title"]
            one["draft"] = bool(re.match(r"\s*(draft:|\[draft\]|\(draft\))", one["title"], re.IGNORECASE))
        if "description" in fields:
            one["description"] = self._text(fields["description"])
        if "target_branch" in fields:
            one["target_branch"] = fields["target_branch"]
        for name in ("labels", "add_labels"):
            one["labels"] += [
                label for label in fields.get(name, "").split(",") if label and label not in one["labels"]
            ]
        if fields.get("state_event") == "close":
            if one["state"] == "merged":
                raise Refused(422, {"state": ["cannot transition via close"]})
            one |= {"state": "closed", "closed_at": "2026-01-02T00:00:00.000+02:00"}

    def _shown(self, here: FakeProject, one: Json) -> Json:
        origin = next((lab for lab in self.projects.values() if lab.id == one["source_project_id"]), None)
        sha = origin.branches.get(one["source_branch"], one.get("sha")) if origin else one.get("sha")
        one["sha"] = sha
        start = here.branches.get(one["target_branch"], "c" * 40)
        refs = {"base_sha": one.get("git_base", "d" * 40), "start_sha": start, "head_sha": sha}
        return one | {"diff_refs": None if one.get("preparing") else refs}


def _merge(lab: FakeLab, here: FakeProject, number: str) -> Json:
    if int(number) not in here.merges:
        raise Refused(404, "404 Not found")
    return here.merges[int(number)]


def _list_merges(lab: FakeLab, here: FakeProject, me: Json, _: list[str], query: Json) -> Any:
    found = [lab._shown(here, one) for one in reversed(here.merges.values())]
    for name, key in (("state", "state"), ("source_branch", "source_branch")):
        found = [one for one in found if query.get(name) in (None, one[key])]
    if "author_id" in query:
        found = [one for one in found if one["author"]["id"] == int(query["author_id"])]
    return [{key: value for key, value in one.items() if key != "diff_refs"} for one in found]


def _put_merge(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    one = _merge(lab, here, path[0])
    lab._edit_merge(here, one, fields)
    return lab._shown(here, one)


def _diff_of(before: str | None, after: str | None) -> str:
    lines = list(difflib.unified_diff((before or "").splitlines(True), (after or "").splitlines(True)))[2:]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _diffs(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    _merge(lab, here, path[0])
    found = []
    for name, (before, after) in here.texts.get(int(path[0]), {}).items():
        old, _, new = name.partition(" => ")
        found.append(
            {
                "old_path": old,
                "new_path": new or old,
                "diff": _diff_of(before, after),
                "new_file": before is None,
                "deleted_file": after is None,
                "renamed_file": bool(new),
            }
        )
    return found


# notes and threads


def _notes(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    _merge(lab, here, path[0])
    notes = here.notes.get(int(path[0]), [])
    return notes if query.get("sort") == "asc" else notes[::-1]


def _post_note(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    _merge(lab, here, path[0])
    text = lab._text(fields["body"])
    if not text:
        raise Refused(400, '400 Bad request - Note {:note=>["can\'t be blank"]}')
    note = {"id": lab._id(), "body": text, "author": me, "system": False, "type": None}
    here.notes.setdefault(int(path[0]), []).append(note)
    return note


def _own_note(lab: FakeLab, here: FakeProject, me: Json, path: list[str]) -> Json:
    note = next((one for one in here.notes.get(int(path[0]), []) if one["id"] == int(path[1])), None)
    if note is None:
        raise Refused(404, "404 Not found")
    if note["author"]["id"] != me["id"]:
        raise Refused(403, "403 Forbidden")
    return note


def _put_note(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    note = _own_note(lab, here, me, path)
    note["body"] = lab._text(fields["body"])
    return note


def _delete_note(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    here.notes[int(path[0])].remove(_own_note(lab, here, me, path))


def _discussions(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    return [{"id": f"{note['id']:x}", "notes": [note]} for note in here.notes.get(int(path[0]), [])]


def _post_discussion(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    one, position = lab._shown(here, _merge(lab, here, path[0])), fields["position"]
    if any(position[name] != one["diff_refs"][name] for name in ("base_sha", "start_sha", "head_sha")):
        raise Refused(400, '400 Bad request - Note {:position=>["is incomplete"]}')
    texts = {name.rpartition(" => ")[2]: pair for name, pair in here.texts[int(path[0])].items()}
    lines = _lines(*texts.get(position["new_path"], (None, None)))
    place = (position.get("old_line"), position.get("new_line"))
    if position["position_type"] != "text" or place not in lines:
        raise Refused(400, '400 Bad request - Note {:line_code=>["can\'t be blank", "must be a valid line code"]}')
    digest = hashlib.sha1(position["new_path"].encode()).hexdigest()
    for end in position.get("line_range", {}).values():
        code = lines.get((end.get("old_line"), end["new_line"]))
        if code is None or end["line_code"] != f"{digest}_{code[0]}_{code[1]}":
            raise Refused(400, "400 Bad request - line_range is invalid")
    note = _post_note(lab, here, me, path, fields) | {"type": "DiffNote", "position": position}
    here.notes[int(path[0])][-1] = note
    return {"id": f"{note['id']:x}", "notes": [note]}


def _lines(before: str | None, after: str | None) -> dict[tuple[int | None, int | None], tuple[int, int]]:
    """(old, new) as a position names a shown line -> (old, new) of its line code."""
    found: dict[tuple[int | None, int | None], tuple[int, int]] = {}
    matcher = difflib.SequenceMatcher(None, (before or "").splitlines(True), (after or "").splitlines(True))
    for group in matcher.get_grouped_opcodes(3):
        for kind, old, old_end, new, new_end in group:
            if kind == "equal":
                found |= {(old + i + 1, new + i + 1): (old + i + 1, new + i + 1) for i in range(old_end - old)}
            else:
                found |= {(None, line + 1): (old_end + 1, line + 1) for line in range(new, new_end)}
    return found


def _emoji(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    return here.emoji.get(int(path[1]), [])


def _post_emoji(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    if not any(note["id"] == int(path[1]) for note in here.notes.get(int(path[0]), [])):
        raise Refused(404, "404 Not found")
    given = here.emoji.setdefault(int(path[1]), [])
    if any(one["name"] == fields["name"] and one["user"]["id"] == me["id"] for one in given):
        raise Refused(404, "404 Award Emoji Name has already been taken Not Found")
    given.append({"id": lab._id(), "name": fields["name"], "user": me})
    return given[-1]


# commits, branches, files, members, issues


def _branch(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    if path[0] not in here.branches:
        raise Refused(404, "404 Branch Not Found")
    return {"name": path[0], "commit": {"id": here.branches[path[0]]}}


def _delete_branch(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    _branch(lab, here, me, path, query)
    if path[0] in here.protected:
        raise Refused(403, "403 Forbidden - branch is protected")
    del here.branches[path[0]]
    if here.bare is not None:
        fakelab_git.delete_branch(here.bare, path[0])


def _file(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    if here.bare is not None and (found := fakelab_git.content(here.bare, query["ref"], path[0])) is not None:
        return found
    if (query["ref"], path[0]) not in here.files:
        raise Refused(404, "404 File Not Found")
    return here.files[query["ref"], path[0]]


def _commit_merges(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    merges = [lab._shown(here, one) for one in here.merges.values()]
    if not any(path[0] in (one["sha"], *one.get("commits", ())) for one in merges):
        raise Refused(404, "404 Commit Not Found")
    return [one for one in merges if path[0] in (one["sha"], *one.get("commits", ()))]


def _statuses(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    return [one for one in here.statuses if one["sha"] == path[0] and one["name"] == query["name"] and one["latest"]]


def _post_status(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    ref = fields.get("ref") or next((name for name, sha in here.branches.items() if sha == path[0]), None)
    if ref is None:
        raise Refused(404, "404 References for commit Not Found")
    if len(fields["name"]) > 255 or len(fields["description"]) > 255:
        raise Refused(400, {"description": ["is too long (maximum is 255 characters)"]})
    state = fields["state"]
    same = [one for one in here.statuses if (one["sha"], one["name"], one["ref"]) == (path[0], fields["name"], ref)]
    found = next((one for one in same if one["status"] in ("running", "pending") and one["author"] == me), None)
    if found is not None and found["status"] == state:
        raise Refused(
            400, f'Cannot transition status via :run from :{state} (Reason(s): Status cannot transition via "run")'
        )
    if found is None:
        for one in same:
            one["latest"] = False
        found = {"id": lab._id(), "sha": path[0], "name": fields["name"], "ref": ref, "author": me, "latest": True}
        here.statuses.append(found)
    found |= {"status": state, "description": fields["description"], "target_url": fields.get("target_url")}
    return found


def _member(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    found = next((more for name, more in here.members.items() if lab.user(name)["id"] == int(path[0])), None)
    if found is None:
        raise Refused(404, "404 Not found")
    return {"id": int(path[0]), "state": "active", "membership_state": "active", **found}


def _issues(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    found = [one for one in reversed(here.issues.values()) if query.get("state") in (None, one["state"])]
    return [one for one in found if "author_id" not in query or one["author"]["id"] == int(query["author_id"])]


def _post_issue(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    number = len(here.issues) + 1
    url = f"https://lab.example/{here.name}/-/issues/{number}"
    made = {"iid": number, "state": "opened", "author": me, "web_url": url, "title": fields["title"]}
    here.issues[number] = made | {"description": lab._text(fields["description"])}
    return here.issues[number]


def _put_issue(lab: FakeLab, here: FakeProject, me: Json, path: list[str], fields: Json) -> Any:
    text = lab._text(fields["description"])
    here.issues[int(path[0])] |= {"title": fields["title"], "description": text}
    return here.issues[int(path[0])]


def _project(lab: FakeLab, here: FakeProject, me: Json, path: list[str], query: Json) -> Any:
    return {
        "id": here.id,
        "path_with_namespace": here.name,
        "http_url_to_repo": f"{lab.url}/{here.name}.git" if here.bare is None else here.bare.as_uri(),
        "default_branch": "main",
        "archived": here.archived,
    }


ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "", _project),
    ("GET", "merge_requests", _list_merges),
    ("POST", "merge_requests", lambda lab, here, me, path, fields: lab._make_merge(here, me, fields, here)),
    ("GET", r"merge_requests/(\d+)", lambda lab, here, me, path, query: lab._shown(here, _merge(lab, here, path[0]))),
    ("PUT", r"merge_requests/(\d+)", _put_merge),
    ("GET", r"merge_requests/(\d+)/diffs", _diffs),
    ("GET", r"merge_requests/(\d+)/notes", _notes),
    ("POST", r"merge_requests/(\d+)/notes", _post_note),
    ("PUT", r"merge_requests/(\d+)/notes/(\d+)", _put_note),
    ("DELETE", r"merge_requests/(\d+)/notes/(\d+)", _delete_note),
    ("GET", r"merge_requests/(\d+)/notes/(\d+)/award_emoji", _emoji),
    ("POST", r"merge_requests/(\d+)/notes/(\d+)/award_emoji", _post_emoji),
    ("GET", r"merge_requests/(\d+)/discussions", _discussions),
    ("POST", r"merge_requests/(\d+)/discussions", _post_discussion),
    ("GET", r"repository/branches/([^/]+)", _branch),
    ("DELETE", r"repository/branches/([^/]+)", _delete_branch),
    ("GET", r"repository/files/([^/]+)/raw", _file),
    ("GET", r"repository/commits/([^/]+)/merge_requests", _commit_merges),
    ("GET", r"repository/commits/([^/]+)/statuses", _statuses),
    ("POST", r"statuses/([^/]+)", _post_status),
    ("GET", r"members/all/(\d+)", _member),
    ("GET", "issues", _issues),
    ("POST", "issues", _post_issue),
    ("PUT", r"issues/(\d+)", _put_issue),
]
