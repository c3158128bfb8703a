"""Webhook deliveries as GitHub and GitLab send them, with the fields that the bot reads, and who sends them."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import json
import uuid
from typing import Any

SECRET = "a-secret-of-the-tests-0123456789"
OLD_SECRET = "the-secret-before-the-exchange-1"
TOKEN = "a-token-of-the-tests-0123456789"
SHA = "0123456789abcdef0123456789abcdef01234567"


def time_text(seconds_ago: float = 0.0) -> str:
    moment = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds_ago)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def pull_request(
    number: int = 7, *, sha: str = SHA, repository: str = "octo/nets", seconds_ago: float = 0.0, **more: Any
) -> bytes:
    payload = {
        "action": "synchronize",
        "repository": {"full_name": repository, "pushed_at": time_text(seconds_ago)},
        "sender": {"login": "ada", "type": "User"},
        "installation": {"id": 11},
        "pull_request": {
            "number": number,
            "head": {"ref": "faster", "sha": sha},
            "base": {"ref": "main"},
            "updated_at": time_text(seconds_ago),
            "draft": False,
        },
    }
    return json.dumps({**payload, **more}).encode()


def merge_request(number: int = 3) -> bytes:
    return json.dumps(
        {
            "user": {"username": "ada"},
            "project": {"path_with_namespace": "group/sub/nets"},
            "object_attributes": {
                "iid": number,
                "source_branch": "faster",
                "target_branch": "main",
                "last_commit": {"id": SHA},
                "action": "open",
                "updated_at": time_text(),
            },
        }
    ).encode()


def hub_signature(body: bytes, secret: str = SECRET) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def github_headers(body: bytes, *, event: str = "pull_request", id: str | None = None, **more: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": id or str(uuid.uuid4()),
        "X-Hub-Signature-256": hub_signature(body),
        **more,
    }


def gitlab_headers(**more: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "X-Gitlab-Event": "Merge Request Hook",
        "Idempotency-Key": str(uuid.uuid4()),
        "X-Gitlab-Token": TOKEN,
        **more,
    }


def send(
    address: tuple[str, int], path: str, body: bytes, headers: dict[str, str], *, method: str = "POST"
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, JSON, headers) of the answer."""
    client = http.client.HTTPConnection(*address, timeout=10)
    try:
        client.request(method, path, body, headers)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read() or b"{}"), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        client.close()


def deliver(address: tuple[str, int], body: bytes, **more: str) -> tuple[int, dict[str, Any]]:
    """A genuine delivery of GitHub's."""
    status, said, _ = send(address, "/github", body, github_headers(body, **more))
    return status, said
