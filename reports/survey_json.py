"""What `advisor analyze` found as a JSON document: stable names first, null for what is not known."""

from __future__ import annotations

from typing import Any

from advisor.measured import Survey

from .jsonform import encode, written


def render_json(survey: Survey) -> str:
    """The document as text: ASCII, the same text for equal surveys; NaN and infinity are null."""
    return written(to_document(survey))


def to_document(survey: Survey) -> dict[str, Any]:
    """The survey as plain lists and dictionaries.

    `files` holds one object per file whose first fields, path to hfu, are stable; `ranks` is null where the files are
    not several ranks of one job. Times are microseconds, shares lie between 0 and 1, rates are per second.
    """
    document: dict[str, Any] = encode(Survey, survey)
    return {"schema": document.pop("schema"), **document}
