"""Whether a delivery comes from the forge, is whole, and is new: what is asked of a request before anything reads it.

The checks are ordered by what they cost. What the head alone can show (size, type, a signature's form, GitLab's token)
is checked before the body is read; the signature before the body is parsed; nothing is stored of a request that fails.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from advisor.bot.tasks import ForgeKind
from advisor.errors import UsageError

DAY_S = 86_400.0
FUTURE_S = 300.0  # how far the forge's clock may be ahead of ours; the tolerance of Standard Webhooks, too

# A longer window weakens nothing: what was accepted is remembered for as long as the window, so that a replay inside of
# it is a duplicate and one after it too old. Three days is how long GitHub offers a missed delivery for redelivery.
WINDOW_S = 3 * DAY_S

_LEAST_SECRET = 16  # characters; a webhook's secret is random and is not typed by anyone
_SIGNING = "whsec_"
_HUB_SIGNATURE = re.compile(r"sha256=([0-9a-f]{64})")
_LENGTH = re.compile(r"[0-9]{1,12}")
_SECONDS = re.compile(r"[0-9]{1,12}")
_JSON = re.compile(r"application/json(?:\s*;.*)?", re.IGNORECASE)


class Refusal(Exception):
    """The request is answered with a status and a few words that help nobody to forge a better one."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The secrets of the webhooks, of each forge several while one is being exchanged for another.

    A GitLab secret is the webhook's secret token, or its signing token, which begins with `whsec_`.
    """

    github: tuple[str, ...] = field(default=(), repr=False)
    gitlab: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Raises UsageError for a secret that is short or malformed; the message does not quote it."""
        for secret in (*self.github, *self.gitlab):
            if len(secret) < _LEAST_SECRET or secret != secret.strip():
                raise UsageError(
                    f"a webhook secret has less than {_LEAST_SECRET} characters or blanks around it: take a random one"
                )
        for secret in self.gitlab:
            if secret.startswith(_SIGNING):
                _signing_key(secret)

    def of(self, forge: ForgeKind) -> tuple[str, ...]:
        """Those of one forge; none means that it delivers nothing here."""
        return self.github if forge == "github" else self.gitlab


def body_length(headers: Mapping[str, str], *, limit: int) -> int:
    """How many bytes of body to read, at most `limit`; `headers` by lower-case name, repeated ones joined by commas.

    Raises Refusal for a body that is too large, of another type, or of no stated length.
    """
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "content-length is required")
    text = headers["content-length"].strip()
    if not _LENGTH.fullmatch(text):
        raise Refusal(HTTPStatus.BAD_REQUEST, "malformed request")
    if int(text) > limit:
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
    if not _JSON.fullmatch(headers.get("content-type", "").strip()) or "content-encoding" in headers:
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the content type must be application/json")
    return int(text)


def check_head(forge: ForgeKind, headers: Mapping[str, str], secrets: Secrets) -> None:
    """Refuse, before the body is read, what its head alone shows to be no delivery of the forge; raises Refusal."""
    if forge == "github":
        credible = _HUB_SIGNATURE.fullmatch(headers.get("x-hub-signature-256", "")) is not None
    elif _is_signed(headers, secrets):
        credible = True
    else:
        credible = _has_token(headers.get("x-gitlab-token", ""), secrets.gitlab)
    if not credible:
        raise _unauthorized()


def check_body(forge: ForgeKind, headers: Mapping[str, str], body: bytes, secrets: Secrets, *, now: float) -> None:
    """Refuse a body that the forge did not sign; raises Refusal. The head has been checked, `now` is in Unix seconds.

    GitHub: HMAC-SHA256 of the raw body; the SHA-1 header beside it is not looked at. GitLab: the token that the head
    was checked for says nothing of the body; a signing token signs id, time and body as Standard Webhooks has it.
    """
    if forge == "github":
        genuine = _hub_signed(headers.get("x-hub-signature-256", ""), body, secrets.github)
    elif _is_signed(headers, secrets):
        genuine = _standard_signed(headers, body, secrets.gitlab, now)
    else:
        genuine = _has_token(headers.get("x-gitlab-token", ""), secrets.gitlab)
    if not genuine:
        raise _unauthorized()


def check_time(occurred: datetime.datetime | None, *, now: float, window_s: float) -> None:
    """Refuse what happened longer ago than the window, or more than five minutes from `now`; raises Refusal."""
    if occurred is None:
        return
    age = now - occurred.timestamp()
    if age > window_s:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the event is too old")
    if age < -FUTURE_S:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the event lies in the future: check the clock")


def digest_of(forge: ForgeKind, body: bytes) -> str:
    """What a replay has in common with the original.

    Neither the delivery's id nor the event's name is signed: the body under another of either is a replay as well.
    """
    return hashlib.sha256(forge.encode() + b"\0" + body).hexdigest()


def _unauthorized() -> Refusal:
    return Refusal(HTTPStatus.UNAUTHORIZED, "the signature is missing or wrong")


def _bytes(header: str) -> bytes:
    return header.encode("latin-1", "replace")  # as it came: the parser of headers decodes so


def _has_token(token: str, secrets: tuple[str, ...]) -> bool:
    """Compare digests: their length is the same whatever the secret's is. No early end tells which of them it was."""
    given = hashlib.sha256(_bytes(token)).digest()
    plain = (secret for secret in secrets if not secret.startswith(_SIGNING))
    matches = [hmac.compare_digest(given, hashlib.sha256(secret.encode()).digest()) for secret in plain]
    return any(matches)


def _hub_signed(header: str, body: bytes, secrets: tuple[str, ...]) -> bool:
    found = _HUB_SIGNATURE.fullmatch(header)
    if found is None:
        return False
    matches = [
        hmac.compare_digest(found[1], hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()) for secret in secrets
    ]
    return any(matches)


def _is_signed(headers: Mapping[str, str], secrets: Secrets) -> bool:
    """Whether the signature counts: where there is one that can be checked, no token makes up for a wrong one."""
    return "webhook-signature" in headers and any(secret.startswith(_SIGNING) for secret in secrets.gitlab)


def _standard_signed(headers: Mapping[str, str], body: bytes, secrets: tuple[str, ...], now: float) -> bool:
    """`v1,` and the base64 of HMAC-SHA256 over `id.time.body`; several signatures are separated by blanks."""
    sent = headers.get("webhook-timestamp", "")
    if not _SECONDS.fullmatch(sent) or abs(now - int(sent)) > FUTURE_S:
        return False
    message = b".".join((_bytes(headers.get("webhook-id", "")), sent.encode(), body))
    keys = [_signing_key(secret) for secret in secrets if secret.startswith(_SIGNING)]
    wanted = [base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()) for key in keys]
    given = [_bytes(part[3:]) for part in headers["webhook-signature"].split()[:8] if part.startswith("v1,")]
    matches = [hmac.compare_digest(one, other) for one in given for other in wanted]
    return any(matches)


def _signing_key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_SIGNING), validate=True)
    except binascii.Error as error:
        raise UsageError(
            f"a GitLab signing token is {_SIGNING} and base64: copy it whole from the webhook's page"
        ) from error
    if len(key) < _LEAST_SECRET:
        raise UsageError(f"a GitLab signing token has less than {_LEAST_SECRET} bytes: let GitLab make one")
    return key
