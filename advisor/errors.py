"""What can go wrong, as one exception tree; each error knows the exit status it ends the command with.

    AdvisorError                        base of everything a user can cause or mend
    |-- UsageError              (2)     a wrong argument, file or configuration
    |   |-- ConfigError         (2)     an unknown key or a value of the wrong type in [tool.advisor]
    |   |-- SourceError         (2)     the script cannot be read or parsed
    |   `-- DirtyTreeError      (2)     `apply` would mix the patch with uncommitted changes
    |-- ScriptError             (3)     the user's script failed while it was being run
    |   |-- NoStepsError        (3)     it ended without a step, or before enough of them
    |   |-- ScriptTimeout       (3)     it did not reach the next step in time
    |   `-- (verify.search.TrialFailed: only the rewritten script failed; never leaves the search)
    |-- ArtifactError           (4)     a file of a run is missing, truncated or of another schema
    |-- RuleError               (5)     a rule raised: a bug of the rule, the others still count
    |-- OutputError             (6)     the run directory cannot be written
    `-- ForgeError              (7)     GitHub, GitLab or the git remote does not do what the bot asks for
        |-- ForgeRefused        (7)     the token is wrong or may not do this
        |-- ForgeMissing        (7)     there is no such thing, or the token may not see it
        |-- ForgeConflict       (7)     what was asked for contradicts the state of the forge, or is malformed
        `-- ForgeUnavailable    (7)     it does not answer, or asks to come back later: `retry_after_s`

Status 1 means "ran, and the gain is not confirmed"; 130 means interrupted. A bug of ours is no member of this tree:
it ends with a traceback.
"""

from __future__ import annotations

import traceback


class AdvisorError(Exception):
    """Base class; `str(error)` is one factual message that says what to do.

    `detail` is text to show unchanged below the message, such as the traceback of the user's script.
    """

    exit_status = 2

    def __init__(self, message: str, *, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(AdvisorError, ValueError):
    """A wrong argument, file or configuration value."""


class ConfigError(UsageError):
    """An unknown key or a wrong value in the configuration."""


class SourceError(UsageError):
    """A source file that cannot be read or parsed."""


class DirtyTreeError(UsageError):
    """The patch would be mixed with changes that are not committed."""


class ScriptError(AdvisorError):
    """The user's script failed; `detail` carries its own traceback or last output."""

    exit_status = 3


class NoStepsError(ScriptError):
    """The script ended without an optimizer step, or before enough of them."""


class ScriptTimeout(ScriptError):
    """The script did not reach its next step within the time allowed."""


class ArtifactError(AdvisorError):
    """A file of a run is missing, truncated, or of a schema this version does not read."""

    exit_status = 4


class RuleError(AdvisorError):
    """A rule raised. `detail` carries its traceback, `rule` its name; the findings of the other rules are kept."""

    exit_status = 5

    def __init__(self, message: str, *, rule: str | None = None, detail: str | None = None) -> None:
        super().__init__(message, detail=detail)
        self.rule = rule

    @classmethod
    def raised(cls, rule: str, error: Exception) -> RuleError:
        """The error of a rule that raised another one, with its traceback."""
        detail = "".join(traceback.format_exception(error))
        return cls(f"rule {rule} raised {type(error).__name__}: {error}", rule=rule, detail=detail)


class OutputError(AdvisorError):
    """A file of the run cannot be written."""

    exit_status = 6


class ForgeError(AdvisorError):
    """A forge or its git remote does not do what it was asked for; the message says what was asked and what it said."""

    exit_status = 7


class ForgeRefused(ForgeError):
    """The token is wrong, has expired, or may not do this."""


class ForgeMissing(ForgeError):
    """There is no such repository, pull request or file, or the token may not see it."""


class ForgeConflict(ForgeError):
    """What was asked for contradicts the state of the forge (a moved branch, a protected one), or is malformed."""


class ForgeUnavailable(ForgeError):
    """No answer, an answer of 5xx, or a rate limit that outlasts the patience; may work later.

    `retry_after_s` is how many seconds to wait, None where the forge did not say.
    """

    def __init__(self, message: str, *, detail: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, detail=detail)
        self.retry_after_s = retry_after_s
