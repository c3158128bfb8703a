"""Webhook payloads of both forges, read as events. Those of GitHub are its own examples (see payloads/README.md)."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import cmarkgfm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.bot.webhooks.events import (
    Command,
    CommandGiven,
    Ignored,
    Ping,
    PullRequestChanged,
    PullRequestClosed,
    Pushed,
    commands,
    parse,
)
from advisor.errors import UsageError

PAYLOADS = Path(__file__).parent / "payloads"
UTC = datetime.timezone.utc
HEAD = "ec26c3e57ca3a959ca5aad62de7213c562f8c821"


def payload(forge: str, name: str) -> Any:
    return json.loads((PAYLOADS / forge / f"{name}.json").read_bytes())


def github(event: str, body: Any, **more: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse("github", {"X-GitHub-Event": event, "X-GitHub-Delivery": "0b989ba4-242f-11e5"}, raw, **more)


def gitlab(event: str, body: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse("gitlab", {"x-gitlab-event": event, **(headers or {"Idempotency-Key": "f5e2"})}, raw, **more)


# --------------------------------------------------------------------------------------------------------------- GitHub


def test_a_pull_request_that_was_opened() -> None:
    assert github("pull_request", payload("github", "pull_request.opened")) == PullRequestChanged(
        delivery="0b989ba4-242f-11e5",
        repository="Codertocat/Hello-World",
        installation=1,
        sender="Codertocat",
        sender_is_bot=False,
        occurred=datetime.datetime(2019, 5, 15, 15, 20, 33, tzinfo=UTC),
        number=2,
        change="opened",
        head_sha=HEAD,
        head_ref="changes",
        base_ref="master",
        draft=False,
    )


@pytest.mark.parametrize("action", ["opened", "reopened", "synchronize", "ready_for_review"])
def test_changes_of_a_pull_request(action: str) -> None:
    body = payload("github", "pull_request.synchronize") | {"action": action}
    assert github("pull_request", body).change == action


def test_an_edit_counts_where_it_changes_the_base() -> None:
    body = payload("github", "pull_request.synchronize") | {"action": "edited"}
    assert isinstance(github("pull_request", body | {"changes": {"title": {"from": "x"}}}), Ignored)
    base = {"ref": {"from": "main"}, "sha": {"from": HEAD}}
    assert github("pull_request", body | {"changes": {"base": base}}).change == "base"


@pytest.mark.parametrize("merged", [True, False])
def test_a_pull_request_that_was_closed(merged: bool) -> None:
    body = payload("github", "pull_request.closed")
    body["pull_request"]["merged"] = merged
    event = github("pull_request", body)
    assert isinstance(event, PullRequestClosed)
    assert (event.number, event.merged, event.head_ref) == (2, merged, "changes")


@pytest.mark.parametrize("action", ["labeled", "assigned", "converted_to_draft", "edited", "\u202eopened", ""])
def test_other_actions_ask_for_nothing(action: str) -> None:
    event = github("pull_request", payload("github", "pull_request.opened") | {"action": action})
    assert isinstance(event, Ignored)
    assert action not in event.reason or not action


def comment(text: str | None = "/advisor optimize", **changes: Any) -> Any:
    body = payload("github", "issue_comment.created")
    body["comment"] |= {"body": text} | changes
    return body


def test_a_command_in_a_comment() -> None:
    event = github("issue_comment", comment("please\r\n/advisor optimize fused-adam\r\n"))
    assert isinstance(event, CommandGiven)
    assert event.commands == (Command(verb="optimize", argument="fused-adam"),)
    assert (event.number, event.comment, event.author) == (1, 492700400, "Codertocat")
    assert event.is_pull_request is False
    assert event.occurred == datetime.datetime(2019, 5, 15, 15, 20, 21, tzinfo=UTC)
    body = comment()
    body["issue"]["pull_request"] = {"url": "https://api.github.com/repos/Codertocat/Hello-World/pulls/1"}
    assert github("issue_comment", body).is_pull_request is True


@pytest.mark.parametrize(
    "body",
    [
        comment() | {"action": "edited"},
        comment() | {"action": "deleted"},
        comment("nothing here"),
        comment(None),
        comment(user=None),
        comment(user={"login": "dependabot[bot]", "type": "Bot"}),
        comment(user={"login": "other[bot]", "type": "User"}),
        comment(user={"login": "us", "type": "User"}),
    ],
)
def test_comments_that_are_ignored(body: Any) -> None:
    assert isinstance(github("issue_comment", body, account="us"), Ignored)


def test_a_push() -> None:
    event = github("push", payload("github", "push"))
    assert isinstance(event, Pushed)
    assert (event.branch, event.before[:7], event.after[:7]) == ("master", "0000000", "6113728")
    assert not event.deleted
    assert event.occurred == datetime.datetime.fromtimestamp(1557933657, UTC)
    body = payload("github", "push.deleted")
    assert isinstance(github("push", body), Ignored)  # a tag
    assert github("push", body | {"ref": "refs/heads/a/b"}).deleted


def test_the_clock_of_a_push_is_not_the_committers() -> None:
    body = payload("github", "push")
    body["head_commit"]["timestamp"] = "2099-01-01T00:00:00Z"
    assert github("push", body).occurred.year == 2019
    del body["repository"]["pushed_at"]
    assert github("push", body).occurred is None


def test_the_sender_is_a_bot() -> None:
    body = payload("github", "pull_request.opened")
    body["sender"] = {"login": "renovate[bot]", "type": "Bot"}
    assert github("pull_request", body).sender_is_bot
    body["sender"] = {"login": "ada", "type": "User"}
    assert not github("pull_request", body).sender_is_bot
    assert github("pull_request", body, account="ada").sender_is_bot
    del body["sender"]
    assert github("pull_request", body).sender == "ghost"


def test_ping_and_events_of_no_use() -> None:
    assert github("ping", payload("github", "ping")) == Ping(delivery="0b989ba4-242f-11e5")
    assert isinstance(github("projects_v2_item", b"{}"), Ignored)
    assert github("installation", b"{}") == Ignored(
        delivery="0b989ba4-242f-11e5", reason="the event installation is not used"
    )


# --------------------------------------------------------------------------------------------------------------- GitLab


def test_commits_pushed_to_a_merge_request() -> None:
    assert gitlab("Merge Request Hook", payload("gitlab", "merge_request.update")) == PullRequestChanged(
        delivery="f5e2",
        repository="research/models/trainer",
        sender="ada",
        sender_is_bot=False,
        occurred=datetime.datetime(2026, 1, 3, 21, 36, 40, tzinfo=UTC),
        number=12,
        change="synchronize",
        head_sha="da1560886d4f094c3e6c9ef40349f7d38b5d27d7",
        head_ref="faster",
        base_ref="main",
        draft=False,
    )


@pytest.mark.parametrize(
    ("attributes", "changes", "change"),
    [
        ({"action": "open", "oldrev": None}, {}, "opened"),
        ({"action": "reopen", "oldrev": None}, {}, "reopened"),
        ({"oldrev": None}, {"draft": {"previous": True, "current": False}}, "ready_for_review"),
        ({"oldrev": None}, {"draft": {"previous": False, "current": True}}, None),
        ({"oldrev": None}, {"target_branch": {"previous": "a", "current": "main"}}, "base"),
        ({"oldrev": None}, {"labels": {"previous": [], "current": []}}, None),
        ({"action": "approved"}, {}, None),
    ],
)
def test_changes_of_a_merge_request(attributes: Any, changes: Any, change: str | None) -> None:
    body = payload("gitlab", "merge_request.update")
    body["object_attributes"] |= attributes
    event = gitlab("Merge Request Hook", body | {"changes": changes})
    assert getattr(event, "change", None) == change


@pytest.mark.parametrize(("action", "merged"), [("close", False), ("merge", True)])
def test_a_merge_request_that_was_closed(action: str, merged: bool) -> None:
    body = payload("gitlab", "merge_request.update")
    body["object_attributes"]["action"] = action
    event = gitlab("Merge Request Hook", body)
    assert isinstance(event, PullRequestClosed)
    assert (event.number, event.merged, event.head_ref) == (12, merged, "faster")


def test_a_command_in_a_note() -> None:
    body = payload("gitlab", "note.merge_request")
    event = gitlab("Note Hook", body)
    assert isinstance(event, CommandGiven)
    assert event.commands == (Command(verb="optimize", argument="attention"),)
    assert (event.number, event.comment, event.author, event.is_pull_request) == (12, 1244, "ada", True)
    del body["object_attributes"]["action"]  # GitLab before 16.11
    assert isinstance(gitlab("Note Hook", body), CommandGiven)


@pytest.mark.parametrize(
    ("attributes", "author"),
    [
        ({"action": "update"}, "ada"),
        ({"system": True}, "ada"),
        ({"noteable_type": "Commit"}, "ada"),
        ({"noteable_type": "Issue"}, "ada"),
        ({"noteable_type": None}, "ada"),
        ({"noteable_type": "Snippet"}, "ada"),
        ({"note": "fine"}, "ada"),
        ({}, "project_5_bot"),
        ({}, "project_5_bot1"),
        ({}, "group_17_bot_3c9e11ab9d2f"),
        ({}, "service_account_group_4_8e1"),
        ({}, "us"),
    ],
)
def test_notes_that_are_ignored(attributes: Any, author: str) -> None:
    body = payload("gitlab", "note.merge_request")
    body["object_attributes"] |= attributes
    body["user"]["username"] = author
    assert isinstance(gitlab("Note Hook", body, account="us"), Ignored)


def test_a_push_to_gitlab() -> None:
    event = gitlab("Push Hook", payload("gitlab", "push"))
    assert isinstance(event, Pushed)
    assert (event.branch, event.deleted, event.occurred, event.sender) == ("main", False, None, "ada")
    assert gitlab("Push Hook", payload("gitlab", "push") | {"after": "0" * 40}).deleted


def test_deliveries_of_gitlab_without_an_idempotency_key() -> None:
    uuid = {"X-Gitlab-Event-UUID": "13792a34-cac6-4fda-95a8-c58e00a3954e"}
    push = payload("gitlab", "push")
    one, again = (gitlab("Push Hook", push, uuid).delivery for _ in range(2))
    assert one == again
    assert one != gitlab("Push Hook", push | {"ref": "refs/heads/x"}, uuid).delivery
    assert gitlab("Push Hook", push, uuid | {"Idempotency-Key": "k"}).delivery == "k"


def test_other_hooks_of_gitlab() -> None:
    assert isinstance(gitlab("Tag Push Hook", b"{}"), Ignored)


# ----------------------------------------------------------------------------------------------------- hostile payloads


def broken(path: str, value: Any) -> Any:
    body = payload("github", "pull_request.opened")
    *folders, last = path.split(".")
    inner = body
    for part in folders:
        inner = inner[part]
    inner[last] = value
    return body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"payload=%7B%7D",
        b"\xef\xbb\xbf{}",
        b'{"action":"\xff"}',
        b'{"action":"\\ud800"}',
        b"[" * 200_000,
        b'{"x":' * 200_000,
        broken("pull_request.number", -1),
        broken("pull_request.number", 2**70),
        broken("pull_request.number", True),
        broken("pull_request.head.sha", "main"),
        broken("pull_request.head.sha", HEAD + "\n"),
        broken("pull_request.head.ref", "a b"),
        broken("pull_request.head.ref", "a\x00b"),
        broken("pull_request.head.ref", "x" * 2000),
        broken("pull_request.updated_at", "yesterday"),
        broken("pull_request.updated_at", "2019-05-15T15:20:33"),
        broken("repository.full_name", "../../etc/passwd"),
        broken("repository.full_name", "a/.."),
        broken("repository.full_name", "a/b\n"),
        broken("repository.full_name", "justone"),
        broken("sender.login", "a/../b"),
        broken("installation", {"id": "5"}),
    ],
)
def test_a_body_that_is_no_such_payload(body: Any) -> None:
    with pytest.raises(UsageError) as caught:
        github("pull_request", body)
    assert len(str(caught.value)) < 300
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize("moment", [10**30, -(10**30), 2**62, "", "9999-99-99T00:00:00Z"])
def test_a_push_at_no_time(moment: Any) -> None:
    body = payload("github", "push")
    body["repository"]["pushed_at"] = moment
    with pytest.raises(UsageError):
        github("push", body)


@pytest.mark.parametrize(
    ("forge", "headers"),
    [
        ("github", {}),
        ("github", {"X-GitHub-Event": "push"}),
        ("github", {"X-GitHub-Delivery": "1"}),
        ("github", {"X-GitHub-Event": "push", "X-GitHub-Delivery": "../../x"}),
        ("github", {"X-GitHub-Event": "push", "X-GitHub-Delivery": "x" * 500}),
        ("github", {"X-GitHub-Event": "push\n\n", "X-GitHub-Delivery": "1"}),
        ("gitlab", {"X-Gitlab-Event": "Push Hook"}),
        ("gitlab", {"X-Gitlab-Event": "Push Hook", "X-Gitlab-Event-UUID": "/"}),
    ],
)
def test_headers_that_no_forge_sends(forge: Any, headers: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="header"):
        parse(forge, headers, b"{}")


def test_an_unpaired_surrogate_somewhere_else_does_no_harm() -> None:
    body = json.dumps(comment()).replace('"/advisor optimize"', '"/advisor optimize \\ud800"').encode()
    with pytest.raises(UsageError):
        github("issue_comment", body)


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/advisor optimize", Command(verb="optimize")),
        ("/advisor optimize  sdpa-attention \t", Command(verb="optimize", argument="sdpa-attention")),
        ("/advisor Profile", Command(verb="profile")),
        ("/advisor explain sdpa", Command(verb="explain", argument="sdpa")),
        ("/advisor status", Command(verb="status")),
        ("/advisor help", Command(verb="help")),
        ("/advisor rebase", Command(verb="rebase")),
        ("/advisor", Command(verb="", known=False)),
        ("/advisor frobnicate", Command(verb="frobnicate", known=False)),
        ("/advisor frobnicate now", Command(verb="frobnicate", known=False)),
        ("/advisor <script>", Command(verb="", known=False)),
        ("/advisor explain", Command(verb="explain", known=False)),
        ("/advisor explain ../../etc", Command(verb="explain", known=False)),
        ("/advisor optimize " + "x" * 65, Command(verb="optimize", known=False)),
        ("/advisor optimize a b", Command(verb="optimize", known=False)),
        ("/advisor optimize $(id)", Command(verb="optimize", known=False)),
        ("/advisor optimize \uff21", Command(verb="optimize", known=False)),
        ("/advisor rebase now", Command(verb="rebase", known=False)),
    ],
)
def test_one_command(text: str, expected: Command) -> None:
    assert commands(text) == (expected,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " /advisor status",
        "\t/advisor status",
        "please /advisor status",
        "/advisors status",
        "/advisor-status",
        "/ADVISOR status",
        "`/advisor status`",
        "```\n/advisor status\n```",
        "```console\n$ x\n/advisor status",
        "~~~\n```\n/advisor status\n~~~",
        "````\n```\n/advisor status\n````",
        "```\n    ```\n/advisor status\n```",
        "   ```\n/advisor status\n   ```",
        "> /advisor status",
        "> text\n/advisor status",
        ">>>\n/advisor status\n>>>",
        "<!--\n/advisor status\n-->",
        "x <!-- y\n/advisor status\n-->",
        "<!--\n```\n-->\n```\n/advisor status\n```",
        "2. ```\n   ```\n/advisor status",
        "- item\n  ```\nx\n  ```\n/advisor status",
        "a `b\n/advisor status\nc` d",
        "`\n# h\n`\n/advisor status\n`",
    ],
)
def test_a_line_that_is_shown_and_not_given(text: str) -> None:
    assert commands(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "```\nx\n```\n/advisor status",
        "> quoted\n\n/advisor status",
        ">>>\nquoted\n>>>\n/advisor status",
        "<!-- x -->\n/advisor status",
        "- ```py\n  x = 1\n  ```\n\n/advisor status",
        "``` not a fence ```\n/advisor status",
        "~~~\n/advisor help\n~~~~\n/advisor status\r\n",
        "text\r/advisor status\r",
    ],
)
def test_a_command_after_what_is_shown(text: str) -> None:
    assert commands(text) == (Command(verb="status"),)


def test_at_most_three() -> None:
    assert len(commands("/advisor status\n" * 50)) == 3


PIECES = [
    "/advisor status",
    "text",
    "",
    "```",
    "````",
    "~~~",
    "   ```",
    "    ```",
    "  ```",
    "- ```",
    "1. ```",
    "3. ```",
]
PIECES += ["`", "a ` b", "``", "` `"]
PIECES += ["> q", "> ```", ">", "<!--", "-->", "<!-- x -->", "a <!-- b", "--> c", "- item", "* - ```", "```py", "# h"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_what_counts_is_rendered_as_plain_text(lines: list[str]) -> None:
    """GitHub's own Markdown renderer is asked where each line went."""
    for number, line in enumerate(lines):
        alone = [other if index == number else other.replace("/advisor", "/other") for index, other in enumerate(lines)]
        if line == "/advisor status" and commands("\n".join(alone)):
            html = cmarkgfm.github_flavored_markdown_to_html("\n".join(alone))
            hidden = re.findall(r"<(pre|blockquote|code)\b.*?</\1>|<!--.*?(?:-->|\Z)", html, re.DOTALL)
            shown = re.sub(r"<(pre|blockquote|code)\b.*?</\1>|<!--.*?(?:-->|\Z)", "", html, flags=re.DOTALL)
            assert "/advisor status" in shown, (alone, hidden, html)


@given(st.text(alphabet="/advisor help`~<!->\n\r\t ", max_size=200))
def test_any_text_is_read(text: str) -> None:
    assert len(commands(text)) <= 3


@pytest.mark.parametrize("piece", ["`", "<!--", "-->", ">", "```\n", "<!-- -->\n", "- ", "/advisor ", "\t", "1. "])
def test_long_comments_are_read_in_linear_time(piece: str) -> None:
    commands(piece * 200_000)
