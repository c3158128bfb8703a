"""What the fake says of its repositories, pull requests, comments and checks; the rest of the shape is filled in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fakehub_state import CheckRun, Comment, Issue, Pull, Repo

if TYPE_CHECKING:
    from fakehub import FakeHub

WEB = "https://github.example"


def _number(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:6], 16)


def user(login: str) -> Any:
    kind = "Bot" if login.endswith("[bot]") else "User"
    names = ("url", "html_url", "followers_url", "following_url", "gists_url", "starred_url", "subscriptions_url")
    names += ("organizations_url", "repos_url", "events_url", "received_events_url", "avatar_url")
    links = {name: f"{WEB}/{login.removesuffix('[bot]')}" for name in names}
    return {
        "login": login,
        "id": _number(login),
        "node_id": "U",
        "type": kind,
        "site_admin": False,
        "gravatar_id": "",
        **links,
    }


def repository(hub: FakeHub, repo: Repo) -> Any:
    return {
        "id": _number(repo.name),
        "name": repo.name.split("/")[1],
        "full_name": repo.name,
        "owner": user(repo.name.split("/")[0]),
        "private": False,
        "html_url": f"{WEB}/{repo.name}",
        "clone_url": repo.clone_url,
        "default_branch": repo.default_branch,
        "archived": repo.archived,
        "fork": False,
        "has_issues": repo.has_issues,
    }


def pull(hub: FakeHub, repo: Repo, found: Pull) -> Any:
    source = hub.repos.get(found.head_repo or "")
    owner = (found.head_repo or "ghost/x").split("/")[0]
    return {
        "number": found.number,
        "id": found.number,
        "url": f"{hub.url}/repos/{repo.name}/pulls/{found.number}",
        "html_url": f"{WEB}/{repo.name}/pull/{found.number}",
        "title": found.title,
        "body": found.body,
        "state": found.state,
        "draft": found.draft,
        "user": user(found.author),
        "author_association": "NONE",
        "labels": [_label(name) for name in found.labels],
        "created_at": found.created_at,
        "updated_at": found.created_at,
        "closed_at": found.closed_at,
        "merged_at": found.merged_at,
        "merged": found.merged_at is not None,
        "merge_commit_sha": None,
        "base": {
            "ref": found.base,
            "sha": found.base_sha,
            "label": f"{repo.name.split('/')[0]}:{found.base}",
            "user": user(repo.name.split("/")[0]),
            "repo": repository(hub, repo),
        },
        "head": {
            "ref": found.head,
            "sha": found.head_sha,
            "label": f"{owner}:{found.head}",
            "user": user(owner),
            "repo": repository(hub, source) if source else None,
        },
    }


def _label(name: str) -> Any:
    return {
        "id": 1,
        "node_id": "L",
        "url": f"{WEB}/l",
        "name": name,
        "color": "ededed",
        "default": False,
        "description": "",
    }


def labels(names: list[str]) -> Any:
    return [_label(name) for name in names]


def issue(hub: FakeHub, repo: Repo, found: Issue | Pull) -> Any:
    kind = "pull" if isinstance(found, Pull) else "issues"
    view = {
        "number": found.number,
        "id": found.number,
        "node_id": "I",
        "html_url": f"{WEB}/{repo.name}/{kind}/{found.number}",
        "title": found.title,
        "body": found.body,
        "state": found.state,
        "user": user(found.author),
        "labels": [_label(name) for name in found.labels],
        "created_at": found.created_at,
        "updated_at": found.created_at,
        "author_association": "NONE",
        "comments": len(repo.of(found.number)),
    }
    if isinstance(found, Pull):
        link = f"{hub.url}/repos/{repo.name}/pulls/{found.number}"
        view["pull_request"] = {"url": link, "html_url": view["html_url"], "diff_url": link, "patch_url": link}
    return view


def comment(hub: FakeHub, repo: Repo, found: Comment) -> Any:
    return {
        "id": found.id,
        "node_id": "C",
        "url": f"{hub.url}/repos/{repo.name}/issues/comments/{found.id}",
        "html_url": f"{WEB}/{repo.name}/pull/{found.number}#issuecomment-{found.id}",
        "issue_url": f"{hub.url}/repos/{repo.name}/issues/{found.number}",
        "body": found.body,
        "user": user(found.author),
        "author_association": "NONE",
        "created_at": hub.stamp(),
        "updated_at": hub.stamp(),
    }


def check(hub: FakeHub, repo: Repo, found: CheckRun) -> Any:
    return {
        "id": found.id,
        "name": found.name,
        "head_sha": found.head_sha,
        "external_id": found.external_id,
        "status": found.status,
        "conclusion": found.conclusion,
        "html_url": f"{WEB}/{repo.name}/runs/{found.id}",
        "url": f"{hub.url}/repos/{repo.name}/check-runs/{found.id}",
        "app": {"id": 1, "slug": found.app, "name": found.app, "owner": user("github")},
        "output": {
            "title": found.title,
            "summary": found.summary,
            "text": None,
            "annotations_count": len(found.annotations),
            "annotations_url": f"{hub.url}/repos/{repo.name}/check-runs/{found.id}/annotations",
        },
        "pull_requests": [],
    }
