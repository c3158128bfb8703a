"""GitHub's REST API as decoded answers and ForgeErrors: one place that sends, pages, waits and tries again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import github
import github.Auth
import msgspec
import requests
import requests.utils

from advisor.bot.forges.failures import Answer, Patience, Request, failure, no_answer
from advisor.errors import ForgeConflict, ForgeMissing, UsageError
from advisor.redact import Redactor
from advisor.reports.untrusted import clip

Result = TypeVar("Result")

PUBLIC_URL = "https://api.github.com"
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Nothing(msgspec.Struct):
    """An answer of which nothing is read."""


class Api:
    """The API at one base URL with the rights of one token; every method raises ForgeError.

    `secret` returns what must never be shown. Requests time out after `timeout_s` seconds without a byte; those that
    write stand `write_gap_s` seconds apart and none overlap, as GitHub asks for. PyGithub sends them and never repeats
    one by itself.
    """

    def __init__(
        self,
        auth: github.Auth.Auth,
        secret: Callable[[], str],
        *,
        base_url: str = PUBLIC_URL,
        patience: Patience,
        timeout_s: int = 30,
        write_gap_s: float = 1.0,
    ) -> None:
        # At level DEBUG it logs whole answers, also those that carry a new token.
        logging.getLogger("github.Requester").setLevel(logging.INFO)
        client = github.Github(
            auth=auth,
            base_url=checked_url(base_url),
            timeout=timeout_s,
            user_agent="advisor",
            retry=None,
            seconds_between_requests=0,
            seconds_between_writes=write_gap_s,
        )
        self._requester = client.requester
        self._lock = threading.Lock()  # PyGithub keeps a request in the connection until it is sent
        self._secret = secret
        self._patience = patience

    def get(self, path: str, kind: type[Result], *, query: Mapping[str, str] | None = None, right: str = "") -> Result:
        """A decoded answer. `right` is what a token needs, for the message of a refusal."""
        return self._patience.call(lambda: self._decoded("GET", path, kind, query=query, right=right)[1])

    def pages(
        self, path: str, kind: type[Result], *, query: Mapping[str, str] | None = None, right: str = ""
    ) -> Iterator[Result]:
        """The decoded pages of a list, each of at most 100 items."""
        following: dict[str, str] | None = {"per_page": "100", **(query or {})}
        seen: list[dict[str, str]] = []
        while following is not None and following not in seen:
            seen.append(following)
            link, page = self._patience.call(
                lambda asked=following: self._decoded("GET", path, kind, query=asked, right=right)  # type: ignore[misc]
            )
            yield page
            following = _next(link)

    def send(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any] | None,
        kind: type[Result],
        *,
        right: str,
        done: Callable[[], Result | None] | None = None,
    ) -> Result:
        """The decoded answer of a request that writes.

        `done` looks whether an attempt without an answer worked; a request without it may be repeated harmlessly.
        """
        return self._patience.call(lambda: self._decoded(verb, path, kind, body=body, right=right)[1], done=done)

    def viewer(self) -> str:
        """Login of the token's account by way of GraphQL, which also tells that of an installation."""
        body = {"query": "query { viewer { login } }"}
        url = self._requester.graphql_url
        return self._patience.call(lambda: self._decoded("POST", url, _Viewed, body=body)[1].data.viewer.login)

    def _decoded(
        self,
        verb: str,
        path: str,
        kind: type[Result],
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        right: str = "",
    ) -> tuple[str, Result]:
        """The Link header and the decoded body of one request, made once."""
        asked = Request(forge="GitHub", action=f"{verb} {path if path[:1] == '/' else '/graphql'}", right=right)
        try:
            with self._lock:
                status, headers, text = self._requester.requestJson(verb, path, dict(query or {}), dict(_HEADERS), body)
        except requests.RequestException as error:
            raise no_answer(asked, error, self._redactor()) from None
        except RuntimeError as error:  # PyGithub follows no redirect to another host or scheme
            raise ForgeMissing(f"{asked}: {clip(self._redactor().text(str(error)), 500)}") from None
        if status >= 300:
            raise failure(asked, Answer(status=status, headers=headers, text=text), self._redactor())
        if kind is Nothing:
            return "", kind()
        try:
            return headers.get("link", ""), msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError as error:
            raise ForgeConflict(f"{asked} answered {status} in an unknown form: {error}") from None
        except msgspec.DecodeError as error:
            raise no_answer(asked, error, self._redactor()) from None

    def _redactor(self) -> Redactor:
        secret = self._secret()
        return Redactor.of_machine(extra=(secret,) if secret else ())


def checked_url(base_url: str) -> str:
    """A base URL without a slash at its end; raises UsageError for one that would give the token away."""
    try:
        parts = urlsplit(base_url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        raise UsageError("the base URL of GitHub's API is no URL; use one such as https://HOST/api/v3") from None
    if not host or parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError("the base URL of GitHub's API needs a host and nothing secret: https://HOST/api/v3")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        raise UsageError(f"the base URL of GitHub's API must begin with https://, the token travels there: {host}")
    return base_url.rstrip("/")


class _Viewer(msgspec.Struct):
    login: str


class _Data(msgspec.Struct):
    viewer: _Viewer


class _Viewed(msgspec.Struct):
    data: _Data


def _next(link: str) -> dict[str, str] | None:
    """The query of the next page; its host and path are not followed."""
    for entry in requests.utils.parse_header_links(link) if link else ():
        if entry.get("rel") == "next":
            return dict(parse_qsl(urlsplit(entry.get("url", "")).query, keep_blank_values=True))
    return None
