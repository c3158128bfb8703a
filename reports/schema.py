"""JSON Schemas of the documents that `jsonform` writes, made from the same nouns, so that consumers can validate."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from advisor.model import Baseline, CheckedFile, Report, ReportedFinding

from . import jsonform

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


def report_schema() -> Schema:
    """The schema of report.json. Fields that later versions add are allowed; those with a default may be absent."""
    definitions: dict[str, Schema] = {}
    root = _object(Report, definitions)
    entry = {"$ref": "#/$defs/ReportedFinding"}
    root["properties"]["schema"] = {"const": jsonform.SCHEMA}
    root["properties"]["declines"] = {"type": "array", "items": entry}
    return _document("report", jsonform.SCHEMA, "A report of advisor optimize", root, definitions)


def check_schema() -> Schema:
    """The schema of the document of `advisor check --output-format json`."""
    definitions: dict[str, Schema] = {}
    entry = _object(ReportedFinding, definitions)
    entry["properties"]["script"] = {"type": "string"}
    entry["required"].append("script")
    file = _object(CheckedFile, definitions)
    for name in ("findings", "declines"):
        del file["properties"][name]
        file["required"].remove(name)
    entries = {"type": "array", "items": {"$ref": "#/$defs/Entry"}}
    properties: Schema = {
        "schema_version": {"const": 1},
        "advisor": {"type": "string"},
        "files": {"type": "array", "items": {"$ref": "#/$defs/File"}},
        "findings": entries,
        "declines": entries,
    }
    root = {"type": "object", "properties": properties, "required": list(properties)}
    definitions |= {"Entry": entry, "File": file}
    del definitions["ReportedFinding"]
    return _document("check", 1, "What advisor check found", root, definitions)


def _document(name: str, version: int, title: str, root: Schema, definitions: Mapping[str, Schema]) -> Schema:
    ordered = {each: definitions[each] for each in sorted(definitions)}
    about = {"$schema": DIALECT, "$id": f"urn:advisor:{name}:{version}", "title": title}
    return {**about, **root, "$defs": ordered}


def _object(kind: Any, definitions: dict[str, Schema]) -> Schema:
    """An object with the fields of a noun; required are those without a default, as `from_document` has it."""
    properties: Schema = {}
    required: list[str] = []
    for field in dataclasses.fields(kind):
        label = jsonform.label(kind, field.name)
        properties[label] = _of(jsonform.declared(kind)[field.name], definitions)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(label)
    if kind is Baseline:
        properties["step_ms"] = {"type": ["number", "null"]}
    if kind in jsonform.DERIVED:
        properties[jsonform.DERIVED[kind][0]] = {"type": ["number", "null"]}
    return {"type": "object", "properties": properties, "required": required}


def _of(kind: Any, definitions: dict[str, Schema]) -> Schema:
    """The schema of a declared type. A number may be null: one that is not finite is written so."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    forms = [_form(member, definitions) for member in members if member is not types.NoneType]
    if types.NoneType in members and not any("null" in form.get("type", ()) for form in forms):
        forms.append({"type": "null"})
    named = [form["type"] for form in forms if set(form) == {"type"}]
    if len(named) == len(forms):
        flat = [name for each in named for name in ([each] if isinstance(each, str) else each)]
        names = list(dict.fromkeys(flat))
        return {"type": names[0] if len(names) == 1 else names}
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _form(kind: Any, definitions: dict[str, Schema]) -> Schema:
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), definitions)
    if get_origin(kind) is Mapping:
        return {"type": "object", "additionalProperties": _of(get_args(kind)[1], definitions)}
    if issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: ["number", "null"]}[kind]}


def _tuple(inner: tuple[Any, ...], definitions: dict[str, Schema]) -> Schema:
    if inner[-1] is Ellipsis:
        return {"type": "array", "items": _of(inner[0], definitions)}
    items = [_of(each, definitions) for each in inner]
    return {"type": ["array", "null"], "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
