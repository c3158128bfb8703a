"""Answers of the fake in GitHub's own shape: what a handler does not say comes from the published description."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

CONTRACT = Path(__file__).parent / "contract" / "github.json"
_BY_FORMAT = {"date-time": "2026-01-02T03:04:05Z", "date": "2026-01-02", "email": "someone@example.com"}


@functools.cache
def description() -> Any:
    return json.loads(CONTRACT.read_text(encoding="utf-8"))


def answer(method: str, template: str, status: int, body: Any) -> Any:
    """`body` with every property that the description requires of this answer."""
    operation = description()["paths"].get(template, {}).get(method.lower(), {})
    found = operation.get("responses", {}).get(str(status))
    schema = _resolved(found or {}).get("content", {}).get("application/json", {}).get("schema")
    return body if schema is None or body is None else filled(schema, body)


def filled(schema: Any, value: Any) -> Any:
    """`value` with the required properties that it lacks, at every depth."""
    schema = _resolved(schema)
    if isinstance(value, list):
        return [filled(_fitting(schema, value).get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for part in _parts(schema, value):
        for name, inner in part.get("properties", {}).items():
            if name in result:
                result[name] = filled(inner, result[name])
        for name in part.get("required", ()):
            if name not in result:
                result[name] = least(part.get("properties", {}).get(name, {}))
    return result


def of_schema(name: str, value: Any) -> Any:
    """`value` filled in as the named schema of the description."""
    return filled({"$ref": f"#/components/schemas/{name}"}, value)


def least(schema: Any) -> Any:
    """The smallest value that fits a schema: null where it may be."""
    schema = _resolved(schema)
    if schema.get("nullable"):
        return None
    if "enum" in schema:
        return schema["enum"][0]
    for many in ("oneOf", "anyOf"):
        if many in schema and "properties" not in schema:
            return least(schema[many][0])
    kind = schema.get("type", "object" if "properties" in schema or "allOf" in schema else "string")
    if kind == "object":
        return filled(schema, {})
    if kind == "string":
        text = _BY_FORMAT.get(schema.get("format", ""))
        return text or (
            "https://github.example/" if schema.get("format") == "uri" else "x" * schema.get("minLength", 1)
        )
    return {"integer": 1, "number": 1, "boolean": False, "array": []}[kind]


def _parts(schema: Any, value: Any) -> list[Any]:
    parts = [_fitting(schema, value)]
    for inner in schema.get("allOf", ()):
        parts += _parts(_resolved(inner), value)
    return parts


def _fitting(schema: Any, value: Any) -> Any:
    """The alternative for a list or an object; of several objects the one whose properties name most of the value's."""
    for many in ("oneOf", "anyOf"):
        if many in schema and "properties" not in schema:
            kind = "array" if isinstance(value, list) else "object"
            fit = [part for part in map(_resolved, schema[many]) if part.get("type", "object") == kind]
            if kind == "array":
                return fit[0] if fit else schema
            return max(fit, key=lambda part: len(set(part.get("properties", ())) & set(value)), default=schema)
    return schema


def _resolved(schema: Any) -> Any:
    while "$ref" in schema:
        here = description()
        for step in schema["$ref"].removeprefix("#/").split("/"):
            here = here[step]
        schema = here
    return schema
