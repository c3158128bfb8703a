"""What a git command left behind, and the error of a forge that its failure amounts to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from advisor.errors import ForgeConflict, ForgeError, ForgeMissing, ForgeRefused, ForgeUnavailable

_CAUSES: tuple[tuple[type[ForgeError], str], ...] = (
    (
        ForgeConflict,
        r"fsck error|invalid path|bad (?:tree|object|revision)|[Nn]ot a valid |is not a commit|malformed object name"
        r"|exists; cannot create",
    ),
    (
        ForgeRefused,
        r"Authentication failed|could not read (?:Username|Password)|terminal prompts disabled|error: 40[13]\b"
        r"|unable to read askpass|dubious ownership|[Pp]ermission denied",
    ),
    (
        ForgeMissing,
        r"repository '[^']*' not found|error: (?:404|410)\b|does not appear to be a git repository"
        r"|couldn't find remote ref|not our ref|unadvertised object|' does not exist",
    ),
    (
        ForgeUnavailable,
        r"error: (?:408|429|5\d\d)\b|Could not resolve|Couldn't connect|Failed to connect|[Cc]onnection \w+|Operation t"
        r"|early EOF|hung up|RPC failed|disconnect|Empty reply|certificate|gnutls|SSL|TLS|timed out|Recv failure"
        r"|invalid index-pack output|expected flush",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command left behind; `said` is its stderr, redacted."""

    status: int
    output: bytes
    said: str


def failure(doing: str, done: Done) -> ForgeError:
    """The error for a command that failed; `doing` completes "cannot ..."."""
    own = [line for line in done.said.split("\n") if not line.startswith("remote:")]
    kind = next((kind for kind, pattern in _CAUSES if re.search(pattern, "\n".join(own))), ForgeError)
    told = [line for line in own if re.match(r"fatal:|error:", line)] or own
    reason = told[0].partition(": ")[2] or told[0] if told and told[0] else f"git ended with status {done.status}"
    return kind(f"cannot {doing}: {reason}", detail=done.said or None)
