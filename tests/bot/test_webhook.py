"""Who may deliver: signatures, tokens, ages, sizes."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
from http import HTTPStatus

import pytest
from deliveries import OLD_SECRET, SECRET, TOKEN, hub_signature
from hypothesis import given
from hypothesis import strategies as st

from advisor.bot.webhooks import webhook
from advisor.bot.webhooks.webhook import Refusal, Secrets
from advisor.errors import UsageError

SECRETS = Secrets(github=(OLD_SECRET, SECRET), gitlab=(TOKEN,))
KEY = bytes(range(32))
SIGNING = "whsec_" + base64.b64encode(KEY).decode()
NOW = 1_790_000_000.0


def refusal(call, *arguments, **named) -> HTTPStatus | None:
    try:
        call(*arguments, **named)
    except Refusal as refused:
        return refused.status
    return None


def github(body: bytes, signature: str, secrets: Secrets = SECRETS) -> HTTPStatus | None:
    headers = {"x-hub-signature-256": signature}
    return refusal(webhook.check_head, "github", headers, secrets) or refusal(
        webhook.check_body, "github", headers, body, secrets, now=NOW
    )


def gitlab(body: bytes, headers: dict[str, str], secrets: Secrets, now: float = NOW) -> HTTPStatus | None:
    return refusal(webhook.check_head, "gitlab", headers, secrets) or refusal(
        webhook.check_body, "gitlab", headers, body, secrets, now=now
    )


def standard(body: bytes, *, id: str = "msg-1", sent: float = NOW, key: bytes = KEY) -> dict[str, str]:
    """Headers as the Standard Webhooks specification, which GitLab's signing tokens follow, has them."""
    message = f"{id}.{sent:.0f}.".encode() + body
    signature = base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()
    return {"webhook-id": id, "webhook-timestamp": f"{sent:.0f}", "webhook-signature": f"v1,{signature}"}


def test_the_vector_of_github_s_documentation():
    # "Validating webhook deliveries", section "Testing the webhook payload validation"
    secrets = Secrets(github=("It's a Secret to Everybody",))
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert github(b"Hello, World!", signature, secrets) is None
    assert github(b"Hello, World", signature, secrets) is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("secret", [SECRET, OLD_SECRET])
def test_every_secret_of_an_exchange_counts(secret):
    assert github(b"{}", hub_signature(b"{}", secret)) is None


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "sha256=",
        hub_signature(b"{}", "another-secret-0123456789"),
        hub_signature(b"{}").removeprefix("sha256="),
        hub_signature(b"{}").upper(),
        hub_signature(b"{}") + ", " + hub_signature(b"{}"),  # the header given twice
        hub_signature(b"{}") + "\n",
        "sha1=" + hmac.new(SECRET.encode(), b"{}", hashlib.sha1).hexdigest(),
        "sha256=" + "\u00e9" * 64,
    ],
)
def test_any_other_signature_is_refused(signature):
    assert github(b"{}", signature) is HTTPStatus.UNAUTHORIZED


def test_the_sha1_header_is_not_looked_at():
    headers = {"x-hub-signature": "sha1=" + hmac.new(SECRET.encode(), b"{}", hashlib.sha1).hexdigest()}
    assert refusal(webhook.check_head, "github", headers, SECRETS) is HTTPStatus.UNAUTHORIZED


@given(st.binary(max_size=200), st.text(max_size=80))
def test_no_text_passes_for_a_signature(body, signature):
    assert github(body, signature) is HTTPStatus.UNAUTHORIZED


def test_a_token_of_gitlab_is_checked_before_the_body_is_read():
    assert refusal(webhook.check_head, "gitlab", {"x-gitlab-token": TOKEN}, SECRETS) is None
    for token in ("", TOKEN[:-1], TOKEN + " ", SECRET, f"{TOKEN}, {TOKEN}", "\u20ac"):
        assert refusal(webhook.check_head, "gitlab", {"x-gitlab-token": token}, SECRETS) is HTTPStatus.UNAUTHORIZED
    assert refusal(webhook.check_head, "gitlab", {}, SECRETS) is HTTPStatus.UNAUTHORIZED


def test_a_token_outside_of_ascii_arrives_as_its_bytes():
    secrets = Secrets(gitlab=("geheim-\u00fc-0123456789",))
    as_parsed = secrets.gitlab[0].encode().decode("latin-1")
    assert refusal(webhook.check_head, "gitlab", {"x-gitlab-token": as_parsed}, secrets) is None


def test_a_signing_token_of_gitlab():
    secrets = Secrets(gitlab=(SIGNING,))
    assert gitlab(b"{}", standard(b"{}"), secrets) is None
    assert gitlab(b"{ }", standard(b"{}"), secrets) is HTTPStatus.UNAUTHORIZED
    assert gitlab(b"{}", {**standard(b"{}"), "webhook-id": "msg-2"}, secrets) is HTTPStatus.UNAUTHORIZED
    assert gitlab(b"{}", standard(b"{}", key=bytes(32)), secrets) is HTTPStatus.UNAUTHORIZED
    both = standard(b"{}", key=bytes(32))
    both["webhook-signature"] += " v2,AAAA " + standard(b"{}")["webhook-signature"]
    assert gitlab(b"{}", both, secrets) is None


@pytest.mark.parametrize(("late", "refused"), [(299, False), (-299, False), (302, True), (-302, True)])
def test_the_time_that_gitlab_signs_is_five_minutes_from_ours_at_most(late, refused):
    assert (gitlab(b"{}", standard(b"{}"), Secrets(gitlab=(SIGNING,)), NOW + late) is not None) is refused


@pytest.mark.parametrize("sent", ["", "soon", "-1", "1e9", "9" * 400, "\u0661"])
def test_a_time_that_is_none_is_refused(sent):
    headers = {**standard(b"{}"), "webhook-timestamp": sent}
    assert gitlab(b"{}", headers, Secrets(gitlab=(SIGNING,))) is HTTPStatus.UNAUTHORIZED


def test_no_token_makes_up_for_a_wrong_signature():
    secrets = Secrets(gitlab=(SIGNING, TOKEN))
    headers = {**standard(b"{}", key=bytes(32)), "x-gitlab-token": TOKEN}
    assert gitlab(b"{}", headers, secrets) is HTTPStatus.UNAUTHORIZED
    assert gitlab(b"{}", {"x-gitlab-token": TOKEN}, secrets) is None  # a webhook that has not been changed over


def test_a_signing_token_is_no_secret_token():
    headers = {"x-gitlab-token": SIGNING}
    assert gitlab(b"{}", headers, Secrets(gitlab=(SIGNING,))) is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize("secret", ["", "short", " " * 20, f"{SECRET}\n"])
def test_a_secret_that_protects_nothing_is_refused_and_not_quoted(secret):
    with pytest.raises(UsageError, match="16 characters") as raised:
        Secrets(github=(secret,))
    assert not secret.strip() or secret.strip() not in str(raised.value)


@pytest.mark.parametrize("secret", ["whsec_not base64 at all", "whsec_" + base64.b64encode(bytes(8)).decode()])
def test_a_signing_token_that_is_none_is_refused(secret):
    with pytest.raises(UsageError, match="signing token"):
        Secrets(gitlab=(secret,))


def test_secrets_do_not_show():
    assert SECRET not in repr(SECRETS) and TOKEN not in repr(SECRETS)


def plain(**more: str) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": "2", **more}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (plain(), None),
        (plain(**{"content-type": "application/json; charset=utf-8"}), None),
        (plain(**{"content-length": "100"}), None),
        (plain(**{"content-length": "101"}), HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (plain(**{"content-length": "9" * 12}), HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (plain(**{"content-length": "9" * 5000}), HTTPStatus.BAD_REQUEST),
        (plain(**{"content-length": "-1"}), HTTPStatus.BAD_REQUEST),
        (plain(**{"content-length": "+2"}), HTTPStatus.BAD_REQUEST),
        (plain(**{"content-length": "1_0"}), HTTPStatus.BAD_REQUEST),
        (plain(**{"content-length": "2, 2"}), HTTPStatus.BAD_REQUEST),
        (plain(**{"content-length": "\u0662"}), HTTPStatus.BAD_REQUEST),
        ({"content-type": "application/json"}, HTTPStatus.LENGTH_REQUIRED),
        (plain(**{"transfer-encoding": "chunked"}), HTTPStatus.LENGTH_REQUIRED),
        (plain(**{"content-type": "application/x-www-form-urlencoded"}), HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        (plain(**{"content-type": "application/jsonp"}), HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        (plain(**{"content-type": ""}), HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        (plain(**{"content-encoding": "gzip"}), HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    ],
)
def test_what_the_head_must_say(headers, status):
    assert refusal(webhook.body_length, headers, limit=100) is status


@pytest.mark.parametrize(
    ("age", "refused"), [(0, False), (-299, False), (-301, True), (3 * 86_400 - 1, False), (3 * 86_400 + 1, True)]
)
def test_how_old_an_event_may_be(age, refused):
    occurred = datetime.datetime.fromtimestamp(NOW - age, datetime.timezone.utc)
    status = refusal(webhook.check_time, occurred, now=NOW, window_s=webhook.WINDOW_S)
    assert status is (HTTPStatus.BAD_REQUEST if refused else None)


def test_an_event_without_a_time_is_of_no_age():
    assert refusal(webhook.check_time, None, now=NOW, window_s=1.0) is None


def test_a_body_is_the_same_under_every_event_name_and_another_for_another_forge():
    assert webhook.digest_of("github", b"{}") == webhook.digest_of("github", b"{}")
    assert len({webhook.digest_of(*key) for key in (("github", b"{}"), ("gitlab", b"{}"), ("github", b"{ }"))}) == 3
