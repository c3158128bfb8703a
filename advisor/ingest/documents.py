"""Reads a JSON artifact into its typed form, with an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from advisor.errors import ArtifactError

Document = TypeVar("Document")


def read_document(path: Path, kind: type[Document]) -> Document:
    """Decode a JSON file as `kind`. Raises ArtifactError when it is missing, truncated or of another form.

    The standard decoder reads it, because a loss that is not a number stands in the file as a bare NaN.
    """
    try:
        return msgspec.convert(json.loads(path.read_bytes()), type=kind)
    except FileNotFoundError:
        raise ArtifactError(f"{path.name} is missing: record the run again") from None
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read ({error.strerror or error}): record the run again") from None
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{path.name} has another form than expected ({error}): record the run again") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path.name} is truncated or no JSON ({error}): record the run again") from None
