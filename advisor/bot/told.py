"""An error in one line, for those who read the bot and not its log."""

from __future__ import annotations

from advisor.errors import AdvisorError, NoStepsError
from advisor.redact import Redactor

LONGEST = 2000  # characters


def told(error: AdvisorError) -> str:
    """What went wrong, with the last line of its detail, redacted and bounded; untrusted where it is of the script."""
    detail = "" if isinstance(error, NoStepsError) else error.detail or ""  # there it is an example, no traceback
    last = detail.strip().splitlines()[-1:]
    said = f"{error}: {last[0].strip()}" if last and last[0].strip() not in str(error) else str(error)
    return Redactor.of_machine().text(said)[:LONGEST]
