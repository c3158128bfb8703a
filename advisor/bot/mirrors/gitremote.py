"""A git remote: its address, the credentials for it, and where it has moved to."""

from __future__ import annotations

import base64
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from advisor.bot.forge import Credentials
from advisor.errors import ForgeRefused, ForgeUnavailable, UsageError
from advisor.redact import Redactor
from advisor.reports.untrusted import visible_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where git goes: `url` is clean of credentials, which are None where none are needed."""

    url: str
    credentials: Credentials | None = None

    @property
    def scheme(self) -> str:
        """https, http or file."""
        return urllib.parse.urlsplit(self.url).scheme

    @property
    def host(self) -> str:
        """Host and port as they stand in the URL."""
        return urllib.parse.urlsplit(self.url).netloc


def checked_url(url: str) -> str:
    """`url`, where it is one that the bot fetches from; raises UsageError.

    https, http to this machine, file; no credentials, no query, no fragment.
    """
    shown = visible_line(Redactor().text(url))[:200]
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"not a repository URL: {shown}: {error}") from error
    if not re.fullmatch(r"[\x21-\x7e]+", url) or "\\" in url or "'" in url:
        raise UsageError(f"not a repository URL: {shown}: it holds characters that belong percent-encoded")
    if "@" in parts.netloc:
        raise UsageError(f"the URL {shown} holds credentials: give them by the settings of the bot")
    if parts.query or parts.fragment:
        raise UsageError(f"not a repository URL: {shown}: it has a query or a fragment")
    local = host in {"127.0.0.1", "::1", "localhost"}
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return url
    if host and (parts.scheme == "https" or (parts.scheme == "http" and local)):
        return url.rstrip("/")
    raise UsageError(f"cannot fetch from {shown}: give an https URL (http only on this machine), or file:///PATH")


def secret_forms(credentials: Credentials) -> tuple[str, ...]:
    """The secret as git or a server may show it."""
    pair = base64.b64encode(f"{credentials.user}:{credentials.secret}".encode()).decode()
    return credentials.secret, urllib.parse.quote(credentials.secret, safe=""), pair


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Leave the answer as it is."""


def followed(remote: Remote) -> Remote:
    """Where a remote has moved to, within its origin; git itself would also follow elsewhere."""
    tail = "/info/refs"
    request = urllib.request.Request(f"{remote.url}{tail}?service=git-upload-pack")
    if remote.credentials is not None:
        request.add_unredirected_header("Authorization", f"Basic {secret_forms(remote.credentials)[2]}")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=60):
            return remote
    except urllib.error.HTTPError as error:
        place = error.headers.get("Location") or ""
        error.close()
    except (OSError, ValueError) as error:
        raise ForgeUnavailable(f"{remote.host} does not answer: {error}") from error
    target = urllib.parse.urlsplit(urllib.parse.urljoin(remote.url, place))
    if (target.scheme, target.netloc) != (remote.scheme, remote.host) or not target.path.endswith(tail):
        shown = visible_line(Redactor().text(f"{target.scheme}://{target.netloc}"))[:200]
        raise ForgeRefused(f"{remote.host} redirects to {shown}: give the URL that the repository has now")
    path = target.path.removesuffix(tail)
    return Remote(url=checked_url(f"{remote.scheme}://{remote.host}{path}"), credentials=remote.credentials)
