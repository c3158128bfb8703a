"""Every request that the bot makes of GitHub holds against GitHub's published description, which Prism checks."""

from __future__ import annotations

from pathlib import Path

import fakehub_shapes
import prism
import pytest
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fakehub import FakeHub

from advisor.bot.forge import Annotation, Check, Suggestion
from advisor.bot.forges.appauth import InstallationAuth
from advisor.bot.forges.github import GitHub
from advisor.errors import ForgeMissing

MARKER = "<!-- advisor:report -->"
TEXT = "".join(f"line {n}\n" for n in range(1, 31))


def _hub(folder: Path) -> FakeHub:
    hub = FakeHub(folder)
    hub.add_repository("o/r", permissions={"alice": "write"})
    hub.commit("o/r", "main", {"train.py": TEXT, "pyproject.toml": "[project]\n"})
    hub.commit("o/r", "feature/a-ü", {"train.py": TEXT.replace("line 3\n", "line three\n"), "image.bin": b"\0"})
    hub.commit("o/r", "advisor/rule-1", {"train.py": TEXT.replace("line 9\n", "line nine\n")})
    hub.open_pull("o/r", head="feature/a-ü")
    return hub


def _flow(forge: GitHub, hub: FakeHub) -> None:
    """All that a Forge does, with its odder arguments."""
    head = hub.sync("o/r").pulls[1].head_sha
    forge.repository()
    assert forge.may_write("alice")
    assert forge.read_file("pyproject.toml", "main") is not None
    assert forge.read_file("no/such file", head) is None
    assert forge.branch_head("feature/a-ü") == head
    assert forge.branch_head("advisor/rule-1") is not None
    assert forge.pull_request_at(head) is not None
    assert forge.pull_request_at("0" * 40) is None
    assert len(forge.changed_files(1)) == 2
    annotations = tuple(
        Annotation(path="train.py", start_line=1, end_line=2, level="warning", title="ü", message=f"m{n}")
        for n in range(60)
    )
    for conclusion, shown in ((None, ()), ("neutral", annotations), ("failure", annotations)):
        forge.post_check(
            Check(
                name="advisor / gpu",
                head_sha=head,
                conclusion=conclusion,  # type: ignore[arg-type]
                title="t",
                summary="| a |\n" * 20_000,
                annotations=shown,
            )
        )
    suggestions = [
        Suggestion(key="a", path="train.py", start_line=3, end_line=3, remark="r", lines=("x",)),
        Suggestion(key="b", path="train.py", start_line=2, end_line=4, remark="r", lines=()),
    ]
    assert forge.post_suggestions(1, head, suggestions) == 2
    assert forge.post_suggestions(1, head, suggestions) == 0
    comment = forge.upsert_comment(1, MARKER, f"{MARKER}\none")
    hub.comment("o/r", 1, comment.author, f"{MARKER}\na second one")
    assert forge.upsert_comment(1, MARKER, f"{MARKER}\ntwo").id == comment.id
    forge.react(1, comment.id, "eyes")
    for title in ("T", "T2"):
        made = forge.open_pull_request(
            branch="advisor/rule-1", base="main", title=title, body="B", labels=("a label",), draft=True
        )
    forge.edit_pull_request(made.number, title="T3", body="B3")
    assert [pull.number for pull in forge.pull_requests(state="all", branch_prefix="advisor/")] == [made.number]
    forge.close_pull_request(made.number, "<!-- advisor:closed -->", "why")
    forge.delete_branch("advisor/rule-1")
    forge.delete_branch("advisor/rule-1")
    for body in ("1", "2"):
        forge.upsert_issue("<!-- advisor:dashboard -->", "Dashboard", f"<!-- advisor:dashboard -->\n{body}")
    forge.upload_sarif('{"version": "2.1.0"}', head_sha=head, ref="refs/pull/1/head")
    for n in range(130):
        hub.comment("o/r", 1, "chatty", f"{n}")
    assert forge.upsert_comment(1, MARKER, f"{MARKER}\nthree").id == comment.id


def _operations(hub: FakeHub) -> set[tuple[str, str]]:
    """The operations of the description that were asked for."""
    found = set()
    for seen in hub.requests:
        fitting = [r for r in hub._routes if r.method == seen.method and r.pattern.fullmatch(seen.path)]
        found.add((seen.method, min(fitting, key=lambda r: r.template.count("{")).template if fitting else seen.path))
    return found


def _app(hub: FakeHub, url: str) -> InstallationAuth:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    app = hub.add_app("speedy", public.decode())
    return InstallationAuth(app.id, pem.decode(), "o/r", base_url=url)


def test_a_whole_flow_through_prism(tmp_path: Path) -> None:
    with _hub(tmp_path / "hub") as hub, prism.proxy(fakehub_shapes.CONTRACT, hub.url, tmp_path) as proxy:
        hub.fail("PATCH", "/check-runs/", 502, after_doing=True)
        _flow(GitHub("o/r", _app(hub, proxy.url), base_url=proxy.url, write_gap_s=0.0, sleep=lambda _: None), hub)
        person = GitHub("o/r", hub.user_token("someone"), base_url=proxy.url, write_gap_s=0.0)
        assert person.account() == "someone"
        assert person.upsert_comment(1, MARKER, MARKER).author == "someone"
    undescribed = "response Unable to match the returned status code"  # 422 for an unknown commit, and the planned 502
    assert [told for told in proxy.violations() if not told.startswith(undescribed)] == []
    paths = fakehub_shapes.description()["paths"]
    described = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    assert _operations(hub) == described, "the subset holds what the bot uses and no more"


def test_a_violation_and_what_is_not_described_would_be_seen(tmp_path: Path) -> None:
    with _hub(tmp_path / "hub") as hub, prism.proxy(fakehub_shapes.CONTRACT, hub.url, tmp_path) as proxy:
        token = hub.workflow_token()
        assert GitHub("o/r", token, base_url=proxy.url).account() == "github-actions[bot]"
        headers = {"Accept": "application/vnd.github+json", "Authorization": f"token {token}"}
        annotation = {"path": "a", "start_line": 1, "end_line": 1, "annotation_level": "critical", "message": "m"}
        output = {"title": "t", "summary": "s", "annotations": [annotation]}
        body = {"name": "n", "head_sha": hub.repo("o/r").pulls[1].head_sha, "output": output}
        requests.post(f"{proxy.url}/repos/o/r/check-runs", json=body, headers=headers, timeout=60)
        requests.get(f"{proxy.url}/repos/o/r/pulls?state=odd", headers=headers, timeout=60)
    told = "\n".join(proxy.violations())
    assert "request Selected route not found" in told, "GraphQL, which the description leaves out"
    assert "annotation_level" in told
    assert "request.query.state" in told


def test_answers_by_the_description_alone_are_understood(tmp_path: Path) -> None:
    with prism.mock(fakehub_shapes.CONTRACT, tmp_path) as mock:
        forge = GitHub("o/r", "token", base_url=mock.url, write_gap_s=0.0, patience_s=0.0)
        assert forge.pull_request(1).created.year == 2019
        assert forge.repository().clone_url
        assert forge.account() == "string"
        assert len(forge.changed_files(1)) == 1
        assert forge.branch_head("main")
        assert forge.upsert_comment(1, MARKER, MARKER).url
        assert forge.post_check(Check(name="n", head_sha="0" * 40, conclusion="success", title="t", summary="s"))
        forge.upload_sarif("{}", head_sha="0" * 40, ref="refs/heads/main")
        with pytest.raises(ForgeMissing):
            GitHub("o/r", "token", base_url=f"{mock.url}/api/v3", patience_s=0.0).repository()
