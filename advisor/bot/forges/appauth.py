"""The token of a GitHub App's installation: made from the App's private key, for one repository, renewed in time."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Mapping

import github.Auth
import jwt
import msgspec

from advisor.bot.forges.failures import Patience
from advisor.bot.forges.githubapi import PUBLIC_URL, Api
from advisor.errors import ForgeConflict, UsageError

RIGHTS: Mapping[str, str] = {
    "checks": "write",
    "contents": "write",
    "issues": "write",
    "metadata": "read",
    "pull_requests": "write",
    "security_events": "write",
}
_RENEWED_BEFORE_S = 900.0  # git may use a token for ten minutes after it was handed out


class _App(msgspec.Struct):
    slug: str


class _Installation(msgspec.Struct):
    id: int
    permissions: dict[str, str]


class _Token(msgspec.Struct):
    token: str
    expires_at: datetime.datetime

    def __repr__(self) -> str:
        return f"_Token(expires_at={self.expires_at!r})"


class InstallationAuth(github.Auth.Auth):
    """Acts as an App on one repository: its token has those of `rights` that the owner granted, and reaches no other.

    `private_key` is PEM text as GitHub hands it out. Raises UsageError for a key that is none, ForgeError when a token
    is needed and GitHub gives none.
    """

    def __init__(
        self,
        app_id: int | str,
        private_key: str,
        repository: str,
        *,
        rights: Mapping[str, str] = RIGHTS,
        base_url: str = PUBLIC_URL,
        patience: Patience | None = None,
    ) -> None:
        super().__init__()
        app = _signer(app_id, private_key)
        self._api = Api(app, lambda: private_key, base_url=base_url, patience=patience or Patience(), write_gap_s=0.0)
        self._repository = repository
        self._rights = dict(rights)
        self._lock = threading.Lock()
        self._held: _Token | None = None
        self._slug: str | None = None

    def __repr__(self) -> str:
        return f"InstallationAuth({self._repository!r})"

    @property
    def token_type(self) -> str:
        """The word before the token in the header Authorization."""
        return "token"

    @property
    def token(self) -> str:
        """A token that is valid for at least fifteen minutes; raises ForgeError."""
        with self._lock:
            if self._held is None or self._held.expires_at.timestamp() - time.time() < _RENEWED_BEFORE_S:
                self._held = self._made()
            return self._held.token

    @property
    def _masked_token(self) -> str:
        return "token (removed)"

    def held(self) -> str:
        """The token in use, so that it can be kept out of messages; empty before the first."""
        held = self._held
        return held.token if held else ""

    def login(self) -> str:
        """Login that the App acts as: its slug with [bot]; raises ForgeError."""
        if self._slug is None:
            self._slug = self._api.get("/app", _App).slug
        return f"{self._slug}[bot]"

    def _made(self) -> _Token:
        path = f"/repos/{self._repository}/installation"
        found = self._api.get(path, _Installation, right="its App to be installed on the repository")
        ranks = ("read", "write", "admin")
        rights = {
            name: min(level, found.permissions[name], key=ranks.index)
            for name, level in self._rights.items()
            if found.permissions.get(name) in ranks
        }
        body = {"repositories": [self._repository.split("/")[1]], "permissions": rights}
        path = f"/app/installations/{found.id}/access_tokens"
        made = self._api.send("POST", path, body, _Token, right="its installation not to be suspended")
        if made.expires_at.tzinfo is None:
            raise ForgeConflict("GitHub: the token of an installation ends at a time without a zone")
        return made


def _signer(app_id: int | str, private_key: str) -> github.Auth.AppAuth:
    """Signs as the App; tried once, so that a wrong key is told before anything is asked."""
    if not str(app_id).strip():
        raise UsageError("the GitHub App needs its id, the number or client id that its settings page shows")
    app: github.Auth.AppAuth | None = None
    try:
        app = github.Auth.AppAuth(str(app_id).strip(), private_key)
        app.create_jwt()
    except (AssertionError, ValueError, TypeError, jwt.PyJWTError):
        raise UsageError("the private key of the GitHub App cannot be read; it must be the PEM text, whole") from None
    return app
