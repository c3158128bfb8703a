"""A report as a JSON document with stable field names and units, and the same report read back from it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from advisor.measured import Cost, Occupancy
from advisor.model import Baseline, CheckReport, Hardware, Region, Report, Utilisation

SCHEMA = 1
"""The newest document schema this module reads."""

# Field names of the document where the noun's own name does not say its unit or place.
_RENAMED: Mapping[type, Mapping[str, str]] = {
    Report: {"before": "utilisation_before", "after": "utilisation_after", "phases_us": "phases_us_before"},
    Utilisation: {
        "busy": "busy_share",
        "achieved_flops": "achieved_flops_per_s",
        "of_measured": "measured_matmul_share",
        "peak_flops": "peak_flops_per_s",
    },
    Occupancy: {"known": "known_share", "limiters": "limiter_shares"},
    Hardware: {
        "peak_flops": "peak_flops_per_s",
        "measured_flops": "measured_flops_per_s",
        "hbm_bandwidth": "hbm_bytes_per_s",
        "measured_bandwidth": "measured_bytes_per_s",
        "link_bandwidth": "link_bytes_per_s",
    },
}

# Properties that are written as fields, null unless the fields they are made of are known.
DERIVED: Mapping[type, tuple[str, tuple[str, ...]]] = {
    Region: ("recoverable_us", ("measured_us", "floor_us")),
    Cost: ("recoverable_us", ("time_us", "floor_us")),
}


def render_json(report: Report) -> str:
    """The document as text: ASCII, two blanks of indentation, the same text for equal reports."""
    return written(to_document(report))


def render_check(report: CheckReport) -> str:
    """What `advisor check` found, as text of one document."""
    return written(check_document(report))


def check_document(report: CheckReport) -> dict[str, Any]:
    """What `advisor check` found as plain lists and dictionaries.

    Entries of `findings` and `declines` have the fields of a report's and `script`, the file that was checked; what was
    declined stands in `declines` alone. `files` tells how far each script could be looked at.
    """
    findings: list[dict[str, Any]] = []
    declines: list[dict[str, Any]] = []
    files = []
    for file in report.files:
        fields = encode(type(file), file)
        for name, every in (("findings", findings), ("declines", declines)):
            every += [{"script": file.path, **entry} for entry in fields.pop(name)]
        files.append(fields)
    return {
        "schema_version": report.schema_version,
        "advisor": report.advisor,
        "files": files,
        "findings": findings,
        "declines": declines,
    }


def written(document: Mapping[str, Any]) -> str:
    """A document as text: ASCII, two blanks of indentation."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def to_document(report: Report) -> dict[str, Any]:
    """The report as plain lists and dictionaries.

    `findings` holds every place that was looked at with its `status`; `declines` repeats those declined. A number that
    is not finite is null, and so is a pair of numbers one of which is not.
    """
    document: dict[str, Any] = encode(Report, report)
    document["declines"] = [finding for finding in document["findings"] if finding["status"] == "declined"]
    assert document["schema"] == report.schema
    return document


def from_document(document: Mapping[str, Any]) -> Report:
    """The report a document was made from; ValueError says which field is missing or of another type.

    Unknown fields are ignored. A null where a number must stand is read as "not a number", which every renderer shows
    as not known.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"report: expected an object, found {_noun(document)}")
    schema = _decode(int, document.get("schema"), "schema")
    if not 1 <= schema <= SCHEMA:
        raise ValueError(f"report has schema {schema}, this version reads 1 to {SCHEMA}: use the advisor that wrote it")
    report: Report = _decode(Report, document, "report")
    return report


def decode(kind: Any, document: Any, where: str) -> Any:
    """The noun of type `kind` that `encode` wrote; ValueError says which field is missing or of another type."""
    return _decode(kind, document, where)


# ------------------------------------------------------------------------------------------------------------ encoding


def encode(kind: Any, value: Any) -> Any:
    """`value` of the declared type `kind` as JSON types; a number that is not finite becomes null."""
    if value is None:
        return None
    kind = _choose(kind, value)
    if dataclasses.is_dataclass(kind):
        return _encode_fields(value)
    if kind is float:
        return float(value) if math.isfinite(value) else None
    if get_origin(kind) is tuple:
        return _encode_tuple(get_args(kind), value)
    if get_origin(kind) is Mapping:
        inner = get_args(kind)[1]
        return {key: encode(inner, value[key]) for key in sorted(value)}
    if isinstance(value, enum.Enum):
        return value.value
    assert isinstance(value, (str, int)), f"a report holds no {type(value).__name__}"
    return value


def _encode_fields(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    encoded: dict[str, Any] = {}
    for name, inner in declared(kind).items():
        item = encode(inner, getattr(value, name))
        if kind is Baseline and name == "step_us":
            encoded["step_ms"] = None if item is None else item / 1000
        encoded[label(kind, name)] = item
    if kind in DERIVED:
        name, made_of = DERIVED[kind]
        encoded[name] = None if any(encoded[each] is None for each in made_of) else getattr(value, name)
    return encoded


def _encode_tuple(inner: tuple[Any, ...], value: tuple[Any, ...]) -> list[Any] | None:
    if inner[-1] is Ellipsis:
        return [encode(inner[0], item) for item in value]
    pair = [encode(each, item) for each, item in zip(inner, value, strict=True)]
    return None if None in pair else pair


# ------------------------------------------------------------------------------------------------------------ decoding


def _decode(kind: Any, value: Any, where: str) -> Any:
    """The value of the declared type `kind` that `value` stands for."""
    if value is None and _optional(kind):
        return None
    kind = _choose(kind, value)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _expect(Mapping, value, where), where)
    if kind is float:
        return math.nan if value is None else _float(value, where)
    if get_origin(kind) is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if get_origin(kind) is Mapping:
        inner = get_args(kind)[1]
        entries = _expect(Mapping, value, where)
        return {_expect(str, key, where): _decode(inner, item, f"{where}.{key}") for key, item in entries.items()}
    if issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError as error:
            raise ValueError(f"{where}: {str(value)[:40]!r} is none of {', '.join(kind)}") from error
    if kind is int and isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{where}: the number is too large")
    return _expect(kind, value, where)


def _decode_fields(kind: Any, entries: Mapping[str, Any], where: str) -> Any:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        named = label(kind, field.name)
        if named in entries:
            given[field.name] = _decode(declared(kind)[field.name], entries[named], f"{where}.{named}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: the field {named!r} is missing")
    return kind(**given)


def _decode_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if inner[-1] is Ellipsis:
        return tuple(_decode(inner[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, value, where)))
    if value is None and set(inner) == {float}:
        return tuple(math.nan for _ in inner)
    items = _expect(list, value, where)
    if len(items) != len(inner):
        raise ValueError(f"{where}: expected {len(inner)} entries, found {len(items)}")
    return tuple(_decode(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(zip(inner, items, strict=True)))


def _float(value: Any, where: str) -> float:
    try:
        return float(_expect((int, float), value, where))
    except OverflowError as error:
        raise ValueError(f"{where}: the number is too large") from error


def _expect(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of `kind`; a boolean is no number."""
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    wanted = " or ".join(_NOUNS[each] for each in (kind if isinstance(kind, tuple) else (kind,)))
    raise ValueError(f"{where}: expected {wanted}, found {_noun(value)}")


# --------------------------------------------------------------------------------------------------------------- types

_NOUNS: Mapping[type, str] = {
    Mapping: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


def _noun(value: Any) -> str:
    if value is None:
        return "null"
    return next((noun for kind, noun in _NOUNS.items() if isinstance(value, kind)), type(value).__name__)


@functools.cache
def declared(kind: Any) -> Mapping[str, Any]:
    """The fields of a noun with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def label(kind: Any, name: str) -> str:
    """The name in a document of a field of a noun."""
    return _RENAMED.get(kind, {}).get(name, name)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _optional(kind: Any) -> bool:
    return types.NoneType in _members(kind)


def _choose(kind: Any, value: Any) -> Any:
    """The member of a union that `value` belongs to; text and number are the only pair in use."""
    members = [each for each in _members(kind) if each is not types.NoneType]
    if len(members) == 1:
        return members[0]
    assert set(members) == {float, str}
    return str if isinstance(value, str) else float
